//! Weights of scores by codes, and averages of values in codes.
//!
//! A weight times the scale of a value's code becomes a whole number of fifteen bits, relative to the largest of
//! [`BLOCK`] values. Products with bytes are then integers, as in a scan of keys, and a block's sums are exact.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use half::bf16;

use crate::kernels::index::{BIAS, ROUND};
use crate::kernels::isa::{ByteDots, LANES, LINE, Lanes, Level, STEP, Steps};
use crate::kernels::simd::{BytePass, Pass, Simd};
use crate::kernels::weights::{DEPTH, Exp, Sum, WeightFn};

/// Sums over some weights: of them, and of their squares; and the largest.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct WeightSums {
    pub(crate) weights: f64,
    pub(crate) squares: f64,
    pub(crate) largest: f32,
}

impl WeightSums {
    /// Adds those of other weights.
    pub(crate) fn join(&mut self, other: &WeightSums) {
        self.weights += other.weights;
        self.squares += other.squares;
        self.largest = self.largest.max(other.largest);
    }
}

/// Smaller weights become nothing: squares of the others, and products with scales, are normal numbers, which take a hundredth of
/// the time of subnormal ones.
pub(crate) const LIGHTEST: f32 = 1.0 / (1u64 << 62) as f32;

/// Weighs scores in place, if there is a shift, and sums the weights.
struct Weigh<'a> {
    scores: &'a mut [f32],
    shift: Option<f32>,
}

impl Pass<WeightSums> for Weigh<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> WeightSums {
        let (mut weights, mut squares) = (Sum::<L::F32>::new(), Sum::<L::F32>::new());
        let nothing = L::F32::splat(0.0);
        let mut largest = nothing;
        for block in self.scores.chunks_mut(LANES * DEPTH) {
            for group in block.chunks_exact_mut(LANES) {
                let mut weight = L::F32::load(group.as_ptr());
                if let Some(shift) = self.shift {
                    weight = Exp(shift).weigh(weight);
                    weight = weight.select(weight.ge(L::F32::splat(LIGHTEST)), nothing);
                    weight.store(group.as_mut_ptr());
                }
                weights.add(weight);
                squares.add(weight.mul(weight));
                largest = weight.max(largest);
            }
            weights.flush();
            squares.flush();
        }
        let (weights, squares) = (weights.total(), squares.total());
        WeightSums { weights, squares, largest: largest.largest() }
    }
}

/// Groups of values whose weights are rounded together: as many as an integer holds the sums of.
const GROUPS: usize = 16;
/// Values of such a block.
const BLOCK: usize = GROUPS * LANES;
/// The largest whole number, so that its high half is a signed byte.
const TOP: f32 = 32_639.0;
/// Smaller products of weights and scales count as nothing.
const LEAST: f32 = 1e-30;
/// Steps of a block.
const STEPS: usize = BLOCK / STEP;
/// Bytes of lines that are prefetched ahead.
const AHEAD: usize = 4096;

/// The weights of a block as whole numbers.
#[derive(Clone, Copy)]
struct Block {
    numbers: Steps<GROUPS>,
    /// Contribution of the bytes' bias to a sum, negated.
    correction: i32,
    /// Weight of a number of 1; 0 if all weights count as nothing.
    unit: f32,
}

impl Block {
    const NOTHING: Block = Block { numbers: Steps::ZERO, correction: 0, unit: 0.0 };
}

/// Sums of values in codes by the weights of one row.
#[derive(Debug)]
pub(crate) struct CodedSums<'a> {
    /// In whole groups of values.
    pub(crate) weights: &'a [f32],
    /// One for each entry of a value, in whole groups.
    pub(crate) sums: &'a mut [f64],
    /// Bound on what rounding the weights moves the sums by, in the largest length of a code.
    pub(crate) lost: f64,
}

/// Averages values of which a line has those in eight bits, or the lines of twice as many steps in `HALF` a byte each.
struct Average<'a, 'b, const Q: usize, const HALF: bool> {
    lines: &'a [u8],
    scales: &'a [bf16],
    to: &'a mut [CodedSums<'b>; Q],
}

