//! Crossings of sums over ascending scores with a value.

use crate::kernels::{PIVOTS, Scalar, around};

/// Returns the score at which a curve reaches a value, linear between its points; `None` beyond its ends.
pub(super) fn interpolate<S: Scalar>(curve: &[(S, f64)], value: f64) -> Option<S> {
    let at = curve.iter().position(|point| point.1 > value)?;
    let (right, left) = (curve[at], curve[at.checked_sub(1)?]);
    let share = ((value - left.1) / (right.1 - left.1)).clamp(0.0, 1.0);
    Some(S::nearest(left.0.into() * (1.0 - share) + right.0.into() * share))
}

/// Returns the last pivot that the rule accepts, and the first that it does not.
pub(super) fn crossing<S: Copy>(
    pivots: &[S; PIVOTS],
    outer: (S, S),
    accepts: impl Fn(usize) -> bool,
) -> (S, S) {
    let first = (0..PIVOTS).find(|&i| !accepts(i)).unwrap_or(PIVOTS);
    around(pivots, first, outer)
}

/// Returns pivots strictly inside a range, ascending, evenly spaced in value.
pub(super) fn values_between<S: Scalar>(least: S, most: S) -> [S; PIVOTS] {
    let (least, most): (f64, f64) = (least.into(), most.into());
    std::array::from_fn(|i| {
        let share = (i + 1) as f64 / (PIVOTS + 1) as f64;
        S::nearest(least * (1.0 - share) + most * share)
    })
}
