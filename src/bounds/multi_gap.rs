//! The multi-gap bound: tail and head are cut into runs, each bounded by its best or its worst member.

use super::cuts::{best_split, of_heads, of_tails};
use super::levels;
use super::measure::Measure;
use super::rows::{VisibleRow, map_rows};
use crate::error::Error;
use crate::rows::Scores;
use crate::runtime::ambient::asked;
use crate::runtime::memory::check_memory;

/// Cuts of sorted rows, beside the cut at k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cuts<'a> {
    /// Cuts after these numbers of best keys: strictly increasing, strictly between 0 and n, without k. Those above k
    /// cut the tail, those below it the head. No cuts give the single gap.
    At(&'a [i64]),
    /// Best places for at most that many cuts, in tail and head together; one per key is exact.
    Best(usize),
}

/// Most cuts times keys of a row that the search for the best cuts may store.
const MOST: usize = 1 << 27;

/// Returns an upper bound of the tail mass of the top k of every row, from the scores at a few ranks. Shape (rows,).
///
/// With cuts `k = b_0 < b_1 < ... < b_B = n` the tail weighs at most `sum_r (b_{r+1} - b_r) e^{s_(b_r + 1)}`. The head,
/// cut likewise, weighs at least the sum of size times smallest member. `k` as in [`score_gap`](super::score_gap). The
/// best cuts are found by dynamic programming in O(n cuts), exact up to the rounding of f64, and then bounded like any
/// others. Source: arXiv 2512.07647, the multi-gap bound.
///
/// ```
/// use certk_rs::{Scores, bounds::{Cuts, multi_gap, single_gap}};
/// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
/// let scores = Scores::new(&row, &[1, 6])?;
/// let two = multi_gap(&scores, &[2], Cuts::Best(2))?;
/// let all = multi_gap(&scores, &[2], Cuts::Best(6))?;
/// assert!(all[0] < two[0] && two[0] < single_gap(&scores, &[2])?[0]);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Cut`], [`Error::KeptCount`], [`Error::Length`], [`Error::Option`] if there are too many cuts to search for,
/// and the error of an invalid score.
pub fn multi_gap(scores: &Scores<'_>, k: &[i64], cuts: Cuts<'_>) -> Result<Vec<f64>, Error> {
    let k = scores.per_row("k", k)?;
    judge(scores, cuts)?;
    map_rows(scores, |mut row| {
        let kept = row.kept(k)?;
        if let Cuts::At(cuts) = cuts {
            fit(cuts, &row, kept)?;
        }
        if kept == 0 || kept == row.keys.len() {
            return Ok(f64::from(u8::from(kept < row.keys.len())));
        }
        row.sorted();
        if let Cuts::Best(most) = cuts {
            ask(row.keys.len(), most)?;
        }
        Ok(match cuts {
            Cuts::At(cuts) => {
                let cuts: Vec<usize> = cuts.iter().map(|c| c.unsigned_abs() as usize).collect();
                bound(row.measure, &row.keys, kept, &cuts)
            }
            Cuts::Best(most) => least(row.measure, &row.keys, kept, most),
        })
    })
}

/// Returns the cuts of [`Cuts::Best`], ascending: at most `most` per row, without k.
///
/// ```
/// use certk_rs::{Scores, bounds::{Cuts, best_cuts, multi_gap}};
/// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
/// let scores = Scores::new(&row, &[1, 6])?;
/// let cuts: Vec<i64> = best_cuts(&scores, &[2], 2)?[0].iter().map(|&c| c as i64).collect();
/// assert!(!cuts.is_empty() && cuts.len() <= 2);
/// let (at, best) = (Cuts::At(&cuts), Cuts::Best(2));
/// assert_eq!(multi_gap(&scores, &[2], at)?, multi_gap(&scores, &[2], best)?);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// As [`multi_gap`].
pub fn best_cuts(scores: &Scores<'_>, k: &[i64], most: usize) -> Result<Vec<Vec<usize>>, Error> {
    let k = scores.per_row("k", k)?;
    judge(scores, Cuts::Best(most))?;
    map_rows(scores, |mut row| {
        let kept = row.kept(k)?;
        if kept == 0 || kept == row.keys.len() {
            return Ok(Vec::new());
        }
        row.sorted();
        ask(row.keys.len(), most)?;
        Ok(best(row.measure, &row.keys, kept, most))
    })
}

