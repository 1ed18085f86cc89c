//! Loss of rows to a set of keys, by f32 products summed block by block. No row of scores is ever held.
//!
//! The weights of a block are relative to its largest score, and are brought to the largest so far by a factor in f64.
//! Each such step is off by less than [`STEP`]: its argument is at most 708 and rounds twice, the exponential is within 2^-50,
//! and a product and a sum round once. What is further below the largest than 708 becomes 0, and counts as flushed.

use super::family::{Family, Laid};
use crate::kernels::{BESIDE, Given, LANES, ScaledExp, Simd};
use crate::numerics::certified_sums::{ErrorBound, SplitSums, exp};

/// Keys of a block: with these, and the products of a few queries, a second-level cache is half full.
const BLOCK: usize = 512;
/// Queries whose products with a block are held together.
pub(super) const ABREAST: usize = 16;
/// Distance of the products of two queries: not a power of two.
const APART: usize = BLOCK + LANES;
/// The relative error of bringing a sum to another largest score and adding to it.
const STEP: f64 = 1.0 / 2_199_023_255_552.0;
/// The relative error of a sum of weights in f32: more than the slack of a ratio of two, which is the sum of both errors.
const SUMMED: f64 = 512.0 / 16_777_216.0;
/// Sums below this are of no use as lower ends: steps that underflow may add to them, each less than 2^-1073.
const FAINT: f64 = f64::MIN_POSITIVE * 4_611_686_018_427_387_904.0;
/// The least budget that the difference of two sums in f32 is precise enough for: to a hundredth.
pub(super) const LEAST_BUDGET: f64 = 1.0 / 128.0;

/// Sums of the weights of a row, relative to its largest score so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sums {
    largest: f32,
    split: SplitSums,
}

/// Sum of all weights of a row, relative to its largest score.
#[derive(Debug, Clone, Copy)]
pub(super) struct Total {
    largest: f32,
    sum: f64,
}

/// Queries of a family, ready for f32 products: entries, numbers of keys seen, and radii.
pub(super) struct Narrow {
    pub(super) queries: Vec<f32>,
    pub(super) sees: Vec<usize>,
    pub(super) radii: Vec<f64>,
}

/// Kept keys of a family in panels, or the dropped ones.
pub(super) struct Picked {
    laid: Laid,
    /// Positions of the keys, ascending.
    keys: Vec<u32>,
    /// `true` if these are the kept keys.
    pub(super) kept: bool,
    /// The same flag for each key, and the padding.
    marks: Vec<u8>,
}

impl Sums {
    const NONE: Sums = Sums {
        largest: f32::NEG_INFINITY,
        split: SplitSums { tail: 0.0, dropped: 0, head: 0.0, kept: 0 },
    };

    fn add(&mut self, largest: f32, given: &Given<f32>, scale: f64) {
        let (before, now) = (f64::from(self.largest), f64::from(largest));
        let (mut own, mut new) = (1.0, 1.0);
        if largest > self.largest {
            own = if before == f64::NEG_INFINITY { 0.0 } else { exp(scale * (before - now)) };
            self.largest = largest;
        } else {
            new = exp(scale * (now - before));
        }
        self.split.tail = self.split.tail * own + given.tail * new;
        self.split.head = self.split.head * own + given.head * new;
        self.split.dropped += given.dropped;
        self.split.kept += given.kept;
    }

    /// Returns the ends of the real tail mass of a row whose scores have this radius.
    pub(super) fn ends(&self, radius: f64) -> (f64, f64) {
        let slack = ErrorBound::f32(radius).widened(more(self.split.kept + self.split.dropped));
        let upper = self.split.upper(slack.certify, slack.flush);
        if self.split.kept > 0 && self.split.tail < FAINT {
            return (0.0, upper);
        }
        (self.split.lower(slack.certify, slack.flush).min(upper), upper)
    }

    pub(super) fn total(&self) -> Total {
        Total { largest: self.largest, sum: self.split.tail + self.split.head }
    }

