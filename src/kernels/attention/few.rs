//! A few rows over keys and values that are read once for all of them, in f32. A lane is an entry.
//!
//! Every number of a row is computed by the same operations in the same order, at every level and beside any other rows.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{BESIDE, Element, LANES, Lanes, Level};
use crate::kernels::matrix::Keys;
use crate::kernels::simd::{Pass, Simd};
use crate::kernels::weights::exp;

/// Most keys of a block: so many weighted values are summed in f32 before they go to f64. The next block is prefetched.
pub(crate) const FEW_KEYS: usize = 4 * LANES;
/// Rows with sums in registers at a time, where registers are few.
const FEW: usize = 4;
/// Sums that hide the latency of an addition, in registers where there are many.
const SUMS: usize = 2 * BESIDE;

/// A row over a block of keys.
#[derive(Debug)]
pub(crate) struct Scored<'a> {
    /// In whole groups.
    pub(crate) query: &'a [f32],
    pub(crate) to: &'a mut [f32],
}

struct Score<'a, 'b, E, const Q: usize> {
    keys: Keys<'a, E>,
    count: usize,
    rows: &'a mut [Scored<'b>; Q],
    scale: f32,
}

impl<E: Element<Scalar = f32>, const Q: usize> Score<'_, '_, E, Q> {
    /// Scores `K` keys for `R` rows, and returns the sums of squares of each key, lane by lane.
    #[inline(always)]
    unsafe fn some<L: Level, const K: usize, const R: usize>(
        &mut self,
        at: usize,
        first: usize,
    ) -> [L::F32; K] {
        let (zero, dim) = (L::F32::splat(0.0), self.keys.dim());
        let mut rows = [self.keys.row(at); K];
        for (k, row) in rows.iter_mut().enumerate() {
            *row = self.keys.row(at + k);
        }
        let ahead = self.keys.distance(FEW_KEYS);
        if first == 0 && ahead == 0 {
            for k in 0..K {
                self.keys.ask_for::<L>(at + k + FEW_KEYS);
            }
        }
        let (mut sums, mut squares, mut keys) = ([[zero; R]; K], [zero; K], [zero; K]);
        for from in (0..dim).step_by(LANES) {
            for (k, key) in keys.iter_mut().enumerate() {
                *key = Keys::group::<L>(rows[k], from);
                if first == 0 {
                    L::prefetch_far(rows[k].as_ptr().wrapping_add(ahead + from).cast());
                }
            }
            for (r, row) in self.rows[first..first + R].iter().enumerate() {
                let query = L::F32::load(row.query.as_ptr().add(from));
                for (sums, key) in sums.iter_mut().zip(keys) {
                    sums[r] = key.mul_add(query, sums[r]);
                }
            }
            for (square, key) in squares.iter_mut().zip(keys) {
                *square = key.mul_add(key, *square);
            }
        }
        let mut scores = [0.0; SUMS];
        let groups = sums.as_flattened();
        let (eights, rest) = groups.as_chunks::<BESIDE>();
        for (to, eight) in scores.chunks_exact_mut(BESIDE).zip(eights) {
            to.copy_from_slice(&L::F32::sums(*eight));
        }
        for (to, sum) in scores[groups.len() - rest.len()..].iter_mut().zip(rest) {
            *to = sum.sum();
        }
        for (r, row) in self.rows[first..first + R].iter_mut().enumerate() {
            for (k, to) in row.to[at..at + K].iter_mut().enumerate() {
                *to = scores[k * R + r] * self.scale;
            }
        }
        squares
    }

    /// Takes keys from `at` on, `K` at a time, with the largest sums of squares so far and the sums of all of them.
    #[inline(always)]
    unsafe fn each<L: Level, const K: usize>(&mut self, at: &mut usize, squares: &mut [L::F32; 2]) {
        while *at + K <= self.count {
            let found = if L::ROOMY || Q <= FEW {
                self.some::<L, K, Q>(*at, 0)
            } else {
                self.some::<L, K, FEW>(*at, FEW);
                self.some::<L, K, FEW>(*at, 0)
            };
            for square in found {
                squares[0] = square.max(squares[0]);
                squares[1] = square.add(squares[1]);
            }
            *at += K;
        }
    }
}

impl<E: Element<Scalar = f32>, const Q: usize> Pass<f32> for Score<'_, '_, E, Q> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) -> f32 {
        let (mut at, mut squares) = (0, [L::F32::splat(0.0); 2]);
        match Q {
            _ if !L::ROOMY => {}
            1 | 2 => self.each::<L, 8>(&mut at, &mut squares),
            4 => self.each::<L, 4>(&mut at, &mut squares),
            _ => self.each::<L, 2>(&mut at, &mut squares),
        }
        self.each::<L, 1>(&mut at, &mut squares);
        // The largest would ignore what is no number.
        if squares[1].sum().is_finite() { squares[0].sum() } else { f32::INFINITY }
    }
}

/// A row over a block of values.
#[derive(Debug)]
pub(crate) struct Weighed<'a> {
    pub(crate) scores: &'a [f32],
    /// The score of weight 1.
    pub(crate) top: f32,
    /// One for each entry of a value, in whole groups, and behind them that of the weights.
    pub(crate) sums: &'a mut [f64],
}

struct Average<'a, 'b, E, const Q: usize> {
    values: Keys<'a, E>,
    rows: &'a mut [Weighed<'b>; Q],
}

