//! Selection of a batch of rows over threads.

use std::ops::Range;

use super::block;
use super::options::{Options, allowed_keys};
use super::prepared::{Prepared, Source, Visitor};
use super::row::{Boundary, Candidates, Constraints, DecideOn, InvertibleWeightFn};
use super::short;
use super::workspace::{Forced, PerDtype, Workspace};
use crate::certificate::Status;
use crate::certified_sums::{CHUNK, Compensated, ErrorBound, ExactSum, SplitSums};
use crate::error::Error;
use crate::interrupt;
use crate::kernels::{
    DefaultFloats, Element, LANES, Piece, Positions, Prefetch, Simd, append_all, ask_for_huge_pages,
};
use crate::memory::{check_memory, check_memory_in_each, filled, room};
use crate::order;
use crate::rows::{Data, PerRow, Scores};
use crate::threads;

/// The sets kept, in compressed rows, with a certificate for each.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Selection {
    /// Keys kept per row.
    pub k: Vec<i64>,
    /// Row `i` keeps `indices[indptr[i]..indptr[i + 1]]`.
    pub indptr: Vec<i64>,
    /// Positions kept, ascending within a row.
    pub indices: Vec<u32>,
    /// The real tail mass of a row is at most this.
    pub tail_mass_upper: Vec<f64>,
    /// The real tail mass of a row is at least this.
    pub tail_mass_lower: Vec<f64>,
    /// Whether no smaller set under the same constraints is within the budget, proven; with a block size, no set of fewer
    /// blocks.
    pub minimal: Vec<bool>,
    /// Whether the row is within its budget.
    pub status: Vec<Status>,
}

impl Selection {
    /// Bytes of a row, but for the positions.
    pub(crate) const ROW: usize = 4 * size_of::<i64>() + 2;

    /// The positions kept of a row, ascending.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[u32] {
        let at = |i: usize| self.indptr[i].unsigned_abs() as usize;
        &self.indices[at(row)..at(row + 1)]
    }

    /// Makes room for the decisions of that many rows.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn room(&mut self, rows: usize) -> Result<(), Error> {
        room("scores", &mut self.k, rows)?;
        room("scores", &mut self.indptr, rows.saturating_add(1))?;
        room("scores", &mut self.tail_mass_upper, rows)?;
        room("scores", &mut self.tail_mass_lower, rows)?;
        room("scores", &mut self.minimal, rows)?;
        room("scores", &mut self.status, rows)
    }

    pub(crate) fn push(&mut self, decision: &Decision) {
        self.k.push(decision.kept as i64);
        self.tail_mass_upper.push(decision.upper);
        self.tail_mass_lower.push(decision.lower);
        self.minimal.push(decision.minimal);
        self.status.push(decision.status);
        self.indptr.push(self.indices.len() as i64);
    }

    /// Appends the answers for later rows.
    fn append(&mut self, parts: &[Selection], threads: usize) -> Result<(), Error> {
        self.room(parts.iter().map(|part| part.k.len()).sum())?;
        let listed = parts.iter().map(|part| part.indices.len()).sum();
        room("scores", &mut self.indices, listed)?;
        let indices: Vec<&[u32]> = parts.iter().map(|part| &part.indices[..]).collect();
        let mut base = self.indices.len() as i64;
        append_all(&mut self.indices, &indices, |pieces| {
            threads::map(threads, pieces, 1, Piece::copy)
        });
        for part in parts {
            self.indptr.extend(part.indptr.iter().map(|end| base + end));
            base += part.indices.len() as i64;
            self.k.extend_from_slice(&part.k);
            self.tail_mass_upper.extend_from_slice(&part.tail_mass_upper);
            self.tail_mass_lower.extend_from_slice(&part.tail_mass_lower);
            self.minimal.extend_from_slice(&part.minimal);
            self.status.extend_from_slice(&part.status);
        }
        Ok(())
    }
}

