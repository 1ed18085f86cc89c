//! Attention of many rows over a block of keys, in f32: a lane is a row.
//!
//! Queries lie with their rows side by side, so that products need no reordering of keys and no sum across lanes.
//! Scores, their maxima and their weights stay in the same lanes. Every number of a row is computed by the same
//! operations in the same order, at every level and beside any other rows.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{LANES, Lanes, Level};
use crate::kernels::matrix::{Lent, product};
use crate::kernels::simd::{Pass, Simd};
use crate::kernels::weights::exp;
use crate::runtime::reused::Reused;

/// Most rows per tile.
pub(crate) const ROWS: usize = 4 * LANES;
/// Keys of a block: that many weights are summed in f32 before they go to f64.
pub(crate) const BLOCK: usize = 128;
/// Terms of a product that are summed one after another; such sums are then added up.
pub(crate) const RUN: usize = 32;
/// Rows of a tile of a product of matrices.
const TILE: usize = 4;

/// State of some rows after the blocks of keys so far.
#[derive(Debug)]
pub(crate) struct Rows {
    dim: usize,
    width: usize,
    /// Rows in whole groups.
    padded: usize,
    scale: f32,
    /// Entry after entry, of all rows.
    queries: Reused<f32>,
    /// Key after key, of all rows: scores, then weights.
    weights: Reused<f32>,
    /// Largest score so far, to which weights are relative.
    tops: [f32; ROWS],
    totals: [f64; ROWS],
    sums: Reused<f64>,
}

impl Rows {
    /// Takes at most [`ROWS`] queries of `dim` entries that are f32 numbers, over values of `width` entries, in whole
    /// groups.
    pub(crate) fn new<'a>(
        queries: impl ExactSizeIterator<Item = &'a [f64]>,
        (dim, width): (usize, usize),
        scale: f32,
    ) -> Self {
        assert!(queries.len() <= ROWS && width.is_multiple_of(LANES) && dim > 0);
        let padded = queries.len().next_multiple_of(LANES);
        let mut rows = Rows {
            dim,
            width,
            padded,
            scale,
            queries: std::iter::repeat_n(0.0, dim * ROWS).collect(),
            weights: std::iter::repeat_n(0.0, BLOCK * ROWS).collect(),
            tops: [f32::NEG_INFINITY; ROWS],
            totals: [0.0; ROWS],
            sums: std::iter::repeat_n(0.0, padded * width).collect(),
        };
        for (r, query) in queries.enumerate() {
            for (j, &entry) in query[..dim].iter().enumerate() {
                rows.queries[j * ROWS + r] = entry as f32;
            }
        }
        rows
    }

    /// Returns the score of weight 1, the sum of a row's weights, and its weighted sum of values.
    pub(crate) fn row(&self, at: usize) -> (f64, f64, &[f64]) {
        (f64::from(self.tops[at]), self.totals[at], &self.sums[at * self.width..][..self.width])
    }
}

struct Attend<'a> {
    rows: &'a mut Rows,
    keys: Lent<'a>,
    values: Lent<'a>,
    count: usize,
    mask: BlockMask<'a>,
}

