//! Maps over rows: reading, distribution over threads, and places for errors.

use super::measure::Measure;
use crate::error::{Error, Place};
use crate::numerics::sorting;
use crate::rows::{PerRow, Scores, drop_masked};
use crate::runtime::ambient;
use crate::runtime::memory::product;
use crate::runtime::memory::{check_memory, check_memory_in_each, list};
use crate::runtime::threads;

/// Elements per task, and between two checks for an interrupt.
const TASK: usize = 1 << 14;
const PORTION: usize = 1 << 22;
/// Least cost of a row in elements: its answer waits for the rest of the portion.
const LEAST: usize = 64;

/// Visible part of a row, without masked entries.
pub(super) struct VisibleRow<'a> {
    pub(super) scores: &'a Scores<'a>,
    pub(super) number: usize,
    pub(super) measure: Measure,
    /// Keys, larger is better; in row order until they are sorted.
    pub(super) keys: Vec<f64>,
}

impl VisibleRow<'_> {
    pub(super) fn place(&self) -> Place {
        self.scores.place(self.number, None)
    }

    /// Returns the number of kept keys, checked, from one number per row or one for all.
    pub(super) fn kept(&self, kept: PerRow<'_, i64>) -> Result<usize, Error> {
        let value = kept.of(self.number);
        let n = self.keys.len();
        match usize::try_from(value) {
            Ok(k) if k <= n => Ok(k),
            _ => Err(Error::KeptCount { place: self.place(), value, n }),
        }
    }

    /// Sorts the keys, best first, and returns them; the order is arbitrary if the call is to end.
    pub(super) fn sorted(&mut self) -> &[f64] {
        sorting::sort(&mut self.keys, |a, b| b.total_cmp(a));
        &self.keys
    }
}

/// Returns an answer for every row, in order. The same for any number of threads.
pub(super) fn map_rows<R: Send>(
    scores: &Scores<'_>,
    work: impl Fn(VisibleRow<'_>) -> Result<R, Error> + Sync + Send,
) -> Result<Vec<R>, Error> {
    let (rows, n) = (scores.rows(), scores.longest().max(1));
    let threads = threads::count(None, rows.saturating_mul(n) > 2 * TASK)?;
    check_memory_in_each("scores", threads, (rows, n), size_of::<f64>())?;
    let one = |number: usize| {
        let mut keys = Vec::new();
        let measure = scores.wide_scores(number, &mut keys)?.into();
        drop_masked(&mut keys);
        ambient::check()?;
        work(VisibleRow { scores, number, measure, keys })
    };
    in_portions(threads, rows, n, one)
}

/// Maps a range of equal pieces of work of size `n`, in portions, with a check for an interrupt after each.
pub(super) fn in_portions<R: Send>(
    threads: usize,
    count: usize,
    n: usize,
    work: impl Fn(usize) -> Result<R, Error> + Sync + Send,
) -> Result<Vec<R>, Error> {
    check_memory("scores", count, size_of::<R>())?;
    let mut answers = list("scores", count)?;
    let sizes = ((PORTION / n.max(LEAST)).max(threads), (TASK / n).max(1));
    threads::in_portions(threads, count, sizes, work, |answer| answers.push(answer))?;
    Ok(answers)
}

/// Maps the entries of an array of this shape; `work` gets a function for the entry's place.
pub(super) fn each<R>(
    shape: &[usize],
    work: impl Fn(usize, &dyn Fn() -> Place) -> Result<R, Error>,
) -> Result<Vec<R>, Error> {
    let entries = product("n", shape)?;
    let mut answers = list("n", entries)?;
    for i in 0..entries {
        answers.push(work(i, &|| Place::unravel(shape, i))?);
    }
    Ok(answers)
}
