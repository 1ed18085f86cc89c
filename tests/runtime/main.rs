//! Calls and their host: time, memory, threads and pools.

mod allocations;
mod contexts;
mod hosts;

/// Held by tests that measure the process, and by those that keep it busy.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns `true` if an emulator stands in for the processor, as `make test-aarch64` says.
///
/// Times mean nothing there, and long rows take too long.
fn emulated() -> bool {
    std::env::var_os("CERTK_EMULATED").is_some()
}

/// Returns numbers that look Gaussian, the same on every machine.
fn gaussian(count: usize, sigma: f64) -> Vec<f32> {
    let uniform = |i: usize, step: f64| (i as f64 * step).fract().max(1e-12);
    (1..=count)
        .map(|i| {
            let (u, v) = (uniform(i, 0.618_033_988_749_894_9), uniform(i, 0.754_877_666_246_692_8));
            (sigma * (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
        })
        .collect()
}
