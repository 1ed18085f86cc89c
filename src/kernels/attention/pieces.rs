//! Attention of many rows over a block of keys by products of bf16: a number is the sum of its pieces.
//!
//! The first piece of a number is the nearest bf16, the second that of what is left. Scores lack the product of the
//! second pieces. Values have one piece, weights one or two. A row's numbers do not depend on other rows.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the unit. Lengths are checked by the methods of [`Simd`]
//! that run a pass.

use super::weighed::{BLOCK, BlockMask, Group, ROWS, Weighed};
use crate::kernels::isa::{DEEP, Element, LANES, Lanes, Level, Line, TILE, Tiles};
use crate::kernels::matrix::Keys;
use crate::kernels::simd::TilePass;
use crate::kernels::weights::exp;
use crate::runtime::held::held;
use crate::runtime::reused::Reused;

/// Rows and columns of a block of sums.
const SIDE: usize = 2 * TILE;
/// Most pieces of a number.
const MOST: usize = 2;
/// Lines of a block's keys, weights or entries of values.
const STEPS: usize = BLOCK / DEEP;

/// A block of keys and values in pieces: keys with their entries one after another, values with their keys.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    keys: Vec<Line>,
    values: Vec<Line>,
    per_key: usize,
    pub(super) count: usize,
}

held!(Pieces { keys, values; per_key, count });

impl Pieces {
    /// Returns `true` if the block fits rows, and values of `width` entries.
    pub(super) fn holds(&self, rows: &PieceRows, width: usize) -> bool {
        let (side, values) = (self.count.next_multiple_of(SIDE), width.next_multiple_of(SIDE));
        self.keys.len() == self.per_key * side * rows.steps && self.values.len() == values * STEPS
    }
}

/// Writes a block in pieces.
pub(super) struct Cut<'a, K, V> {
    pub(super) keys: Keys<'a, K>,
    pub(super) values: Keys<'a, V>,
    pub(super) from: usize,
    pub(super) count: usize,
    pub(super) most: usize,
    pub(super) to: &'a mut Pieces,
}

impl<K: Element<Scalar = f32>, V: Element<Scalar = f32>> Cut<'_, K, V> {
    /// Writes the pieces of keys, a plane for the first ones, and a plane for each further.
    #[inline(always)]
    unsafe fn cut_keys<T: Tiles, const P: usize>(&mut self) {
        let steps = self.keys.dim().div_ceil(DEEP);
        let padded = self.count.next_multiple_of(SIDE);
        (self.to.per_key, self.to.count) = (P, self.count);
        self.to.keys.resize(P * padded * steps, Line::ZERO);
        for key in 0..self.count {
            let row = self.keys.row(self.from + key);
            self.keys.ask_for::<T::Level>(self.from + self.count + key);
            for step in 0..steps {
                let at = step * DEEP;
                let mut low = Keys::group::<T::Level>(row, at);
                let mut high = <T::Level as Level>::F32::splat(0.0);
                if at + LANES < row.len() {
                    high = Keys::group::<T::Level>(row, at + LANES);
                }
                for piece in 0..P {
                    let (a, rest) = T::piece(low);
                    let (b, other) = T::piece(high);
                    (low, high) = (rest, other);
                    let to = &mut self.to.keys[(piece * padded + key) * steps + step];
                    T::write(T::beside(a, b), &raw mut *to);
                }
            }
        }
    }

    /// Writes values, entry after entry.
    #[inline(always)]
    unsafe fn turn_values<T: Tiles>(&mut self) {
        let padded = self.values.dim().next_multiple_of(SIDE);
        self.to.values.resize(padded * STEPS, Line::ZERO);
        let nothing = <T::Level as Level>::F32::splat(0.0);
        for step in 0..self.count.div_ceil(DEEP) {
            for key in 0..DEEP {
                self.values.ask_for::<T::Level>(self.from + self.count + step * DEEP + key);
            }
            for at in (0..self.values.dim()).step_by(LANES) {
                let mut tile = [T::zero(); TILE];
                for (pair, pairs) in tile.iter_mut().enumerate() {
                    let mut two = [nothing; 2];
                    for (i, entries) in two.iter_mut().enumerate() {
                        let key = step * DEEP + 2 * pair + i;
                        if key < self.count {
                            *entries =
                                Keys::group::<T::Level>(self.values.row(self.from + key), at);
                        }
                    }
                    *pairs = T::pairs(T::piece(two[0]).0, T::piece(two[1]).0);
                }
                for (entry, line) in T::turn(tile).into_iter().enumerate() {
                    T::write(line, &raw mut self.to.values[(at + entry) * STEPS + step]);
                }
            }
        }
    }
}

