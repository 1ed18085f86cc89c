//! Products of many queries with the same keys, in f64: a lane is a key.
//!
//! Keys are widened and laid side by side a panel at a time, so that sums stay in their lanes. Each sum takes its terms
//! one after another, at every level and beside any other queries and keys.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{Element, LANES, Lanes, Level};
use crate::kernels::matrix::{Keys, product};
use crate::kernels::simd::{Pass, Simd};

/// Groups of keys side by side.
const GROUPS: usize = 2;
/// Keys of a panel.
pub(crate) const SIDE: usize = GROUPS * LANES;
/// Entries of a panel, which then fits a first-level cache; sums of that many terms are added up.
pub(crate) const DEPTH: usize = 8 * LANES;
/// Keys transposed together: their entries are written four at a time.
const TURNED: usize = 4;

/// Lays some entries of `count` keys side by side, entry after entry, with zeros behind the last key.
struct Lay<'a, E> {
    keys: Keys<'a, E>,
    from: usize,
    count: usize,
    entry: usize,
    panel: &'a mut [f64],
    squares: &'a mut [f64; SIDE],
}

impl<E: Element> Pass for Lay<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let depth = self.panel.len() / SIDE;
        for side in (0..SIDE).step_by(TURNED) {
            let count = self.count.saturating_sub(side).min(TURNED);
            let mut tile = [[0.0; LANES]; TURNED];
            for at in (0..depth).step_by(LANES) {
                for (key, tile) in tile[..count].iter_mut().enumerate() {
                    let row = self.keys.row(self.from + side + key);
                    let group = Keys::group::<L>(row, self.entry + at);
                    E::double::<L>(group).store(tile.as_mut_ptr());
                }
                let places = self.panel[at * SIDE..].chunks_exact_mut(SIDE).take(LANES);
                for (i, to) in places.enumerate() {
                    let entries: [f64; TURNED] = std::array::from_fn(|key| tile[key][i]);
                    to[side..side + TURNED].copy_from_slice(&entries);
                }
            }
        }
        for at in (0..SIDE).step_by(LANES) {
            let mut sum = L::F64::load(self.squares[at..].as_ptr());
            for entries in self.panel.chunks_exact(SIDE) {
                let lanes = L::F64::load(entries[at..].as_ptr());
                sum = lanes.mul_add(lanes, sum);
            }
            sum.store(self.squares[at..].as_mut_ptr());
        }
    }
}

/// Queries one after another in f64, with as many entries as the keys have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queries<'a> {
    pub(crate) data: &'a [f64],
    pub(crate) dim: usize,
}

struct Multiply<'a, 'b> {
    panel: &'a [f64],
    queries: Queries<'a>,
    entry: usize,
    to: &'a mut [&'b mut [f64]],
    /// Offset of the panel's products in a row of products.
    at: usize,
    count: usize,
}

impl Multiply<'_, '_> {
    /// Adds the products of `R` queries with `C` groups of keys to those of entries before.
    #[inline(always)]
    unsafe fn tile<L: Level, const R: usize, const C: usize>(&mut self, row: usize, side: usize) {
        if side >= self.count {
            return;
        }
        let count = (self.count - side).min(C * LANES);
        let (dim, depth) = (self.queries.dim, self.panel.len() / SIDE);
        // `multiply` has checked that queries and panel are there.
        let left = self.queries.data.as_ptr().add(row * dim + self.entry);
        let right = self.panel.as_ptr().add(side);
        let sums = product::<L, f64, R, C>((left, dim, 1), (right, SIDE), depth);
        for (to, sums) in self.to[row..].iter_mut().zip(sums) {
            let to = &mut to[self.at + side..][..count];
            let mut all = [0.0; SIDE];
            let whole = count == C * LANES;
            if self.entry > 0 && !whole {
                all[..count].copy_from_slice(to);
            }
            let places = if whole { to.as_mut_ptr() } else { all.as_mut_ptr() };
            for (c, sum) in sums.into_iter().enumerate() {
                let place = places.add(c * LANES);
                let sum = if self.entry > 0 { sum.add(L::F64::load(place)) } else { sum };
                sum.store(place);
            }
            if !whole {
                to.copy_from_slice(&all[..count]);
            }
        }
    }
}

