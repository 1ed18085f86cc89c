//! Certificates of kept sets given by a caller.

use super::candidates::Candidates;
use super::constraints::{Constraints, DecideOn};
use super::read::{Row, Source};
use super::scratch::{Computed, RowScratch, Searches, Workspace, grow, padded};
use super::search_row::Search;
use super::weight_fn::{InvertibleWeightFn, for_scale, for_weights};
use crate::builders::builders_of_defaults;
use crate::certificate::{self, Certificate, Verdict};
use crate::error::Error;
use crate::kernels::{Element, Given, InDouble, LANES, Scalar, Simd};
use crate::numerics::certified_sums::{self, CHUNK, SplitSums};
use crate::rows::{Keep, PerRow, Scores, for_dtype};
use crate::runtime::interrupt;
use crate::runtime::memory::{check_memory, check_memory_in_each};
use crate::runtime::scratch::with_scratch;
use crate::runtime::threads;

/// Options of [`certify`].
///
/// ```
/// use certk_rs::{CertifyOptions, Keep, Scores, certify};
/// let scores = Scores::new(&[4.0_f32, 0.0], &[1, 2])?;
/// let keep = Keep::Indices { indptr: &[0, 1], indices: &[0] };
/// let options = CertifyOptions::new().eps(&[0.1]).independent(true).threads(1);
/// assert_eq!(certify(&scores, &keep, &options)?.holds, Some(vec![true]));
/// assert_eq!(certify(&scores, &keep, &CertifyOptions::new())?.holds, None);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CertifyOptions<'a> {
    /// Budgets of tail mass to check the sets against, one for all rows or one per row; `None` for no check.
    pub eps: Option<&'a [f64]>,
    /// Use a slow check in scalar f64 that shares no kernel with the selector.
    pub independent: bool,
    /// Number of threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

builders_of_defaults! { CertifyOptions<'a> {
    /// Sets the budgets of tail mass to check the sets against, one for all rows or one per row.
    eps(eps: &'a [f64]) = Some(eps);
    /// Uses a slow check in scalar f64 that shares no kernel with the selector.
    independent(independent: bool) = independent;
    /// Sets the number of threads; `None` for all available.
    threads(threads: impl Into<Option<usize>>) = threads.into();
} }

/// Certifies kept sets: an interval that contains the real tail mass of each row and, given budgets, whether each
/// holds.
///
/// A row that f32 leaves undecided is decided again in f64.
///
/// ```
/// use certk_rs::{CertifyOptions, Keep, Scores, certify};
/// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
/// let keep = Keep::Indices { indptr: &[0, 1], indices: &[0] };
/// let judged = certify(&Scores::new(&row, &[1, 6])?, &keep, &CertifyOptions::new().eps(&[0.1]))?;
/// assert!(0.30 < judged.tail_mass_lower[0] && judged.tail_mass_upper[0] < 0.31);
/// assert_eq!(judged.holds, Some(vec![false]));
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// The [`Error`] for invalid scores, budgets or kept sets, for too little memory, or for a call that was ended.
pub fn certify(
    scores: &Scores<'_>,
    keep: &Keep<'_>,
    options: &CertifyOptions<'_>,
) -> Result<Certificate, Error> {
    let &CertifyOptions { eps, independent, threads } = options;
    judge_all(scores, keep, eps, None, (independent, true), threads)
}

/// Elements per task, and between two checks for an interrupt.
const TASK: usize = 1 << 15;
const PORTION: usize = 1 << 24;
/// With fewer elements, another thread would start too late to help.
const WORTH: usize = 1 << 18;
/// Least cost of a row in elements: its verdict waits for the rest of the portion.
const LEAST: usize = 256;
/// Length from which rows are split into chunks when there are fewer rows than threads can use.
const SHARED: usize = 4 * CHUNK;

/// Certifies the listed rows, in the order listed. `minimal` is not decided and is `false`.
pub(crate) fn certify_listed(
    scores: &Scores<'_>,
    keep: &Keep<'_>,
    eps: Option<&[f64]>,
    listed: &[usize],
    threads: usize,
) -> Result<Certificate, Error> {
    judge_all(scores, keep, eps, Some(listed), (false, false), Some(threads))
}

