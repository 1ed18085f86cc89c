//! Scores of listed keys in f32.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{Element, LANES, Lanes, Level};
use crate::kernels::matrix::{AHEAD, Keys};
use crate::kernels::simd::{Pass, Simd};

/// Keys with sums in registers at a time.
const BESIDE: usize = 4;

struct Scores<'a, E> {
    keys: Keys<'a, E>,
    list: &'a [u32],
    /// In whole groups.
    query: &'a [f32],
    scale: f32,
    to: &'a mut [f32],
}

impl<E: Element<Scalar = f32>> Scores<'_, E> {
    #[inline(always)]
    unsafe fn some<L: Level, const K: usize>(&mut self, at: usize) {
        let rows: [&[E]; K] = std::array::from_fn(|k| self.keys.row(self.list[at + k] as usize));
        let mut sums = [L::F32::splat(0.0); K];
        for (g, query) in self.query.chunks_exact(LANES).enumerate() {
            let query = L::F32::load(query.as_ptr());
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum = Keys::group::<L>(row, g * LANES).mul_add(query, *sum);
            }
        }
        for (to, sum) in self.to[at..at + K].iter_mut().zip(sums) {
            *to = sum.sum() * self.scale;
        }
    }
}

impl<E: Element<Scalar = f32>> Pass for Scores<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let count = self.to.len();
        let mut at = 0;
        while at + BESIDE <= count {
            for &ahead in self.list.get(at + AHEAD..).unwrap_or(&[]).iter().take(BESIDE) {
                self.keys.fetch::<L>(ahead as usize);
            }
            self.some::<L, BESIDE>(at);
            at += BESIDE;
        }
        while at < count {
            self.some::<L, 1>(at);
            at += 1;
        }
    }
}

impl Simd {
    /// Computes the products of a query, in whole groups, with listed keys, times a scale, as many as there are places.
    /// Each sum is `width / 16` fused terms deep, then a tree over sixteen lanes; the scale is one more rounding.
    pub(crate) fn scores_listed<E: Element<Scalar = f32>>(
        self,
        keys: Keys<'_, E>,
        list: &[u32],
        (query, scale): (&[f32], f32),
        to: &mut [f32],
    ) {
        assert!(query.len() == keys.dim().next_multiple_of(LANES) && list.len() >= to.len());
        self.run(Scores { keys, list, query, scale, to });
    }
}
