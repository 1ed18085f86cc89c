//! Passes over many rows of weights at once: writing them, mixing them, and each row's loss.
//!
//! A [`Panel`] holds the rows one behind another. Mixing goes down the rows with a few groups of lanes in registers, so
//! that every weight is read once. Callers cut long rows into blocks that stay in the second-level cache between the
//! mixing and the sums that follow.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use std::ops::Range;

use super::isa::{Element, LANES, Lanes, Level};
use super::simd::{Pass, Simd};
use super::weights::WeightFn;

/// Terms that are added in f32 before a sum goes to f64.
const DEPTH: usize = 16;
/// Groups mixed, or rows multiplied, at a time.
const WIDTH: usize = 4;
/// Relative error of a mixed weight: sixteen fused steps in f32, a sum in f64, one rounding to f32.
pub(crate) const MIXED: f64 = 20.0 / 16_777_216.0;
/// Relative error of a row's sum over keys: fifteen additions in f32, and sums in f64.
pub(crate) const SUMMED: f64 = 20.0 / 16_777_216.0;

/// Rows of f32 weights, each `stride` long (whole groups of lanes).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panel<'a> {
    weights: &'a [f32],
    stride: usize,
}

impl<'a> Panel<'a> {
    pub(crate) fn new(weights: &'a [f32], stride: usize) -> Self {
        assert!(stride.is_multiple_of(LANES) && stride > 0 && weights.len().is_multiple_of(stride));
        Panel { weights, stride }
    }

    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        &self.weights[row * self.stride..][..self.stride]
    }

    fn check(&self, columns: &Range<usize>, len: usize) {
        assert!(columns.start.is_multiple_of(LANES) && columns.end.is_multiple_of(LANES));
        assert!(columns.end <= self.stride && columns.len() == len);
    }
}

/// Returns the stride of a row of `n` weights: an odd number of whole groups, because rows at a distance of a power of
/// two would compete for the same few places in the caches. Blocks of long rows get distinct places.
pub(crate) fn padded_stride(n: usize) -> usize {
    /// Groups (cache lines) above which a few more hardly matter.
    const LONG: usize = 2048;
    /// Distance of the rows of a block in cache lines, modulo a divisor of the number of places.
    const APART: usize = 67;
    const PLACES: usize = 128;
    let groups = n.div_ceil(LANES);
    if groups < LONG {
        return (groups | 1) * LANES;
    }
    (groups + (APART + PLACES - groups % PLACES) % PLACES) * LANES
}

/// Sums all lanes of several accumulators in a fixed tree.
#[inline(always)]
unsafe fn total<V: Lanes<Scalar = f64>>(wides: [V; WIDTH]) -> f64 {
    let mut sums = [0.0; LANES];
    for wide in wides {
        let lanes = wide.array();
        for (sum, lane) in sums.iter_mut().zip(lanes) {
            *sum += lane;
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

struct Weights<'a, E, W> {
    scores: &'a [E],
    weight_fn: W,
    unit: f64,
    to: &'a mut [f32],
}

impl<E: Element, W: WeightFn<E::Scalar>> Pass<f64> for Weights<'_, E, W> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let mut lanes = [E::Scalar::default(); LANES];
        let least = L::F32::splat(f32::MIN_POSITIVE);
        let mut wide = L::F64::splat(0.0);
        let blocks = self.scores.chunks(LANES * DEPTH).zip(self.to.chunks_mut(LANES * DEPTH));
        for (scores, to) in blocks {
            let mut sum = L::F32::splat(0.0);
            for (scores, to) in scores.chunks_exact(LANES).zip(to.chunks_exact_mut(LANES)) {
                self.weight_fn.weigh(E::load::<L>(scores.as_ptr())).store(lanes.as_mut_ptr());
                for (to, &weight) in to.iter_mut().zip(&lanes) {
                    let weight: f64 = weight.into();
                    *to = weight as f32;
                }
                if self.unit != 1.0 {
                    for (to, &weight) in to.iter_mut().zip(&lanes) {
                        let weight: f64 = weight.into();
                        *to = (weight / self.unit) as f32;
                    }
                }
                // Rounded down to 0: a subnormal would not be within a relative error.
                let weights = L::F32::load(to.as_ptr());
                let weights = weights.keep(weights.ge(least));
                weights.store(to.as_mut_ptr());
                sum = sum.add(weights);
            }
            wide = sum.widen_add(wide);
        }
        wide.sum()
    }
}

