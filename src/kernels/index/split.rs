//! Scores of quantized keys for several queries, split in registers at an edge of each query. Scores below are summed,
//! the others are listed, and nothing else is written.
//!
//! Weights below the edge are bounded from above, not computed: `2^t <= 2^floor(t) (1 + t - floor(t))`, a chord of a
//! convex function, whose float has the bits of `(t + 127) 2^23`. It is at most 6.2 % above.
//!
//! Rounding may lower a chord, u = 2^-24 (`certified_sums` has the same steps for weights). The difference from the
//! shift rounds once (<= 87.4u), times a constant that is off by .23u (<= 20u). The bits are integers below 2^30, of
//! which the fused multiply-add rounds 6 binary digits and the conversion the rest (<= 64u + 2u). Sums are 16 deep
//! (16u). Together < 190u. Weights below 2^-126 may be lost.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass, and so is the room behind pointers.

use half::bf16;

use super::scan::Coarse;
use crate::kernels::isa::{ByteDots, LANES, LINE, Lanes, Level, Single, ask_for};
use crate::kernels::simd::{BytePass, Simd};
use crate::kernels::weights::DEPTH;
use crate::runtime::held::Held;

/// Keys at a time: that many groups are summed in f32.
pub(crate) const SPLIT_KEYS: usize = DEPTH * LANES;
/// Bytes of lines that are prefetched ahead.
const AHEAD: usize = 4096;

/// One and a shift of the exponent, as the bits of floats have them.
const ONE: f32 = (127u32 << 23) as f32;
const STEP_OF_EXPONENT: f32 = (1u32 << 23) as f32;

/// One query's scores above its edge, and the sums of weights of those below.
#[derive(Debug, Default)]
pub(crate) struct Above {
    /// Upper bound on the scores below the edge, to which weights are relative.
    pub(crate) shift: f32,
    pub(crate) edge: f32,
    /// Positions, ascending, then their scores.
    pub(crate) positions: Vec<u32>,
    pub(crate) scores: Vec<f32>,
    /// Number of listed scores, without the padding of a group; at first all.
    pub(crate) count: usize,
    /// Mean and deviation of a sample of all scores.
    pub(crate) mean: f32,
    pub(crate) deviation: f32,
    /// Threshold found among them.
    pub(crate) found: f32,
    /// `true` if so many scores lie above the edge that nothing is listed.
    pub(crate) flat: bool,
    /// `true` if the edge was too high and was replaced; then the number of such misses.
    pub(crate) again: bool,
    pub(crate) misses: u32,
    /// Upper bounds of sums of weights below, and of their squares, lane by lane, for the current segment of keys.
    weights: [f64; LANES],
    squares: [f64; LANES],
    /// The same for all earlier segments.
    before: (f64, f64),
}

impl Held for Above {
    fn held(&self) -> usize {
        self.positions.held() + self.scores.held()
    }
}

impl Above {
    /// Prepares for another row.
    pub(crate) fn forget(&mut self) {
        (self.again, self.misses) = (false, 0);
    }

    /// Clears the results, and makes room for the keys, as far as memory allows.
    pub(crate) fn begin(&mut self, (shift, edge): (f32, f32)) {
        (self.shift, self.edge) = (shift, edge);
        self.positions.clear();
        self.scores.clear();
        (self.weights, self.squares) = ([0.0; LANES], [0.0; LANES]);
        self.before = (0.0, 0.0);
        self.count = usize::MAX;
    }

    /// Ends a segment of keys: sums then do not depend on the threads that split them.
    pub(crate) fn end_segment(&mut self) {
        self.before.0 += total(&self.weights);
        self.before.1 += total(&self.squares);
        (self.weights, self.squares) = ([0.0; LANES], [0.0; LANES]);
    }

    /// Appends a segment that was split elsewhere at the same edge. There must be room.
    pub(crate) fn join(&mut self, other: &Above) {
        self.positions.extend_from_slice(&other.positions);
        self.scores.extend_from_slice(&other.scores);
        (self.weights, self.squares) = (other.weights, other.squares);
        self.end_segment();
    }

    /// Returns upper bounds of the sum of weights below the edge, and of their squares, before an allowance for
    /// rounding.
    pub(crate) fn below(&self) -> (f64, f64) {
        (self.before.0 + total(&self.weights), self.before.1 + total(&self.squares))
    }
}

fn total(lanes: &[f64; LANES]) -> f64 {
    lanes.iter().sum()
}

/// Scores of keys between products and lists, query after query.
pub(crate) type Passing<const Q: usize> = [[[f32; LANES]; DEPTH]; Q];

/// Pass over at most [`SPLIT_KEYS`] keys, the first at position `first`. `K` groups of keys at a time have their sums
/// in registers, if there are enough.
struct Split<'a, 'b, const Q: usize, const K: usize> {
    lines: &'a [u8],
    scales: &'a [bf16],
    first: usize,
    queries: [Coarse<'a>; Q],
    /// Each query sees the keys before this position.
    prefixes: [usize; Q],
    passing: &'a mut Passing<Q>,
    to: &'a mut [&'b mut Above; Q],
}

