//! Short rows, several at a time.

use std::ops::Range;

use super::again;
use super::candidates::Candidates;
use super::constraints::{Constraints, TINY_BUDGET};
use super::decide::emit;
use super::job::SelectJob;
use super::options::Options;
use super::scratch::{PerDtype, SearchScratch, Workspace};
use super::search_row;
use super::selection::{Decision, Selection};
use super::weight_fn::InvertibleWeightFn;
use crate::certificate::Status;
use crate::error::Error;
use crate::kernels::{
    BATCH, Edge, Element, KeptSums, LANES, Positions, RANKED, Scalar, ScaledBy, Simd, Strided,
    TailTarget, Unscaled, WeightFnOf,
};
use crate::numerics::certified_sums::{ErrorBound, SplitSums};
use crate::rows::{Kind, for_dtype};
use crate::runtime::ambient;

/// Longest row decided here.
const LONGEST: usize = 4096;
/// Entries of a batch: its data stays in the first-level cache.
const ENTRIES: usize = 2048;

/// Returns `true` if the options allow it: masses alone decide, and the whole row competes.
pub(crate) fn applies(job: &SelectJob<'_>) -> bool {
    let scores = job.scores;
    // Named one by one, so that a new option does not compile before it is decided here.
    let &Options { min_keep, max_keep, keep_first, keep_last, block_size, prove_minimal, threads } =
        job.options;
    // Rows left open are decided again one by one; threads were assigned before.
    let _ = (prove_minimal, threads);
    scores.kind != Kind::Probs
        && scores.scale > 0.0
        && block_size == 1
        && keep_first == 0
        && keep_last == 0
        && min_keep <= 1
        && max_keep.is_none()
}

/// Decides rows in order, short ones in batches.
///
/// # Errors
/// The error of the first bad row.
pub(crate) fn rows(
    job: &SelectJob<'_>,
    rows: Range<usize>,
    workspace: &mut Workspace,
    part: &mut Selection,
) -> Result<(), Error> {
    for_dtype!(job.scores.data, stored => scaled(job, stored, rows, workspace, part))
}

fn scaled<E: PerDtype>(
    job: &SelectJob<'_>,
    stored: &Strided<'_, E>,
    rows: Range<usize>,
    workspace: &mut Workspace,
    part: &mut Selection,
) -> Result<(), Error>
where
    E::Scalar: Element<Scalar = E::Scalar> + PerDtype,
{
    if job.scores.scale == 1.0 {
        batches(job, stored, Unscaled, 1.0, rows, workspace, part)
    } else {
        let scale = job.scores.scale;
        batches(job, stored, ScaledBy(scale), scale, rows, workspace, part)
    }
}

fn batches<E: PerDtype, M: WeightFnOf<E::Scalar, Weights: InvertibleWeightFn<E::Scalar>>>(
    job: &SelectJob<'_>,
    stored: &Strided<'_, E>,
    weight_fn: M,
    scale: f64,
    rows: Range<usize>,
    workspace: &mut Workspace,
    part: &mut Selection,
) -> Result<(), Error>
where
    E::Scalar: Element<Scalar = E::Scalar> + PerDtype,
{
    if rows.is_empty() {
        return Ok(());
    }
    let (mut next, end) = (rows.start, rows.end);
    let since = part.begun(&rows)..end;
    let mut plan = Plan::new(job, next, scale);
    let masked = job.scores.mask.is_some();
    let mut dense = std::mem::take(E::dense(workspace));
    let mut listed = std::mem::take(&mut workspace.listed);
    let mut result = Ok(());
    while next < end && result.is_ok() {
        let room = ambient::check().and_then(|()| job.make_room(&since, next, &mut part.indices));
        if let Err(error) = room {
            result = Err(error);
            break;
        }
        // As many rows of one budget as fit. A row with another budget ends the batch and is decided alone.
        let mut batch: [&[E]; BATCH] = [&[]; BATCH];
        let (mut lengths, mut count, mut longest) = ([0; BATCH], 0, 0);
        while count < BATCH && next + count < end {
            let row = next + count;
            let from = job.scores.visible(stored, row);
            if from.len() > LONGEST || (count > 0 && !plan.holds(job, row)) {
                break;
            }
            if count == 0 && !plan.holds(job, row) {
                plan = Plan::new(job, row, scale);
            }
            let mut n = from.len();
            if masked && n > RANKED {
                let source = job.source(row, 1, None);
                match source.compact(from, workspace, &mut dense[count], &mut listed[count]) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        result = Err(error);
                        break;
                    }
                }
                n = dense[count].len();
            }
            let most = longest.max(n);
            if n <= RANKED
                || plan.constraints.eps < TINY_BUDGET
                || (count > 0 && (count + 1) * most > ENTRIES)
            {
                break;
            }
            longest = most;
            (lengths[count], batch[count]) = (n, from);
            count += 1;
        }
        if result.is_err() {
            break;
        }
        if count == 0 {
            result = job.row(next, 1, workspace, &mut part.indices).map(|one| part.push(&one));
            next += 1;
            continue;
        }
        result = if masked {
            let mut batch: [&[E::Scalar]; BATCH] = [&[]; BATCH];
            let mut positions = [Positions::From(0); BATCH];
            for r in 0..count {
                batch[r] = &dense[r];
                listed[r].resize(lengths[r].next_multiple_of(LANES), u32::MAX);
            }
            for r in 0..count {
                positions[r] = Positions::Listed(&listed[r]);
            }
            let batch = (next, &batch[..count], &positions[..]);
            decide_batch(job, &plan, batch, longest, weight_fn, workspace, part)
        } else {
            let batch = (next, &batch[..count], &[Positions::From(0); BATCH][..]);
            decide_batch(job, &plan, batch, longest, weight_fn, workspace, part)
        };
        next += count;
    }
    *E::dense(workspace) = dense;
    workspace.listed = listed;
    result
}