/// What is known of one row's set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Decision {
    pub(crate) kept: usize,
    pub(crate) upper: f64,
    pub(crate) lower: f64,
    pub(crate) minimal: bool,
    pub(crate) status: Status,
}

impl Decision {
    const EMPTY: Decision =
        Decision { kept: 0, upper: 0.0, lower: 0.0, minimal: true, status: Status::Empty };

    pub(crate) fn new(
        split: &SplitSums,
        minimal: bool,
        exact: bool,
        constraints: &Constraints,
    ) -> Self {
        let slack = &constraints.slack;
        let mut upper = split.upper(slack.select, slack.flush);
        if exact {
            upper = upper.min(constraints.eps);
        }
        let lower = split.lower(slack.certify, slack.flush).min(upper);
        let holds = upper <= constraints.eps;
        let status = if holds { Status::Certified } else { Status::OverBudget };
        Decision { kept: split.kept, upper, lower, minimal: minimal && holds, status }
    }

    /// Whether better arithmetic could still change the answer.
    pub(crate) fn open(&self, eps: f64) -> bool {
        match self.status {
            Status::Certified => !self.minimal,
            Status::OverBudget => self.lower <= eps,
            Status::Empty => false,
        }
    }
}

/// Selects, for every row, the smallest set of keys whose dropped softmax mass is proven to be at most `eps`.
///
/// `eps` holds one budget per row, or one for all, in [0, 1); 0 keeps every visible key. Ties go to the lower position.
/// The same input gives the same bits for any number of threads and any instruction set.
///
/// # Errors
/// Whatever is wrong with the scores, the budgets or the options, by variant.
pub fn select(scores: &Scores<'_>, eps: &[f64], options: &Options) -> Result<Selection, Error> {
    let _modes = threads::default_floats();
    let job = Job::new(scores, eps, options)?;
    let (rows, n) = (scores.rows(), scores.longest().max(1));
    let threads = threads::count(options.threads, rows.saturating_mul(n) > 2 * TASK)?;
    check_memory_in_each("scores", threads, (rows, n), 1)?;
    let mut selection = Selection { indptr: vec![0], ..Selection::default() };
    // What no memory holds in the end is not begun.
    check_memory("scores", rows, Selection::ROW)?;
    if threads > 1 && rows < 2 * threads && n >= SHARED {
        for row in 0..rows {
            // A row's way, and so its bits, depends on itself alone.
            let threads = if scores.span(row).visible >= SHARED { threads } else { 1 };
            join(&mut selection, vec![job.rows(row..row + 1, threads)?], threads)?;
            interrupt::check()?;
        }
        return Ok(selection);
    }
    let portion = (PORTION / n.max(LEAST)).max(1);
    for start in (0..rows).step_by(portion) {
        let end = (start + portion).min(rows);
        if threads == 1 {
            join(&mut selection, vec![job.rows(start..end, 1)?], 1)?;
        } else {
            let task = (TASK / n).max(1).min((end - start).div_ceil(threads));
            let parts = threads::map(threads, (start..end).step_by(task), 1, |first| {
                job.rows(first..(first + task).min(end), 1)
            });
            // The first error in the order of rows, whoever found one first.
            let parts: Result<Vec<Selection>, Error> = parts.into_iter().collect();
            join(&mut selection, parts?, threads)?;
        }
        interrupt::check()?;
    }
    Ok(selection)
}

/// Elements that one task decides at least, and elements between two checks for an interrupt.
const TASK: usize = 1 << 15;
const PORTION: usize = 1 << 25;
/// What a row counts at least: what is found waits for the rest of the portion.
const LEAST: usize = 128;
/// Rows at least this long are shared out by chunks when there are fewer rows than threads can use.
const SHARED: usize = 4 * CHUNK;

/// Appends the answers for later rows; the first ones are taken as they are.
fn join(selection: &mut Selection, mut parts: Vec<Selection>, threads: usize) -> Result<(), Error> {
    if selection.k.is_empty() && parts.len() == 1 {
        *selection = parts.remove(0);
        selection.indptr.insert(0, 0);
        return Ok(());
    }
    selection.append(&parts, threads)
}