fn judge_all(
    scores: &Scores<'_>,
    keep: &Keep<'_>,
    eps: Option<&[f64]>,
    listed: Option<&[usize]>,
    (independent, minimal): (bool, bool),
    threads: Option<usize>,
) -> Result<Certificate, Error> {
    let _modes = threads::default_floats();
    let eps = eps.map(|eps| scores.budgets(eps)).transpose()?;
    keep.check(scores)?;
    let judge = Judge { scores, keep, eps, minimal, simd: Simd::current()? };
    let rows = listed.map_or(scores.rows(), <[usize]>::len);
    let n = scores.longest().max(1);
    let threads = threads::count(threads, rows.saturating_mul(n) > WORTH || independent)?;
    check_memory_in_each("scores", threads, (rows, n), 1)?;
    let by = |threads: usize, at: usize| {
        let row = listed.map_or(at, |listed| listed[at]);
        if independent {
            certificate::check_row(scores, keep, row, judge.eps(row))
        } else {
            with_scratch(|workspace: &mut Workspace| judge.row(row, threads, &mut workspace.row))
        }
    };
    let one = |at: usize| by(1, at);
    check_memory("scores", rows, Certificate::ROW)?;
    let mut result = Certificate::new(rows, eps.is_some())?;
    if threads > 1 && rows < 2 * threads && n >= SHARED && !independent {
        for at in 0..rows {
            result.push(&by(threads, at)?);
            interrupt::check()?;
        }
        return Ok(result);
    }
    // The independent check takes about a hundred times as long.
    let portion = (if independent { PORTION >> 6 } else { PORTION } / n.max(LEAST)).max(1);
    let sizes = (portion, (TASK / n).max(1));
    threads::in_portions(threads, rows, sizes, one, |verdict| result.push(&verdict))?;
    Ok(result)
}

#[derive(Clone, Copy)]
struct Judge<'a> {
    scores: &'a Scores<'a>,
    keep: &'a Keep<'a>,
    eps: Option<PerRow<'a, f64>>,
    /// `true` to decide whether a smaller set would hold.
    minimal: bool,
    simd: Simd,
}

/// Verdict, and `true` if more precise arithmetic could change it.
type Opinion = (Verdict, bool);

