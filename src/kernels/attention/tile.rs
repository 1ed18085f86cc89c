//! Attention of many rows over a block of keys, in f32: a lane is a row.
//!
//! Queries lie with their rows side by side, so that products need no reordering of keys and no sum across lanes.
//! Scores, their maxima and their weights stay in the same lanes. Every number of a row is computed by the same
//! operations in the same order, at every level and beside any other rows.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use super::pieces::{AttendPieces, Cut, Cutting, PieceRows, Pieces};
use super::weighed::{BLOCK, BlockMask, Group, ROWS, Scaling, Weighed};
use crate::kernels::isa::Line;
use crate::kernels::isa::{Element, LANES, Lanes, Level};
use crate::kernels::matrix::{Keys, Lent, product};
use crate::kernels::simd::{Pass, Simd};
use crate::kernels::weights::exp;
use crate::runtime::held::held;
use crate::runtime::reused::Reused;

/// Terms of a product that are summed one after another; such sums are then added up.
pub(crate) const RUN: usize = 32;
/// Rows of a tile of a product of matrices.
const TILE: usize = 4;

/// State of some rows after the blocks of keys so far.
#[derive(Debug)]
pub(crate) struct Rows {
    dim: usize,
    width: usize,
    queries: Queries,
    weighed: Weighed,
    sums: Reused<f64>,
}

/// Queries, entry after entry, of all rows.
#[derive(Debug)]
enum Queries {
    Floats(Reused<f32>),
    Pieces(PieceRows),
}

/// Precision of rows that keep all keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Precise {
    /// `true` if weights and values may be rounded to eight bits, and scores to sixteen.
    pub(crate) short: bool,
    /// `true` if queries, keys and values are bf16.
    pub(crate) stored_short: bool,
}

impl Rows {
    /// Takes at most [`ROWS`] queries of `dim` entries that are f32 numbers, over values of `width` entries, in whole
    /// groups.
    pub(crate) fn new<'a>(
        queries: impl ExactSizeIterator<Item = &'a [f64]>,
        (dim, width): (usize, usize),
        scaling: Scaling,
        cutting: Option<Cutting>,
    ) -> Self {
        assert!(queries.len() <= ROWS && width.is_multiple_of(LANES) && dim > 0);
        let padded =
            queries.len().next_multiple_of(if cutting.is_some() { 2 * LANES } else { LANES });
        let weighed = Weighed::new(padded, scaling);
        let sums = std::iter::repeat_n(0.0, padded * width).collect();
        let queries = match cutting {
            Some(cutting) => Queries::Pieces(PieceRows::new(queries, (dim, padded), cutting)),
            _ => Queries::floats(queries, dim),
        };
        Rows { dim, width, queries, weighed, sums }
    }

    /// Appends a row's weighted sum of values, and returns the score of weight 1 and the sum of weights.
    pub(crate) fn row(&self, at: usize, to: &mut Vec<f64>) -> (f64, f64) {
        match self.queries {
            Queries::Floats(_) => to.extend_from_slice(&self.sums[at * self.width..][..self.width]),
            Queries::Pieces(_) => {
                let group = &self.sums[at / LANES * LANES * self.width..][..LANES * self.width];
                to.extend(group.as_chunks::<LANES>().0.iter().map(|rows| rows[at % LANES]));
            }
        }
        (f64::from(self.weighed.tops[at]), self.weighed.totals[at])
    }
}

impl Queries {
    fn floats<'a>(queries: impl ExactSizeIterator<Item = &'a [f64]>, dim: usize) -> Self {
        let mut floats: Reused<f32> = std::iter::repeat_n(0.0, dim * ROWS).collect();
        for (r, query) in queries.enumerate() {
            for (j, &entry) in query[..dim].iter().enumerate() {
                floats[j * ROWS + r] = entry as f32;
            }
        }
        Queries::Floats(floats)
    }
}

/// Keys and values of at most [`BLOCK`] consecutive positions, as rows are attended over them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Block<'a> {
    Floats { keys: Lent<'a>, values: Lent<'a>, count: usize },
    Pieces(&'a Pieces),
}

/// Memory of a block.
#[derive(Debug, Default)]
pub(crate) struct BlockScratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    pieces: Pieces,
}

/// Memory of the weights of some rows over a block.
#[derive(Debug, Default)]
pub(crate) struct WeightScratch {
    /// Key after key, of all rows.
    numbers: Vec<Group>,
    pieces: Vec<Line>,
}

held!(BlockScratch { keys, values, pieces });
held!(WeightScratch { numbers, pieces });

