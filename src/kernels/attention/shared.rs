//! Products of consecutive stored vectors with several queries, in f32 or in f64. The vectors are read once for all.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{BESIDE, Element, LANES, Lanes, Level, Scalar};
use crate::kernels::matrix::Keys;
use crate::kernels::simd::{Pass, Simd};

/// Most queries with sums in registers at a time.
const FEW: usize = 4;

/// Pass with sums in `S`; `finish` converts each to its stored form.
struct Shared<'a, E, S, F, const Q: usize> {
    keys: Keys<'a, E>,
    from: usize,
    /// In whole groups, all of one length.
    queries: [&'a [S]; Q],
    finish: F,
    to: [&'a mut [f64]; Q],
}

impl<E: Element, S: Scalar, F: Fn(S) -> f64, const Q: usize> Shared<'_, E, S, F, Q> {
    /// Sums `K` keys of whole groups with all queries, side by side in registers.
    #[inline(always)]
    unsafe fn beside<L: Level, const K: usize>(&mut self, at: usize) {
        // The other arms of the match that calls this are never reached.
        assert!(K * Q == BESIDE);
        let rows: [*const E; K] =
            std::array::from_fn(|k| self.keys.row(self.from + at + k).as_ptr());
        let queries = self.queries.map(<[_]>::as_ptr);
        let mut sums = [[S::Lanes::<L>::splat(S::default()); Q]; K];
        for from in (0..self.keys.dim()).step_by(LANES) {
            for (sums, row) in sums.iter_mut().zip(rows) {
                let key = S::of::<L, E>(E::load::<L>(row.add(from)));
                for (sum, query) in sums.iter_mut().zip(queries) {
                    *sum = key.mul_add(S::Lanes::<L>::load(query.add(from)), *sum);
                }
            }
        }
        // The same sums in one list.
        let sums = S::Lanes::<L>::sums(sums.as_ptr().cast::<[S::Lanes<L>; BESIDE]>().read());
        for (k, sums) in sums.chunks_exact(Q).enumerate() {
            for (to, &sum) in self.to.iter_mut().zip(sums) {
                to[at + k] = (self.finish)(sum);
            }
        }
    }

    /// Sums one key, a few queries at a time.
    #[inline(always)]
    unsafe fn one<L: Level>(&mut self, at: usize) {
        if Q <= FEW {
            self.some::<L, Q>(at, 0);
        } else {
            for first in (0..Q).step_by(FEW) {
                self.some::<L, FEW>(at, first);
            }
        }
    }

    /// Sums one key with `R` queries from `first` on.
    #[inline(always)]
    unsafe fn some<L: Level, const R: usize>(&mut self, at: usize, first: usize) {
        let row = self.keys.row(self.from + at);
        let queries: [&[S]; R] = std::array::from_fn(|r| self.queries[first + r]);
        let mut sums = [S::Lanes::<L>::splat(S::default()); R];
        for g in 0..queries[0].len() / LANES {
            let key = S::of::<L, E>(Keys::group::<L>(row, g * LANES));
            for (sum, query) in sums.iter_mut().zip(queries) {
                *sum = key.mul_add(S::Lanes::<L>::load(query.as_ptr().add(g * LANES)), *sum);
            }
        }
        for (sum, to) in sums.into_iter().zip(&mut self.to[first..]) {
            to[at] = (self.finish)(sum.sum());
        }
    }
}

impl<E: Element, S: Scalar, F: Fn(S) -> f64, const Q: usize> Pass for Shared<'_, E, S, F, Q> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let (count, mut at) = (self.to[0].len(), 0);
        // With fewer queries memory is the bottleneck, and more keys at once arrive later.
        if L::ROOMY && Q >= FEW && self.keys.in_groups() {
            while at + BESIDE / Q <= count {
                match Q {
                    8 => self.beside::<L, 1>(at),
                    _ => self.beside::<L, 2>(at),
                }
                at += BESIDE / Q;
            }
        }
        for at in at..count {
            self.one::<L>(at);
        }
    }
}

impl Simd {
    /// Computes the same as [`Simd::products_f64`], for rows from `from` on with several queries.
    pub(crate) fn shared_products<E: Element, const Q: usize>(
        self,
        keys: Keys<'_, E>,
        from: usize,
        queries: [&[f64]; Q],
        to: [&mut [f64]; Q],
    ) {
        self.share(keys, from, (queries, |sum| sum), to);
    }

    /// Computes the same as [`Simd::scores_listed`], for rows from `from` on with several queries.
    pub(crate) fn scores_shared<E: Element<Scalar = f32>, const Q: usize>(
        self,
        keys: Keys<'_, E>,
        from: usize,
        (queries, scale): ([&[f32]; Q], f32),
        to: [&mut [f64]; Q],
    ) {
        self.share(keys, from, (queries, |sum: f32| f64::from(sum * scale)), to);
    }

    fn share<E: Element, S: Scalar, const Q: usize>(
        self,
        keys: Keys<'_, E>,
        from: usize,
        (queries, finish): ([&[S]; Q], impl Fn(S) -> f64),
        to: [&mut [f64]; Q],
    ) {
        let width = keys.dim().next_multiple_of(LANES);
        assert!(queries.iter().all(|query| query.len() == width));
        assert!(to.iter().all(|each| each.len() == to[0].len()));
        self.run(Shared { keys, from, queries, finish, to });
    }
}
