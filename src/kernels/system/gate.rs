//! Work lent to other threads while its lender waits.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

type Work = dyn Fn() + Sync;
type Panic = Box<dyn std::any::Any + Send>;

/// Gate that helpers enter until the lender closes it. A later helper finds no work, so nobody waits for a helper that
/// has not begun.
pub(crate) struct Gate {
    inside: Mutex<Inside>,
    empty: Condvar,
}

struct Inside {
    /// The work, while the gate is open.
    work: Option<Lent>,
    helpers: usize,
    panic: Option<Panic>,
}

/// Reference without its lifetime.
#[derive(Clone, Copy)]
struct Lent(*const Work);

// SAFETY: it points to what is `Sync`, and is looked through by helpers only while the lender keeps it alive: see `Gate::enter`.
unsafe impl Send for Lent {}

/// Number of checks before the lender sleeps: some ten microseconds, about as long as waking up
/// takes. The last helper is seldom later than that.
const LOOKS: usize = 400;

impl Gate {
    /// Returns `true` if there is still work, which may end a moment later.
    pub(crate) fn is_open(&self) -> bool {
        self.lock().work.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes part in the work, if there is still some. A panic in it is passed to the lender.
    pub(crate) fn enter(&self) {
        let work = {
            let mut inside = self.lock();
            let Some(work) = inside.work else { return };
            inside.helpers += 1;
            work
        };
        // SAFETY: the gate was open when this helper was counted, and the lender, who holds the work, does not go before the
        // count is back at zero: `Open` waits for that, also when the lender panics.
        let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.0)() }));
        let mut inside = self.lock();
        inside.helpers -= 1;
        if let Err(panic) = done {
            inside.panic.get_or_insert(panic);
        }
        if inside.helpers == 0 {
            self.empty.notify_all();
        }
    }
}

/// Open gate. When dropped, it closes and waits for the helpers inside.
struct Open<'a>(&'a Gate);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let mut inside = self.0.lock();
        inside.work = None;
        for _ in 0..LOOKS {
            if inside.helpers == 0 {
                return;
            }
            drop(inside);
            // Helpers inside need the lock only to leave.
            for _ in 0..32 {
                std::hint::spin_loop();
            }
            inside = self.0.lock();
        }
        while inside.helpers > 0 {
            inside = self.0.empty.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Runs `work` here while helpers that `ask` invites may [`Gate::enter`] and run it too. Returns when all that have
/// begun are done, and waits for no others. This thread runs nothing else meanwhile.
pub(crate) fn lend(work: &(dyn Fn() + Sync), ask: impl FnOnce(&Arc<Gate>)) {
    let lent: *const (dyn Fn() + Sync + '_) = work;
    // A cast does not lengthen a lifetime.
    #[allow(clippy::transmute_ptr_to_ptr)]
    // SAFETY: only the lifetime changes. Whoever looks through the pointer does it inside the gate, which is closed and empty
    // before this function ends.
    let lent: *const Work = unsafe { std::mem::transmute(lent) };
    let inside = Inside { work: Some(Lent(lent)), helpers: 0, panic: None };
    let gate = Arc::new(Gate { inside: Mutex::new(inside), empty: Condvar::new() });
    let open = Open(&gate);
    ask(&gate);
    work();
    drop(open);
    let panic = gate.lock().panic.take();
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn who_comes_late_finds_nothing_to_do() {
        let mut kept = None;
        let runs = AtomicUsize::new(0);
        lend(
            &|| {
                runs.fetch_add(1, Ordering::Relaxed);
            },
            |gate| kept = Some(Arc::clone(gate)),
        );
        kept.unwrap().enter();
        assert_eq!(runs.into_inner(), 1);
    }

    #[test]
    fn the_lender_waits_for_who_has_begun() {
        for _ in 0..100 {
            let (both, done) = (Barrier::new(2), AtomicUsize::new(0));
            let work = || {
                both.wait();
                done.fetch_add(1, Ordering::Relaxed);
            };
            let mut helper = None;
            lend(&work, |gate| {
                let gate = Arc::clone(gate);
                helper = Some(std::thread::spawn(move || gate.enter()));
            });
            assert_eq!(done.load(Ordering::Relaxed), 2);
            helper.unwrap().join().unwrap();
        }
    }

    #[test]
    fn panics_reach_the_lender_after_everybody_is_done() {
        for here in [true, false] {
            let (both, done) = (Barrier::new(2), AtomicUsize::new(0));
            let lender = std::thread::current().id();
            let work = || {
                both.wait();
                let lends = std::thread::current().id() == lender;
                assert!(lends != here, "as it should be");
                std::thread::sleep(std::time::Duration::from_millis(5));
                done.fetch_add(1, Ordering::Relaxed);
            };
            let panic = catch_unwind(AssertUnwindSafe(|| {
                lend(&work, |gate| {
                    let gate = Arc::clone(gate);
                    std::thread::spawn(move || gate.enter());
                });
            }));
            assert!(panic.is_err());
            assert_eq!(done.load(Ordering::Relaxed), 1);
        }
    }
}
