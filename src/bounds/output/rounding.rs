//! Rounding of sums over the values of a head.

/// Half a unit in the last place of 1.
pub(super) const V: f64 = f64::EPSILON / 2.0;

/// Factor that rounds a non-negative number up by more than fifty rounded operations can lose.
pub(super) const UP: f64 = 1.0 + 64.0 * f64::EPSILON;

/// Keys per block of a weighted sum; sums of blocks carry their rounding errors along.
pub(super) const BLOCK: usize = 256;

/// Bound on the error of such a sum, relative to the sum of the sizes of its terms.
pub(super) const SUM: f64 = (BLOCK + 44) as f64 * V;
