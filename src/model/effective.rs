//! How many entries of a row carry weight: those of probability at least `eps`, and the participation ratio.

use crate::error::Error;
use crate::kernels::{LANES, ScaledExp, Simd};
use crate::numerics::certified_sums::{self, Compensated, ExactSum};
use crate::numerics::double_double::DoubleDouble;
use crate::numerics::sorting;
use crate::rows::{Scores, WeightKind, WideScores, drop_masked};
use crate::runtime::ambient::{self, asked, pieces, pieces_mut};
use crate::runtime::memory::{check_memory, filled, room};
use crate::runtime::threads;
use std::cmp::Ordering;

use super::exponential::{exp, exp_m1, scaled};
use super::gaussian::{check_eps, per_row};

/// Entries of a row with probability at least `eps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Effective {
    /// Entries whose probability is proven to be at least `eps`.
    pub count: usize,
    /// Entries whose probability is not proven to be below `eps`: `count`, unless a row was made to hit the threshold to
    /// some 27 digits without being exactly on it, or large additive masks blur the scores.
    pub count_upper: usize,
    /// Visible entries.
    pub n: usize,
}

/// Counts, per row, the entries with `P_i >= eps`, `P` the softmax of exactly the stored scores; `eps` in (0, 1).
///
/// Decided in f64 with a margin for all rounding, what that leaves open in some 105 bits, and exact hits (equal scores, stored
/// probabilities) in integers.
///
/// ```
/// use certk_rs::{Scores, model::effective_entries};
/// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
/// let found = effective_entries(&Scores::new(&row, &[1, 6])?, 0.1, None)?;
/// assert_eq!((found[0].count, found[0].count_upper, found[0].n), (2, 2, 6));
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// Whatever is wrong with the scores; [`Error::Number`] for `eps`.
pub fn effective_entries(
    scores: &Scores<'_>,
    eps: f64,
    threads: Option<usize>,
) -> Result<Vec<Effective>, Error> {
    let _modes = threads::default_floats();
    check_eps(eps)?;
    let simd = Simd::current()?;
    per_row(scores, threads, |row| {
        let mut keys = Vec::new();
        let about = scores.wide_scores(row, &mut keys)?;
        drop_masked(&mut keys);
        ambient::check()?;
        let n = keys.len();
        if n == 0 {
            return Ok(Effective { count: 0, count_upper: 0, n });
        }
        let (count, count_upper) = match about.weight_kind {
            WeightKind::Weight => {
                sorting::sort(&mut keys, |a, b| b.total_cmp(a));
                ambient::check()?;
                let count = count_weights(&keys, eps);
                (count, count)
            }
            WeightKind::Exp { scale } => {
                let weights = weigh(simd, &mut keys, &about)?;
                let total = asked(weights).collect::<Compensated>().value();
                // Those that are open after the first look, a list that grows by doubling.
                check_memory("scores", n, 2 * size_of::<f64>())?;
                let row = Exponentials { keys: &keys[..n], largest: about.largest, scale };
                row.count(total, eps, about.error)
            }
        };
        Ok(Effective { count, count_upper, n })
    })
}

/// Exact, in wide integers.
fn count_weights(weights: &[f64], eps: f64) -> usize {
    let mut total = ExactSum::new();
    for &weight in asked(weights) {
        total.add(weight);
    }
    weights.partition_point(|&weight| {
        let mut one = ExactSum::new();
        one.add(weight);
        one.compare_share(&total, eps) != Ordering::Less
    })
}

/// What is known of an entry's probability beside the threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    AtLeast,
    Below,
    Open,
}

/// The weights of keys relative to the largest, each with an error below 2^-41; keys are filled up to whole groups.
fn weigh(simd: Simd, keys: &mut Vec<f64>, about: &WideScores) -> Result<Vec<f64>, Error> {
    let (n, largest) = (keys.len(), about.largest);
    room("scores", keys, n.next_multiple_of(LANES) - n)?;
    keys.resize(n.next_multiple_of(LANES), f64::NEG_INFINITY);
    let mut weights = filled("scores", keys.len(), 0.0)?;
    match about.weight_kind {
        WeightKind::Weight => {
            asked(weights.iter_mut().zip(&keys[..n]))
                .for_each(|(weight, key)| *weight = key / largest);
        }
        WeightKind::Exp { scale } => {
            let smallest = pieces(&keys[..n]).flatten().copied().fold(largest, f64::min);
            if (largest - smallest).is_finite() {
                for (keys, weights) in pieces(keys).zip(pieces_mut(&mut weights)) {
                    simd.weights(keys, ScaledExp { shift: largest, scale }, weights);
                }
            } else {
                let exact = |key: &f64| certified_sums::exp(exponent(scale, *key, largest));
                asked(weights.iter_mut().zip(&keys[..n]))
                    .for_each(|(weight, key)| *weight = exact(key));
            }
        }
    }
    Ok(weights)
}

