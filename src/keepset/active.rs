//! Many rows: the program is solved for some of them, all are certified against its set, and those that lose too much join.
//!
//! Few rows of many set a limit. A set that is within the budget of every row is feasible, whichever rows it was found
//! for, and a lower bound for some rows is one for all; so what comes out of the last round is enclosed as if all rows had been
//! in the program. Weights are held for its rows only, the others are read once a round.

use super::problem::{Problem, Seen};
use super::{KeepSet, certified_rows, positions};
use crate::certificate::Status;
use crate::error::Error;
use crate::interrupt;
use crate::memory::check_memory;
use crate::rows::{PerRow, Scores};
use crate::select::Options;

/// From so many rows on some are enough.
pub(super) const MANY: usize = 2048;
/// Rows of the first program, evenly spaced, and those that may join in a round, the ones that lose most.
const JOIN: usize = 256;
/// One row in so many may be in the program, or lose too much to its set: where more have a say, all are weighed.
const SHARE: usize = 8;
/// Rounds in which rounding alone was in the way.
const ATTEMPTS: usize = 3;

/// The set, unless `max_keep` asks for less than all rows need, or too many rows have a say: then all have to be weighed.
pub(super) fn keep_set(
    scores: &Scores<'_>,
    eps: &PerRow<'_, f64>,
    options: &Options,
    threads: usize,
) -> Result<Option<KeepSet>, Error> {
    let rows = scores.rows();
    // Budgets, the answer, and the rows that lose too much.
    check_memory("scores", rows, 64)?;
    let seen = Seen::by_all(scores, eps, threads)?;
    if seen.visible.iter().all(|visible| !visible) {
        return Ok(Some(KeepSet::empty(rows)));
    }
    let budgets: Vec<f64> = (0..rows).map(|row| eps.of(row)).collect();
    let mut listed: Vec<usize> = (0..JOIN).map(|i| i * rows / JOIN).collect();
    let mut attempts = 0;
    while listed.len() <= (rows / SHARE).max(2 * JOIN) && attempts < ATTEMPTS {
        let mut problem = Problem::new(scores, &listed, eps, Some(&seen), options, threads)?;
        if problem.aims != problem.eps {
            return Ok(None);
        }
        for attempt in 0..attempts {
            problem.set_more_aside(attempt);
        }
        let best = problem.search()?;
        if best.size > problem.max_keep {
            return Ok(None);
        }
        let judged = certified_rows(scores, &best.kept, &budgets, threads)?;
        let excess = |row: usize| judged.tail_mass_upper[row] / budgets[row].max(f64::MIN_POSITIVE);
        let mut over: Vec<(f64, usize)> = (judged.holds.iter().flatten().enumerate())
            .filter(|(_, holds)| !**holds)
            .map(|(row, _)| (excess(row), row))
            .collect();
        if over.is_empty() {
            let mut weights = vec![0.0; rows];
            for (&row, weight) in listed.iter().zip(&best.weights) {
                weights[row] = *weight;
            }
            return Ok(Some(KeepSet {
                indices: positions(&best.kept),
                status: Status::Certified,
                tail_mass_upper: judged.tail_mass_upper,
                tail_mass_lower: judged.tail_mass_lower,
                lower_bound: best.lower_bound,
                weights,
            }));
        }
        let among = over.len();
        over.retain(|(_, row)| listed.binary_search(row).is_err());
        // Of rows of the program only rounding makes such.
        attempts += usize::from(over.len() < among);
        if over.len() > rows / SHARE {
            return Ok(None);
        }
        over.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        listed.extend(over.iter().take(JOIN).map(|(_, row)| row));
        listed.sort_unstable();
        interrupt::check()?;
    }
    Ok(None)
}