pub(crate) fn select_in(
    workspace: &mut Workspace,
    scores: &Scores<'_>,
    eps: &[f64],
    options: &Options,
) -> Result<Selection, Error> {
    let _environment = DefaultFloats::set();
    let job = Job::new(scores, eps, options)?;
    let mut selection = Selection::default();
    selection.room(scores.rows())?;
    selection.indptr.push(0);
    job.append(0..scores.rows(), 1, workspace, &mut selection)?;
    Ok(selection)
}

thread_local! {
    /// Kept between calls, because pool threads live as long as the process and rows come again.
    static WORKSPACE: std::cell::Cell<Option<Box<Workspace>>> = const { std::cell::Cell::new(None) };
}

/// Runs with this thread's workspace; a nested call gets a fresh one.
pub(crate) fn with_workspace<R>(work: impl FnOnce(&mut Workspace) -> R) -> R {
    let mut workspace = WORKSPACE.take().unwrap_or_default();
    let result = work(&mut workspace);
    workspace.trim();
    WORKSPACE.set(Some(workspace));
    result
}

/// One call's arguments.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) scores: &'a Scores<'a>,
    eps: PerRow<'a, f64>,
    pub(crate) options: &'a Options,
    pub(crate) simd: Simd,
}

impl<'a> Job<'a> {
    /// Judges what does not depend on a row's content.
    fn new(scores: &'a Scores<'a>, eps: &'a [f64], options: &'a Options) -> Result<Self, Error> {
        if scores.is_ragged() && options.block_size > 1 {
            let remedy = "pad the rows and give lengths, or leave block_size at 1";
            return Err(Error::Conflict { first: "block_size", second: "indptr", remedy });
        }
        let eps = scores.budgets(eps)?;
        options.check()?;
        Ok(Job { scores, eps, options, simd: Simd::current()? })
    }
}