impl<E: Element<Scalar = f32>, const Q: usize> Average<'_, '_, E, Q> {
    /// Adds `G` groups of weighted values from an entry on to the sums of `R` rows.
    #[inline(always)]
    unsafe fn groups<L: Level, const R: usize, const G: usize>(
        &mut self,
        weights: &[[f32; FEW_KEYS]; Q],
        first: usize,
        at: usize,
    ) {
        let zero = L::F32::splat(0.0);
        let (mut sums, mut entries) = ([[zero; G]; R], [zero; G]);
        let distance = self.values.distance(FEW_KEYS);
        for key in 0..self.rows[0].scores.len() {
            let row = self.values.row(key);
            if first == 0 && at == 0 && distance == 0 {
                self.values.ask_for::<L>(key + FEW_KEYS);
            }
            let ahead = row.as_ptr().wrapping_add(distance + at);
            for (g, entries) in entries.iter_mut().enumerate() {
                if first == 0 {
                    L::prefetch_far(ahead.wrapping_add(g * LANES).cast());
                }
                // If there are several groups, all are whole.
                *entries = if G > 1 {
                    E::load::<L>(row.as_ptr().add(at + g * LANES))
                } else {
                    Keys::group::<L>(row, at)
                };
            }
            for (sums, weights) in sums.iter_mut().zip(&weights[first..]) {
                let weight = L::F32::splat(weights[key]);
                for (sum, entries) in sums.iter_mut().zip(entries) {
                    *sum = entries.mul_add(weight, *sum);
                }
            }
        }
        for (sums, row) in sums.into_iter().zip(&mut self.rows[first..]) {
            for (sum, to) in sums.into_iter().zip(row.sums[at..].chunks_exact_mut(LANES)) {
                L::double(sum).add(L::F64::load(to.as_ptr())).store(to.as_mut_ptr());
            }
        }
    }
}

impl<E: Element<Scalar = f32>, const Q: usize> Pass for Average<'_, '_, E, Q> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let (mut weights, mut hidden) = ([[0.0f32; FEW_KEYS]; Q], true);
        let width = self.rows[0].sums.len() - 1;
        for (row, weights) in self.rows.iter_mut().zip(&mut weights) {
            let (top, mut sum) = (L::F32::splat(row.top), L::F32::splat(0.0));
            weights.fill(f32::NEG_INFINITY);
            weights[..row.scores.len()].copy_from_slice(row.scores);
            let mut largest = L::F32::splat(f32::NEG_INFINITY);
            for group in weights.chunks_exact_mut(LANES) {
                let score = L::F32::load(group.as_ptr());
                largest = score.max(largest);
                let weight = exp(score.sub(top));
                weight.store(group.as_mut_ptr());
                sum = sum.add(weight);
            }
            hidden &= largest.largest() == f32::NEG_INFINITY;
            row.sums[width] += L::double(sum).sum();
        }
        // What nobody sees is not touched.
        if hidden {
            return;
        }
        let (mut at, whole) = (0, self.values.dim() / LANES * LANES);
        let step = (SUMS / Q).min(BESIDE) * LANES;
        while L::ROOMY && at + step <= whole {
            match Q {
                1 | 2 => self.groups::<L, Q, 8>(&weights, 0, at),
                4 => self.groups::<L, Q, 4>(&weights, 0, at),
                _ => self.groups::<L, Q, 2>(&weights, 0, at),
            }
            at += step;
        }
        while Q <= 2 && at + 4 * LANES <= whole {
            self.groups::<L, Q, 4>(&weights, 0, at);
            at += 4 * LANES;
        }
        for at in (at..width).step_by(LANES) {
            if L::ROOMY || Q <= FEW {
                self.groups::<L, Q, 1>(&weights, 0, at);
            } else {
                self.groups::<L, FEW, 1>(&weights, 0, at);
                self.groups::<L, FEW, 1>(&weights, FEW, at);
            }
        }
    }
}

impl Simd {
    /// Computes the products of a few queries, in whole groups, with as many keys as there are places, times a scale. Each sum
    /// is `width / 16` fused terms deep, then a tree over sixteen lanes; the scale is one more rounding.
    ///
    /// Returns the square of a length that no key exceeds, from sums of the same depths; infinity if a key is not finite.
    pub(crate) fn score_few<E: Element<Scalar = f32>, const Q: usize>(
        self,
        keys: Keys<'_, E>,
        rows: &mut [Scored<'_>; Q],
        scale: f32,
    ) -> f32 {
        let (width, count) = (keys.dim().next_multiple_of(LANES), rows[0].to.len());
        assert!(rows.iter().all(|row| row.query.len() == width && row.to.len() == count));
        self.run(Score { keys, count, rows, scale })
    }

    /// Weighs the scores of a few rows, of at most [`FEW_KEYS`] keys, and adds to their sums. Weights and weighted values are
    /// summed in f32, then in f64. Values are not read if no row has a score above negative infinity.
    pub(crate) fn average_few<E: Element<Scalar = f32>, const Q: usize>(
        self,
        values: Keys<'_, E>,
        rows: &mut [Weighed<'_>; Q],
    ) {
        let (width, count) = (values.dim().next_multiple_of(LANES), rows[0].scores.len());
        assert!(count <= FEW_KEYS);
        assert!(rows.iter().all(|row| row.scores.len() == count && row.sums.len() == width + 1));
        self.run(Average { values, rows });
    }
}
