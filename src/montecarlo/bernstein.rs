//! Empirical Bernstein bounds.

use super::sample::Sample;
use crate::numerics::certified_sums::Compensated;

/// With replacement Maurer and Pontil (COLT 2009), Theorem 4: `mean + sqrt(2 V ln(2/delta) / m) + 7 ln(2/delta) / (3 (m - 1))`,
/// V the unbiased sample variance. Without replacement Bardenet and Maillard (2015), Theorem 4.3, one side of it:
/// `mean + sd sqrt(2 rho ln(5/delta) / m) + kappa ln(5/delta) / m`, kappa = 7/3 + 3/sqrt(2). Both rounded up.
pub(super) fn upper(sample: Sample<'_>, delta: f64) -> f64 {
    // 7/3 + 3/sqrt(2) = 4.45465...
    const KAPPA: f64 = 4.454_653_676_892_976;
    let m = sample.values.len() as f64;
    let mean = sample.mean();
    // The sum about another centre than the mean is larger, never smaller.
    let squares: Compensated = sample.values.iter().map(|x| (x - mean) * (x - mean)).collect();
    // Rounding of the mean may lower a deviation by up to 2^-52, absolutely.
    let spread = (squares.value() / m).sqrt() + f64::EPSILON;
    let width = if sample.population.is_some() {
        let log = 5f64.ln() - delta.ln();
        spread * (2.0 * sample.shrinking() * log / m).sqrt() + KAPPA * log / m
    } else {
        let log = 2f64.ln() - delta.ln();
        // One value has no variance: infinite.
        spread * (2.0 * log / (m - 1.0)).sqrt() + 7.0 * log / (3.0 * (m - 1.0))
    };
    let upper = sample.up(mean + width);
    if upper.is_nan() { 1.0 } else { upper }
}
