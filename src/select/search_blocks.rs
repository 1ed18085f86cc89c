//! Search for the fewest whole blocks of a row, ranked by their mass.

use super::candidates::Candidates;
use super::constraints::Constraints;
use super::scratch::Forced;
use super::selection::Decision;
use crate::error::Error;
use crate::kernels::{Element, LANES, WeightFn};
use crate::numerics::certified_sums::{Compensated, SplitSums};
use crate::numerics::exact_share::leaves_exactly;
use crate::numerics::sorting;
use crate::rows::Scores;
use crate::runtime::ambient::{self, PIECE, asked};
use crate::runtime::memory::check_memory;
use crate::runtime::reused::{Reused, filled_again};

#[derive(Clone, Copy)]
struct BlockMass {
    index: usize,
    mass: f64,
    visible: usize,
}

/// Adds blocks, best first, until the rule accepts or the next one would exceed `max_keep`, and lists their keys.
/// Blocks with a forced position are always kept. `candidates` holds all keys of the row, forced ones included.
///
/// # Errors
/// [`Error::ForcedOverMax`], [`Error::BlockOverMax`], [`Error::MinOverMax`].
pub(super) fn search<E: Element, W: WeightFn<E::Scalar>>(
    candidates: &Candidates<'_, E>,
    weight_fn: W,
    constraints: &Constraints,
    block_size: usize,
    forced: &Forced,
    (scores, row): (&Scores<'_>, usize),
    out: &mut Vec<u32>,
) -> Result<Decision, Error> {
    // Per block: the block, the mass of its tail, and a flag.
    let each = size_of::<BlockMass>() + size_of::<f64>() + 2;
    check_memory("scores", candidates.scores.len().div_ceil(block_size), each)?;
    let mut weights: Reused<E::Scalar> =
        filled_again("scores", candidates.scores.len(), E::Scalar::default())?;
    for (scores, weights) in candidates.scores.chunks(PIECE).zip(weights.chunks_mut(PIECE)) {
        ambient::check()?;
        candidates.simd.weights(scores, weight_fn, weights);
    }
    debug_assert!(weights.len().is_multiple_of(LANES));
    let masked = E::MASKED.widen();
    let mut blocks: Reused<BlockMass> =
        asked(candidates.scores.chunks(block_size).zip(weights.chunks(block_size)).enumerate())
            .map(|(index, (scores, weights))| BlockMass {
                index,
                mass: weights.iter().map(|&w| w.into()).collect::<Compensated>().value(),
                visible: scores.iter().filter(|score| score.widen() > masked).count(),
            })
            .collect();
    ambient::check()?;
    let mut kept: Reused<bool> = filled_again("scores", blocks.len(), false)?;
    for &position in forced.first.iter().chain(&forced.last) {
        kept[position as usize / block_size] = true;
    }
    let (mut head, mut count) = (Compensated::default(), 0);
    for block in blocks.iter().filter(|block| kept[block.index]) {
        head.add(block.mass);
        count += block.visible;
    }
    if count > constraints.max_keep {
        let place = scores.place(row, None);
        return Err(Error::ForcedOverMax { place, forced: count, max_keep: constraints.max_keep });
    }
    blocks.retain(|block| block.visible > 0 && !kept[block.index]);
    sorting::sort(&mut blocks, |a, b| b.mass.total_cmp(&a.mass).then(a.index.cmp(&b.index)));
    // tails[j]: the mass of the ranked blocks from j on, summed from the worst upward.
    let mut tails: Reused<f64> = filled_again("scores", blocks.len() + 1, 0.0)?;
    let mut tail = Compensated::default();
    for j in asked((0..blocks.len()).rev()) {
        tail.add(blocks[j].mass);
        tails[j] = tail.value();
    }
    let all = count + blocks.iter().map(|block| block.visible).sum::<usize>();
    let limit = constraints.max_keep;
    let constraints = Constraints {
        // Compensated sums of compensated sums: a few roundings for any number of blocks.
        slack: constraints.slack.widened(8.0 * f64::EPSILON),
        max_keep: usize::MAX,
        min_keep: constraints.min_keep.min(all),
        ..*constraints
    };
    let mut split =
        SplitSums { tail: tails[0], dropped: all - count, head: head.value(), kept: count };
    ambient::check()?;
    let (mut previous, mut chosen, mut exact) = (None, 0, false);
    for (j, block) in asked(blocks.iter().enumerate()) {
        if constraints.accepts(&split) {
            break;
        }
        if constraints.may_tie(&split) {
            let scores = candidates.scores.iter().map(|score| score.widen());
            let visible = scores.enumerate().filter(|entry| entry.1 > masked);
            let entries = visible.map(|(j, score)| (score.into(), kept[j / block_size]));
            exact = leaves_exactly(constraints.eps, (split.dropped, all), entries)?;
        }
        if exact || split.kept + block.visible > limit {
            break;
        }
        previous = Some(split);
        head.add(block.mass);
        chosen += 1;
        kept[block.index] = true;
        split = SplitSums {
            tail: tails[j + 1],
            dropped: split.dropped - block.visible,
            head: head.value(),
            kept: split.kept + block.visible,
        };
    }
    ambient::check()?;
    if split.kept == 0 {
        let place = scores.place(row, None);
        return Err(Error::BlockOverMax { place, block_size, max_keep: limit });
    }
    if split.kept < constraints.min_keep {
        let (place, min_keep) = (scores.place(row, None), constraints.min_keep);
        return Err(Error::MinOverMax { place, min_keep, most: split.kept });
    }
    // One block less: either the best such set provably loses too much, or no such set has `min_keep` keys.
    let minimal = (exact || constraints.accepts(&split))
        && previous.is_none_or(|last| {
            let others = (chosen - 1) * block_size;
            constraints.refutes(&last) || count + others < constraints.min_keep
        });
    for (start, _) in (0..).step_by(block_size).zip(&kept[..]).filter(|block| *block.1) {
        let end = (start + block_size).min(candidates.scores.len());
        let shown = (start..end).filter(|&j| candidates.scores[j].widen() > masked);
        out.extend(shown.map(|j| j as u32));
    }
    Ok(Decision::new(&split, minimal, exact, &constraints))
}
