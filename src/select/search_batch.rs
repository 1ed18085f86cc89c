//! Short rows, several at a time.

use std::ops::Range;

use super::candidates::Candidates;
use super::constraints::{Constraints, TINY_BUDGET};
use super::job::{SelectJob, Typed, make_room};
use super::options::Options;
use super::read::Source;
use super::scratch::{Batch, BatchRoom, PerDtype, RowScratch, SearchScratch, Workspace};
use super::search_row;
use super::selection::{Decision, Selection};
use super::settle;
use super::weight_fn::{InvertibleWeightFn, WeightFns};
use crate::certificate::Status;
use crate::error::Error;
use crate::kernels::{
    BATCH, Edge, Element, InDouble, KeptSums, LANES, Positions, RANKED, TailTarget,
};
use crate::numerics::certified_sums::{ErrorBound, SplitSums};
use crate::rows::Kind;
use crate::runtime::ambient;

/// Longest row decided here.
const LONGEST: usize = 4096;
/// Entries of a batch: its data stays in the first-level cache.
const ENTRIES: usize = 2048;

/// Returns `true` if the options allow it: masses alone decide, and the whole row competes.
pub(super) fn applies(job: &SelectJob<'_>) -> bool {
    let scores = job.scores;
    // Named one by one, so that a new option does not compile before it is decided here.
    let &Options {
        min_keep,
        max_keep,
        keep_first,
        keep_last,
        block_size,
        prove_minimal,
        effort,
        threads,
    } = job.options;
    // Rows left open are decided again one by one; threads were assigned before.
    let _ = (prove_minimal, effort, threads);
    scores.kind != Kind::Probs
        && scores.scale > 0.0
        && block_size == 1
        && keep_first == 0
        && keep_last == 0
        && min_keep <= 1
        && max_keep.is_none()
}