    /// Returns the ends from the kept keys of a row of `sees` keys, or from the dropped ones, and its total. The other
    /// side is the difference, with the errors of both sums.
    pub(super) fn ends_within(
        &self,
        (total, of_kept): (Total, bool),
        sees: usize,
        radius: f64,
        scale: f64,
    ) -> (f64, f64) {
        let here = self.split.kept + self.split.dropped;
        let (kept, dropped) = if of_kept { (here, sees - here) } else { (sees - here, here) };
        if dropped == 0 || kept == 0 {
            let lost = f64::from(u8::from(dropped > 0));
            return (lost, lost);
        }
        if self.largest > total.largest {
            return (0.0, 1.0);
        }
        let more = more(sees);
        let slack = ErrorBound::f32(radius).widened(more);
        let off = SUMMED + 2.0 * more;
        let shift = exp(scale * (f64::from(self.largest) - f64::from(total.largest)));
        let (least, most) = (total.sum * (1.0 - off), total.sum * (1.0 + off));
        let (upper, lower);
        if of_kept {
            let head = self.split.head * shift;
            let high = most + sees as f64 * slack.flush - head * (1.0 - off);
            let low = least - kept as f64 * slack.flush - head * (1.0 + off);
            upper = SplitSums { tail: high.max(0.0), dropped, head, kept };
            lower = SplitSums { tail: low.max(0.0), dropped, head, kept };
        } else {
            let tail = self.split.tail * shift;
            let high = most + sees as f64 * slack.flush - tail * (1.0 - off);
            let low = least - dropped as f64 * slack.flush - tail * (1.0 + off);
            upper = SplitSums { tail, dropped, head: low.max(0.0), kept };
            let tail = if tail < FAINT { 0.0 } else { tail };
            lower = SplitSums { tail, dropped, head: high.max(0.0), kept };
        }
        let upper = upper.upper(slack.certify, slack.flush);
        (lower.lower(slack.certify, slack.flush).min(upper), upper)
    }
}

/// Returns the relative error of bringing the blocks of that many keys to one largest score.
fn more(keys: usize) -> f64 {
    (keys / BLOCK + 3) as f64 * STEP
}

impl Family<'_> {
    /// Sums the rows' losses to the keys whose mark is 0. There is a mark per place in the panels.
    pub(super) fn stream(
        &self,
        simd: Simd,
        laid: &Laid,
        some: (&[f32], &[usize]),
        marks: &[u8],
        room: &mut Vec<f32>,
    ) -> Vec<Sums> {
        let ((queries, sees), scale) = (some, self.block.scale.abs());
        let mut sums = vec![Sums::NONE; sees.len()];
        room.resize(ABREAST * APART, 0.0);
        let reach = sees.iter().copied().max().unwrap_or(0);
        for start in (0..reach).step_by(BLOCK) {
            let panels = start / BESIDE..(start + BLOCK).min(reach).div_ceil(BESIDE);
            let rows = queries.chunks(ABREAST * self.dim).zip(sees.chunks(ABREAST));
            for ((queries, sees), sums) in rows.zip(sums.chunks_mut(ABREAST)) {
                self.narrow(simd, laid, queries, panels.clone(), (room, APART));
                for ((row, &sees), sums) in room.chunks_mut(APART).zip(sees).zip(sums) {
                    let len = sees.saturating_sub(start).min(BLOCK);
                    if len == 0 {
                        continue;
                    }
                    let whole = len.next_multiple_of(LANES);
                    row[len..whole].fill(f32::NEG_INFINITY);
                    let (scores, marks) = (&row[..whole], &marks[start..start + whole]);
                    let (_, largest) = simd.extent(scores);
                    let weigh = ScaledExp { shift: largest.into(), scale };
                    sums.add(largest, &simd.given(scores, marks, weigh), scale);
                }
            }
        }
        sums
    }

    /// Sums the rows' weights of the picked keys.
    pub(super) fn stream_picked(
        &self,
        simd: Simd,
        picked: &Picked,
        (queries, sees): (&[f32], &[usize]),
        room: &mut Vec<f32>,
    ) -> Vec<Sums> {
        let within = |sees: &usize| picked.keys.partition_point(|key| (*key as usize) < *sees);
        let sees: Vec<usize> = sees.iter().map(within).collect();
        self.stream(simd, &picked.laid, (queries, &sees), &picked.marks, room)
    }

    /// Lays out the kept keys among those that a query sees, or the dropped ones, in panels.
    pub(super) fn pick(&self, laid: &Laid, marks: &[u8], kept: bool) -> Picked {
        let keys: Vec<u32> =
            (0..self.len as u32).filter(|&key| (marks[key as usize] != 0) == kept).collect();
        let marks = vec![u8::from(kept); keys.len().next_multiple_of(BESIDE)];
        Picked { laid: laid.pick(&keys, self.dim), keys, kept, marks }
    }
}
