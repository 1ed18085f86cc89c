//! Short rows, several at a time.

use std::ops::Range;

use super::batch::{Decision, Job, Selection};
use super::row;
use super::row::Rule;
use super::workspace::{Buffers, Workspace};
use crate::certificate::Status;
use crate::error::Error;
use crate::kernels::{
    Aim, BATCH, Element, LANES, LawOf, RANKED, Room, ScaledBy, Settled, Unscaled,
};
use crate::mass::Split;
use crate::scores::{Data, Kind};

/// Rows up to this length are decided here, if nothing is special about them.
const LONGEST: usize = 4096;
/// Entries of a batch: what it works on stays in the first-level cache.
const ENTRIES: usize = 2048;

/// Whether the options allow it: masses alone decide, and the whole row competes.
pub(crate) fn applies(job: &Job<'_>) -> bool {
    let (scores, options) = (job.scores, job.options);
    scores.kind != Kind::Probs
        && scores.scale > 0.0
        && scores.mask.is_none()
        && options.block_size == 1
        && options.keep_first + options.keep_last == 0
        && options.min_keep <= 1
        && options.max_keep.is_none()
}

/// Decides rows one after the other, short ones in batches.
///
/// # Errors
/// Whatever is wrong with the first bad row.
pub(crate) fn rows(
    job: &Job<'_>,
    rows: Range<usize>,
    workspace: &mut Workspace,
    part: &mut Selection,
) -> Result<(), Error> {
    match job.scores.data {
        Data::F32(data) => scaled(job, data, rows, workspace, part),
        Data::F64(data) => scaled(job, data, rows, workspace, part),
        Data::F16(data) => scaled(job, data, rows, workspace, part),
        Data::Bf16(data) => scaled(job, data, rows, workspace, part),
    }
}

fn scaled<E: Buffers>(
    job: &Job<'_>,
    data: &[E],
    rows: Range<usize>,
    workspace: &mut Workspace,
    part: &mut Selection,
) -> Result<(), Error>
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    if job.scores.scale == 1.0 {
        batches(job, data, Unscaled, 1.0, rows, workspace, part)
    } else {
        let scale = job.scores.scale;
        batches(job, data, ScaledBy(scale), scale, rows, workspace, part)
    }
}

fn batches<E: Buffers, M: LawOf<E::Scalar>>(
    job: &Job<'_>,
    data: &[E],
    law: M,
    scale: f64,
    rows: Range<usize>,
    workspace: &mut Workspace,
    part: &mut Selection,
) -> Result<(), Error>
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let mut next = rows.start;
    let mut plan = Plan::new(job, next, scale);
    while next < rows.end {
        // As many rows of one budget as fit; a long one ends the batch and goes its own way.
        let mut batch: [&[E]; BATCH] = [&[]; BATCH];
        let (mut count, mut longest) = (0, 0);
        while count < BATCH && next + count < rows.end {
            let row = next + count;
            let span = job.scores.span(row);
            let n = span.visible;
            let most = longest.max(n);
            if n <= RANKED || n > LONGEST || (count > 0 && (count + 1) * most > ENTRIES) {
                break;
            }
            if !plan.holds(job, row) {
                if count > 0 {
                    break;
                }
                plan = Plan::new(job, row, scale);
            }
            if plan.rule.eps < row::TINY {
                break;
            }
            longest = most;
            batch[count] = &data[span.start..span.start + n];
            count += 1;
        }
        if count == 0 {
            let decision = job.row(next, false, workspace, &mut part.indices)?;
            part.push(&decision);
            next += 1;
            continue;
        }
        let mut short = std::mem::take(E::short(workspace));
        let stride = longest.next_multiple_of(LANES) + 2 * RANKED;
        let mut room = short.room(stride, count, part.indices.as_ptr_range().end);
        let found = job.simd.approach(&batch[..count], &plan.aim, law, &mut room);
        for r in 0..count {
            let mark = part.indices.len();
            let settled = found[r].edge.and_then(|(edge, weight)| {
                let (keys, weights) = room.row(r, batch[r].len());
                let sums = job.simd.settle(keys, weights, edge, &mut part.indices);
                decide(&plan.rule, batch[r].len(), &sums, weight.into())
            });
            let decision = match settled {
                Some(decision)
                    if !(job.options.prove_minimal && decision.open(job.eps(next + r))) =>
                {
                    decision
                }
                _ => {
                    part.indices.truncate(mark);
                    job.row(next + r, false, workspace, &mut part.indices)?
                }
            };
            part.push(&decision);
        }
        *E::short(workspace) = short;
        next += count;
    }
    Ok(())
}

