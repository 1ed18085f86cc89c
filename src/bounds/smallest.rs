//! Smallest k that a bound certifies, for comparing bounds on the same rows.

use super::cuts::{best_split, of_heads, of_tails};
use super::gap::{from_gap, required_gap};
use super::measure::Measure;
use super::multi_gap::{self, Cuts};
use super::rows::map_rows;
use crate::error::Error;
use crate::rows::Scores;
use crate::runtime::ambient::{asked, pieces};
use crate::runtime::threads;

/// Bound that has to certify the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GapRule {
    /// [`single_gap`](super::single_gap).
    SingleGap,
    /// [`multi_gap`](super::multi_gap()) with the best cuts, at most `cuts`.
    MultiGap {
        /// Most cuts, in tail and head together.
        cuts: usize,
    },
    /// The largest score and all within `max(0, ln[(n - 1)(1 - eps) / eps])` below it. Needs no exponential.
    Threshold,
}

/// Returns a bound on the relative excess of the least ratio found by the search for cuts over the rigorous bound with
/// the best cuts. The search compares sums of n terms, once per cut.
fn near(n: usize, most: usize) -> f64 {
    1e-10 + 8.0 * f64::EPSILON * n as f64 * (most.min(n) + 1) as f64
}

/// Returns the smallest k whose top k a rule certifies for the budget of the row, in natural order of k. Shape (rows,).
///
/// `eps` holds one budget per row, or one for all, in [0, 1). A row without unmasked entries gives 0, any other at
/// least 1. Every answer is sound: the tail mass of the top k is at most `eps` in real arithmetic. So no answer is
/// below the k of [`select`](crate::select()) with `prove_minimal`, unless that one could not use the last 1e-12 of the
/// budget. Below budgets of some 1e-300, where weights underflow, the multi-gap rule may miss the smallest k that it
/// would certify.
///
/// ```
/// use certk_rs::{Options, Scores, bounds::{GapRule, smallest_k}, select};
/// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
/// let scores = Scores::new(&row, &[1, 6])?;
/// let [single] = smallest_k(&scores, &[0.1], GapRule::SingleGap)?[..] else { panic!() };
/// let [multi] = smallest_k(&scores, &[0.1], GapRule::MultiGap { cuts: 6 })?[..] else { panic!() };
/// let least = select(&scores, &[0.1], &Options::new())?.k[0];
/// assert!(least <= multi && multi < single && single < 6);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Eps`], [`Error::Length`], [`Error::Option`] for too many cuts, and the error of an invalid score.
pub fn smallest_k(scores: &Scores<'_>, eps: &[f64], rule: GapRule) -> Result<Vec<i64>, Error> {
    let _modes = threads::default_floats();
    let eps = scores.budgets(eps)?;
    if let GapRule::MultiGap { cuts } = rule {
        multi_gap::judge(scores, Cuts::Best(cuts))?;
    }
    map_rows(scores, |mut row| {
        let eps = eps.of(row.number);
        let n = row.keys.len();
        if n <= 1 || eps == 0.0 {
            return Ok(n as i64);
        }
        if let GapRule::MultiGap { cuts } = rule {
            multi_gap::ask(n, cuts)?;
        }
        let measure = row.measure;
        let k = match rule {
            GapRule::Threshold => within(measure, &row.keys, eps)?,
            GapRule::SingleGap => by_single_gap(measure, row.sorted(), eps),
            GapRule::MultiGap { cuts } => by_multi_gap(measure, row.sorted(), eps, cuts),
        };
        Ok(k as i64)
    })
}

/// Returns the number of keys that the threshold keeps. A dropped key is proven to lie far enough below the largest.
fn within(measure: Measure, keys: &[f64], eps: f64) -> Result<usize, Error> {
    let needed = required_gap(keys.len() as u64, 1, eps)?.max(0.0) + 2.0 * measure.error;
    let needed = if measure.error == 0.0 { needed } else { needed.next_up() };
    let largest = pieces(keys).flatten().copied().fold(f64::NEG_INFINITY, f64::max);
    let near =
        pieces(keys).flatten().filter(|key| measure.gap_down(largest, **key) < needed).count();
    Ok(near.max(1))
}

fn by_single_gap(measure: Measure, keys: &[f64], eps: f64) -> usize {
    let n = keys.len();
    asked(1..n).find(|&k| from_gap(measure, n, k, (keys[k - 1], keys[k])) <= eps).unwrap_or(n)
}

fn by_multi_gap(measure: Measure, keys: &[f64], eps: f64, most: usize) -> usize {
    if most == 0 {
        return by_single_gap(measure, keys, eps);
    }
    let n = keys.len();
    let mut weights: Vec<f64> = asked(keys).map(|&key| measure.weight_up(keys[0], key)).collect();
    weights.resize(n, 0.0);
    // One search serves every k: a tail is a suffix of the row, and a head a prefix.
    let (tails, heads) = (of_tails(&weights, most, false), of_heads(&weights, most, false));
    let odds = eps / (1.0 - eps) * (1.0 + near(n, most));
    let (mut tail, mut head) = (Vec::new(), Vec::new());
    for k in asked(1..n) {
        tail.clear();
        tail.extend(tails.costs.iter().take(n - k).map(|costs| costs[k]));
        head.clear();
        head.extend(heads.costs.iter().take(k).map(|costs| costs[k]));
        let close = best_split(&tail, &head, most).0 <= odds;
        if close && multi_gap::least(measure, keys, k, most) <= eps {
            return k;
        }
    }
    n
}
