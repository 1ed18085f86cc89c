//! Products of many queries with the same keys, in f32 or in f64: a lane is a key. Keys are laid side by side once, for
//! all queries, in f32, which holds them exactly.
//!
//! Each sum takes its terms one after another, at every level and beside any other queries and keys.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{Element, LANES, Lanes, Level};
use crate::kernels::matrix::{Keys, product};
use crate::kernels::simd::{Pass, Simd};

/// Groups of keys side by side.
const GROUPS: usize = 2;
/// Keys of a panel.
pub(crate) const BESIDE: usize = GROUPS * LANES;

/// Lays the entries of `count` keys side by side, entry after entry, with zeros behind the last key.
struct LayNarrow<'a, E> {
    keys: Keys<'a, E>,
    from: usize,
    count: usize,
    panel: &'a mut [f32],
    squares: &'a mut [f64],
}

impl<E: Element<Scalar = f32>> Pass for LayNarrow<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let dim = self.keys.dim();
        let mut tile = [[0f32; LANES]; LANES];
        for side in (0..BESIDE).step_by(LANES) {
            let count = self.count.saturating_sub(side).min(LANES);
            let mut sums = [L::F64::splat(0.0); LANES];
            for at in (0..dim).step_by(LANES) {
                for (key, (tile, sum)) in tile[..count].iter_mut().zip(&mut sums).enumerate() {
                    let group = Keys::group::<L>(self.keys.row(self.from + side + key), at);
                    group.store(tile.as_mut_ptr());
                    let wide = E::double::<L>(group);
                    *sum = wide.mul_add(wide, *sum);
                }
                for tile in &mut tile[count..] {
                    tile.fill(0.0);
                }
                let places = self.panel[at * BESIDE..].chunks_exact_mut(BESIDE).take(LANES);
                for (i, to) in places.enumerate() {
                    let entries: [f32; LANES] = std::array::from_fn(|key| tile[key][i]);
                    to[side..side + LANES].copy_from_slice(&entries);
                }
            }
            for (square, sum) in self.squares.iter_mut().skip(side).zip(sums).take(count) {
                *square = sum.sum();
            }
        }
    }
}

struct MultiplyNarrow<'a> {
    panel: &'a [f32],
    queries: &'a [f32],
    dim: usize,
    to: &'a mut [f32],
    stride: usize,
    /// Offset of the panel's products in a row of products.
    at: usize,
}

impl MultiplyNarrow<'_> {
    #[inline(always)]
    unsafe fn tile<L: Level, const R: usize, const C: usize>(&mut self, row: usize, side: usize) {
        // `multiply_narrow` has checked that queries, panel and places are there.
        let left = self.queries.as_ptr().add(row * self.dim);
        let right = self.panel.as_ptr().add(side);
        let sums = product::<L, R, C>((left, self.dim, 1), (right, BESIDE), self.dim);
        for (r, sums) in sums.into_iter().enumerate() {
            let to = self.to.as_mut_ptr().add((row + r) * self.stride + self.at + side);
            for (c, sum) in sums.into_iter().enumerate() {
                sum.store(to.add(c * LANES));
            }
        }
    }
}

impl Pass for MultiplyNarrow<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        const FEW: usize = 4;
        // As many sums as hide the latency of an addition. The grouping does not change their bits.
        const MANY: usize = 8;
        let rows = self.queries.len() / self.dim;
        let mut row = 0;
        while L::ROOMY && row + MANY <= rows {
            self.tile::<L, MANY, GROUPS>(row, 0);
            row += MANY;
        }
        while row + FEW <= rows {
            for side in (0..BESIDE).step_by(LANES) {
                self.tile::<L, FEW, 1>(row, side);
            }
            row += FEW;
        }
        while row < rows {
            for side in (0..BESIDE).step_by(LANES) {
                self.tile::<L, 1, 1>(row, side);
            }
            row += 1;
        }
    }
}

struct MultiplyWide<'a> {
    panel: &'a [f32],
    queries: &'a [f64],
    dim: usize,
    to: &'a mut [f64],
    stride: usize,
    at: usize,
}

impl MultiplyWide<'_> {
    #[inline(always)]
    unsafe fn tile<L: Level, const R: usize, const C: usize>(&mut self, row: usize, side: usize) {
        // `multiply_wide` has checked that queries, panel and places are there.
        let left = self.queries.as_ptr().add(row * self.dim);
        let right = self.panel.as_ptr().add(side);
        let mut sums = [[L::F64::splat(0.0); C]; R];
        for k in 0..self.dim {
            let mut columns = [L::F64::splat(0.0); C];
            for (c, column) in columns.iter_mut().enumerate() {
                let entries = L::F32::load(right.add(k * BESIDE + c * LANES));
                *column = f32::double::<L>(entries);
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let entry = L::F64::splat(*left.add(r * self.dim + k));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = column.mul_add(entry, *sum);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            let to = self.to.as_mut_ptr().add((row + r) * self.stride + self.at + side);
            for (c, sum) in sums.into_iter().enumerate() {
                sum.store(to.add(c * LANES));
            }
        }
    }
}

impl Pass for MultiplyWide<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        const FEW: usize = 2;
        const MANY: usize = 4;
        let rows = self.queries.len() / self.dim;
        let mut row = 0;
        while L::ROOMY && row + MANY <= rows {
            self.tile::<L, MANY, GROUPS>(row, 0);
            row += MANY;
        }
        while row + FEW <= rows {
            for side in (0..BESIDE).step_by(LANES) {
                self.tile::<L, FEW, 1>(row, side);
            }
            row += FEW;
        }
        while row < rows {
            for side in (0..BESIDE).step_by(LANES) {
                self.tile::<L, 1, 1>(row, side);
            }
            row += 1;
        }
    }
}