impl Judge<'_> {
    fn eps(&self, row: usize) -> Option<f64> {
        self.eps.map(|eps| eps.of(row))
    }

    /// Judges a row, on several threads if it is long. The split into chunks, and so the bits, does not depend on their
    /// number.
    fn row(&self, row: usize, threads: usize, scratch: &mut RowScratch) -> Result<Verdict, Error> {
        let Judge { scores, simd, .. } = *self;
        let threads = if scores.span(row).prefix >= SHARED { threads } else { 1 };
        let source = Source { threads, ..Source::new(scores, row, simd) };
        let RowScratch { read, search, keep, .. } = scratch;
        if source.is_plain(&mut read.admitted)? {
            let (verdict, open) = for_dtype!(scores.data, stored => {
                let read = source.whole(stored, read)?;
                for_scale!(scores.scale.abs(), read.keys.largest, weight_fn =>
                    self.read_row(row, &read, weight_fn, search, keep)?)
            });
            if !open {
                return Ok(verdict);
            }
        }
        let (read, kind) = source.double(&mut read.copies.f64)?;
        let (verdict, open) = for_weights!(kind, read.keys.largest, weight_fn =>
            self.read_row(row, &read, weight_fn, search, keep)?);
        if open {
            // Ties and stored weights can be decided exactly: the independent checker does so.
            return certificate::check_row(scores, self.keep, row, self.eps(row));
        }
        Ok(verdict)
    }

    /// Judges a row that was read, on several threads if it is long.
    fn read_row<E: InDouble<Scalar: Computed>, W: InvertibleWeightFn<E::Scalar>>(
        &self,
        number: usize,
        row: &Row<'_, E>,
        weight_fn: W,
        search: &mut Searches,
        keep: &mut Vec<u8>,
    ) -> Result<Opinion, Error> {
        let &Row { keys, slack, exact_ties, .. } = row;
        let Candidates { largest, smallest, visible, .. } = keys;
        let scores = row.scores.as_slice();
        let keys = Candidates { scores, ..keys };
        let n = self.scores.span(number).n;
        let given = if let Some(bytes) = self.keep.lent(self.scores, number)
            && bytes.len() == scores.len()
        {
            sums(&keys, bytes, weight_fn)?
        } else {
            grow(keep, scores.len().max(n))?;
            let bytes = padded(keep, scores.len().max(n), 0);
            self.keep.lay(self.scores, number, &mut bytes[..n])?;
            bytes[n..].fill(0);
            sums(&keys, &bytes[..scores.len()], weight_fn)?
        };
        if visible == 0 {
            return Ok((Verdict::EMPTY, false));
        }
        let split = SplitSums {
            tail: given.tail,
            dropped: given.dropped,
            head: given.head,
            kept: given.kept,
        };
        let upper = split.upper(slack.certify, slack.flush);
        let lower = split.lower(slack.certify, slack.flush).min(upper);
        let mut verdict = Verdict { kept: split.kept, upper, lower, holds: false, minimal: false };
        let Some(eps) = self.eps(number) else {
            return Ok((verdict, false));
        };
        verdict.holds = upper <= eps;
        if !verdict.holds {
            return Ok((verdict, lower <= eps));
        }
        if !self.minimal {
            return Ok((verdict, false));
        }
        let fewer = split.kept - 1;
        if fewer == 0 || eps == 0.0 && split.dropped == 0 {
            verdict.minimal = true;
            return Ok((verdict, false));
        }
        if given.worst_kept >= given.best_dropped {
            // A set of the best keys: one key less is the best smaller set. Its head is a difference, whose relative
            // error is at most three times as large, because the key taken away is the smallest of at least two.
            let mut weights = [E::Scalar::default(); LANES];
            self.simd.weights(&[given.worst_kept; LANES], weight_fn, &mut weights);
            let weight: f64 = weights[0].into();
            let smaller = SplitSums {
                tail: split.tail + weight,
                dropped: split.dropped + 1,
                head: (split.head - weight).max(0.0),
                kept: fewer,
            };
            verdict.minimal = smaller.lower(3.0 * slack.certify, slack.flush) > eps;
            if smallest == largest && exact_ties {
                // Equal weights: decided in integers.
                let visible = visible as u64;
                verdict.minimal = !certified_sums::equal_weights_hold(fewer as u64, visible, eps);
                return Ok((verdict, false));
            }
            // More precise arithmetic could prove more. Rows that f32 leaves open stay open, or the check would cost
            // more than the selection.
            let open = !E::SINGLE
                && !verdict.minimal
                && smaller.upper(3.0 * slack.certify, slack.flush) > eps;
            return Ok((verdict, open));
        }
        let rule = Constraints { decide_on: DecideOn::Lower, ..Constraints::new(eps, slack) };
        let search = E::Scalar::scratch(search);
        let least = Search { keys: &keys, weight_fn, rule: &rule }.run(None, search)?;
        verdict.minimal = least.minimal && split.kept <= least.split.kept;
        Ok((verdict, false))
    }
}

/// Sums a row on both sides of a kept set.
fn sums<E: Element, W: InvertibleWeightFn<E::Scalar>>(
    keys: &Candidates<'_, E>,
    keep: &[u8],
    weight_fn: W,
) -> Result<Given<E::Scalar>, Error> {
    let &Candidates { simd, scores, threads, .. } = keys;
    let mut total = Given {
        head: 0.0,
        kept: 0,
        tail: 0.0,
        dropped: 0,
        worst_kept: E::Scalar::INFINITY,
        best_dropped: E::Scalar::NEG_INFINITY,
    };
    let mut add = |part: Given<E::Scalar>| {
        total.head += part.head;
        total.kept += part.kept;
        total.tail += part.tail;
        total.dropped += part.dropped;
        if part.worst_kept < total.worst_kept {
            total.worst_kept = part.worst_kept;
        }
        if part.best_dropped > total.best_dropped {
            total.best_dropped = part.best_dropped;
        }
    };
    let pass = |(scores, keep): (&[E], &[u8])| simd.given(scores, keep, weight_fn);
    let chunks = scores.chunks(CHUNK).zip(keep.chunks(CHUNK));
    if threads == 1 {
        chunks.map(pass).for_each(&mut add);
    } else {
        threads::map(threads, chunks, 1, pass)?.into_iter().for_each(&mut add);
    }
    Ok(total)
}