impl Pass for Multiply<'_, '_> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        const FEW: usize = 2;
        // As many sums as hide the latency of an addition. The grouping does not change their bits.
        const MANY: usize = 4;
        let rows = self.to.len();
        let mut row = 0;
        // Rows and groups are those that are there.
        while L::ROOMY && row + MANY <= rows {
            self.tile::<L, MANY, GROUPS>(row, 0);
            row += MANY;
        }
        while row + FEW <= rows {
            for side in (0..SIDE).step_by(LANES) {
                self.tile::<L, FEW, 1>(row, side);
            }
            row += FEW;
        }
        while row < rows {
            for side in (0..SIDE).step_by(LANES) {
                self.tile::<L, 1, 1>(row, side);
            }
            row += 1;
        }
    }
}

impl Simd {
    /// Widens some entries of up to [`SIDE`] keys into a panel, `SIDE` places for each of at most [`DEPTH`] entries,
    /// and adds their squares to those of entries before.
    pub(crate) fn lay<E: Element>(
        self,
        keys: Keys<'_, E>,
        (from, count): (usize, usize),
        entry: usize,
        panel: &mut [f64],
        squares: &mut [f64; SIDE],
    ) {
        assert!(count <= SIDE && panel.len().is_multiple_of(SIDE));
        assert!(entry + panel.len() / SIDE <= keys.dim());
        self.run(Lay { keys, from, count, entry, panel, squares });
    }

    /// Adds the products of queries with the first `count` keys of a panel that begins at `entry`. Each query's
    /// products go to its row, from `at` on, on top of those of entries before.
    pub(crate) fn multiply(
        self,
        panel: &[f64],
        queries: Queries<'_>,
        entry: usize,
        to: &mut [&mut [f64]],
        (at, count): (usize, usize),
    ) {
        assert!(count <= SIDE && panel.len().is_multiple_of(SIDE));
        assert!(entry + panel.len() / SIDE <= queries.dim);
        assert!(queries.data.len() == queries.dim * to.len());
        self.run(Multiply { panel, queries, entry, to, at, count });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers, whose products f64 holds exactly.
    fn integers(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) % 2001) as f32 - 1000.0
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn every_tile_holds_its_own_products() {
        for (rows, count, dim) in
            [(1, 1, 1), (2, 15, 16), (5, 16, 17), (7, 17, 3), (14, 31, 130), (25, 32, 256)]
        {
            let (queries, keys) = (integers(rows * dim, 1), integers((count + 2) * dim, 2));
            let wide: Vec<f64> = queries.iter().map(|&entry| entry.into()).collect();
            for (name, simd) in Simd::all() {
                let mut squares = [0.0; SIDE];
                let mut all = vec![f64::NAN; rows * (count + 3)];
                let mut to: Vec<&mut [f64]> = all.chunks_mut(count + 3).collect();
                for entry in (0..dim).step_by(DEPTH) {
                    let mut panel = vec![f64::NAN; DEPTH.min(dim - entry) * SIDE];
                    let keys = Keys::new(&keys, dim, dim);
                    simd.lay(keys, (2, count), entry, &mut panel, &mut squares);
                    let queries = Queries { data: &wide, dim };
                    simd.multiply(&panel, queries, entry, &mut to, (3, count));
                }
                for (query, row) in wide.chunks(dim).zip(all.chunks(count + 3)) {
                    assert!(row[..3].iter().all(|place| place.is_nan()), "{name}");
                    for (i, key) in keys.chunks(dim).skip(2).enumerate() {
                        let key = || key.iter().map(|&entry| f64::from(entry));
                        let want: f64 = query.iter().zip(key()).map(|(q, k)| q * k).sum();
                        assert_eq!(row[3 + i], want, "{name} {rows} {count} {dim}");
                        assert_eq!(squares[i], key().map(|k| k * k).sum::<f64>(), "{name}");
                    }
                }
                assert!(squares[count..].iter().all(|square| *square == 0.0), "{name}");
            }
        }
    }
}