struct Mix<'a> {
    panel: Panel<'a>,
    from: usize,
    terms: &'a [(usize, f32)],
    to: &'a mut [f32],
}

impl Mix<'_> {
    /// Mixes `G` groups from a column on.
    #[inline(always)]
    unsafe fn groups<L: Level, const G: usize>(&mut self, at: usize) {
        let mut wide = [L::F64::splat(0.0); G];
        for terms in self.terms.chunks(DEPTH) {
            let mut sums = [L::F32::splat(0.0); G];
            for &(row, factor) in terms {
                let factor = L::F32::splat(factor);
                let weights = &self.panel.row(row)[self.from + at..][..G * LANES];
                for (g, sum) in sums.iter_mut().enumerate() {
                    *sum = L::F32::load(weights[g * LANES..].as_ptr()).mul_add(factor, *sum);
                }
            }
            for (wide, sum) in wide.iter_mut().zip(sums) {
                *wide = sum.widen_add(*wide);
            }
        }
        for (to, wide) in self.to[at..][..G * LANES].chunks_exact_mut(LANES).zip(wide) {
            for (to, sum) in to.iter_mut().zip(wide.array()) {
                *to = sum as f32;
            }
        }
    }
}

impl Pass for Mix<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let whole = self.to.len() / (WIDTH * LANES) * (WIDTH * LANES);
        for at in (0..whole).step_by(WIDTH * LANES) {
            self.groups::<L, WIDTH>(at);
        }
        for at in (whole..self.to.len()).step_by(LANES) {
            self.groups::<L, 1>(at);
        }
    }
}

struct Losses<'a> {
    panel: Panel<'a>,
    from: usize,
    shares: &'a [f32],
    sums: &'a mut [f64],
}

impl Pass for Losses<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        for (row, sum) in self.sums.iter_mut().enumerate() {
            let weights = &self.panel.row(row)[self.from..][..self.shares.len()];
            let mut wide = [L::F64::splat(0.0); WIDTH];
            let blocks = weights.chunks(LANES * DEPTH * WIDTH);
            for (weights, shares) in blocks.zip(self.shares.chunks(LANES * DEPTH * WIDTH)) {
                let mut sums = [L::F32::splat(0.0); WIDTH];
                let whole = weights.len() / (LANES * WIDTH) * (LANES * WIDTH);
                let (body, tail) = weights.split_at(whole);
                let (shares, tail_shares) = shares.split_at(whole);
                let wholes = body.chunks_exact(LANES * WIDTH);
                for (weights, shares) in wholes.zip(shares.chunks_exact(LANES * WIDTH)) {
                    for (g, sum) in sums.iter_mut().enumerate() {
                        let shares = L::F32::load(shares[g * LANES..].as_ptr());
                        let weights = L::F32::load(weights[g * LANES..].as_ptr());
                        *sum = weights.mul_add(shares, *sum);
                    }
                }
                let groups = tail.chunks_exact(LANES).zip(tail_shares.chunks_exact(LANES));
                for ((weights, shares), sum) in groups.zip(&mut sums) {
                    let shares = L::F32::load(shares.as_ptr());
                    *sum = L::F32::load(weights.as_ptr()).mul_add(shares, *sum);
                }
                for (wide, sum) in wide.iter_mut().zip(sums) {
                    *wide = sum.widen_add(*wide);
                }
            }
            *sum += total(wide);
        }
    }
}

struct Ramp<'a> {
    mixed: &'a [f32],
    half: f32,
    to: &'a mut [f32],
}

impl Pass<f64> for Ramp<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let zero = L::F32::splat(0.0);
        let (low, high) = (L::F32::splat(1.0 - self.half), L::F32::splat(1.0 + self.half));
        let width = L::F32::splat(2.0 * self.half);
        let inverse = L::F32::splat(0.5 / self.half);
        let halved = L::F32::splat(0.5);
        let mut wide = L::F64::splat(0.0);
        let blocks = self.mixed.chunks(LANES * DEPTH).zip(self.to.chunks_mut(LANES * DEPTH));
        for (mixed, to) in blocks {
            let mut sum = zero;
            for (mixed, to) in mixed.chunks_exact(LANES).zip(to.chunks_exact_mut(LANES)) {
                let mixed = L::F32::load(mixed.as_ptr());
                let inside = high.sub(mixed).max(zero).min(width);
                let share = inside.mul(inverse);
                share.store(to.as_mut_ptr());
                let below = low.sub(mixed).max(zero);
                sum = sum.add(inside.mul(share).mul_add(halved, below));
            }
            wide = sum.widen_add(wide);
        }
        wide.sum()
    }
}

