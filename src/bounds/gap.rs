//! The single-gap bound on the tail mass, from the k-th and the (k+1)-th best score.

use super::levels;
use super::measure::Measure;
use super::rows::{VisibleRow, map_rows};
use crate::error::{Error, Place};
use crate::numerics::certified_sums;
use crate::numerics::double_double::{DoubleDouble, ln_ratio, split, two_sum};
use crate::numerics::sorting;
use crate::rows::Scores;
use crate::runtime::ambient::pieces;
use crate::runtime::threads;

/// Bound on the change of the logarithm of a quotient when both products in it are rounded.
const ROUNDED: f64 = 1.0 / (1u128 << 95) as f64;

/// Returns the gap `s_(k) - s_(k+1)`, in nats, that certifies a tail mass of at most `eps` for the top k of `n` scores:
/// `ln[(n - k)(1 - eps) / (k eps)]`, rounded up.
///
/// `k = n` gives -inf: nothing is dropped. Otherwise `eps = 0` and `k = 0` give +inf: no gap suffices. A value <= 0
/// means that the `k` best scores suffice for any values. Its sign is decided in integers, `(n - k)(1 - eps) <= k eps`.
/// Source: arXiv 2512.07647, the single-gap certificate.
///
/// ```
/// use certk_rs::bounds::required_gap;
/// assert!((required_gap(4, 1, 0.1)? - 27f64.ln()).abs() < 1e-12);
/// assert!(required_gap(4, 3, 0.5)? <= 0.0); // any three of four do
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::KeptCount`] if `k > n`, [`Error::Eps`] if `eps` lies outside [0, 1).
pub fn required_gap(n: u64, k: u64, eps: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    let place = || Place(vec![]);
    if k > n {
        return Err(Error::KeptCount { place: place(), value: k as i64, n: n as usize });
    }
    if !(0.0..1.0).contains(&eps) {
        return Err(Error::Eps { place: place(), value: eps });
    }
    if k == n {
        return Ok(f64::NEG_INFINITY);
    }
    if k == 0 || eps == 0.0 {
        return Ok(f64::INFINITY);
    }
    let enough = certified_sums::equal_weights_hold(k, n, eps);
    let (m, e) = split(eps);
    let (high, low) = two_sum(1.0, -eps);
    let dropped = count(n - k).times(DoubleDouble { high, low });
    // The two products may differ by no more than their rounding, which is below 2^-100.
    let gap = ln_ratio(dropped, count(k).times(m), -e).plus(ROUNDED).up();
    Ok(if enough { gap.min(0.0) } else { gap.max(f64::MIN_POSITIVE) })
}

/// Returns a count below 2^64, exactly.
fn count(value: u64) -> DoubleDouble {
    let high = value as f64;
    // The difference is exact, and so is its conversion.
    let low = (i128::from(value) - high as i128) as f64;
    DoubleDouble { high, low }
}

/// Returns [`required_gap`] of every entry of three arrays of one shape.
///
/// # Errors
/// As [`required_gap`], naming the entry.
pub fn required_gaps(
    n: &[i64],
    k: &[i64],
    eps: &[f64],
    shape: &[usize],
) -> Result<Vec<f64>, Error> {
    super::rows::each(shape, |i, place| {
        let Ok(count) = u64::try_from(n[i]) else {
            return Err(Error::RowCount { place: place(), value: n[i] });
        };
        let Ok(kept) = u64::try_from(k[i]) else {
            return Err(Error::KeptCount { place: place(), value: k[i], n: count as usize });
        };
        required_gap(count, kept, eps[i]).map_err(|error| match error {
            Error::KeptCount { value, n, .. } => Error::KeptCount { place: place(), value, n },
            Error::Eps { value, .. } => Error::Eps { place: place(), value },
            other => other,
        })
    })
}

/// Returns the gap `s_(k) - s_(k+1)` of every row, in nats, rounded down. Shape (rows,).
///
/// `k` holds one count per row, or one for all; masked entries do not count. `k = n` gives +inf (there is no further
/// score), otherwise `k = 0` gives -inf (an empty set certifies nothing). So `score_gap >= required_gap` always proves
/// the budget.
///
/// ```
/// use certk_rs::{Scores, bounds::score_gap};
/// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
/// let gap = score_gap(&Scores::new(&row, &[1, 6])?, &[2])?;
/// assert!(2.0 - 1e-9 < gap[0] && gap[0] <= 2.0); // between 3 and 1
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::KeptCount`], [`Error::Length`], and the error of an invalid score.
pub fn score_gap(scores: &Scores<'_>, k: &[i64]) -> Result<Vec<f64>, Error> {
    let k = scores.per_row("k", k)?;
    map_rows(scores, |mut row| {
        let kept = row.kept(k)?;
        Ok(match boundary(&mut row, kept) {
            None if kept == row.keys.len() => f64::INFINITY,
            None => f64::NEG_INFINITY,
            Some((worst, next)) => {
                let gap = row.measure.gap_down(worst, next);
                let error = 2.0 * row.measure.error;
                if error == 0.0 { gap } else { (gap - error).next_down() }
            }
        })
    })
}

/// Returns an upper bound of the tail mass of the top k of every row, from two scores: `(n - k) / (n - k + k e^gap)`.
/// Shape (rows,).
///
/// `k` as in [`score_gap`]. `k = n` gives exactly 0, otherwise `k = 0` gives 1. The bound is an equality for two-level
/// rows; a gap of 0 gives the smallest float that is not below `(n - k) / n`. Source: arXiv 2512.07647, the single-gap
/// bound.
///
/// ```
/// use certk_rs::{Scores, bounds::single_gap};
/// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
/// let upper = single_gap(&Scores::new(&row, &[1, 6])?, &[2])?;
/// let bound = 4.0 / (4.0 + 2.0 * 2f64.exp());
/// assert!(bound <= upper[0] && upper[0] < bound + 1e-9);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// As [`score_gap`].
pub fn single_gap(scores: &Scores<'_>, k: &[i64]) -> Result<Vec<f64>, Error> {
    let k = scores.per_row("k", k)?;
    map_rows(scores, |mut row| {
        let kept = row.kept(k)?;
        Ok(match boundary(&mut row, kept) {
            None => f64::from(u8::from(kept < row.keys.len())),
            Some(ends) => from_gap(row.measure, row.keys.len(), kept, ends),
        })
    })
}

/// Returns the bound of the top `kept` of `n`, 0 < kept < n, from the worst score kept and the best one dropped.
pub(super) fn from_gap(measure: Measure, n: usize, kept: usize, (worst, next): (f64, f64)) -> f64 {
    let tail = std::iter::once(((n - kept) as u64, next));
    levels::tail_mass(measure, tail, std::iter::once((kept as u64, worst)))
}

/// Returns the worst key of the top `kept` and the best of the others; `None` if one side is empty.
fn boundary(row: &mut VisibleRow<'_>, kept: usize) -> Option<(f64, f64)> {
    if kept == 0 || kept == row.keys.len() {
        return None;
    }
    sorting::place(&mut row.keys, kept, |a, b| b.total_cmp(a));
    let worst = pieces(&row.keys[..kept]).flatten().copied().fold(f64::INFINITY, f64::min);
    Some((worst, row.keys[kept]))
}