struct Attend<'a> {
    queries: &'a [f32],
    weighed: &'a mut Weighed,
    sums: &'a mut [f64],
    dim: usize,
    width: usize,
    keys: Lent<'a>,
    values: Lent<'a>,
    count: usize,
    mask: BlockMask<'a>,
    numbers: &'a mut [Group],
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
        let right = self.queries.as_ptr().add(from * ROWS + at);
        let sums = product::<L, R, C>((left, stride, 1), (right, ROWS), depth);
        for (r, sums) in sums.into_iter().enumerate() {
            let to = self.numbers.as_mut_ptr().cast::<f32>().add((key + r) * ROWS + at);
            for (c, sum) in sums.into_iter().enumerate() {
                let to = to.add(c * LANES);
                let sum = if from == 0 { sum } else { sum.add(L::F32::load(to)) };
                sum.store(to);
            }
        }
    }

    /// Computes the scores of all keys for `C` groups of rows, `R` keys at a time.
    #[inline(always)]
    unsafe fn scores<L: Level, const R: usize, const C: usize>(&mut self, at: usize) {
        let whole = self.count / R * R;
        for from in (0..self.dim).step_by(RUN) {
            let entries = (from, RUN.min(self.dim - from));
            // Keys and rows are those that are there.
            for key in (0..whole).step_by(R) {
                self.score::<L, R, C>(key, at, entries);
            }
            for key in whole..self.count {
                self.score::<L, 1, C>(key, at, entries);
            }
        }
    }

    /// Turns the scores of a group of rows into weights.
    #[inline(always)]
    unsafe fn weigh<L: Level>(&mut self, at: usize) {
        let numbers = self.numbers.as_mut_ptr().cast::<f32>();
        self.weighed.top::<L>(numbers, at, self.count, self.mask);
        let top = L::F32::load(self.weighed.tops[at..].as_ptr());
        let mut sum = L::F32::splat(0.0);
        for key in 0..self.count {
            let to = numbers.add(key * ROWS + at);
            // The exponent of a row that has seen nothing yet is NaN, which weighs nothing.
            let weight = exp(L::F32::load(to).sub(top));
            weight.store(to);
            sum = sum.add(weight);
        }
        self.weighed.count(at, sum);
    }

    /// Rescales the sums of a group of rows whose largest score has grown.
    #[inline(always)]
    unsafe fn rescale<L: Level>(&mut self, at: usize) {
        for row in at..at + LANES {
            let factor = self.weighed.factors[row];
            if factor != 1.0 {
                for group in self.sums[row * self.width..][..self.width].chunks_exact_mut(LANES) {
                    let sum = L::F64::load(group.as_ptr()).mul(L::F64::splat(factor));
                    sum.store(group.as_mut_ptr());
                }
            }
        }
    }

    /// Adds the weighted values of `C` groups of entries for a tile of rows.
    #[inline(always)]
    unsafe fn average<L: Level, const C: usize>(&mut self, row: usize, at: usize) {
        let (data, stride) = self.values.place();
        // `attend` has checked that values, entries and rows are there.
        let left = self.numbers.as_ptr().cast::<f32>().add(row);
        let right = data.add(at);
        let sums = product::<L, TILE, C>((left, 1, ROWS), (right, stride), self.count);
        for (r, sums) in sums.into_iter().enumerate() {
            let to = self.sums.as_mut_ptr().add((row + r) * self.width + at);
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
        let (padded, width) = (self.weighed.padded, self.width);
        // As many sums as hide the latency of an addition. The grouping does not change their bits.
        let mut at = 0;
        while at < padded {
            let groups = if L::ROOMY { 1 << ((padded - at) / LANES).min(4).ilog2() } else { 1 };
            match groups {
                1 if L::ROOMY => self.scores::<L, 16, 1>(at),
                1 => self.scores::<L, TILE, 1>(at),
                2 => self.scores::<L, 8, 2>(at),
                _ => self.scores::<L, TILE, 4>(at),
            }
            at += groups * LANES;
        }
        for at in (0..padded).step_by(LANES) {
            self.weigh::<L>(at);
            self.rescale::<L>(at);
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
    /// Returns how rows of a precision are cut into pieces; `None` where they are computed in f32.
    pub(crate) fn cutting(self, precise: Precise) -> Option<Cutting> {
        let Precise { short, stored_short } = precise;
        let pieces = |less: bool| if less { 1 } else { 2 };
        (self.has_tiles() && (short || stored_short))
            .then(|| Cutting { entries: pieces(stored_short), weights: pieces(short) })
    }

    /// Returns at most [`BLOCK`] consecutive keys and their values, for [`Simd::attend`] of rows of the same cutting.
    pub(crate) fn block<'a, K: Element<Scalar = f32>, V: Element<Scalar = f32>>(
        self,
        keys: Keys<'a, K>,
        values: Keys<'a, V>,
        (from, count): (usize, usize),
        cutting: Option<Cutting>,
        scratch: &'a mut BlockScratch,
    ) -> Block<'a> {
        assert!(count > 0 && count <= BLOCK);
        if let Some(cutting) = cutting {
            let (most, to) = (cutting.entries, &mut scratch.pieces);
            self.run_tiles(Cut { keys, values, from, count, most, to });
            return Block::Pieces(&scratch.pieces);
        }
        let width = |dim: usize| dim.next_multiple_of(LANES);
        let keys = self.lend(keys, (from, count), width(keys.dim()), &mut scratch.keys);
        let values = self.lend(values, (from, count), width(values.dim()), &mut scratch.values);
        Block::Floats { keys, values, count }
    }

    /// Takes rows over a block of the same cutting. Keys that a row sees must be finite, and
    /// products with them must not overflow.
    pub(crate) fn attend(
        self,
        rows: &mut Rows,
        block: Block<'_>,
        mask: BlockMask<'_>,
        scratch: &mut WeightScratch,
    ) {
        scratch.numbers.resize(BLOCK * ROWS / LANES, Group::ZERO);
        let numbers = &mut scratch.numbers[..];
        let Rows { dim, width, queries, weighed, sums } = rows;
        let (dim, width) = (*dim, *width);
        match (queries, block) {
            (Queries::Floats(queries), Block::Floats { keys, values, count }) => {
                assert!(keys.holds(count, dim) && values.holds(count, width));
                assert!(mask.holds(count));
                self.run(Attend {
                    queries,
                    weighed,
                    sums,
                    dim,
                    width,
                    keys,
                    values,
                    count,
                    mask,
                    numbers,
                });
            }
            (Queries::Pieces(rows), Block::Pieces(block)) => {
                assert!(block.holds(rows, width) && mask.holds(block.count));
                let weights = &mut scratch.pieces;
                self.run_tiles(AttendPieces {
                    rows,
                    weighed,
                    sums,
                    width,
                    block,
                    mask,
                    numbers,
                    weights,
                });
            }
            _ => unreachable!("rows and a block of different cuttings"),
        }
    }
}