impl Job<'_> {
    fn rows(&self, rows: Range<usize>, threads: usize) -> Result<Selection, Error> {
        with_workspace(|workspace| {
            let mut part = Selection::default();
            part.room(rows.len())?;
            self.append(rows, threads, workspace, &mut part)?;
            Ok(part)
        })
    }

    /// The next row's scores and the room behind the positions listed so far, if a row is not too long for a cache.
    fn prefetch(&self, row: usize, out: &[u32]) -> Option<Prefetch> {
        const MOST: usize = 1 << 18;
        let row = (row + 1).min(self.scores.rows() - 1);
        let span = self.scores.span(row);
        let (start, write) = (span.start, out.as_ptr_range().end);
        let (prefetch, size) = match self.scores.data {
            Data::F32(data) => (Prefetch::new(data.as_ptr().wrapping_add(start), write), 4),
            Data::F64(data) => (Prefetch::new(data.as_ptr().wrapping_add(start), write), 8),
            Data::F16(data) => (Prefetch::new(data.as_ptr().wrapping_add(start), write), 2),
            Data::Bf16(data) => (Prefetch::new(data.as_ptr().wrapping_add(start), write), 2),
        };
        (span.visible * size <= MOST).then_some(prefetch)
    }

    fn append(
        &self,
        rows: Range<usize>,
        threads: usize,
        workspace: &mut Workspace,
        part: &mut Selection,
    ) -> Result<(), Error> {
        if threads == 1 && short::applies(self) {
            return short::rows(self, rows, workspace, part);
        }
        for row in rows.clone() {
            self.make_room(&rows, row, &mut part.indices)?;
            let decision = self.row(row, threads, workspace, &mut part.indices)?;
            part.push(&decision);
        }
        Ok(())
    }

    /// Makes room for the positions of a row, and if that takes new memory for as many rows as are still to come: memory
    /// touched for the first time costs more than what is written to it.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn make_room(
        &self,
        rows: &Range<usize>,
        row: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let n = self.scores.span(row).visible + LANES;
        if out.capacity() - out.len() < n {
            let done = (row - rows.start).max(1);
            let like_so_far = out.len() as f64 / done as f64 * (rows.end - row) as f64;
            #[allow(clippy::cast_sign_loss)] // of a product of lengths
            let more = (1.02 * like_so_far) as usize;
            // Not everything at once: the first rows may be denser than the rest.
            let more = more.min((8 * out.len()).max(1 << 16)).max(out.len() / 8);
            if out.try_reserve_exact(more + n).is_err() {
                room("scores", out, n)?;
            }
            ask_for_huge_pages(out);
        }
        Ok(())
    }

    pub(crate) fn eps(&self, row: usize) -> f64 {
        self.eps.of(row)
    }

    /// What a row of `n` scores without special wishes must satisfy.
    pub(crate) fn plain_constraints(&self, row: usize, n: usize) -> Constraints {
        let radius = self.scores.row_radius(row);
        let slack = match self.scores.data {
            Data::F64(_) => ErrorBound::f64(n, radius),
            _ => ErrorBound::f32(radius),
        };
        Constraints {
            eps: self.eps(row),
            slack,
            min_keep: 1,
            max_keep: usize::MAX,
            decide_on: DecideOn::Upper,
            exact_ties: radius == 0.0,
        }
    }

    pub(crate) fn source(
        &self,
        row: usize,
        threads: usize,
        prefetch: Option<Prefetch>,
    ) -> Source<'_> {
        Source { scores: self.scores, row, simd: self.simd, threads, copied: false, prefetch }
    }

    pub(crate) fn row(
        &self,
        row: usize,
        threads: usize,
        workspace: &mut Workspace,
        out: &mut Vec<u32>,
    ) -> Result<Decision, Error> {
        let prefetch = self.prefetch(row, out);
        let mut source = self.source(row, threads, prefetch);
        let mark = out.len();
        if source.is_plain(workspace)? {
            let mut decision = source.native(workspace, Decide { job: self, source, out });
            if let Err(Error::Changed { .. }) = decision {
                out.truncate(mark);
                source.copied = true;
                decision = source.native(workspace, Decide { job: self, source, out });
            }
            let decision = decision?;
            let again = source.is_single() && self.options.prove_minimal;
            if !(again && decision.open(self.eps(row))) {
                return Ok(decision);
            }
            out.truncate(mark);
        }
        source.double(workspace, Decide { job: self, source, out })
    }
}

/// Decides a prepared row and lists what is kept.
struct Decide<'a> {
    job: &'a Job<'a>,
    source: Source<'a>,
    out: &'a mut Vec<u32>,
}

