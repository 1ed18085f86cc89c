//! Inner products of stored vectors with a query, in f64.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{Element, LANES, Lanes, LanesOf, Level};
use crate::kernels::matrix::{AHEAD, Keys, Picked};
use crate::kernels::simd::{Pass, Simd};

struct Products<'a, E> {
    keys: Keys<'a, E>,
    picked: Picked<'a>,
    /// In whole groups.
    query: &'a [f64],
    to: &'a mut [f64],
}

impl<E: Element> Pass for Products<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let count = match self.picked {
            Picked::From(_) => self.to.len(),
            Picked::Listed(list) => list.len(),
        };
        for (at, to) in self.to.iter_mut().enumerate() {
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

struct Shared<'a, E, const Q: usize> {
    keys: Keys<'a, E>,
    from: usize,
    queries: [&'a [f64]; Q],
    to: [&'a mut [f64]; Q],
}

impl<E: Element, const Q: usize> Pass for Shared<'_, E, Q> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let groups = self.queries[0].len() / LANES;
        for at in 0..self.to[0].len() {
            let row = self.keys.row(self.from + at);
            let mut sums = [L::F64::splat(0.0); Q];
            for g in 0..groups {
                let key = E::double::<L>(Keys::group::<L>(row, g * LANES));
                for (sum, query) in sums.iter_mut().zip(self.queries) {
                    let query = L::F64::load(query.as_ptr().add(g * LANES));
                    *sum = key.mul_add(query, *sum);
                }
            }
            for (sum, to) in sums.into_iter().zip(&mut self.to) {
                to[at] = sum.sum();
            }
        }
    }
}

struct Largest<'a, E> {
    keys: Keys<'a, E>,
    picked: Picked<'a>,
    count: usize,
}

impl<E: Element> Pass<f64> for Largest<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let zero = LanesOf::<L, E>::splat(E::Scalar::default());
        let mut largest = [zero; 2];
        for at in 0..self.count {
            let row = self.keys.row(self.picked.row(at));
            for from in (0..row.len()).step_by(LANES) {
                let lanes = Keys::group::<L>(row, from);
                largest[0] = lanes.max(largest[0]);
                largest[1] = zero.sub(lanes).max(largest[1]);
            }
        }
        largest[0].max(largest[1]).largest().into()
    }
}

impl Simd {
    /// The largest absolute entry of some rows; numbers that are none may be passed over.
    pub(crate) fn largest<E: Element>(
        self,
        keys: Keys<'_, E>,
        picked: Picked<'_>,
        count: usize,
    ) -> f64 {
        self.run(Largest { keys, picked, count })
    }

    /// The same as [`Simd::products_f64`], of rows from one on with several queries, which are read once for all.
    pub(crate) fn shared_products<E: Element, const Q: usize>(
        self,
        keys: Keys<'_, E>,
        from: usize,
        queries: [&[f64]; Q],
        to: [&mut [f64]; Q],
    ) {
        let width = keys.dim().next_multiple_of(LANES);
        assert!(queries.iter().all(|query| query.len() == width));
        assert!(to.iter().all(|each| each.len() == to[0].len()));
        self.run(Shared { keys, from, queries, to });
    }

    /// The products of a query with some rows (as many of a list as there are places; what follows is fetched ahead),
    /// each sum `width / 16` terms deep and then a tree over sixteen lanes.
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
