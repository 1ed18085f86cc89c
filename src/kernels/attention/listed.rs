//! Scores in f32, of listed keys or of consecutive ones for several queries.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{BESIDE as SUMS, Element, LANES, Lanes, Level};
use crate::kernels::matrix::{AHEAD, Keys};
use crate::kernels::simd::{Pass, Simd};

/// Rows that are asked for at once: more would push each other out.
const AT_ONCE: usize = 64;
/// Keys, or queries, whose sums are in registers at a time, where these are few.
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

struct Shared<'a, E, const Q: usize> {
    keys: Keys<'a, E>,
    from: usize,
    queries: [&'a [f32]; Q],
    scale: f32,
    to: [&'a mut [f64]; Q],
}

impl<E: Element<Scalar = f32>, const Q: usize> Shared<'_, E, Q> {
    /// The sums of `K` keys of whole groups with all queries, side by side in registers: as many sums as are taken at a time.
    #[inline(always)]
    unsafe fn beside<L: Level, const K: usize>(&mut self, at: usize) {
        // The other arms of the match that calls this are never reached.
        assert!(K * Q == SUMS);
        let rows: [*const E; K] =
            std::array::from_fn(|k| self.keys.row(self.from + at + k).as_ptr());
        let queries = self.queries.map(<[_]>::as_ptr);
        let mut sums = [[L::F32::splat(0.0); Q]; K];
        for from in (0..self.keys.dim()).step_by(LANES) {
            for (sums, row) in sums.iter_mut().zip(rows) {
                let key = E::load::<L>(row.add(from));
                for (sum, query) in sums.iter_mut().zip(queries) {
                    // Whole groups, all of one length.
                    *sum = key.mul_add(L::F32::load(query.add(from)), *sum);
                }
            }
        }
        // The same sums in one list.
        let sums = L::F32::sums(sums.as_ptr().cast::<[L::F32; SUMS]>().read());
        let scores = sums.map(|sum| f64::from(sum * self.scale));
        for (k, scores) in scores.chunks_exact(Q).enumerate() {
            for (to, &score) in self.to.iter_mut().zip(scores) {
                to[at + k] = score;
            }
        }
    }

    /// The sums of one key, a few queries at a time.
    #[inline(always)]
    unsafe fn one<L: Level>(&mut self, at: usize) {
        if Q <= BESIDE {
            self.some::<L, Q>(at, 0);
        } else {
            for first in (0..Q).step_by(BESIDE) {
                self.some::<L, BESIDE>(at, first);
            }
        }
    }

    /// The sums of one key with `R` queries from one on.
    #[inline(always)]
    unsafe fn some<L: Level, const R: usize>(&mut self, at: usize, first: usize) {
        let row = self.keys.row(self.from + at);
        let queries: [&[f32]; R] = std::array::from_fn(|r| self.queries[first + r]);
        let mut sums = [L::F32::splat(0.0); R];
        for g in 0..queries[0].len() / LANES {
            let key = Keys::group::<L>(row, g * LANES);
            for (sum, query) in sums.iter_mut().zip(queries) {
                *sum = key.mul_add(L::F32::load(query.as_ptr().add(g * LANES)), *sum);
            }
        }
        for (sum, to) in sums.into_iter().zip(&mut self.to[first..]) {
            to[at] = f64::from(sum.sum() * self.scale);
        }
    }
}

impl<E: Element<Scalar = f32>, const Q: usize> Pass for Shared<'_, E, Q> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let (count, mut at) = (self.to[0].len(), 0);
        // For fewer queries memory is what takes time, and more keys at once are slower to come.
        if L::ROOMY && Q >= 4 && self.keys.in_groups() {
            while at + SUMS / Q <= count {
                match Q {
                    8 => self.beside::<L, 1>(at),
                    _ => self.beside::<L, 2>(at),
                }
                at += SUMS / Q;
            }
        }
        for at in at..count {
            self.one::<L>(at);
        }
    }
}

struct Fetch<'a, E> {
    keys: Keys<'a, E>,
    list: &'a [u32],
}

impl<E: Element> Pass for Fetch<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        for &row in self.list {
            self.keys.fetch::<L>(row as usize);
        }
    }
}

impl Simd {
    /// Asks for the first rows of a list, which will be read soon.
    pub(crate) fn fetch_listed<E: Element>(self, keys: Keys<'_, E>, list: &[u32]) {
        self.run(Fetch { keys, list: &list[..list.len().min(AT_ONCE)] });
    }

    /// The products of a query, in whole groups, with as many keys of a list as there are places, times a scale. Each sum is
    /// `width / 16` fused terms deep, then a tree over sixteen lanes; the scale is one rounding more.
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

    /// The same of rows from one on with several queries, which are read once for all.
    pub(crate) fn scores_shared<E: Element<Scalar = f32>, const Q: usize>(
        self,
        keys: Keys<'_, E>,
        from: usize,
        (queries, scale): ([&[f32]; Q], f32),
        to: [&mut [f64]; Q],
    ) {
        let width = keys.dim().next_multiple_of(LANES);
        assert!(queries.iter().all(|query| query.len() == width));
        assert!(to.iter().all(|each| each.len() == to[0].len()));
        self.run(Shared { keys, from, queries, scale, to });
    }
}