impl Visitor for Decide<'_> {
    type Output = Decision;

    fn searches(&self) -> bool {
        self.job.options.block_size == 1
    }

    fn changes(&self) -> bool {
        self.job.options.keep_first > 0 || self.job.options.keep_last > 0
    }

    fn visit<E: PerDtype, W: InvertibleWeightFn<E::Scalar>>(
        self,
        row: Prepared<'_, E>,
        weight_fn: W,
        workspace: &mut Workspace,
    ) -> Result<Decision, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let Prepared {
            prefetch,
            scores,
            positions,
            largest,
            rough,
            smallest,
            visible,
            slack,
            exact_ties,
            weights,
        } = row;
        let Source { row: number, simd, threads, .. } = self.source;
        if visible == 0 {
            return Ok(Decision::EMPTY);
        }
        let (job, options) = (self.job, self.job.options);
        // Every option has its say below, but those for whoever calls this.
        let &Options {
            min_keep,
            max_keep: _, // by `allowed_keys`
            keep_first,
            keep_last,
            block_size,
            prove_minimal: _,
            threads: _,
        } = options;
        let mut forced = std::mem::take(&mut workspace.forced);
        let asked = keep_first.saturating_add(keep_last).min(visible);
        forced.first.clear();
        forced.last.clear();
        room("keep_first", &mut forced.first, keep_first.min(asked))?;
        room("keep_last", &mut forced.last, keep_last.min(asked))?;
        forced.find(scores.as_slice(), visible, keep_first, keep_last);
        let count = forced.first.len() + forced.last.len();
        let max_keep = allowed_keys(options, visible, count, job.scores, number)?;
        let constraints = Constraints {
            eps: job.eps(number),
            slack,
            min_keep: min_keep.clamp(1, visible),
            max_keep,
            decide_on: DecideOn::Upper,
            exact_ties,
        };
        if block_size > 1 {
            let scores = scores.as_slice();
            let candidates = Candidates {
                simd,
                scores,
                visible,
                largest,
                rough,
                smallest,
                prefetch,
                forced: (0.0, 0),
                threads,
            };
            let positions = forced.first.iter().chain(&forced.last).copied();
            let found = block::search(
                &candidates,
                weight_fn,
                &constraints,
                block_size,
                positions,
                job.scores,
                number,
            )?;
            let masked = E::MASKED.widen();
            for (b, _) in found.kept.iter().enumerate().filter(|(_, kept)| **kept) {
                let start = b * block_size;
                let end = (start + block_size).min(scores.len());
                let kept = (start..end).filter(|&j| scores[j].widen() > masked);
                self.out.extend(kept.map(|j| j as u32));
            }
            workspace.forced = forced;
            let constraints = Constraints { slack: found.slack, ..constraints };
            return Ok(Decision::new(&found.split, found.minimal, false, &constraints));
        }
        let mut fixed = 0.0;
        let lent;
        let scores: &[E] = if count == 0 {
            lent = scores;
            lent.as_slice()
        } else {
            let scores = scores.copied();
            // What is forced does not compete: weigh it, then hide it.
            let mut own = filled("keep_first", count.next_multiple_of(LANES), E::MASKED)?;
            for (score, &position) in own.iter_mut().zip(forced.first.iter().chain(&forced.last)) {
                *score = std::mem::replace(&mut scores[position as usize], E::MASKED);
            }
            let forced = (0.0, 0);
            let (own, visible, threads) = (&own[..], count, 1);
            let of = Candidates {
                simd,
                scores: own,
                visible,
                largest,
                rough,
                smallest,
                prefetch,
                forced,
                threads,
            };
            fixed = of.mass(weight_fn);
            scores
        };
        let visible = visible - count;
        let candidates = Candidates {
            simd,
            scores,
            visible,
            largest,
            rough,
            smallest,
            prefetch,
            forced: (fixed, count),
            threads,
        };
        let mut found = candidates.search(weight_fn, &constraints, E::scratch(workspace))?;
        let mut decision = Decision::new(&found.split, found.minimal, found.exact, &constraints);
        if weights && decision.open(constraints.eps) && count == 0 {
            // Two lists of keys with their positions, each grown by doubling.
            check_memory("scores", visible, 4 * size_of::<(f64, u32)>())?;
            refine(scores, &mut found, &constraints);
            decision = Decision::new(&found.split, found.minimal, found.exact, &constraints);
        }
        let mark = self.out.len();
        let at = |j: &u32| positions.map_or(*j, |list| list[*j as usize]);
        self.out.extend(forced.first.iter().map(at));
        if let Some(boundary) = found.boundary {
            if threads > 1 {
                // Parts of the list, which kernels fill.
                check_memory("scores", scores.len(), 2 * size_of::<u32>())?;
            }
            emit((simd, threads), scores, positions, boundary, self.out);
        }
        self.out.extend(forced.last.iter().map(at));
        workspace.forced = forced;
        // A row that is read where it is stored can change between the sums and the list; then it is copied.
        if self.out.len() - mark != decision.kept {
            return Err(Error::Changed { place: job.scores.place(number, None) });
        }
        Ok(decision)
    }
}