impl<K: Element<Scalar = f32>, V: Element<Scalar = f32>> TilePass for Cut<'_, K, V> {
    #[inline(always)]
    unsafe fn run<T: Tiles>(mut self) {
        if K::PIECES.min(self.most) == 1 {
            self.cut_keys::<T, 1>();
        } else {
            self.cut_keys::<T, MOST>();
        }
        self.turn_values::<T>();
    }
}

/// Queries in pieces.
#[derive(Debug)]
pub(super) struct PieceRows {
    cutting: Cutting,
    steps: usize,
    groups: usize,
    /// Piece, group of rows, tile of entries, pair of entries: that pair of each row.
    queries: Reused<Line>,
}

/// Numbers of pieces: of queries and keys, and of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cutting {
    pub(super) entries: usize,
    pub(super) weights: usize,
}

impl PieceRows {
    pub(super) fn new<'a>(
        queries: impl ExactSizeIterator<Item = &'a [f64]>,
        (dim, padded): (usize, usize),
        cutting: Cutting,
    ) -> Self {
        let (steps, groups) = (dim.div_ceil(DEEP), padded / LANES);
        let plane = groups * steps * TILE;
        let mut lines: Reused<Line> =
            std::iter::repeat_n(Line::ZERO, cutting.entries * plane).collect();
        let mut narrow = [0.0f32; DEEP];
        for (r, query) in queries.enumerate() {
            for (step, entries) in query[..dim].chunks(DEEP).enumerate() {
                narrow.fill(0.0);
                for (to, &entry) in narrow.iter_mut().zip(entries) {
                    *to = entry as f32;
                }
                let tile = (r / LANES * steps + step) * TILE;
                for piece in 0..cutting.entries {
                    // In steps that compilers vectorize.
                    let words =
                        narrow.map(|rest| rest.to_bits().wrapping_add(0x8000) & 0xFFFF_0000);
                    for (rest, word) in narrow.iter_mut().zip(words) {
                        *rest -= f32::from_bits(word);
                    }
                    let to = &mut lines[piece * plane + tile..][..TILE];
                    for (Line(pairs), [low, high]) in to.iter_mut().zip(words.as_chunks::<2>().0) {
                        pairs[r % LANES] = low >> 16 | high;
                    }
                }
            }
        }
        PieceRows { cutting, steps, groups, queries: lines }
    }
}

/// Lines of a matrix in pieces: the first of a block's rows or columns, how far rows or tiles of columns are apart, how far
/// pieces are, and their number.
#[derive(Clone, Copy)]
struct Side {
    start: *const Line,
    apart: usize,
    plane: usize,
    pieces: usize,
}

/// Sums products of pieces of rows with pieces of columns, but for those of both second pieces.
#[inline(always)]
unsafe fn products<T: Tiles>(by: &mut T::Registers, rows: Side, columns: Side, steps: usize) {
    T::clear(by);
    for step in 0..steps {
        let first_rows = rows.start.add(step);
        let first_columns = columns.start.add(step * TILE);
        let tiles = |start: *const Line, apart: usize| [start, start.wrapping_add(apart)];
        T::load_rows(by, tiles(first_rows, TILE * rows.apart), rows.apart);
        if columns.pieces > 1 {
            T::load_columns(by, tiles(first_columns.add(columns.plane), columns.apart));
            T::add(by);
        }
        T::load_columns(by, tiles(first_columns, columns.apart));
        T::add(by);
        if rows.pieces > 1 {
            T::load_rows(by, tiles(first_rows.add(rows.plane), TILE * rows.apart), rows.apart);
            T::add(by);
        }
    }
}

/// Scores of a block, then weights, and these in pieces: piece, group of rows, tile of keys, pair of keys.
pub(super) struct AttendPieces<'a> {
    pub(super) rows: &'a PieceRows,
    pub(super) weighed: &'a mut Weighed,
    pub(super) sums: &'a mut [f64],
    pub(super) width: usize,
    pub(super) block: &'a Pieces,
    pub(super) mask: BlockMask<'a>,
    pub(super) numbers: &'a mut [Group],
    pub(super) weights: &'a mut Vec<Line>,
}

