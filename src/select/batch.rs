//! Selection of a batch of rows over threads.

use std::ops::Range;

use super::job::{SelectJob, Typed, make_room};
use super::options::Options;
use super::scratch::{PerDtype, Workspace};
use super::search_batch;
use super::selection::Selection;
use super::weight_fn::WeightFns;
use crate::error::Error;
use crate::kernels::{ScaledBy, Unscaled};
use crate::numerics::certified_sums::CHUNK;
use crate::rows::{Scores, for_dtype};
use crate::runtime::ambient;
use crate::runtime::interrupt;
use crate::runtime::memory::{check_memory, check_memory_in_each};
use crate::runtime::recycled;
use crate::runtime::scratch::with_scratch;
use crate::runtime::threads;

/// Selects, for every row, the smallest set of keys whose dropped softmax mass is proven to be at most `eps`.
///
/// `eps` holds one budget per row, or one for all, in [0, 1); 0 keeps every visible key. Ties go to the lower position.
/// The same input gives the same bits for any number of threads and any instruction set.
///
/// ```
/// use certk_rs::{Options, Scores, select};
/// let rows = [9.0_f32, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0];
/// let found = select(&Scores::new(&rows, &[2, 4])?, &[0.2], &Options::new())?;
/// assert_eq!(found.row(0), [0]);
/// assert_eq!(found.k, [1, 4]); // of four equal keys each has a quarter
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// The [`Error`] for invalid scores, budgets or options, for too little memory, or for a call that was ended.
pub fn select(scores: &Scores<'_>, eps: &[f64], options: &Options) -> Result<Selection, Error> {
    let _modes = threads::default_floats();
    let job = SelectJob::new(scores, eps, options)?;
    let (rows, n) = (scores.rows(), scores.longest().max(1));
    let threads = threads::count(options.threads, rows.saturating_mul(n) > WORTH)?;
    check_memory_in_each("scores", threads, (rows, n), 1)?;
    // Fail early if the result would not fit in memory.
    check_memory("scores", rows, Selection::ROW)?;
    let mut selection: Selection = recycled::empty();
    selection.indptr.push(0);
    if threads > 1 && rows < 2 * threads && n >= SHARED {
        for row in 0..rows {
            // A row's computation, and so its bits, depends on the row alone.
            let threads = if scores.span(row).prefix >= SHARED { threads } else { 1 };
            job.append_here(row..row + 1, threads, &mut selection)?;
            interrupt::check()?;
        }
        return Ok(selection);
    }
    let portion = (PORTION / n.max(LEAST)).max(1);
    for start in (0..rows).step_by(portion) {
        let end = (start + portion).min(rows);
        if threads == 1 {
            job.append_here(start..end, 1, &mut selection)?;
        } else {
            let task = (TASK / n).max(1).min((end - start).div_ceil(threads));
            let parts = threads::map(threads, (start..end).step_by(task), 1, |first| {
                job.rows(first..(first + task).min(end))
            })?;
            // Report the first error in row order, for any order of discovery.
            let parts: Result<Vec<Selection>, Error> = parts.into_iter().collect();
            join(&mut selection, parts?, threads)?;
        }
        interrupt::check()?;
    }
    Ok(selection)
}

/// Least elements per task, and elements between two checks for an interrupt.
const TASK: usize = 1 << 15;
const PORTION: usize = 1 << 25;
/// With fewer elements, another thread would start too late to help.
const WORTH: usize = 1 << 17;
/// Least cost of a row in elements: its result waits for the rest of the portion.
const LEAST: usize = 128;
/// Length from which rows are split into chunks when there are fewer rows than threads can use.
const SHARED: usize = 4 * CHUNK;

/// Appends the answers for later rows; into an empty selection, a single part is moved.
fn join(selection: &mut Selection, mut parts: Vec<Selection>, threads: usize) -> Result<(), Error> {
    if selection.k.is_empty() && parts.len() == 1 {
        *selection = parts.remove(0);
        selection.indptr.insert(0, 0);
        return Ok(());
    }
    selection.append(&parts, threads)
}

impl SelectJob<'_> {
    /// Selects the given rows into a selection of their own.
    fn rows(&self, rows: Range<usize>) -> Result<Selection, Error> {
        let mut part = Selection::default();
        self.append_here(rows, 1, &mut part)?;
        Ok(part)
    }

    fn append_here(
        &self,
        rows: Range<usize>,
        threads: usize,
        to: &mut Selection,
    ) -> Result<(), Error> {
        to.room(rows.len())?;
        with_scratch(|workspace: &mut Workspace| self.append(rows, threads, workspace, to))
    }

    /// Appends the answers for some rows. Only here are the types of scores and weights told apart.
    fn append(
        &self,
        rows: Range<usize>,
        threads: usize,
        workspace: &mut Workspace,
        part: &mut Selection,
    ) -> Result<(), Error> {
        let (job, scale) = (self, self.scores.scale.abs());
        for_dtype!(self.scores.data, stored => if scale == 1.0 {
            Typed { job, stored, weight_fns: Unscaled }.append(rows, threads, workspace, part)
        } else {
            let weight_fns = ScaledBy(scale);
            Typed { job, stored, weight_fns }.append(rows, threads, workspace, part)
        })
    }
}

impl<E: PerDtype, M: WeightFns<E::Scalar>> Typed<'_, E, M> {
    fn append(
        &self,
        rows: Range<usize>,
        threads: usize,
        workspace: &mut Workspace,
        part: &mut Selection,
    ) -> Result<(), Error> {
        if threads == 1 && search_batch::applies(self.job) {
            return self.batches(rows, workspace, part);
        }
        let since = part.begun(&rows)..rows.end;
        for row in rows {
            ambient::check()?;
            let n = self.job.scores.span(row).prefix;
            make_room(&since, &(row..row + 1), n, &mut part.indices)?;
            let decision = self.row(row, threads, &mut workspace.row, &mut part.indices)?;
            part.push(&decision);
        }
        Ok(())
    }
}

impl Workspace {
    /// Selects as [`select`] does, on the calling thread and with this scratch.
    ///
    /// # Errors
    /// As [`select`].
    pub(crate) fn select(
        &mut self,
        scores: &Scores<'_>,
        eps: &[f64],
        options: &Options,
    ) -> Result<Selection, Error> {
        let job = SelectJob::new(scores, eps, options)?;
        let mut selection: Selection = recycled::empty();
        selection.room(scores.rows())?;
        selection.indptr.push(0);
        job.append(0..scores.rows(), 1, self, &mut selection)?;
        Ok(selection)
    }
}