/// Lists the positions kept down to a boundary.
pub(crate) fn emit<E: Element>(
    (simd, threads): (Simd, usize),
    scores: &[E],
    positions: Option<&[u32]>,
    boundary: (E::Scalar, u32),
    out: &mut Vec<u32>,
) {
    let list = |range: Range<usize>, inclusive: bool, out: &mut Vec<u32>| {
        let from = match positions {
            Some(list) => Positions::Listed(&list[range.clone()]),
            None => Positions::From(range.start as u32),
        };
        simd.emit(&scores[range], from, boundary.0, inclusive, out);
    };
    // Up to the boundary ties are kept, behind it they are not.
    let edge = (boundary.1 as usize).min(scores.len());
    let (before, behind) = (edge / LANES * LANES, (edge + 1).next_multiple_of(LANES));
    if threads == 1 {
        list(0..before, true, out);
    } else {
        let share = threads::share(before, CHUNK, threads);
        let parts = threads::map(threads, (0..before).step_by(share), 1, |start| {
            let mut part = Vec::new();
            list(start..(start + share).min(before), true, &mut part);
            part
        });
        let parts: Vec<&[u32]> = parts.iter().map(Vec::as_slice).collect();
        append_all(out, &parts, |pieces| threads::map(threads, pieces, 1, Piece::copy));
    }
    if before < scores.len() {
        for j in before..behind {
            if order::kept(&(scores[j].widen(), j as u32), &boundary) {
                out.push(positions.map_or(j as u32, |list| list[j]));
            }
        }
        list(behind..scores.len(), false, out);
    }
}

impl Forced {
    /// Lists the first and the last unmasked positions; what both ends claim is listed once.
    pub(crate) fn find<E: Element>(
        &mut self,
        scores: &[E],
        visible: usize,
        keep_first: usize,
        keep_last: usize,
    ) {
        self.first.clear();
        self.last.clear();
        let masked = E::MASKED.widen();
        let shows = |j: &usize| scores[*j].widen() > masked;
        let first = keep_first.min(visible);
        let last = keep_last.min(visible - first);
        if first > 0 {
            self.first.extend((0..scores.len()).filter(shows).take(first).map(|j| j as u32));
        }
        if last > 0 {
            self.last.extend((0..scores.len()).rev().filter(shows).take(last).map(|j| j as u32));
            self.last.reverse();
        }
    }
}

/// Decides a row of stored weights in exact arithmetic: drops the worst kept keys while what is lost stays within the
/// budget, comparing sums of integers.
fn refine<E: Element>(scores: &[E], found: &mut Boundary<E::Scalar>, constraints: &Constraints) {
    let Some(boundary) = found.boundary else {
        return;
    };
    let masked = E::MASKED.widen();
    let visible = scores.iter().enumerate().map(|(j, score)| (score.widen(), j as u32));
    let (mut kept, dropped): (Vec<_>, Vec<_>) =
        visible.filter(|entry| entry.0 > masked).partition(|entry| order::kept(entry, &boundary));
    kept.sort_unstable_by(order::worst_first);
    let mut tail = ExactSum::new();
    let mut total = ExactSum::new();
    for entry in &dropped {
        tail.add(entry.0.into());
        total.add(entry.0.into());
    }
    for entry in &kept {
        total.add(entry.0.into());
    }
    let holds = |tail: &ExactSum| tail.compare_share(&total, constraints.eps).is_le();
    if !holds(&tail) {
        return;
    }
    let mut dropping = 0;
    while kept.len() - dropping > constraints.min_keep.max(1) {
        tail.add(kept[dropping].0.into());
        if !holds(&tail) {
            break;
        }
        dropping += 1;
    }
    let mut split = SplitSums { kept: kept.len() - dropping, ..SplitSums::default() };
    split.dropped = dropped.len() + dropping;
    let weigh = |entries: &mut dyn Iterator<Item = &(E::Scalar, u32)>| {
        let mut sum = Compensated::default();
        entries.for_each(|entry| sum.add(entry.0.into()));
        sum.value()
    };
    split.tail = weigh(&mut dropped.iter().chain(&kept[..dropping]));
    split.head = weigh(&mut kept[dropping..].iter());
    found.split = split;
    found.boundary = Some(kept[dropping]);
    found.minimal = true;
    found.exact = true;
}