struct Products<'a> {
    one: &'a [f32],
    panel: Panel<'a>,
    rows: &'a [usize],
    to: &'a mut [f64],
}

impl Products<'_> {
    #[inline(always)]
    unsafe fn rows<L: Level, const R: usize>(&mut self, at: usize) {
        let rows: [&[f32]; R] =
            std::array::from_fn(|r| &self.panel.row(self.rows[at + r])[..self.one.len()]);
        let mut sums = [L::F32::splat(0.0); R];
        for (g, one) in self.one.chunks_exact(LANES).enumerate() {
            let one = L::F32::load(one.as_ptr());
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum = L::F32::load(row[g * LANES..][..LANES].as_ptr()).mul_add(one, *sum);
            }
        }
        for (to, sum) in self.to[at..].iter_mut().zip(sums) {
            *to = sum.widen_add(L::F64::splat(0.0)).sum();
        }
    }
}

impl Pass for Products<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let whole = self.rows.len() / WIDTH * WIDTH;
        for at in (0..whole).step_by(WIDTH) {
            self.rows::<L, WIDTH>(at);
        }
        for at in whole..self.rows.len() {
            self.rows::<L, 1>(at);
        }
    }
}

impl Simd {
    /// Writes the weights of whole groups of scores, divided by `unit`, and returns their sum. Weights that would be
    /// subnormal in f32 become 0.
    pub(crate) fn weights_f32<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        weight_fn: W,
        unit: f64,
        to: &mut [f32],
    ) -> f64 {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == to.len());
        self.run(Weights { scores, weight_fn, unit, to })
    }

    /// Writes the weights in some columns of a mixture, given by its rows and their factors. The relative error is
    /// [`MIXED`] without underflow.
    pub(crate) fn mix(
        self,
        panel: Panel<'_>,
        columns: Range<usize>,
        terms: &[(usize, f32)],
        to: &mut [f32],
    ) {
        panel.check(&columns, to.len());
        self.run(Mix { panel, from: columns.start, terms, to });
    }

    /// Adds to each row's sum the weights in some columns, times the share of each column. With shares of 0 and 1 the
    /// relative error is [`SUMMED`].
    pub(crate) fn losses(
        self,
        panel: Panel<'_>,
        columns: Range<usize>,
        shares: &[f32],
        sums: &mut [f64],
    ) {
        panel.check(&columns, shares.len());
        self.run(Losses { panel, from: columns.start, shares, sums });
    }

    /// Writes the share of each key that is dropped when the step at 1 is a ramp from `1 - half` to `1 + half`. Returns
    /// the sum over the keys of the integral of the share from the key's weight upwards.
    pub(crate) fn ramp(self, mixed: &[f32], half: f32, to: &mut [f32]) -> f64 {
        assert!(mixed.len().is_multiple_of(LANES) && mixed.len() == to.len());
        self.run(Ramp { mixed, half, to })
    }

    /// Computes the inner products of `one` with some rows, all in f32.
    pub(crate) fn products(self, one: &[f32], panel: Panel<'_>, rows: &[usize], to: &mut [f64]) {
        assert!(one.len() == panel.stride && rows.len() <= to.len());
        self.run(Products { one, panel, rows, to });
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Exp, Identity, ScaledExp};
    use super::*;

    fn weights(rows: usize, n: usize) -> Vec<f32> {
        let stride = padded_stride(n);
        let mut all = vec![0.0; rows * stride];
        for (j, row) in all.chunks_exact_mut(stride).enumerate() {
            for (i, weight) in row[..n].iter_mut().enumerate() {
                let u = ((i * rows + j + 1) as f32 * 0.618_034).fract();
                *weight = u * u * u * 10f32.powi(-((i % 7) as i32));
            }
        }
        all
    }

    /// Returns the results of all passes, as bits.
    fn digest(simd: Simd, all: &[f32], stride: usize) -> Vec<u64> {
        let rows = all.len() / stride;
        let panel = Panel::new(all, stride);
        let terms: Vec<(usize, f32)> =
            (0..rows).filter(|j| j % 3 != 1).map(|j| (j, 0.1 + j as f32)).collect();
        let mut mixed = vec![0.0; stride];
        simd.mix(panel, 0..stride, &terms, &mut mixed);
        let mut shares = vec![0.0; stride];
        let value = simd.ramp(&mixed, 0.3, &mut shares);
        let mut sums = vec![0.5; rows];
        simd.losses(panel, 0..stride, &shares, &mut sums);
        let reversed: Vec<usize> = (0..rows).rev().collect();
        let mut products = vec![0.0; rows];
        simd.products(&shares, panel, &reversed, &mut products);
        let singles = mixed.iter().chain(&shares).map(|&x| f64::from(x));
        singles.chain(sums).chain(products).chain([value]).map(f64::to_bits).collect()
    }

    #[test]
    fn all_levels_return_the_same_bits() {
        let levels = Simd::all();
        let portable = levels[levels.len() - 1].1;
        for (rows, n) in [(1, 1), (2, 16), (5, 17), (17, 100), (33, 1025), (70, 4100)] {
            let (all, stride) = (weights(rows, n), padded_stride(n));
            let want = digest(portable, &all, stride);
            for &(name, simd) in levels {
                assert_eq!(digest(simd, &all, stride), want, "{name} {rows} {n}");
            }
            let keys: Vec<f64> = all.iter().map(|w| f64::from(*w).ln().max(-800.0)).collect();
            let narrow: Vec<f32> = keys.iter().map(|key| *key as f32).collect();
            let written = |simd: Simd| {
                let mut to = vec![1.0; all.len()];
                let mut out = vec![simd.weights_f32(&keys, Exp(0.0), 1.0, &mut to).to_bits()];
                out.extend(to.iter().map(|w| u64::from(w.to_bits())));
                let weight_fn = ScaledExp { shift: 0.0, scale: 0.7 };
                out.push(simd.weights_f32(&narrow, weight_fn, 1.0, &mut to).to_bits());
                out.extend(to.iter().map(|w| u64::from(w.to_bits())));
                out.push(simd.weights_f32(&all, Identity, 3.0, &mut to).to_bits());
                out.extend(to.iter().map(|w| u64::from(w.to_bits())));
                out
            };
            for &(name, simd) in levels {
                assert_eq!(written(simd), written(portable), "{name} {rows} {n}");
            }
        }
    }

    #[test]
    fn rows_do_not_lie_at_powers_of_two() {
        for n in [0, 1, 16, 17, 4096, 32767, 32768, 65536, 65537, 1 << 20] {
            let stride = padded_stride(n);
            assert!(stride >= n && stride.is_multiple_of(LANES) && stride / LANES % 2 == 1);
            assert!(stride <= n + 32.max(n / 15));
        }
    }

    #[test]
    fn errors_are_within_what_is_claimed() {
        for (rows, n) in [(1, 40), (40, 300), (700, 50)] {
            let (all, stride) = (weights(rows, n), padded_stride(n));
            let panel = Panel::new(&all, stride);
            let terms: Vec<(usize, f32)> = (0..rows).map(|j| (j, 0.3 / (1.0 + j as f32))).collect();
            let simd = Simd::current().unwrap();
            let mut mixed = vec![0.0; stride];
            simd.mix(panel, 0..stride, &terms, &mut mixed);
            for (i, &got) in mixed.iter().enumerate() {
                let want: f64 =
                    terms.iter().map(|&(j, y)| f64::from(panel.row(j)[i]) * f64::from(y)).sum();
                assert!((f64::from(got) - want).abs() <= MIXED * want);
            }
            let shares: Vec<f32> = (0..stride).map(|i| f32::from(u8::from(i % 3 == 0))).collect();
            let mut sums = vec![0.0; rows];
            simd.losses(panel, 0..stride, &shares, &mut sums);
            for (j, &got) in sums.iter().enumerate() {
                let want: f64 = panel.row(j).iter().step_by(3).map(|&w| f64::from(w)).sum();
                assert!((got - want).abs() <= SUMMED * want);
            }
        }
    }

    #[test]
    fn the_ramp_is_the_slope_of_its_value() {
        let simd = Simd::current().unwrap();
        let mut shares = [0.0; LANES];
        let mut value = |weight: f32| {
            let value = simd.ramp(&[weight; LANES], 0.25, &mut shares) / LANES as f64;
            (value, shares[3])
        };
        assert_eq!(value(0.5), (0.5, 1.0));
        assert_eq!(value(1.0), (0.0625, 0.5));
        assert_eq!(value(1.25), (0.0, 0.0));
        assert_eq!(value(f32::INFINITY), (0.0, 0.0));
        assert_eq!(value(0.0), (1.0, 1.0));
    }
}