impl<const Q: usize, const HALF: bool> Average<'_, '_, Q, HALF> {
    /// Rounds the weights of a row's block that begins with a group.
    #[inline(always)]
    unsafe fn round<B: ByteDots>(
        &mut self,
        q: usize,
        (group, groups): (usize, usize),
        block: &mut Block,
    ) {
        let to = &mut self.to[q];
        let (weights, scales) = (to.weights.as_ptr(), self.scales.as_ptr());
        let mut products = [[0.0f32; LANES]; GROUPS];
        let mut top = <B::Level as Level>::F32::splat(0.0);
        for (g, product) in products.iter_mut().enumerate().take(groups) {
            // `average_codes` has checked that weights and scales are there.
            let at = (group + g) * LANES;
            let weights = <B::Level as Level>::F32::load(weights.add(at))
                .mul(B::Level::load_bf16(scales.add(at)));
            weights.store(product.as_mut_ptr());
            top = weights.max(top);
        }
        let top = top.largest();
        (block.unit, block.correction) = (0.0, 0);
        if top < LEAST {
            to.lost += f64::from(top) * BLOCK as f64;
            return;
        }
        block.unit = top / TOP;
        let (inverse, round) =
            (<B::Level as Level>::F32::splat(TOP / top), <B::Level as Level>::F32::splat(ROUND));
        let mut total = <B::Level as Level>::F32::splat(0.0);
        for (g, product) in products.iter().enumerate().take(groups) {
            // The low byte of what is rounded so is that of a whole number, a signed one.
            let rounded = <B::Level as Level>::F32::load(product.as_ptr()).mul_add(inverse, round);
            let number = rounded.sub(round);
            total = total.add(number);
            // A tie of the high half goes upward, as the low one is then negative.
            let high = number.mul_add(
                <B::Level as Level>::F32::splat(1.0 / 256.0),
                <B::Level as Level>::F32::splat(1.0 / 1024.0),
            );
            block.numbers.set::<B>(
                g,
                B::Level::low_bytes(high.add(round)),
                B::Level::low_bytes(rounded),
            );
        }
        // Each number is off by half a unit, and by the roundings of the product, of the unit and of its inverse.
        to.lost += f64::from(block.unit) * (0.51 * BLOCK as f64);
        // Scales of bytes that are trusted may be anything.
        block.correction = i32::from(BIAS).wrapping_mul(total.sum() as i32).wrapping_neg();
    }

    /// Adds the sums of `T` lines of a block's steps, from one of each step's lines on.
    #[inline(always)]
    unsafe fn tile<B: ByteDots, const T: usize>(
        &mut self,
        blocks: &[Block; Q],
        (first, steps): (usize, usize),
        (at, width): (usize, usize),
    ) {
        let mut sums = [[B::zero(); T]; Q];
        let share = if HALF { 2 } else { 1 };
        // `average_codes` has checked that the lines are there, and sums for each of them.
        let lines = self.lines.as_ptr().add((first / share * width + at) * LINE);
        let mut halves = [[0; LINE]; 2];
        for s in 0..steps / share {
            for t in 0..T {
                let line = lines.add((s * width + t) * LINE);
                // A few rows take lines as they lie, and soon; more rows take a column of a block, and then the next one.
                if Q <= 2 {
                    B::Level::prefetch(line.wrapping_add(AHEAD));
                } else {
                    B::Level::prefetch_far(line.wrapping_add(STEPS / share * width * LINE));
                }
                if HALF {
                    let [low, high] = &mut halves;
                    let line = std::slice::from_raw_parts(line, LINE);
                    for ((low, high), both) in low.iter_mut().zip(high).zip(line) {
                        (*low, *high) = (both << 4, both & 0xf0);
                    }
                    // Those of the first and of the last values of a group.
                    let s = s / 2 * 4 + s % 2;
                    for (sums, block) in sums.iter_mut().zip(blocks) {
                        sums[t] = B::add(sums[t], halves[0].as_ptr(), block.numbers.step(s));
                        sums[t] = B::add(sums[t], halves[1].as_ptr(), block.numbers.step(s + 2));
                    }
                } else {
                    for (sums, block) in sums.iter_mut().zip(blocks) {
                        sums[t] = B::add(sums[t], line, block.numbers.step(s));
                    }
                }
            }
        }
        for ((sums, block), to) in sums.into_iter().zip(blocks).zip(self.to.iter_mut()) {
            let unit = <B::Level as Level>::F64::splat(block.unit.into());
            let to = to.sums.as_mut_ptr().add(at * LANES);
            for (t, sum) in sums.into_iter().enumerate() {
                let sum = B::Level::double(B::plus(sum, block.correction));
                let to = to.add(t * LANES);
                sum.mul_add(unit, <B::Level as Level>::F64::load(to)).store(to);
            }
        }
    }
}

