//! One set of keys for many rows, with a lower bound on the size of any such set.
//!
//! The smallest set S whose tail mass is within the budget in every row solves a covering integer program. Two facts
//! enclose its size.
//!
//! * **Lower bound.** For mixture weights y >= 0, every feasible S satisfies
//!   `sum_{i not in S} sum_j y_j P_j(i) <= sum_j y_j eps_j`. So no feasible set has fewer keys than the mixed row needs
//!   for that budget.
//! * **Upper bound.** A walk over the keys, from the worst of the mixed row to the best, drops each key that every row
//!   can still afford. It leaves a feasible set.
//!
//! The weights are multipliers of the relaxed program's dual. They are improved by multiplicative updates, then by
//! Newton steps on the few keys near the boundary (`dual`), from coarse to fine (`search`). The contested keys are
//! walked in several orders (`walk`). If there are many rows, only those that set a limit are weighed, and all are
//! certified (`rounds`).
//!
//! The certificate covers the listed rows only, and no other queries.

mod block;
mod bound;
mod by_queries;
mod dual;
mod family;
mod frame;
mod limits;
mod overshoot;
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
    /// Kept positions, ascending.
    pub indices: Vec<u32>,
    /// Status: certified if every row is within its budget, over budget if `max_keep` forbade that, empty if no row has
    /// a visible key.
    pub status: Status,
    /// Upper bound on the real tail mass of each row.
    pub tail_mass_upper: Vec<f64>,
    /// Lower bound on the real tail mass of each row.
    pub tail_mass_lower: Vec<f64>,
    /// Lower bound on the size of any set with the same forced keys whose loss is, in each row, at most the budget, or
    /// this set's loss (`tail_mass_upper`) where that is more.
    pub lower_bound: usize,
    /// Mixture of the (normalised) rows that proves the lower bound. The weights are exact in f32, and 0 for rows
    /// without influence.
    pub weights: Vec<f64>,
}

/// Finds one set of keys whose dropped mass is proven to be at most `eps` in every row, close to the smallest such set.
///
/// The options `max_keep`, `keep_first`, `keep_last`, `effort` and `threads` apply. Under `max_keep` the largest ratio
/// of loss to budget is made small. `keep_first` and `keep_last` count the positions visible to any row.
///
/// Up to 256 rows are all weighed, of more rows only those that set a limit. A weighed row takes four bytes per score,
/// and usually a third of that again for the keys near the boundary (three times as much if all scores are equal).
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
/// The [`Error`] for invalid scores, budgets or options, for too little memory, or for a call that was ended.
pub fn keep_set(scores: &Scores<'_>, eps: &[f64], options: &Options) -> Result<KeepSet, Error> {
    let _environment = threads::default_floats();
    let eps = scores.budgets(eps)?;
    options.check()?;
    judge_options(scores, options)?;
    let size = scores.rows().saturating_mul(scores.longest());
    let threads = threads::count(options.threads, size > SERIAL)?;
    // Budgets, the answer, and a few numbers per row.
    check_memory("scores", scores.rows(), 80)?;
    let budgets: Vec<f64> = (0..scores.rows()).map(|row| eps.of(row)).collect();
    let source = Scored { scores, eps, budgets: &budgets, threads };
    let seen = source.seen()?;
    let visible = seen.visible.iter().filter(|visible| **visible).count();
    let asked = ends(&seen.visible, options.keep_first, options.keep_last);
    let max_keep = allowed_keys(options, visible, 0, scores, 0)?;
    let frame = Frame::new(seen, asked, max_keep)?;
    Ok(KeepSet::of(rounds::solve(&source, &frame, options.effort, threads)?))
}

fn judge_options(scores: &Scores<'_>, options: &Options) -> Result<(), Error> {
    let conflict = |first, remedy| Err(Error::Conflict { first, second: "keep_set", remedy });
    if scores.is_ragged() {
        return conflict("indptr", "rows of one set share their positions; pad them and mask");
    }
    // Named one by one, so that a new option does not compile before it is decided here.
    let &Options {
        min_keep,
        block_size,
        max_keep: _,
        keep_first: _,
        keep_last: _,
        prove_minimal: _, // of a set there is a lower bound instead
        effort: _,
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
    /// Returns a set of single keys.
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
