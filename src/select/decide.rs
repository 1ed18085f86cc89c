//! Decision of one row: searched by keys or by blocks, then listed.

use std::ops::Range;

use super::again;
use super::candidates::{Boundary, Candidates};
use super::constraints::{Constraints, DecideOn};
use super::job::SelectJob;
use super::options::{Options, allowed_keys};
use super::prepared::{Prepared, Source, Visitor};
use super::scratch::{Forced, PerDtype, Workspace};
use super::search_blocks;
use super::selection::Decision;
use super::weight_fn::InvertibleWeightFn;
use crate::error::Error;
use crate::kernels::{Element, LANES, Piece, Positions, Simd, append_all};
use crate::numerics::certified_sums::{self, CHUNK, Compensated, ExactSum, SplitSums};
use crate::numerics::exact_share::leaves_exactly;
use crate::numerics::order;
use crate::numerics::sorting;
use crate::runtime::ambient;
use crate::runtime::memory::{check_memory, room};
use crate::runtime::reused::{Reused, filled_again};
use crate::runtime::threads;

impl SelectJob<'_> {
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
            // The f64 search has already decided rows without blocks.
            let again =
                source.is_single() && self.options.prove_minimal && self.options.block_size > 1;
            if !(again && decision.open(self.eps(row))) {
                return Ok(decision);
            }
            out.truncate(mark);
        }
        source.double(workspace, Decide { job: self, source, out })
    }
}

/// Visitor that decides a prepared row and lists its kept keys.
pub(super) struct Decide<'a> {
    job: &'a SelectJob<'a>,
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
            finer,
            exact_ties,
            weights,
        } = row;
        let Source { row: number, simd, threads, .. } = self.source;
        if visible == 0 {
            return Ok(Decision::EMPTY);
        }
        let (job, options) = (self.job, self.job.options);
        // Every option is handled below, except those for the caller.
        let &Options {
            min_keep,
            max_keep: _, // by `allowed_keys`
            keep_first,
            keep_last,
            block_size,
            prove_minimal,
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
        let whole = Candidates {
            simd,
            scores: &[],
            visible,
            largest,
            rough,
            smallest,
            prefetch,
            forced: (0.0, 0),
            threads,
        };
        if block_size > 1 {
            let scores = scores.as_slice();
            let candidates = Candidates { scores, ..whole };
            let positions = forced.first.iter().chain(&forced.last).copied();
            let found = search_blocks::search(
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
            return Ok(Decision::new(&found.split, found.minimal, found.exact, &constraints));
        }
        let mut fixed = 0.0;
        let mut own: Reused<E> = Reused::default();
        let lent;
        let scores: &[E] = if count == 0 {
            lent = scores;
            lent.as_slice()
        } else {
            let scores = scores.copied();
            // Forced keys do not compete: weigh them, then hide them.
            own = filled_again("keep_first", count.next_multiple_of(LANES), E::MASKED)?;
            for (score, &position) in own.iter_mut().zip(forced.first.iter().chain(&forced.last)) {
                *score = std::mem::replace(&mut scores[position as usize], E::MASKED);
            }
            let alone = Candidates { scores: &own[..], visible: count, threads: 1, ..whole };
            fixed = alone.mass(weight_fn)?;
            scores
        };
        let visible = visible - count;
        let candidates = Candidates { scores, visible, forced: (fixed, count), ..whole };
        let mut found = candidates.search(weight_fn, &constraints, E::scratch(workspace))?;
        let mut decision = Decision::new(&found.split, found.minimal, found.exact, &constraints);
        if weights && decision.open(constraints.eps) {
            // Two lists of keys with their positions, each grown by doubling.
            check_memory("scores", visible, 4 * size_of::<(f64, u32)>())?;
            refine(scores, &own, &mut found, &constraints);
            decision = Decision::new(&found.split, found.minimal, found.exact, &constraints);
        }
        if exact_ties && count > 0 && decision.open(constraints.eps) {
            settle_tie(scores, &own, &mut found, &constraints)?;
            decision = Decision::new(&found.split, found.minimal, found.exact, &constraints);
        }
        if let Some(slack) = finer.filter(|_| prove_minimal && decision.open(constraints.eps)) {
            let constraints = Constraints { slack, ..constraints };
            let worst = found.worst.map(|worst| worst.0);
            let scratch = &mut workspace.scratch64;
            found = again::in_double(&candidates, &own, weight_fn, &constraints, worst, scratch)?;
            decision = Decision::new(&found.split, found.minimal, found.exact, &constraints);
        }
        let mark = self.out.len();
        let at = |j: &u32| positions.map_or(*j, |list| list[*j as usize]);
        self.out.extend(forced.first.iter().map(at));
        if let Some(boundary) = found.worst {
            if threads > 1 {
                // Parts of the list, filled by kernels.
                check_memory("scores", scores.len(), 2 * size_of::<u32>())?;
            }
            emit((simd, threads), scores, (positions, decision.kept), boundary, self.out)?;
        }
        self.out.extend(forced.last.iter().map(at));
        workspace.forced = forced;
        // A row that is read in place can change between the sums and the list; then it is copied.
        if self.out.len() - mark != decision.kept {
            return Err(Error::Changed { place: job.scores.place(number, None) });
        }
        Ok(decision)
    }
}

