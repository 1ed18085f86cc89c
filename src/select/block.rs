//! The fewest whole blocks of a row, ranked by their mass.

use super::row::{Field, Rule};
use crate::error::Error;
use crate::kernels::{Element, LANES, Weigh};
use crate::mass::{Compensated, Slack, Split};
use crate::memory::{afford, filled};
use crate::scores::Scores;

/// The blocks chosen.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) split: Split,
    pub(crate) minimal: bool,
    pub(crate) slack: Slack,
    /// One entry per block of the row.
    pub(crate) kept: Vec<bool>,
}

struct Block {
    index: usize,
    mass: f64,
    live: usize,
}

/// Adds blocks, best first, until the rule accepts or the next one would exceed `max_keep`. Blocks with a forced position
/// are kept in any case. `field` holds all keys of the row, forced ones included.
///
/// # Errors
/// [`Error::ForcedOverMax`], [`Error::BlockOverMax`], [`Error::MinOverMax`].
pub(crate) fn search<E: Element, W: Weigh<E::Scalar>>(
    field: &Field<'_, E>,
    law: W,
    rule: &Rule,
    block_size: usize,
    forced: impl Iterator<Item = u32>,
    scores: &Scores<'_>,
    row: usize,
) -> Result<Blocks, Error> {
    // Of each block itself, its tail's mass and a flag.
    let each = size_of::<Block>() + size_of::<f64>() + 2;
    afford("scores", field.keys.len().div_ceil(block_size), each)?;
    let mut weights = filled("scores", field.keys.len(), E::Scalar::default())?;
    field.simd.weights(field.keys, law, &mut weights);
    debug_assert!(weights.len().is_multiple_of(LANES));
    let masked = E::MASKED.widen();
    let mut blocks: Vec<Block> = (field.keys.chunks(block_size).zip(weights.chunks(block_size)))
        .enumerate()
        .map(|(index, (keys, weights))| Block {
            index,
            mass: weights.iter().map(|&w| w.into()).collect::<Compensated>().value(),
            live: keys.iter().filter(|key| key.widen() > masked).count(),
        })
        .collect();
    let mut kept = vec![false; blocks.len()];
    for position in forced {
        kept[position as usize / block_size] = true;
    }
    let (mut head, mut count) = (Compensated::default(), 0);
    for block in blocks.iter().filter(|block| kept[block.index]) {
        head.add(block.mass);
        count += block.live;
    }
    if count > rule.max_keep {
        let place = scores.place(row, None);
        return Err(Error::ForcedOverMax { place, forced: count, max_keep: rule.max_keep });
    }
    blocks.retain(|block| block.live > 0 && !kept[block.index]);
    blocks.sort_unstable_by(|a, b| b.mass.total_cmp(&a.mass).then(a.index.cmp(&b.index)));
    // tails[j]: the mass of the ranked blocks from j on, summed from the worst upward.
    let mut tails = vec![0.0; blocks.len() + 1];
    let mut tail = Compensated::default();
    for j in (0..blocks.len()).rev() {
        tail.add(blocks[j].mass);
        tails[j] = tail.value();
    }
    let all = count + blocks.iter().map(|block| block.live).sum::<usize>();
    let limit = rule.max_keep;
    let rule = Rule {
        // Compensated sums of compensated sums: a few roundings, whatever the number of blocks.
        slack: rule.slack.widened(8.0 * f64::EPSILON),
        max_keep: usize::MAX,
        min_keep: rule.min_keep.min(all),
        ..*rule
    };
    let mut split = Split { tail: tails[0], dropped: all - count, head: head.value(), kept: count };
    let (mut previous, mut chosen) = (None, 0);
    for (j, block) in blocks.iter().enumerate() {
        if rule.accepts(&split) || split.kept + block.live > limit {
            break;
        }
        previous = Some(split);
        head.add(block.mass);
        chosen += 1;
        kept[block.index] = true;
        split = Split {
            tail: tails[j + 1],
            dropped: split.dropped - block.live,
            head: head.value(),
            kept: split.kept + block.live,
        };
    }
    if split.kept == 0 {
        let place = scores.place(row, None);
        return Err(Error::BlockOverMax { place, block_size, max_keep: limit });
    }
    if split.kept < rule.min_keep {
        let (place, min_keep) = (scores.place(row, None), rule.min_keep);
        return Err(Error::MinOverMax { place, min_keep, most: split.kept });
    }
    // One block less: either the best such set provably loses too much, or no such set has `min_keep` keys.
    let minimal = rule.accepts(&split)
        && previous.is_none_or(|last| {
            let others = (chosen - 1) * block_size;
            rule.refutes(&last) || count + others < rule.min_keep
        });
    Ok(Blocks { split, minimal, slack: rule.slack, kept })
}
