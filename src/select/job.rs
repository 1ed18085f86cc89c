//! Arguments of one selection call, checked, with the services that every search needs.

use std::ops::Range;

use super::constraints::Constraints;
use super::options::Options;
use crate::error::Error;
use crate::kernels::{Element, LANES, Prefetch, Simd, Strided, ask_for_huge_pages};
use crate::numerics::certified_sums::ErrorBound;
use crate::rows::{PerRow, Scores, Stored};
use crate::runtime::memory::{room, within_limit};

/// Arguments of one call.
#[derive(Clone, Copy)]
pub(super) struct SelectJob<'a> {
    pub(super) scores: &'a Scores<'a>,
    eps: PerRow<'a, f64>,
    pub(super) options: &'a Options,
    pub(super) simd: Simd,
}

impl<'a> SelectJob<'a> {
    /// Checks everything that does not depend on a row's content.
    pub(super) fn new(
        scores: &'a Scores<'a>,
        eps: &'a [f64],
        options: &'a Options,
    ) -> Result<Self, Error> {
        if options.block_size > 1 {
            let remedy = "pad the rows and give lengths, or leave block_size at 1";
            scores.not_ragged("block_size", remedy)?;
        }
        let eps = scores.budgets(eps)?;
        options.check()?;
        Ok(SelectJob { scores, eps, options, simd: Simd::current()? })
    }
}

/// Call whose types of scores and weights are known.
pub(super) struct Typed<'a, E, M> {
    pub(super) job: &'a SelectJob<'a>,
    pub(super) stored: &'a Strided<'a, E>,
    pub(super) weight_fns: M,
}

impl<E: Element, M> Typed<'_, E, M> {
    /// Returns the next row's scores, for rows that fit a cache.
    pub(super) fn prefetch(&self, row: usize) -> Option<Prefetch> {
        const MOST: usize = 1 << 20;
        let scores = self.job.scores;
        let next = scores.visible(self.stored, (row + 1).min(scores.rows() - 1));
        (size_of_val(next) <= MOST).then(|| Prefetch::new(next.as_ptr()))
    }
}

/// Makes room for the positions of the next rows, each of up to `n` scores. If that needs new memory, makes room
/// for the remaining rows as well: the first touch of memory costs more than the writes.
///
/// # Errors
/// [`Error::NoMemory`].
pub(super) fn make_room(
    rows: &Range<usize>,
    next: &Range<usize>,
    n: usize,
    out: &mut Vec<u32>,
) -> Result<(), Error> {
    /// Number of rows for which room is made for every key.
    const FEW: usize = 16;
    /// Positions reserved on the evidence of a few rows.
    const MODEST: usize = 1 << 22;
    /// Positions reserved before rows are evidence: few enough to move later.
    const FIRST: usize = 1 << 14;
    let n = n + LANES;
    let here = next.len() * n;
    if out.capacity() - out.len() < here {
        let (done, left) = (next.start - rows.start, rows.end - next.end);
        let all = left.saturating_mul(n);
        let more = if left <= FEW {
            all
        } else {
            // Moving a nearly complete list costs as much as half of the writes. So the estimate from the last rows
            // gets a margin, larger for fewer rows. It is not reserved at once: the first rows may be denser than
            // the rest.
            let so_far = done.max(1) as f64;
            let like_so_far = out.len() as f64 / so_far * left as f64;
            #[allow(clippy::cast_sign_loss)] // of a product of lengths
            let more = (like_so_far * (1.02 + 0.5 / so_far.sqrt())) as usize;
            more.min((8 * out.len()).max(MODEST)).max(out.len() / 2).max(FIRST).min(all)
        };
        let bytes = (out.len() + more + here).saturating_mul(size_of::<u32>());
        // A limit may leave room for these rows, though not for later ones.
        if !within_limit(bytes) || out.try_reserve_exact(more + here).is_err() {
            room("scores", out, here)?;
        }
        ask_for_huge_pages(out);
    }
    Ok(())
}

impl SelectJob<'_> {
    pub(super) fn eps(&self, row: usize) -> f64 {
        self.eps.of(row)
    }

    /// Returns the constraints of a row of `n` scores under default options.
    pub(super) fn plain_constraints(&self, row: usize, n: usize) -> Constraints {
        let radius = self.scores.row_radius(row);
        let slack = match self.scores.data {
            Stored::F64(_) => ErrorBound::f64(n, radius),
            _ => ErrorBound::f32(radius),
        };
        Constraints { exact_ties: radius == 0.0, ..Constraints::new(self.eps(row), slack) }
    }
}