/// The decision, if the edge, which has this weight, is the boundary.
fn decide(rule: &Rule, n: usize, sums: &Settled, weight: f64) -> Option<Decision> {
    // A tail that was flushed whole may be no tail at all.
    if sums.below == 0.0 {
        return None;
    }
    let kept = sums.kept;
    let with = Split { tail: sums.below, dropped: n - kept, head: sums.above, kept };
    let mut minimal = kept == 1;
    if !minimal {
        // One key less. The head is a difference; while the key is not most of it, its relative error is at most
        // three times as large, and the proof takes that into account.
        let without = Split {
            tail: sums.below + weight,
            dropped: n - kept + 1,
            head: sums.above - weight,
            kept: kept - 1,
        };
        if weight > 0.5 * sums.above {
            return None;
        }
        minimal = without.lower(3.0 * rule.slack.certify, rule.slack.flush) > rule.eps;
        if !minimal {
            // Open, or not the boundary: the general search knows.
            return None;
        }
    }
    let decision = Decision::new(&with, minimal, false, rule);
    (decision.status == Status::Certified).then_some(decision)
}

/// What rows of one budget and one radius share.
struct Plan {
    rule: Rule,
    radius: f64,
    aim: Aim,
}

impl Plan {
    fn new(job: &Job<'_>, row: usize, scale: f64) -> Self {
        let rule = job.plain_rule(row, LONGEST);
        let share = rule.target(1.0);
        let quantile = quantile(share);
        let density = (-0.5 * quantile * quantile).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let drift = share / density;
        let reach = row::depth(LONGEST, rule.eps) / scale;
        let aim = Aim { share, quantile, drift, reach, scale };
        Plan { rule, radius: job.scores.row_radius(row), aim }
    }

    fn holds(&self, job: &Job<'_>, row: usize) -> bool {
        self.rule.eps == job.eps(row) && self.radius == job.scores.row_radius(row)
    }
}

/// A quantile of the standard normal law to within 5e-4 (Abramowitz and Stegun 26.2.23); it only shows the way.
fn quantile(share: f64) -> f64 {
    let tail = share.min(1.0 - share).max(1e-300);
    let t = (-2.0 * tail.ln()).sqrt();
    let above = t
        - (2.515_517 + t * (0.802_853 + t * 0.010_328))
            / (1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308)));
    if share < 0.5 { -above } else { above }
}

/// Scratch of a batch.
#[derive(Debug, Default)]
pub(crate) struct Short<E, S> {
    keys: Vec<E>,
    weights: Vec<S>,
    inside: Vec<S>,
    inside_weights: Vec<S>,
}

impl<E: Element> Short<E, E::Scalar> {
    fn room(&mut self, stride: usize, rows: usize, write: *const u32) -> Room<'_, E> {
        let zero = E::Scalar::default();
        Room {
            stride,
            keys: super::workspace::padded(&mut self.keys, rows * stride, E::MASKED),
            weights: super::workspace::padded(&mut self.weights, rows * stride, zero),
            inside: super::workspace::padded(&mut self.inside, rows * stride, zero),
            inside_weights: super::workspace::padded(&mut self.inside_weights, rows * stride, zero),
            write,
        }
    }
}