impl<const Q: usize, const HALF: bool> BytePass for Average<'_, '_, Q, HALF> {
    #[inline(always)]
    unsafe fn run<B: ByteDots>(mut self) {
        let (groups, width) = (self.scales.len() / LANES, self.to[0].sums.len() / LANES);
        let mut blocks = [Block::NOTHING; Q];
        for group in (0..groups).step_by(GROUPS) {
            let here = (groups - group).min(GROUPS);
            for (q, block) in blocks.iter_mut().enumerate() {
                self.round::<B>(q, (group, here), block);
            }
            if blocks.iter().all(|block| block.unit == 0.0) {
                continue;
            }
            let (steps, mut at) = ((group * LANES / STEP, here * LANES / STEP), 0);
            while at < width {
                // As many lines at a time as have their sums in registers.
                let most = if B::Level::ROOMY { 8 / Q } else { 2 / Q };
                at += match most.min(width - at) {
                    8 => {
                        self.tile::<B, 8>(&blocks, steps, (at, width));
                        8
                    }
                    4..8 => {
                        self.tile::<B, 4>(&blocks, steps, (at, width));
                        4
                    }
                    2..4 => {
                        self.tile::<B, 2>(&blocks, steps, (at, width));
                        2
                    }
                    _ => {
                        self.tile::<B, 1>(&blocks, steps, (at, width));
                        1
                    }
                };
            }
        }
    }
}

impl Simd {
    /// Turns whole groups of scores, at most `shift`, into weights in place, and sums them.
    pub(crate) fn weigh_codes(self, scores: &mut [f32], shift: f32) -> WeightSums {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(Weigh { scores, shift: Some(shift) })
    }

    /// Sums whole groups of weights.
    pub(crate) fn sum_weights(self, weights: &mut [f32]) -> WeightSums {
        assert!(weights.len().is_multiple_of(LANES));
        self.run(Weigh { scores: weights, shift: None })
    }