/// Decides the rows of a batch, from row number `first`.
fn decide_batch<E: PerDtype, M: WeightFnOf<E::Scalar, Weights: InvertibleWeightFn<E::Scalar>>>(
    job: &SelectJob<'_>,
    plan: &Plan,
    (first, batch, positions): (usize, &[&[E]], &[Positions<'_>]),
    longest: usize,
    weight_fn: M,
    workspace: &mut Workspace,
    part: &mut Selection,
) -> Result<(), Error>
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let mut short = std::mem::take(E::short(workspace));
    let stride = longest.next_multiple_of(LANES) + 2 * RANKED;
    let mut room = short.room(stride, batch.len(), part.indices.as_ptr_range().end);
    let found = job.simd.find_candidate(batch, &plan.target, weight_fn, &mut room);
    let mut result = Ok(());
    for (r, row) in batch.iter().enumerate() {
        let mark = part.indices.len();
        let kept_sums = found[r].edge.and_then(|edge| {
            let (scores, weights) = room.row(r, row);
            let (n, out) = (row.len(), &mut part.indices);
            if edge.ties == 1 {
                let sums = job.simd.sum_and_emit(scores, weights, edge.score, positions[r], out);
                decide(&plan.constraints, n, &sums, edge.weight.into())
            } else {
                decide_ties(
                    job.simd,
                    &plan.constraints,
                    n,
                    (scores, weights, positions[r]),
                    &edge,
                    out,
                )
            }
        });
        let number = first + r;
        let open = |decision: &Decision| {
            job.options.prove_minimal && E::SINGLE && decision.open(job.eps(number))
        };
        let decision = match (kept_sums, found[r].edge) {
            (Some(decision), Some(edge)) if open(&decision) => {
                part.indices.truncate(mark);
                let (n, out) = (row.len(), &mut part.indices);
                let candidates = Candidates {
                    simd: job.simd,
                    scores: room.row(r, row).0,
                    visible: n,
                    largest: found[r].largest,
                    rough: None,
                    smallest: E::Scalar::NEG_INFINITY,
                    prefetch: None,
                    forced: (0.0, 0),
                    threads: 1,
                };
                let constraints =
                    Constraints { slack: ErrorBound::f64(n, plan.radius), ..plan.constraints };
                let law = weight_fn.of(found[r].largest);
                let at = (positions[r], edge.score);
                let scratch = &mut workspace.scratch64;
                decide_again(&candidates, law, &constraints, at, scratch, out)
            }
            (decision, _) => Ok(decision),
        };
        let decision = match decision {
            Ok(decision) => decision,
            Err(error) => {
                result = Err(error);
                break;
            }
        };
        if let Some(decision) = decision {
            part.push(&decision);
        } else {
            part.indices.truncate(mark);
            match job.row(number, 1, workspace, &mut part.indices) {
                Ok(decision) => part.push(&decision),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
    }
    *E::short(workspace) = short;
    result
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
fn decide_again<E: PerDtype, W: InvertibleWeightFn<E::Scalar>>(
    candidates: &Candidates<'_, E>,
    weight_fn: W,
    constraints: &Constraints,
    (positions, worst): (Positions<'_>, E::Scalar),
    scratch: &mut SearchScratch<f64>,
    out: &mut Vec<u32>,
) -> Result<Option<Decision>, Error> {
    let found = again::in_double(candidates, &[], weight_fn, constraints, Some(worst), scratch)?;
    let Some(boundary) = found.worst else { return Ok(None) };
    let mark = out.len();
    let list = positions.listed();
    emit((candidates.simd, 1), candidates.scores, (list, 0), boundary, out)?;
    // The general search handles a row that another thread writes to.
    let decision = Decision::new(&found.split, found.minimal, found.exact, constraints);
    Ok((out.len() - mark == decision.kept).then_some(decision))
}

/// Returns the decision, and the positions kept, if the boundary is among the scores equal to the edge.
fn decide_ties<E: Element>(
    simd: Simd,
    constraints: &Constraints,
    n: usize,
    (scores, weights, positions): (&[E], &[E::Scalar], Positions<'_>),
    edge: &Edge<E::Scalar>,
    out: &mut Vec<u32>,
) -> Option<Decision> {
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
    emit((simd, 1), scores, (positions.listed(), 0), (edge.score, last), out).ok()?;
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
    fn new(job: &SelectJob<'_>, row: usize, scale: f64) -> Self {
        let constraints = job.plain_constraints(row, LONGEST);
        let share = constraints.target(1.0);
        let reach = search_row::depth(LONGEST, constraints.eps) / scale;
        let target = TailTarget { share, ln_share: share.ln(), reach, scale };
        Plan { constraints, radius: job.scores.row_radius(row), target }
    }

    fn holds(&self, job: &SelectJob<'_>, row: usize) -> bool {
        self.constraints.eps == job.eps(row) && self.radius == job.scores.row_radius(row)
    }
}