/// A row of weights `exp(scale * key)`.
struct Exponentials<'a> {
    keys: &'a [f64],
    largest: f64,
    scale: f64,
}

/// Exponents below this are only known to be positive, and below [`FAINT_WEIGHT`].
const FAINT: f64 = -600.0;
/// 2^-865 > e^-600.
const FAINT_WEIGHT: f64 = 4.064_936_359_238_081e-261;

impl Exponentials<'_> {
    /// `scale * (key - largest)`, relative error below 2^-51.
    fn exponent(&self, key: f64) -> f64 {
        exponent(self.scale, key, self.largest)
    }

    /// Entries proven to be at the threshold or above it, and entries not proven to be below it, given the sum of the
    /// weights.
    fn count(&self, total: f64, eps: f64, error: f64) -> (usize, usize) {
        let line = libm::log(eps) + libm::log(total);
        // |ln eps| <= 745 and ln total <= 45 lose less than 2^-42 by rounding, the weights another 2^-41; scores that are off
        // by `error` move an exponent and the total by that much each.
        let margin = |x: f64| x.abs() * 2f64.powi(-50) + 2f64.powi(-39) + 2.25 * error;
        let above = |key: f64| {
            let x = self.exponent(key);
            x - margin(x) >= line
        };
        let not_below = |key: f64| {
            let x = self.exponent(key);
            x + margin(x) >= line
        };
        let count =
            |holds: &dyn Fn(f64) -> bool| asked(self.keys).filter(|&&key| holds(key)).count();
        let (above_count, not_below_count) = (count(&above), count(&not_below));
        if error > 0.0 || above_count == not_below_count {
            return (above_count, not_below_count);
        }
        let mut open: Vec<f64> =
            asked(self.keys).copied().filter(|&key| not_below(key) && !above(key)).collect();
        sorting::sort(&mut open, |a, b| b.total_cmp(a));
        let above = above_count;
        let count = open.partition_point(|&key| self.side(key, eps) == Side::AtLeast);
        let upper =
            count + open[count..].partition_point(|&key| self.side(key, eps) != Side::Below);
        (above + count, above + upper)
    }

    /// The sign of `eps * sum_j e^(s_j - s) - 1`, where the score `s` belongs to `key`.
    ///
    /// Terms near 1 are counted and their distances to 1 summed apart, so that equal scores leave no rounding and tiny
    /// differences are not lost beside 1.
    fn side(&self, key: f64, eps: f64) -> Side {
        let (mut near, mut faint, mut apart) = (0u32, 0u32, false);
        let zero = DoubleDouble::from(0.0);
        let (mut sum, mut size) = (zero, zero);
        for &other in asked(self.keys) {
            let difference = DoubleDouble::sum(other, -key);
            let x = scaled(difference, self.scale);
            if !x.high.is_finite() || x.high > 700.0 {
                return Side::Open;
            }
            let term = if x.high < FAINT {
                faint += 1;
                continue;
            } else if x.high.abs() <= 0.5 {
                near += 1;
                if difference == zero {
                    continue;
                }
                exp_m1(x)
            } else {
                exp(x)
            };
            apart = true;
            sum = sum.plus(term);
            size = size.plus(if term.high < 0.0 { term.negated() } else { term });
        }
        let product = DoubleDouble::product(eps, f64::from(near));
        if eps < f64::MIN_POSITIVE / f64::EPSILON {
            return Side::Open;
        }
        let base = product.plus(-1.0);
        let value = base.plus(scaled(sum, eps)).high;
        // The relative precision of two parts is lost where the second would be subnormal.
        let precision = if size.high * eps < 2f64.powi(-850) { -50 } else { -92 };
        let terms = self.keys.len() as f64 + 64.0;
        let doubt = if apart {
            (size.high * eps + base.high.abs()) * terms.max(256.0) / 256.0 * 2f64.powi(precision)
                + 2f64.powi(-1060)
        } else {
            base.high.abs() * 2f64.powi(-100)
        };
        let hidden = f64::from(faint) * FAINT_WEIGHT * eps * 2.0;
        let strictly = faint > 0;
        if value - doubt > 0.0 || strictly && value - doubt >= 0.0 {
            Side::Below
        } else if value + doubt + hidden <= 0.0 {
            Side::AtLeast
        } else {
            Side::Open
        }
    }
}