    /// Adds to the sums of each row what its weights make of whole groups of values in codes of eight bits, or of four where lines
    /// are half as many, without the centre of the values.
    pub(crate) fn average_codes<const Q: usize>(
        self,
        lines: &[u8],
        scales: &[bf16],
        to: &mut [CodedSums<'_>; Q],
    ) {
        let width = to[0].sums.len();
        assert!(width.is_multiple_of(LANES) && scales.len().is_multiple_of(LANES));
        let whole = scales.len() * width;
        assert!(lines.len() == whole || 2 * lines.len() == whole);
        for to in &*to {
            assert!(to.sums.len() == width && to.weights.len() == scales.len());
        }
        if lines.len() == whole {
            self.run_bytes(Average::<Q, false> { lines, scales, to });
        } else {
            self.run_bytes(Average::<Q, true> { lines, scales, to });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, scales and weights of that many groups of values, the same at every run.
    fn made(groups: usize, width: usize) -> (Vec<u8>, Vec<bf16>, Vec<f32>) {
        let mut state = 7u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let lines = (0..groups * LANES * width).map(|_| next() as u8).collect();
        let scales = (0..groups * LANES).map(|_| bf16::from_f32(next() as f32 * 1e-9)).collect();
        // Of all sizes, and some of them nothing.
        let weight = |i: usize| (-((i * i % 97) as f32) * 0.4).exp() * (i % 5).min(1) as f32;
        (lines, scales, (0..groups * LANES).map(weight).collect())
    }

    /// Returns the byte of an entry of a value.
    fn byte(lines: &[u8], width: usize, value: usize, entry: usize) -> u8 {
        let line = value / STEP * (width / LANES) + entry / LANES;
        lines[line * LINE + entry % LANES * STEP + value % STEP]
    }

    fn averages<const Q: usize>(
        simd: Simd,
        (lines, scales, weights): &(Vec<u8>, Vec<bf16>, Vec<f32>),
        width: usize,
    ) -> Vec<(Vec<f64>, f64)> {
        let mut sums = vec![vec![0.5; width]; Q];
        let mut rows = sums.iter_mut();
        let mut to: [CodedSums<'_>; Q] = std::array::from_fn(|_| CodedSums {
            weights,
            sums: &mut rows.next().unwrap()[..],
            lost: 0.0,
        });
        simd.average_codes(lines, scales, &mut to);
        let lost = to.map(|to| to.lost);
        sums.into_iter().zip(lost).collect()
    }

    /// Returns bytes with empty low halves, and the same as pairs of halves.
    fn halves(lines: &[u8], width: usize) -> (Vec<u8>, Vec<u8>) {
        let whole: Vec<u8> = lines.iter().map(|byte| byte & 0xf0).collect();
        let group = |group: &[u8]| -> Vec<u8> {
            let (first, last) = group.split_at(group.len() / 2);
            first.iter().zip(last).map(|(first, last)| first >> 4 | last).collect()
        };
        let packed = whole.chunks_exact(width * LANES).flat_map(group).collect();
        (whole, packed)
    }

    #[test]
    fn averages_of_halves_are_those_of_whole_bytes() {
        for (groups, width) in [(1, 16), (3, 48), (17, 128), (33, 80)] {
            let (lines, scales, weights) = made(groups, width);
            let (whole, packed) = halves(&lines, width);
            let whole = (whole, scales.clone(), weights.clone());
            let packed = (packed, scales, weights);
            for (name, simd) in Simd::all() {
                let (of, same) = (&whole, &packed);
                let one = averages::<1>(*simd, of, width);
                assert_eq!(one, averages::<1>(*simd, same, width), "{name} {width}");
                assert_eq!(averages::<4>(*simd, of, width), averages::<4>(*simd, same, width));
                assert_eq!(averages::<8>(*simd, of, width), averages::<8>(*simd, same, width));
            }
        }
    }

    #[test]
    fn averages_are_as_near_as_they_say_at_every_level() {
        for (groups, width) in [(1, 16), (3, 48), (4, 128), (9, 80), (33, 64), (6, 144)] {
            let given = made(groups, width);
            let (lines, scales, weights) = &given;
            let portable = averages::<1>(Simd::all().last().unwrap().1, &given, width).remove(0);
            for (name, simd) in Simd::all() {
                let all = [
                    averages::<1>(*simd, &given, width),
                    averages::<2>(*simd, &given, width),
                    averages::<4>(*simd, &given, width),
                    averages::<8>(*simd, &given, width),
                ];
                assert!(all.iter().flatten().all(|one| *one == portable), "{name} {width}");
            }
            let (mut off, mut size) = (0.0, 0.0);
            for (entry, sum) in portable.0.iter().enumerate() {
                let term = |value: usize| {
                    let code = f64::from(byte(lines, width, value, entry)) - 128.0;
                    f64::from(weights[value]) * f64::from(scales[value].to_f32()) * code
                };
                let terms = (0..weights.len()).map(term);
                size += terms.clone().map(f64::abs).sum::<f64>();
                off += (sum - 0.5 - terms.sum::<f64>()).powi(2);
            }
            let bound = portable.1 * 128.0 * (width as f64).sqrt() + 3e-7 * size;
            assert!(off.sqrt() <= bound && portable.1 > 0.0, "{width}: {} {bound}", off.sqrt());
        }
    }

    /// Numbers that are halves of a unit round the same way, and all codes are the largest.
    #[test]
    fn rounding_of_weights_reaches_its_bound() {
        let (width, lines) = (16, vec![255; BLOCK * 16]);
        let numbers = (0..BLOCK).map(|i| 2.0 * (i * 101 % 16_000) as f32 + 0.5);
        let mut weights: Vec<f32> = numbers.collect();
        weights[0] = TOP;
        let given = (lines, vec![bf16::ONE; BLOCK], weights);
        let (sums, lost) = averages::<1>(Simd::current().unwrap(), &given, width).remove(0);
        let real: f64 = given.2.iter().map(|&weight| f64::from(weight) * 127.0).sum();
        let off = (sums[0] - 0.5 - real).abs();
        assert!(off <= lost * 127.0 && off >= 0.96 * lost * 127.0, "{off} {lost}");
        // What is too small for a number counts in whole.
        let tiny = (given.0, given.1, vec![LEAST / 2.0; BLOCK]);
        let (sums, lost) = averages::<1>(Simd::current().unwrap(), &tiny, width).remove(0);
        assert!(sums[0] == 0.5 && lost >= f64::from(LEAST) / 2.0 * BLOCK as f64);
    }

    #[test]
    fn weights_and_their_sums_are_the_same_at_every_level() {
        // The largest is in no first group.
        let scores: Vec<f32> =
            (0..20 * LANES).map(|i| -(((i * 37 + 5) % 91) as f32) * 0.7).collect();
        let weigh = |simd: Simd| {
            let mut weights = scores.clone();
            let sums = simd.weigh_codes(&mut weights, 0.5);
            assert_eq!(simd.sum_weights(&mut weights.clone()), sums);
            (weights, sums)
        };
        let (weights, sums) = weigh(Simd::current().unwrap());
        let wide = weights.iter().map(|&weight| f64::from(weight));
        assert!((sums.weights / wide.clone().sum::<f64>() - 1.0).abs() < 1e-6);
        assert!((sums.squares / wide.map(|w| w * w).sum::<f64>() - 1.0).abs() < 1e-6);
        assert_eq!(sums.largest, weights.iter().copied().fold(0.0, f32::max));
        for (name, simd) in Simd::all() {
            assert_eq!(weigh(*simd), (weights.clone(), sums), "{name}");
        }
    }
}
