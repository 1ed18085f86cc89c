//! One set of keys for many rows, with a lower bound on the size of any such set.
//!
//! The smallest set S whose tail mass is within the budget in every row solves a covering integer program. Two facts
//! enclose its size. For any mixture weights y >= 0, every feasible S satisfies
//! `sum_{i not in S} sum_j y_j P_j(i) <= sum_j y_j eps_j`, so no feasible set has fewer keys than the best keys of the mixed row need
//! for that budget: a **lower bound**. And walking the keys from the worst of the mixed row to the best, dropping each
//! one that every row can still afford, leaves a feasible set: an **upper bound**. The weights are multipliers of the
//! relaxed program's dual, which is improved by multiplicative updates first and then by Newton steps on the few keys near
//! the boundary (`dual`), from coarse to fine (`search`); the contested keys are walked in several orders (`walk`). Of many rows
//! only those are weighed that have a say, and all are certified (`rounds`).
//!
//! The promise covers the listed rows only. It says nothing about queries that were not among them.

mod block;
mod bound;
mod by_queries;
mod dual;
mod family;
mod frame;
mod problem;
mod queried;
mod repair;
mod rounds;
mod scored;
mod search;
mod solve;
mod source;
mod streamed;
mod walk;

pub use block::{Block, QueryOptions};
pub use by_queries::keep_set_of_queries;

use crate::certificate::Status;
use crate::error::Error;
use crate::rows::Scores;
use crate::runtime::memory::check_memory;
use crate::runtime::threads;
use crate::select::{Options, allowed_keys};
use frame::{Frame, ends};
use rounds::Found;
use scored::Scored;

/// Scores up to which one thread is faster than several.
const SERIAL: usize = 1 << 14;

/// One kept set for many rows.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct KeepSet {
    /// Positions kept, ascending.
    pub indices: Vec<u32>,
    /// Certified if every row is within its budget, over budget if `max_keep` forbade that, empty if no row has a
    /// visible key.
    pub status: Status,
    /// The real tail mass of each row is at most this.
    pub tail_mass_upper: Vec<f64>,
    /// The real tail mass of each row is at least this.
    pub tail_mass_lower: Vec<f64>,
    /// No set with the same forced keys can be smaller and lose, in each row, at most the budget, or what this set loses
    /// (`tail_mass_upper`) where that is more.
    pub lower_bound: usize,
    /// The mixture of (normalised) rows that proves the lower bound: numbers that f32 holds exactly, and 0 for every row that has
    /// no say.
    pub weights: Vec<f64>,
}

/// Finds one set of keys whose dropped mass is proven to be at most `eps` in every row, close to the smallest such set.
///
/// Of the options, `max_keep` (with which the largest ratio of loss to budget is made small), `keep_first` and `keep_last`
/// (counted over the positions visible to any row) and `threads` apply. Of up to 256 rows all are weighed, of more those that set a
/// limit; a row that is takes four bytes per score, and again for the keys near the boundary: usually a third of that, three
/// times as much where all scores are equal.
///
/// ```
/// use certk_rs::{Options, Scores, keep_set};
/// let rows = [3.0_f32, 0.0, 2.0, -9.0, 0.0, 3.0, 2.0, -9.0];
/// let set = keep_set(&Scores::new(&rows, &[2, 4])?, &[0.1], &Options::new())?;
/// assert_eq!(set.indices, [0, 1, 2]);
/// assert_eq!(set.lower_bound, 3); // no set of two serves both rows
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// Whatever is wrong with the scores, the budgets or the options, by variant.
pub fn keep_set(scores: &Scores<'_>, eps: &[f64], options: &Options) -> Result<KeepSet, Error> {
    let _environment = threads::default_floats();
    let eps = scores.budgets(eps)?;
    options.check()?;
    judge_options(scores, options)?;
    let size = scores.rows().saturating_mul(scores.longest());
    let threads = threads::count(options.threads, size > SERIAL)?;
    // Budgets, the answer, and what is known of each row.
    check_memory("scores", scores.rows(), 80)?;
    let budgets: Vec<f64> = (0..scores.rows()).map(|row| eps.of(row)).collect();
    let source = Scored { scores, eps, budgets: &budgets, threads };
    let seen = source.seen()?;
    let visible = seen.visible.iter().filter(|visible| **visible).count();
    let asked = ends(&seen.visible, options.keep_first, options.keep_last);
    let max_keep = allowed_keys(options, visible, 0, scores, 0)?;
    let frame = Frame::new(seen, asked, max_keep)?;
    Ok(KeepSet::of(rounds::solve(&source, &frame, threads)?))
}

fn judge_options(scores: &Scores<'_>, options: &Options) -> Result<(), Error> {
    let conflict = |first, remedy| Err(Error::Conflict { first, second: "keep_set", remedy });
    if scores.is_ragged() {
        return conflict("indptr", "rows of one set share their positions; pad them and mask");
    }
    // One by one, so that an option that is added does not compile before somebody has decided here.
    let &Options {
        min_keep,
        block_size,
        max_keep: _,
        keep_first: _,
        keep_last: _,
        prove_minimal: _, // of a set there is a lower bound instead
        threads: _,
    } = options;
    if block_size != 1 {
        return conflict("block_size", "a set of whole blocks is not supported; leave it at 1");
    }
    if min_keep > 1 {
        return conflict("min_keep", "use keep_first or keep_last, or leave it at 1");
    }
    Ok(())
}

impl KeepSet {
    /// A set of single keys.
    fn of(found: Found) -> Self {
        let Found { kept, status, upper, lower, lower_bound, weights } = found;
        KeepSet {
            indices: (0..kept.len()).filter(|&i| kept[i]).map(|i| i as u32).collect(),
            status,
            tail_mass_upper: upper,
            tail_mass_lower: lower,
            lower_bound,
            weights,
        }
    }
}