/// Lists the kept positions down to a boundary; `kept` is their expected number.
pub(crate) fn emit<E: Element>(
    (simd, threads): (Simd, usize),
    scores: &[E],
    (positions, kept): (Option<&[u32]>, usize),
    boundary: (E::Scalar, u32),
    out: &mut Vec<u32>,
) -> Result<(), Error> {
    let list = |range: Range<usize>, inclusive: bool, out: &mut Vec<u32>| {
        let from = match positions {
            Some(list) => Positions::Listed(&list[range.clone()]),
            None => Positions::From(range.start as u32),
        };
        simd.emit(&scores[range], from, boundary.0, inclusive, out);
    };
    // Ties are kept up to the boundary's position, and dropped behind it.
    let edge = (boundary.1 as usize).min(scores.len());
    let (before, behind) = (edge / LANES * LANES, (edge + 1).next_multiple_of(LANES));
    if threads == 1 {
        for start in (0..before).step_by(CHUNK) {
            ambient::check()?;
            list(start..(start + CHUNK).min(before), true, out);
        }
    } else {
        let share = threads::share(before, CHUNK, threads);
        let parts = threads::map(threads, (0..before).step_by(share), 1, |start| {
            // About the part's share, so that lists rarely move while they grow.
            let mut part = Vec::with_capacity((kept * share / scores.len()).min(share) + CHUNK);
            list(start..(start + share).min(before), true, &mut part);
            part
        })?;
        let parts: Vec<&[u32]> = parts.iter().map(Vec::as_slice).collect();
        append_all(out, &parts, |pieces| threads::map_all(threads, pieces, 1, Piece::copy));
    }
    if before < scores.len() {
        for j in before..behind {
            if order::kept(&(scores[j].widen(), j as u32), &boundary) {
                out.push(positions.map_or(j as u32, |list| list[j]));
            }
        }
        for start in (behind..scores.len()).step_by(CHUNK) {
            ambient::check()?;
            list(start..(start + CHUNK).min(scores.len()), false, out);
        }
    }
    Ok(())
}

impl Forced {
    /// Lists the first and the last unmasked positions; a position claimed by both is listed once.
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

/// Decides a row of stored weights in exact arithmetic, by sums of integers: drops the worst kept keys while the loss
/// stays within the budget.
pub(super) fn refine<E: Element>(
    scores: &[E],
    forced: &[E],
    found: &mut Boundary<E::Scalar>,
    constraints: &Constraints,
) {
    let Some(boundary) = found.worst else {
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
    let (mut forced_mass, mut forced_count) = (Compensated::default(), 0);
    for weight in forced.iter().map(|score| score.widen()).filter(|weight| *weight > masked) {
        total.add(weight.into());
        forced_mass.add(weight.into());
        forced_count += 1;
    }
    let holds = |tail: &ExactSum| tail.compare_share(&total, constraints.eps).is_le();
    if !holds(&tail) {
        return;
    }
    let (mut dropping, mut refused) = (0, false);
    // The boundary is a competing key: one of them stays.
    let least = constraints.min_keep.saturating_sub(forced_count).max(1);
    while kept.len() - dropping > least && !refused {
        tail.add(kept[dropping].0.into());
        refused = !holds(&tail);
        dropping += usize::from(!refused);
    }
    let weigh = |entries: &mut dyn Iterator<Item = &(E::Scalar, u32)>, mut sum: Compensated| {
        entries.for_each(|entry| sum.add(entry.0.into()));
        sum.value()
    };
    found.split = SplitSums {
        tail: weigh(&mut dropped.iter().chain(&kept[..dropping]), Compensated::default()),
        dropped: dropped.len() + dropping,
        head: weigh(&mut kept[dropping..].iter(), forced_mass),
        kept: kept.len() - dropping + forced_count,
    };
    found.worst = Some(kept[dropping]);
    found.minimal = refused || forced_count == 0 || forced_count < constraints.min_keep;
    found.exact = true;
}

/// Decides a row with forced keys whose tail mass can equal the budget exactly. Drops a share `eps` of its keys, if
/// that drops the same share of each level of equal scores.
///
/// # Errors
/// [`Error::NoMemory`].
fn settle_tie<E: Element>(
    scores: &[E],
    forced: &[E],
    found: &mut Boundary<E::Scalar>,
    constraints: &Constraints,
) -> Result<(), Error> {
    let eps = constraints.eps;
    let visible = found.split.kept + found.split.dropped;
    let dropped = certified_sums::equal_weights_droppable(visible as u64, eps) as usize;
    // Not below `min_keep`. `max_keep` is met already by a row over its budget.
    let fits = visible - dropped >= constraints.min_keep.max(1) && dropped >= found.split.dropped;
    if dropped == 0 || !fits || !certified_sums::is_share(dropped as u64, visible as u64, eps) {
        return Ok(());
    }
    let shows = |score: &E::Scalar| *score > E::MASKED.widen();
    let competing = scores.iter().enumerate().map(|(j, score)| (score.widen(), j as u32));
    let mut ranked: Reused<(E::Scalar, u32)> = Reused::new();
    room("scores", &mut ranked, visible)?;
    ranked.extend(competing.filter(|entry| shows(&entry.0)));
    sorting::sort(&mut ranked, order::worst_first);
    if dropped > ranked.len() {
        return Ok(());
    }
    let competing = ranked.iter().enumerate().map(|(at, entry)| (entry.0.into(), at >= dropped));
    let kept = forced.iter().map(|score| score.widen()).filter(shows);
    let entries = competing.chain(kept.map(|score| (score.into(), true)));
    if leaves_exactly(eps, (dropped, visible), entries)? {
        let split = SplitSums { tail: eps, dropped, head: 1.0 - eps, kept: visible - dropped };
        // One key less would lose more than the budget.
        let worst = ranked.get(dropped).copied();
        *found = Boundary { split, worst, minimal: true, exact: true };
    }
    Ok(())
}
