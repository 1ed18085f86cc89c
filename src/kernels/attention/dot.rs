//! Inner products of stored vectors with a query, in f64.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{BESIDE as SUMS, Element, LANES, Lanes, Level};
use crate::kernels::matrix::{AHEAD, Keys, Picked};
use crate::kernels::simd::{Pass, Simd};

struct Products<'a, E> {
    keys: Keys<'a, E>,
    picked: Picked<'a>,
    /// In whole groups.
    query: &'a [f64],
    to: &'a mut [f64],
}

impl<E: Element> Products<'_, E> {
    /// Computes the products of several rows of whole groups, with their sums side by side in registers.
    #[inline(always)]
    unsafe fn beside<L: Level>(&mut self, at: usize) {
        let rows: [*const E; SUMS] =
            std::array::from_fn(|k| self.keys.row(self.picked.row(at + k)).as_ptr());
        let mut sums = [L::F64::splat(0.0); SUMS];
        for (g, query) in self.query.chunks_exact(LANES).enumerate() {
            let query = L::F64::load(query.as_ptr());
            for (sum, row) in sums.iter_mut().zip(rows) {
                let key = E::double::<L>(E::load::<L>(row.add(g * LANES)));
                *sum = key.mul_add(query, *sum);
            }
        }
        self.to[at..at + SUMS].copy_from_slice(&L::F64::sums(sums));
    }
}

impl<E: Element> Pass for Products<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let count = match self.picked {
            Picked::From(_) => self.to.len(),
            Picked::Listed(list) => list.len(),
        };
        let mut done = 0;
        // Consecutive keys arrive as fast as they are summed one by one.
        if let Picked::Listed(list) = self.picked
            && L::ROOMY
            && self.keys.in_groups()
        {
            while done + SUMS <= self.to.len() {
                for &ahead in list.get(done + AHEAD..).unwrap_or(&[]).iter().take(SUMS) {
                    self.keys.fetch::<L>(ahead as usize);
                }
                self.beside::<L>(done);
                done += SUMS;
            }
        }
        for (at, to) in self.to.iter_mut().enumerate().skip(done) {
            if let Picked::Listed(_) = self.picked
                && at + AHEAD < count
            {
                self.keys.fetch::<L>(self.picked.row(at + AHEAD));
            }
            let row = self.keys.row(self.picked.row(at));
            let mut sum = L::F64::splat(0.0);
            for (g, query) in self.query.chunks_exact(LANES).enumerate() {
                let key = Keys::group::<L>(row, g * LANES);
                sum = E::double::<L>(key).mul_add(L::F64::load(query.as_ptr()), sum);
            }
            *to = sum.sum();
        }
    }
}

impl Simd {
    /// Computes the products of a query with some rows, each sum `width / 16` terms deep and then a tree over sixteen
    /// lanes. Of a list as many rows are read as there are places; the next ones are prefetched.
    pub(crate) fn products_f64<E: Element>(
        self,
        keys: Keys<'_, E>,
        picked: Picked<'_>,
        query: &[f64],
        to: &mut [f64],
    ) {
        assert!(query.len() == keys.dim().next_multiple_of(LANES));
        if let Picked::Listed(list) = picked {
            assert!(list.len() >= to.len());
        }
        self.run(Products { keys, picked, query, to });
    }
}