impl AttendPieces<'_> {
    #[inline(always)]
    unsafe fn scores<T: Tiles>(&mut self, by: &mut T::Registers) {
        let &PieceRows { cutting, steps, groups, ref queries } = self.rows;
        let padded = self.block.count.next_multiple_of(SIDE);
        for key in (0..padded).step_by(SIDE) {
            let rows = Side {
                start: self.block.keys.as_ptr().add(key * steps),
                apart: steps,
                plane: padded * steps,
                pieces: self.block.per_key,
            };
            for group in (0..groups).step_by(2) {
                let columns = Side {
                    start: queries.as_ptr().add(group * steps * TILE),
                    apart: steps * TILE,
                    plane: groups * steps * TILE,
                    pieces: cutting.entries,
                };
                products::<T>(by, rows, columns, steps);
                let to = self.numbers.as_mut_ptr().cast::<f32>();
                T::store(by, to.add(key * ROWS + group * LANES), ROWS);
            }
        }
    }

    /// Turns a group's scores into weights in pieces, and adds up what these hold.
    #[inline(always)]
    unsafe fn weigh<T: Tiles, const P: usize>(&mut self, group: usize) {
        let scores = self.numbers.as_ptr().cast::<f32>().add(group * LANES);
        let top = <T::Level as Level>::F32::load(self.weighed.tops[group * LANES..].as_ptr());
        let to = self.weights.as_mut_ptr().add(group * STEPS * TILE);
        let plane = self.rows.groups * STEPS * TILE;
        let mut sum = <T::Level as Level>::F32::splat(0.0);
        for pair in 0..self.block.count.next_multiple_of(DEEP) / 2 {
            let scores = scores.add(2 * pair * ROWS);
            // The exponent of a row that has seen nothing yet is NaN, which weighs nothing.
            let mut even = exp(<T::Level as Level>::F32::load(scores).sub(top));
            let mut odd = exp(<T::Level as Level>::F32::load(scores.add(ROWS)).sub(top));
            let whole = (even, odd);
            for piece in 0..P {
                let (a, b);
                (a, even) = T::piece(even);
                (b, odd) = T::piece(odd);
                T::write(T::pairs(a, b), to.add(piece * plane + pair));
            }
            sum = sum.add(whole.0.sub(even)).add(whole.1.sub(odd));
        }
        self.weighed.count(group * LANES, sum);
    }

    #[inline(always)]
    unsafe fn average<T: Tiles>(&mut self, by: &mut T::Registers) {
        let groups = self.rows.groups;
        let padded = self.width.next_multiple_of(SIDE);
        let steps = self.block.count.div_ceil(DEEP);
        let mut block = [Line::ZERO; 2 * SIDE];
        let block = block.as_mut_ptr().cast::<f32>();
        for at in (0..padded).step_by(SIDE) {
            let start = self.block.values.as_ptr().add(at * STEPS);
            let rows = Side { start, apart: STEPS, plane: 0, pieces: 1 };
            for group in (0..groups).step_by(2) {
                let columns = Side {
                    start: self.weights.as_ptr().add(group * STEPS * TILE),
                    apart: STEPS * TILE,
                    plane: groups * STEPS * TILE,
                    pieces: self.rows.cutting.weights,
                };
                products::<T>(by, rows, columns, steps);
                T::store(by, block, SIDE);
                for side in 0..2 {
                    let factors = self.weighed.factors[(group + side) * LANES..].as_ptr();
                    let factors = <T::Level as Level>::F64::load(factors);
                    let to = self.sums.as_mut_ptr().add(((group + side) * self.width + at) * LANES);
                    for entry in 0..SIDE.min(self.width - at) {
                        let new = block.add(entry * SIDE + side * LANES);
                        let new = T::Level::double(<T::Level as Level>::F32::load(new));
                        let to = to.add(entry * LANES);
                        <T::Level as Level>::F64::load(to).mul_add(factors, new).store(to);
                    }
                }
            }
        }
    }
}

impl TilePass for AttendPieces<'_> {
    #[inline(always)]
    unsafe fn run<T: Tiles>(mut self) {
        let groups = self.rows.groups;
        self.weights.resize(self.rows.cutting.weights * groups * STEPS * TILE, Line::ZERO);
        let count = self.block.count;
        let numbers = self.numbers.as_mut_ptr().cast::<f32>();
        let mut by = T::begin();
        self.scores::<T>(&mut by);
        for group in 0..groups {
            self.weighed.top::<T::Level>(numbers, group * LANES, count, self.mask);
            let hidden = <T::Level as Level>::F32::splat(f32::NEG_INFINITY);
            for key in count..count.next_multiple_of(DEEP) {
                hidden.store(numbers.add(key * ROWS + group * LANES));
            }
            if self.rows.cutting.weights == 1 {
                self.weigh::<T, 1>(group);
            } else {
                self.weigh::<T, MOST>(group);
            }
        }
        self.average::<T>(&mut by);
        T::end(by);
    }
}
