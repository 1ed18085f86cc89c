//! Inputs that are made up.

use proptest::collection::vec;
use proptest::prelude::*;

/// Scores of an ordinary size, of which some may be equal.
pub(crate) fn row(most: usize) -> impl Strategy<Value = Vec<f32>> {
    let spread = vec(-9.0f32..9.0, 1..most);
    let tied = vec((-12i8..12).prop_map(|level| f32::from(level) / 2.0), 1..most);
    prop_oneof![3 => spread, 2 => tied]
}

/// A row with a flag for each score.
pub(crate) fn flagged(most: usize) -> impl Strategy<Value = (Vec<f32>, Vec<bool>)> {
    row(most).prop_flat_map(|row| {
        let n = row.len();
        (Just(row), vec(any::<bool>(), n))
    })
}

pub(crate) fn budget() -> impl Strategy<Value = f64> {
    prop_oneof![4 => 0.0f64..0.999, 2 => (-12.0f64..0.0).prop_map(|power| 10f64.powf(power) / 2.0), 1 => Just(0.0)]
}

pub(crate) fn scale() -> impl Strategy<Value = f64> {
    prop_oneof![4 => Just(1.0), 1 => Just(-0.5), 1 => Just(0.0), 2 => 0.01f64..2.0]
}

/// Numbers that look normal, from a seed: for inputs so large that nobody would read them.
pub(crate) fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    let mut uniform = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 31) as f64 - 0.5
    };
    (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f64>() as f32).collect()
}

/// Returns a configuration of so many cases. They are fewer where an emulator stands in for the processor, as
/// `make test-aarch64` says.
pub(crate) fn cases(many: u32) -> ProptestConfig {
    let emulated = std::env::var_os("CERTK_EMULATED").is_some();
    ProptestConfig::with_cases(if emulated { many.div_ceil(50) } else { many })
}