impl Simd {
    /// Lays up to [`BESIDE`] keys in a panel, `BESIDE` places for each entry, and writes the sums of their squares, in
    /// f64.
    pub(crate) fn lay_narrow<E: Element<Scalar = f32>>(
        self,
        keys: Keys<'_, E>,
        (from, count): (usize, usize),
        panel: &mut [f32],
        squares: &mut [f64],
    ) {
        assert!(count <= BESIDE && panel.len() == BESIDE * keys.dim() && squares.len() >= count);
        self.run(LayNarrow { keys, from, count, panel, squares });
    }

    /// Computes the products of queries with the keys of a panel, and 0 for missing keys. Each query's products go to
    /// its row of `stride` places, from `at` on.
    ///
    /// Each is a chain of as many fused steps in f32 as vectors have entries.
    pub(crate) fn multiply_narrow(
        self,
        panel: &[f32],
        (queries, dim): (&[f32], usize),
        (to, stride): (&mut [f32], usize),
        at: usize,
    ) {
        assert!(panel.len() == BESIDE * dim && queries.len().is_multiple_of(dim));
        assert!(at + BESIDE <= stride && queries.len() / dim * stride <= to.len());
        self.run(MultiplyNarrow { panel, queries, dim, to, stride, at });
    }

    /// Computes the same in f64, from the same entries of the keys.
    pub(crate) fn multiply_wide(
        self,
        panel: &[f32],
        (queries, dim): (&[f64], usize),
        (to, stride): (&mut [f64], usize),
        at: usize,
    ) {
        assert!(panel.len() == BESIDE * dim && queries.len().is_multiple_of(dim));
        assert!(at + BESIDE <= stride && queries.len() / dim * stride <= to.len());
        self.run(MultiplyWide { panel, queries, dim, to, stride, at });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers, whose products f32 holds exactly.
    fn integers(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) % 201) as f32 - 100.0
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn every_tile_holds_its_own_products() {
        for (rows, count, dim) in
            [(1, 1, 1), (2, 15, 16), (5, 16, 17), (7, 17, 3), (14, 31, 130), (25, 32, 256)]
        {
            let (queries, keys) = (integers(rows * dim, 1), integers((count + 2) * dim, 2));
            for (name, simd) in Simd::all() {
                let (mut squares, mut panel) = ([0.0; BESIDE], vec![f32::NAN; BESIDE * dim]);
                simd.lay_narrow(Keys::new(&keys, dim, dim), (2, count), &mut panel, &mut squares);
                let stride = BESIDE + 5;
                let mut all = vec![f32::NAN; rows * stride];
                simd.multiply_narrow(&panel, (&queries, dim), (&mut all, stride), 3);
                for (query, row) in queries.chunks(dim).zip(all.chunks(stride)) {
                    assert!(row[..3].iter().all(|place| place.is_nan()), "{name}");
                    for (i, key) in keys.chunks(dim).skip(2).enumerate() {
                        let want: f32 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                        assert_eq!(row[3 + i], want, "{name} {rows} {count} {dim}");
                        let square: f32 = key.iter().map(|entry| entry * entry).sum();
                        assert_eq!(squares[i], f64::from(square), "{name}");
                    }
                    assert!(row[3 + count..3 + BESIDE].iter().all(|p| *p == 0.0), "{name}");
                }
                let wide: Vec<f64> = queries.iter().map(|&entry| entry.into()).collect();
                let mut both = vec![f64::NAN; rows * stride];
                simd.multiply_wide(&panel, (&wide, dim), (&mut both, stride), 3);
                for (wide, narrow) in both.iter().zip(&all) {
                    assert!(*wide == f64::from(*narrow) || wide.is_nan() && narrow.is_nan());
                }
            }
        }
    }

    #[test]
    fn all_levels_return_the_same_bits() {
        let (rows, count, dim) = (13, 29, 67);
        let fractions = |count, seed| -> Vec<f32> {
            integers(count, seed).iter().map(|entry| entry / 3.0).collect()
        };
        let (queries, keys) = (fractions(rows * dim, 1), fractions(count * dim, 2));
        let digest = |simd: Simd| {
            let (mut squares, mut panel) = ([0.0; BESIDE], vec![0.0; BESIDE * dim]);
            simd.lay_narrow(Keys::new(&keys, dim, dim), (0, count), &mut panel, &mut squares);
            let mut all = vec![0.0; rows * BESIDE];
            simd.multiply_narrow(&panel, (&queries, dim), (&mut all, BESIDE), 0);
            let singles = all.iter().map(|&product| f64::from(product));
            let wide: Vec<f64> = queries.iter().map(|&entry| f64::from(entry) / 7.0).collect();
            let mut both = vec![0.0; rows * BESIDE];
            simd.multiply_wide(&panel, (&wide, dim), (&mut both, BESIDE), 0);
            singles.chain(squares).chain(both).map(f64::to_bits).collect::<Vec<_>>()
        };
        let levels = Simd::all();
        let want = digest(levels[levels.len() - 1].1);
        for &(name, simd) in levels {
            assert_eq!(digest(simd), want, "{name}");
        }
    }
}
