//! Scores of a block of keys for many rows, a lane for a row: their maxima, and the sums of their weights.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for scores of as many keys.

use crate::kernels::isa::{LANES, Lanes, Level};
use crate::kernels::soft_cap::SoftCap;
use crate::kernels::weights::exp;

/// Most rows per tile.
pub(crate) const ROWS: usize = 4 * LANES;
/// Keys of a block: that many weights are summed in f32 before they go to f64.
pub(crate) const BLOCK: usize = 128;

/// Sixteen rows' scores of a key, then weights.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
#[expect(dead_code, reason = "read through pointers")]
pub(super) struct Group([f32; LANES]);

impl Group {
    pub(super) const ZERO: Group = Group([0.0; LANES]);
}

/// Factor from products to scores, and their soft cap.
pub(crate) type Scaling = (f32, Option<SoftCap<f32>>);

/// Largest scores and sums of weights of rows so far.
#[derive(Debug)]
pub(super) struct Weighed {
    /// Rows in whole groups.
    pub(super) padded: usize,
    scale: f32,
    cap: Option<SoftCap<f32>>,
    /// Largest score so far, to which weights are relative.
    pub(super) tops: [f32; ROWS],
    pub(super) totals: [f64; ROWS],
    /// Factors by which sums of earlier blocks must be multiplied.
    pub(super) factors: [f64; ROWS],
}

/// Keys of a block that each row sees.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BlockMask<'a> {
    /// Number of keys, from the first.
    First(&'a [f32; ROWS]),
    /// Key after key, a number for each row: positive if it sees the key.
    Each(&'a [f32]),
    /// Key after key, a number for each row to add to its score: negative infinity if it does not see the key.
    Biased(&'a [f32]),
}

impl BlockMask<'_> {
    pub(super) fn holds(self, count: usize) -> bool {
        match self {
            BlockMask::First(_) => true,
            BlockMask::Each(each) | BlockMask::Biased(each) => each.len() >= count * ROWS,
        }
    }
}

impl Weighed {
    pub(super) fn new(padded: usize, (scale, cap): Scaling) -> Self {
        let tops = [f32::NEG_INFINITY; ROWS];
        Weighed { padded, scale, cap, tops, totals: [0.0; ROWS], factors: [1.0; ROWS] }
    }

    /// Scales, caps, biases and masks the scores of a group of rows, finds the largest, and rescales sums of weights by it.
    #[inline(always)]
    pub(super) unsafe fn top<L: Level>(
        &mut self,
        scores: *mut f32,
        at: usize,
        count: usize,
        mask: BlockMask<'_>,
    ) {
        let hidden = L::F32::splat(f32::NEG_INFINITY);
        let (limit, each, biases) = match mask {
            BlockMask::First(limits) => (L::F32::load(limits[at..].as_ptr()), None, None),
            BlockMask::Each(each) => (hidden, Some(each), None),
            BlockMask::Biased(biases) => (hidden, None, Some(biases)),
        };
        let all = limit.smallest() >= count as f32;
        let scale = L::F32::splat(self.scale);
        let before = L::F32::load(self.tops[at..].as_ptr());
        let mut top = before;
        for key in 0..count {
            let to = scores.add(key * ROWS + at);
            let mut score = L::F32::load(to).mul(scale);
            if let Some(cap) = self.cap {
                score = cap.of(score);
            }
            if let Some(biases) = biases {
                let bias = L::F32::load(biases[key * ROWS + at..].as_ptr());
                score = score.add(bias).select(bias.gt(hidden), hidden);
            } else if let Some(each) = each {
                let seen = L::F32::load(each[key * ROWS + at..].as_ptr());
                score = score.select(seen.gt(L::F32::splat(0.0)), hidden);
            } else if !all {
                score = score.select(limit.gt(L::F32::splat(key as f32)), hidden);
            }
            score.store(to);
            top = score.max(top);
        }
        top.store(self.tops[at..].as_mut_ptr());
        let factors = exp(L::double(before).sub(L::double(top)));
        factors.store(self.factors[at..].as_mut_ptr());
        let totals = self.totals[at..].as_mut_ptr();
        L::F64::load(totals).mul(factors).store(totals);
    }

    /// Adds a block's sum of weights.
    #[inline(always)]
    pub(super) unsafe fn count<V: Lanes<Wide: Lanes<Scalar = f64>>>(&mut self, at: usize, sum: V) {
        let totals = self.totals[at..].as_mut_ptr();
        sum.widen_add(V::Wide::load(totals)).store(totals);
    }
}