/// `scale * (key - largest)` without overflow of the difference.
fn exponent(scale: f64, key: f64, largest: f64) -> f64 {
    let difference = key - largest;
    if difference.is_finite() {
        scale * difference
    } else {
        // Numbers this large lose nothing when halved.
        2.0 * scale * (0.5 * key - 0.5 * largest)
    }
}

/// The participation ratio `1 / sum P_i^2` per row, in [1, n]: n for equal scores, 1 for a single spike, 0 for a row without
/// visible entries.
///
/// Relative error below 2^-38 (about 4e-12), plus four times the blur of large additive masks.
///
/// ```
/// use certk_rs::{Scores, model::participation};
/// let rows = [1.0_f32, 1.0, 1.0, 1.0, 99.0, 0.0, 0.0, 0.0];
/// let found = participation(&Scores::new(&rows, &[2, 4])?, None)?;
/// assert!((found[0] - 4.0).abs() < 1e-9 && (found[1] - 1.0).abs() < 1e-9);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// Whatever is wrong with the scores.
pub fn participation(scores: &Scores<'_>, threads: Option<usize>) -> Result<Vec<f64>, Error> {
    let _modes = threads::default_floats();
    let simd = Simd::current()?;
    per_row(scores, threads, |row| {
        let mut keys = Vec::new();
        let about = scores.wide_scores(row, &mut keys)?;
        drop_masked(&mut keys);
        if keys.is_empty() {
            return Ok(0.0);
        }
        let n = keys.len();
        let weights = weigh(simd, &mut keys, &about)?;
        let total = asked(&weights).copied().collect::<Compensated>().value();
        let squares =
            asked(&weights).map(|weight| weight * weight).collect::<Compensated>().value();
        Ok((total * total / squares).clamp(1.0, n as f64))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(row: &[f64], eps: f64) -> (usize, usize) {
        let scores = Scores::new(row, &[row.len()]).unwrap();
        let found = effective_entries(&scores, eps, None).unwrap()[0];
        (found.count, found.count_upper)
    }

    #[test]
    fn thresholds_that_are_hit() {
        assert_eq!(count(&[0.0; 4], 0.25), (4, 4));
        assert_eq!(count(&[0.0; 4], 0.25f64.next_up()), (0, 0));
        assert_eq!(count(&[0.0, 0.0, -1000.0], 0.5), (0, 0));
        assert_eq!(count(&[0.0, 0.0, -1000.0], 0.5f64.next_down()), (2, 2));
        assert_eq!(count(&[1e-300, 0.0], 0.5), (1, 1));
        assert_eq!(count(&[2f64.powi(-100), 0.0], 0.5), (1, 1));
        assert_eq!(count(&[0.0, -5e307, -1e308], 0.999), (1, 1));
        // The float64 nearest to ln 3 lies a quarter of a unit above it: 3/4 is just passed.
        let three = 3f64.ln();
        assert_eq!(count(&[three, 0.0], 0.75), (1, 1));
        assert_eq!(count(&[three.next_down(), 0.0], 0.75), (0, 0));
    }

    #[test]
    fn stored_weights_are_exact() {
        let weights = [0.5, 0.25, 0.25];
        let scores = Scores::new(&weights[..], &[3]).unwrap().kind(crate::Kind::Probs).unwrap();
        assert_eq!(effective_entries(&scores, 0.25, None).unwrap()[0].count, 3);
        assert_eq!(effective_entries(&scores, 0.25f64.next_up(), None).unwrap()[0].count, 1);
        assert_eq!(participation(&scores, None).unwrap(), [1.0 / 0.375]);
    }

    #[test]
    fn participation_at_the_ends() {
        let row = [3.0f32, 3.0, 3.0, f32::NEG_INFINITY];
        let scores = Scores::new(&row[..], &[4]).unwrap();
        assert_eq!(participation(&scores, None).unwrap(), [3.0]);
        let row = [0.0f32, -1e30, f32::MIN];
        let scores = Scores::new(&row[..], &[3]).unwrap();
        assert_eq!(participation(&scores, None).unwrap(), [1.0]);
        let row = [f32::NEG_INFINITY];
        let scores = Scores::new(&row[..], &[1]).unwrap();
        assert_eq!(participation(&scores, None).unwrap(), [0.0]);
    }
}
