//! Hoeffding's bound, and Serfling's for draws without replacement.

use super::sample::Sample;

/// Returns `mean + sqrt(rho ln(1/delta) / (2 m))`, rounded up: Hoeffding (1963), Theorem 1, with rho = 1. Without
/// replacement rho is that of Bardenet and Maillard (2015), Corollary 2.5.
pub(super) fn upper(sample: Sample<'_>, delta: f64) -> f64 {
    let m = sample.values.len() as f64;
    let width = (sample.shrinking() * -delta.ln() / (2.0 * m)).sqrt();
    sample.up(sample.mean() + width)
}