impl<const Q: usize, const K: usize> Split<'_, '_, Q, K> {
    /// Scores `G` groups from `group` on.
    #[inline(always)]
    unsafe fn score<B: ByteDots, const G: usize>(&mut self, group: usize) {
        let steps = self.queries[0].steps.len();
        // `split_codes` has checked that lines and numbers are there.
        let lines = self.lines.as_ptr().add(group * steps * LINE);
        let numbers = self.queries.map(|query| query.steps.as_ptr());
        let mut products = [[B::zero(); G]; Q];
        for s in 0..steps {
            let at: [*const u8; G] = std::array::from_fn(|k| lines.add((k * steps + s) * LINE));
            for line in at {
                ask_for(line.wrapping_add(AHEAD));
            }
            for (products, numbers) in products.iter_mut().zip(numbers) {
                let number = *numbers.add(s);
                for (product, line) in products.iter_mut().zip(at) {
                    *product = B::add(*product, line, number);
                }
            }
        }
        // Through memory, so that sums of products stay in registers until they are complete.
        let scales: [_; G] = std::array::from_fn(|k| {
            B::Level::load_bf16(self.scales.as_ptr().add((group + k) * LANES))
        });
        let rows = products.into_iter().zip(self.queries).zip(self.passing.iter_mut());
        for ((products, query), to) in rows {
            let groups = products.into_iter().zip(scales).zip(&mut to[group..group + G]);
            for ((product, scales), to) in groups {
                let product = B::plus(product, query.correction);
                product.mul(scales).mul(Lanes::splat(query.factor)).store(to.as_mut_ptr());
            }
        }
    }

    /// Sums the scores of a query below its edge, and lists the others. The query sees the first `whole` groups in
    /// full, and a part of the rest.
    #[inline(always)]
    unsafe fn divide<L: Level>(&mut self, r: usize, (whole, groups): (usize, usize)) {
        let Above { shift, edge, weights, squares, positions, scores: listed, .. } =
            &mut *self.to[r];
        let (shift, edge) = (L::F32::splat(*shift), L::F32::splat(*edge));
        let exponents = L::F32::splat(std::f32::consts::LOG2_E * STEP_OF_EXPONENT);
        let (one, nothing) = (L::F32::splat(ONE), L::F32::splat(0.0));
        let (mut sum, mut sum_of_squares) = (nothing, nothing);
        // Bit i is group i: some of its scores are not below the edge.
        let (mut masks, mut left) = ([0u16; DEPTH], 0u32);
        for (group, mask) in masks.iter_mut().enumerate().take(groups) {
            let mut scores = L::F32::load(self.passing[r][group].as_ptr());
            if group >= whole {
                let seen = self.prefixes[r].saturating_sub(self.first + group * LANES).min(LANES);
                let seen = L::F32::mask(((1u32 << seen) - 1) as u16);
                scores = scores.select(seen, L::F32::splat(f32::NEG_INFINITY));
                scores.store(self.passing[r][group].as_mut_ptr());
            }
            let bits = scores.sub(shift).mul_add(exponents, one);
            // Scores not below the edge may have any bits here.
            let below = scores.lt(edge);
            let weight = bits.max(nothing).as_bits().keep(below);
            sum = sum.add(weight);
            sum_of_squares = weight.mul_add(weight, sum_of_squares);
            // NaN is not below, and is examined again.
            let above = !L::F32::number(below);
            *mask = above;
            left |= u32::from(above != 0) << group;
        }
        let mut written = positions.len();
        while left != 0 {
            let group = left.trailing_zeros() as usize;
            left &= left - 1;
            let mask = masks[group];
            // `split_codes` has checked that there is room.
            let first = (self.first + group * LANES) as u32;
            L::compress_count(first, mask, positions.as_mut_ptr().add(written));
            let scores = L::F32::load(self.passing[r][group].as_ptr());
            scores.compress_store(mask, listed.as_mut_ptr().add(written));
            written += mask.count_ones() as usize;
        }
        positions.set_len(written);
        listed.set_len(written);
        for (lanes, more) in [(weights, sum), (squares, sum_of_squares)] {
            more.widen_add(L::F64::load(lanes.as_ptr())).store(lanes.as_mut_ptr());
        }
    }
}

impl<const Q: usize, const K: usize> BytePass for Split<'_, '_, Q, K> {
    #[inline(always)]
    unsafe fn run<B: ByteDots>(mut self) {
        let groups = self.scales.len() / LANES;
        let mut group = 0;
        while B::Level::ROOMY && group + K <= groups {
            self.score::<B, K>(group);
            group += K;
        }
        for group in group..groups {
            self.score::<B, 1>(group);
        }
        for r in 0..Q {
            let whole = self.prefixes[r].saturating_sub(self.first) / LANES;
            self.divide::<B::Level>(r, (whole, groups));
        }
    }
}

impl Simd {
    /// Scores at most [`SPLIT_KEYS`] keys for some queries as [`Simd::scan_codes`] does, and splits them at the edge of
    /// each. Scores below an edge must not exceed its shift. `first` is the position of the first key, and each query
    /// sees those before its prefix.
    pub(crate) fn split_codes<const Q: usize, const K: usize>(
        self,
        (lines, scales, first): (&[u8], &[bf16], usize),
        queries: [Coarse<'_>; Q],
        prefixes: [usize; Q],
        passing: &mut Passing<Q>,
        mut to: [&mut Above; Q],
    ) {
        let steps = queries[0].steps.len();
        assert!(steps > 0 && scales.len().is_multiple_of(LANES) && scales.len() <= SPLIT_KEYS);
        assert!(lines.len() == scales.len() / LANES * steps * LINE);
        assert!(queries.iter().all(|query| query.steps.len() == steps));
        for to in &mut to {
            // Both lists have the same length.
            assert!(to.positions.len() == to.scores.len() && to.edge <= to.shift);
            let room = |held: usize| held - to.positions.len() >= scales.len() + LANES;
            assert!(room(to.positions.capacity()) && room(to.scores.capacity()));
        }
        let to = &mut to;
        self.run_bytes(Split::<Q, K> { lines, scales, first, queries, prefixes, passing, to });
    }
}