impl<E: PerDtype, M: WeightFns<E::Scalar>> Typed<'_, E, M> {
    /// Decides rows in order, short ones in batches.
    ///
    /// # Errors
    /// The error of the first bad row.
    pub(super) fn batches(
        &self,
        rows: Range<usize>,
        workspace: &mut Workspace,
        part: &mut Selection,
    ) -> Result<(), Error> {
        if rows.is_empty() {
            return Ok(());
        }
        let Workspace { row: scratch, short } = workspace;
        let Batch { admitted, positions, whole, masked } = E::batch(short);
        let (job, scores) = (self.job, self.job.scores);
        let (mut next, end) = (rows.start, rows.end);
        let since = part.begun(&rows)..end;
        let mut plan = Plan::new(job, next);
        while next < end {
            ambient::check()?;
            // As many rows of one budget as fit. A row with another budget ends the batch and is decided alone.
            let mut batch: [&[E]; BATCH] = [&[]; BATCH];
            let (mut count, mut longest) = (0, 0);
            while count < BATCH && next + count < end {
                let row = next + count;
                let from = scores.visible(self.stored, row);
                if from.len() > LONGEST || (count > 0 && !plan.holds(job, row)) {
                    break;
                }
                if count == 0 && !plan.holds(job, row) {
                    plan = Plan::new(job, row);
                }
                let mut n = from.len();
                if scores.mask.is_some() && n > RANKED {
                    let source = Source::new(scores, row, job.simd);
                    if !source.is_plain(&mut scratch.read.admitted)? {
                        break;
                    }
                    let Some(allowed) = source.allowed(&scratch.read.admitted) else { break };
                    job.simd.compact(from, allowed, &mut admitted[count], &mut positions[count]);
                    n = admitted[count].len();
                    positions[count].resize(n.next_multiple_of(LANES), u32::MAX);
                }
                let most = longest.max(n);
                if n <= RANKED
                    || plan.constraints.eps < TINY_BUDGET
                    || (count > 0 && (count + 1) * most > ENTRIES)
                {
                    break;
                }
                longest = most;
                batch[count] = from;
                count += 1;
            }
            let (here, most) = (next..next + count.max(1), longest.max(scores.span(next).prefix));
            make_room(&since, &here, most, &mut part.indices)?;
            if count == 0 {
                let decision = self.row(next, 1, scratch, &mut part.indices)?;
                part.push(&decision);
                count = 1;
            } else if scores.mask.is_some() {
                let mut batch: [&[E::Scalar]; BATCH] = [&[]; BATCH];
                let mut listed = [Positions::From(0); BATCH];
                for r in 0..count {
                    (batch[r], listed[r]) = (&admitted[r], Positions::Listed(&positions[r]));
                }
                let batch = (next, &batch[..count], &listed);
                self.batch(&plan, batch, longest, masked, scratch, part)?;
            } else {
                let batch = (next, &batch[..count], &[Positions::From(0); BATCH]);
                self.batch(&plan, batch, longest, whole, scratch, part)?;
            }
            next += count;
        }
        Ok(())
    }

    /// Decides the rows of a batch, from row number `first`.
    fn batch<B: InDouble<Scalar = E::Scalar>>(
        &self,
        plan: &Plan,
        (first, batch, positions): (usize, &[&[B]], &[Positions<'_>; BATCH]),
        longest: usize,
        room: &mut BatchRoom<B, E::Scalar>,
        scratch: &mut RowScratch,
        part: &mut Selection,
    ) -> Result<(), Error> {
        let (simd, prove_minimal) = (self.job.simd, self.job.options.prove_minimal);
        let mut room = room.of(batch.len(), longest);
        let found = simd.find_candidate(batch, &plan.target, self.weight_fns, &mut room);
        for (r, row) in batch.iter().enumerate() {
            let (n, mark, out) = (row.len(), part.indices.len(), &mut part.indices);
            let (scores, weights) = room.row(r, row);
            let keys = || Candidates::new(simd, scores, n, found[r].largest);
            let mut decision = None;
            if let Some(edge) = found[r].edge {
                decision = if edge.ties == 1 {
                    let sums = simd.sum_and_emit(scores, weights, edge.score, positions[r], out);
                    decide(&plan.constraints, n, &sums, edge.weight.into())
                } else {
                    decide_ties(&keys(), &plan.constraints, weights, positions[r], &edge, out)
                };
                let open = |decision: &Decision| decision.open(plan.constraints.eps);
                if prove_minimal && B::SINGLE && decision.as_ref().is_some_and(open) {
                    out.truncate(mark);
                    let slack = ErrorBound::f64(n, plan.radius);
                    let constraints = Constraints { slack, ..plan.constraints };
                    let weight_fn = self.weight_fns.of(found[r].largest);
                    let at = (positions[r], edge.score);
                    let scratch = &mut scratch.search.f64;
                    decision = decide_again(&keys(), weight_fn, &constraints, at, scratch, out)?;
                }
            }
            let decision = if let Some(decision) = decision {
                decision
            } else {
                out.truncate(mark);
                self.row(first + r, 1, scratch, out)?
            };
            part.push(&decision);
        }
        Ok(())
    }
}

/// Returns the decision if the edge, which has this weight, is the boundary.
fn decide(constraints: &Constraints, n: usize, sums: &KeptSums, weight: f64) -> Option<Decision> {
    let kept = sums.kept;
    // A tail that was flushed to zero may have mass.
    if sums.below == 0.0 && kept < n {
        return None;
    }
    let head = sums.above + weight;
    let with = SplitSums { tail: sums.below, dropped: n - kept, head, kept };
    // With one key less, both heads are still sums: the general search would decide the same.
    let (tail, dropped) = (sums.below + weight, n - kept + 1);
    let without = SplitSums { tail, dropped, head: sums.above, kept: kept - 1 };
    let minimal = kept == 1 || constraints.refutes(&without);
    if !minimal && constraints.accepts(&without) {
        // Not the boundary: left to the general search.
        return None;
    }
    let decision = Decision::new(&with, minimal, false, constraints);
    (decision.status == Status::Certified).then_some(decision)
}

/// Returns the f64 decision, and the positions kept, of a row that f32 leaves open at a score.
fn decide_again<E: InDouble, W: InvertibleWeightFn<E::Scalar>>(
    keys: &Candidates<'_, E>,
    weight_fn: W,
    constraints: &Constraints,
    (positions, worst): (Positions<'_>, E::Scalar),
    scratch: &mut SearchScratch<f64>,
    out: &mut Vec<u32>,
) -> Result<Option<Decision>, Error> {
    let found = settle::in_double(keys, &[], weight_fn, constraints, Some(worst), scratch)?;
    let Some(boundary) = found.worst else { return Ok(None) };
    let mark = out.len();
    keys.emit(positions.listed(), 0, boundary, out)?;
    // The general search handles a row that another thread writes to.
    let decision = found.decision(constraints);
    Ok((out.len() - mark == decision.kept).then_some(decision))
}

/// Returns the decision, and the positions kept, if the boundary is among the scores equal to the edge.
fn decide_ties<E: Element>(
    keys: &Candidates<'_, E>,
    constraints: &Constraints,
    weights: &[E::Scalar],
    positions: Positions<'_>,
    edge: &Edge<E::Scalar>,
    out: &mut Vec<u32>,
) -> Option<Decision> {
    let &Candidates { simd, scores, visible: n, .. } = keys;
    let sums = simd.sum_around_ties(scores, weights, edge.score);
    let (ties, weight): (usize, f64) = (edge.ties, edge.weight.into());
    // Rows of equal scores are decided in integers, and a flushed tail may have mass: left to the general search.
    if ties == n || (sums.below == 0.0 && sums.count_below > scores.len() - n) {
        return None;
    }
    let at = |kept: usize| SplitSums {
        tail: sums.below + weight * (ties - kept) as f64,
        // Negative only if another thread writes to the row meanwhile.
        dropped: n.saturating_sub(sums.count_above + kept),
        head: sums.above + weight * kept as f64,
        kept: sums.count_above + kept,
    };
    if !constraints.accepts(&at(ties)) || constraints.accepts(&at(0)) {
        return None;
    }
    let enough = search_row::fewest((0, ties), |kept| constraints.accepts(&at(kept)));
    let last = if enough == ties {
        u32::MAX
    } else {
        simd.find_equal(scores, edge.score, enough).ok()? as u32
    };
    let split = at(enough);
    let minimal = split.kept == 1 || constraints.refutes(&at(enough - 1));
    let mark = out.len();
    keys.emit(positions.listed(), 0, (edge.score, last), out).ok()?;
    // The general search handles a row that another thread writes to.
    (out.len() - mark == split.kept).then(|| Decision::new(&split, minimal, false, constraints))
}

/// Data shared by rows of one budget and one radius.
struct Plan {
    constraints: Constraints,
    radius: f64,
    target: TailTarget,
}

impl Plan {
    fn new(job: &SelectJob<'_>, row: usize) -> Self {
        let constraints = job.plain_constraints(row, LONGEST);
        let (share, scale) = (constraints.target(1.0), job.scores.scale);
        let reach = search_row::depth(LONGEST, constraints.eps) / scale;
        let target = TailTarget { share, ln_share: share.ln(), reach, scale };
        Plan { constraints, radius: job.scores.row_radius(row), target }
    }

    fn holds(&self, job: &SelectJob<'_>, row: usize) -> bool {
        self.constraints.eps == job.eps(row) && self.radius == job.scores.row_radius(row)
    }
}