/// Keys of a block that each row sees.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BlockMask<'a> {
    /// Number of keys, from the first.
    First(&'a [f32; ROWS]),
    /// Key after key, a number for each row: positive if it sees the key.
    Each(&'a [f32]),
}

impl Attend<'_> {
    /// Adds the products of `R` keys with `C` groups of rows over some entries.
    #[inline(always)]
    unsafe fn score<L: Level, const R: usize, const C: usize>(
        &mut self,
        key: usize,
        at: usize,
        (from, depth): (usize, usize),
    ) {
        let (data, stride) = self.keys.place();
        // `attend` has checked that keys, entries and rows are there.
        let left = data.add(key * stride + from);
        let right = self.rows.queries.as_ptr().add(from * ROWS + at);
        let sums = product::<L, f32, R, C>((left, stride, 1), (right, ROWS), depth);
        for (r, sums) in sums.into_iter().enumerate() {
            let to = self.rows.weights.as_mut_ptr().add((key + r) * ROWS + at);
            for (c, sum) in sums.into_iter().enumerate() {
                let to = to.add(c * LANES);
                let sum = if from == 0 { sum } else { sum.add(L::F32::load(to)) };
                sum.store(to);
            }
        }
    }

    /// Computes the scores of all keys for `C` groups of rows.
    #[inline(always)]
    unsafe fn scores<L: Level, const C: usize>(&mut self, at: usize) {
        let whole = self.count / TILE * TILE;
        for from in (0..self.rows.dim).step_by(RUN) {
            let entries = (from, RUN.min(self.rows.dim - from));
            // Keys and rows are those that are there.
            for key in (0..whole).step_by(TILE) {
                self.score::<L, TILE, C>(key, at, entries);
            }
            for key in whole..self.count {
                self.score::<L, 1, C>(key, at, entries);
            }
        }
    }

    /// Turns scores into weights.
    #[inline(always)]
    unsafe fn weigh<L: Level>(&mut self, at: usize) {
        let count = self.count;
        let hidden = L::F32::splat(f32::NEG_INFINITY);
        let (limit, each) = match self.mask {
            BlockMask::First(limits) => (L::F32::load(limits[at..].as_ptr()), None),
            BlockMask::Each(each) => (hidden, Some(each)),
        };
        let all = limit.smallest() >= count as f32;
        let scale = L::F32::splat(self.rows.scale);
        let mut top = L::F32::load(self.rows.tops[at..].as_ptr());
        let scores = self.rows.weights.as_mut_ptr().add(at);
        for key in 0..count {
            let to = scores.add(key * ROWS);
            let mut score = L::F32::load(to).mul(scale);
            if let Some(each) = each {
                let seen = L::F32::load(each[key * ROWS + at..].as_ptr());
                score = score.select(seen.gt(L::F32::splat(0.0)), hidden);
            } else if !all {
                score = score.select(limit.gt(L::F32::splat(key as f32)), hidden);
            }
            score.store(to);
            top = score.max(top);
        }
        // Earlier sums are rescaled where the largest score has grown.
        let before = L::F32::load(self.rows.tops[at..].as_ptr());
        let factors = exp(L::double(before).sub(L::double(top)));
        let totals = L::F64::load(self.rows.totals[at..].as_ptr()).mul(factors);
        let (before, factors) = (before.array(), factors.array());
        top.store(self.rows.tops[at..].as_mut_ptr());
        for (lane, factor) in factors.into_iter().enumerate() {
            if before[lane] != self.rows.tops[at + lane] && before[lane] > f32::NEG_INFINITY {
                let sums = &mut self.rows.sums[(at + lane) * self.rows.width..][..self.rows.width];
                for group in sums.chunks_exact_mut(LANES) {
                    let sum = L::F64::load(group.as_ptr()).mul(L::F64::splat(factor));
                    sum.store(group.as_mut_ptr());
                }
            }
        }
        let scores = self.rows.weights.as_mut_ptr().add(at);
        let mut sum = L::F32::splat(0.0);
        for key in 0..count {
            let to = scores.add(key * ROWS);
            // The exponent of a row that has seen nothing yet is NaN, which weighs nothing.
            let weight = exp(L::F32::load(to).sub(top));
            weight.store(to);
            sum = sum.add(weight);
        }
        L::double(sum).add(totals).store(self.rows.totals[at..].as_mut_ptr());
    }

    /// Adds the weighted values of `C` groups of entries for a tile of rows.
    #[inline(always)]
    unsafe fn average<L: Level, const C: usize>(&mut self, row: usize, at: usize) {
        let (data, stride) = self.values.place();
        // `attend` has checked that values, entries and rows are there.
        let left = self.rows.weights.as_ptr().add(row);
        let right = data.add(at);
        let sums = product::<L, f32, TILE, C>((left, 1, ROWS), (right, stride), self.count);
        for (r, sums) in sums.into_iter().enumerate() {
            let to = self.rows.sums.as_mut_ptr().add((row + r) * self.rows.width + at);
            for (c, sum) in sums.into_iter().enumerate() {
                let to = to.add(c * LANES);
                L::double(sum).add(L::F64::load(to)).store(to);
            }
        }
    }
}

impl Pass for Attend<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        const WIDE: usize = 4 * LANES;
        let (padded, width) = (self.rows.padded, self.rows.width);
        if L::ROOMY && padded == WIDE {
            self.scores::<L, 4>(0);
        } else {
            for at in (0..padded).step_by(LANES) {
                self.scores::<L, 1>(at);
            }
        }
        for at in (0..padded).step_by(LANES) {
            self.weigh::<L>(at);
        }
        let whole = if L::ROOMY { width / WIDE * WIDE } else { 0 };
        for row in (0..padded).step_by(TILE) {
            for at in (0..whole).step_by(WIDE) {
                self.average::<L, 4>(row, at);
            }
            for at in (whole..width).step_by(LANES) {
                self.average::<L, 1>(row, at);
            }
        }
    }
}

impl Simd {
    /// Takes rows over at most [`BLOCK`] keys. Keys that a row sees must be finite, and products with them must not
    /// overflow.
    pub(crate) fn attend(
        self,
        rows: &mut Rows,
        keys: Lent<'_>,
        values: Lent<'_>,
        count: usize,
        mask: BlockMask<'_>,
    ) {
        assert!(count > 0 && count <= BLOCK);
        assert!(keys.holds(count, rows.dim) && values.holds(count, rows.width));
        assert!(
            matches!(mask, BlockMask::First(_))
                || matches!(mask, BlockMask::Each(each) if each.len() >= count * ROWS)
        );
        self.run(Attend { rows, keys, values, count, mask });
    }
}