/// Checks the memory for the search of a row's best cuts. It holds weights, an envelope of lines that grows by
/// doubling, and on either side a cost and a cut per key and number of cuts.
pub(super) fn ask(n: usize, most: usize) -> Result<(), Error> {
    let layers = most.min(n).saturating_add(1);
    check_memory("scores", n.saturating_add(2), layers.saturating_mul(16).saturating_add(64))
}

/// Checks everything that does not depend on a row.
pub(super) fn judge(scores: &Scores<'_>, cuts: Cuts<'_>) -> Result<(), Error> {
    match cuts {
        Cuts::At(cuts) => {
            for (position, pair) in cuts.windows(2).enumerate() {
                if pair[1] <= pair[0] {
                    let problem = format!("cuts must increase, and {} stands before it", pair[0]);
                    return Err(Error::Cut { position: position + 1, value: pair[1], problem });
                }
            }
            match cuts.first() {
                Some(&value) if value <= 0 => {
                    let problem = "cuts lie strictly between 0 and n".into();
                    Err(Error::Cut { position: 0, value, problem })
                }
                _ => Ok(()),
            }
        }
        Cuts::Best(most) => {
            let n = scores.longest();
            if most.min(n).saturating_mul(n) > MOST {
                return Err(Error::Option {
                    argument: "n_cuts",
                    value: most.to_string(),
                    problem: "so many cuts of so long a row cannot be searched for; take fewer, or give cuts",
                });
            }
            Ok(())
        }
    }
}

/// Checks increasing positive cuts against a row.
fn fit(cuts: &[i64], row: &VisibleRow<'_>, kept: usize) -> Result<(), Error> {
    let n = row.keys.len();
    for (position, &value) in cuts.iter().enumerate() {
        let problem = if value.unsigned_abs() >= n as u64 {
            format!("cuts lie strictly between 0 and n, which is {n} in {}", row.place().row())
        } else if value.unsigned_abs() == kept as u64 {
            format!("k = {kept} is a cut already; leave it out")
        } else {
            continue;
        };
        return Err(Error::Cut { position, value, problem });
    }
    Ok(())
}

/// Returns the bound with given cuts, 0 < kept < n, of keys sorted best first.
pub(super) fn bound(measure: Measure, keys: &[f64], kept: usize, cuts: &[usize]) -> f64 {
    let inside = cuts.partition_point(|&cut| cut < kept);
    let (head, tail) = cuts.split_at(inside);
    let run = |(from, to): (usize, usize)| (to - from) as u64;
    let starts = std::iter::once(kept).chain(tail.iter().copied());
    let ends = tail.iter().copied().chain([keys.len()]);
    let tail = starts.zip(ends).map(|piece| (run(piece), keys[piece.0]));
    let starts = std::iter::once(0).chain(head.iter().copied());
    let ends = head.iter().copied().chain([kept]);
    let head = starts.zip(ends).map(|piece| (run(piece), keys[piece.1 - 1]));
    levels::tail_mass(measure, tail, head)
}

/// Returns the bound with the best cuts, 0 < kept < n, of keys sorted best first.
pub(super) fn least(measure: Measure, keys: &[f64], kept: usize, most: usize) -> f64 {
    let cuts = best(measure, keys, kept, most);
    // Where weights underflow beside the largest, the single gap may be sharper.
    bound(measure, keys, kept, &cuts).min(bound(measure, keys, kept, &[]))
}

/// Returns the best cuts of keys sorted best first, 0 < kept < n.
pub(super) fn best(measure: Measure, keys: &[f64], kept: usize, most: usize) -> Vec<usize> {
    let weigh = |keys: &[f64]| -> Vec<f64> {
        let mut weights: Vec<f64> =
            asked(keys).map(|&key| measure.weight_up(keys[0], key)).collect();
        weights.resize(keys.len(), 0.0);
        weights
    };
    // Each side relative to its own best: a common factor of all ratios has no effect.
    let tails = of_tails(&weigh(&keys[kept..]), most, true);
    let heads = of_heads(&weigh(&keys[..kept]), most, true);
    let tail: Vec<f64> = tails.costs.iter().map(|costs| costs[0]).collect();
    let head: Vec<f64> = heads.costs.iter().map(|costs| costs[kept]).collect();
    let (_, in_tail) = best_split(&tail, &head, most);
    let mut cuts = heads.path(most - in_tail, kept);
    cuts.reverse();
    cuts.extend(tails.path(in_tail, 0).into_iter().map(|cut| kept + cut));
    cuts
}
