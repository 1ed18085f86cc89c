//! Scores of encoded keys for several queries, split at an edge of each while they are in registers: what lies below is summed,
//! what does not is listed, and nothing else is written.
//!
//! Weights below the edge are bounded from above, not computed: `2^t <= 2^floor(t) (1 + t - floor(t))`, a chord of a convex
//! function, which is what the bits of `(t + 127) 2^23` are as a float. It is at most 6.2 % above.
//!
//! What a chord may be too small by, u = 2^-24 (`certified_sums` has the same steps for weights): the difference from the shift rounds
//! once (<= 87.4u), times a constant that is off by .23u (<= 20u); the bits are whole numbers below 2^30, of which the fused
//! multiply-add rounds 6 binary digits and the conversion the rest (<= 64u + 2u); sums are 16 deep (16u). Together < 190u. What
//! is below 2^-126 may be lost.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass, and so is the room behind pointers.

use half::bf16;

use super::scan::{Coarse, Number};
use crate::kernels::isa::{ByteDots, LANES, LINE, Lanes, Level, Single, ask_for};
use crate::kernels::simd::{BytePass, Simd};
use crate::kernels::weights::DEPTH;
use crate::runtime::recycled::held;

/// Keys at a time: so many groups are summed in f32.
pub(crate) const SPLIT_KEYS: usize = DEPTH * LANES;
/// Bytes of lines that are on their way while one is computed with.
const AHEAD: usize = 4096;

/// One and a shift of the exponent, as the bits of floats have them.
const ONE: f32 = (127u32 << 23) as f32;
const STEP_OF_EXPONENT: f32 = (1u32 << 23) as f32;

/// One query's scores above its edge, and the sums of weights of those below.
#[derive(Debug, Default)]
pub(crate) struct Above {
    /// No score below the edge is above this, and weights are relative to it.
    pub(crate) shift: f32,
    pub(crate) edge: f32,
    /// Ascending, and their scores.
    pub(crate) positions: Vec<u32>,
    pub(crate) scores: Vec<f32>,
    /// How many, whatever is behind them to fill up a group; at first all.
    pub(crate) count: usize,
    /// Of a sample of all scores.
    pub(crate) mean: f32,
    pub(crate) deviation: f32,
    /// The threshold that was found among them.
    pub(crate) found: f32,
    /// Whether so many lie above the edge that nothing is listed.
    pub(crate) flat: bool,
    /// Whether the edge was too high, and another has been set; and how often that happened.
    pub(crate) again: bool,
    pub(crate) misses: u32,
    /// Upper bounds of sums of weights below, and of their squares, lane by lane: of the segment of keys that is split now.
    weights: [f64; LANES],
    squares: [f64; LANES],
    /// The same of all segments before.
    before: (f64, f64),
}

impl Above {
    /// The memory of its lists.
    pub(crate) fn bytes(&self) -> usize {
        held(&self.positions) + held(&self.scores)
    }

    /// Another row is next.
    pub(crate) fn forget(&mut self) {
        (self.again, self.misses) = (false, 0);
    }

    /// Forgets what was found, and makes room for as many keys; not more than there is memory for.
    pub(crate) fn begin(&mut self, (shift, edge): (f32, f32)) {
        (self.shift, self.edge) = (shift, edge);
        self.positions.clear();
        self.scores.clear();
        (self.weights, self.squares) = ([0.0; LANES], [0.0; LANES]);
        self.before = (0.0, 0.0);
        self.count = usize::MAX;
    }

    /// Begins another segment of keys: sums then do not depend on who has split which.
    pub(crate) fn end_segment(&mut self) {
        self.before.0 += total(&self.weights);
        self.before.1 += total(&self.squares);
        (self.weights, self.squares) = ([0.0; LANES], [0.0; LANES]);
    }

    /// Takes up a segment that was split elsewhere, at the same edge; there is room.
    pub(crate) fn join(&mut self, other: &Above) {
        self.positions.extend_from_slice(&other.positions);
        self.scores.extend_from_slice(&other.scores);
        (self.weights, self.squares) = (other.weights, other.squares);
        self.end_segment();
    }

    /// Upper bounds of the sum of weights below the edge, and of their squares, but for what roundings may take from them.
    pub(crate) fn below(&self) -> (f64, f64) {
        (self.before.0 + total(&self.weights), self.before.1 + total(&self.squares))
    }
}

fn total(lanes: &[f64; LANES]) -> f64 {
    lanes.iter().sum()
}

/// Scores of keys on their way from products to lists, query after query.
pub(crate) type Passing<const Q: usize> = [[[f32; LANES]; DEPTH]; Q];

/// Keys at most [`SPLIT_KEYS`], the first of which has this position. `K` groups of keys at a time have their sums in registers,
/// where there are many.
struct Split<'a, 'b, N, const Q: usize, const K: usize> {
    lines: &'a [u8],
    scales: &'a [bf16],
    first: usize,
    queries: [Coarse<'a, N>; Q],
    /// Each query sees the keys before this position.
    prefixes: [usize; Q],
    passing: &'a mut Passing<Q>,
    to: &'a mut [&'b mut Above; Q],
}

impl<N: Number, const Q: usize, const K: usize> Split<'_, '_, N, Q, K> {
    /// Scores `G` groups from one on.
    #[inline(always)]
    unsafe fn score<B: ByteDots, const G: usize>(&mut self, group: usize) {
        let steps = self.queries[0].steps.len();
        // `split_codes` has checked that lines and numbers are there.
        let lines = self.lines.as_ptr().add(group * steps * LINE);
        let numbers = self.queries.map(|query| query.steps.as_ptr());
        let mut products = [[N::zero::<B>(); G]; Q];
        for s in 0..steps {
            let at: [*const u8; G] = std::array::from_fn(|k| lines.add((k * steps + s) * LINE));
            for line in at {
                ask_for(line.wrapping_add(AHEAD));
            }
            for (products, numbers) in products.iter_mut().zip(numbers) {
                let number = *numbers.add(s);
                for (product, line) in products.iter_mut().zip(at) {
                    *product = N::add::<B>(*product, line, number);
                }
            }
        }
        // Through memory, so that sums of products stay in registers until they are whole.
        let scales: [_; G] = std::array::from_fn(|k| {
            B::Level::load_bf16(self.scales.as_ptr().add((group + k) * LANES))
        });
        let rows = products.into_iter().zip(self.queries).zip(self.passing.iter_mut());
        for ((products, query), to) in rows {
            let groups = products.into_iter().zip(scales).zip(&mut to[group..group + G]);
            for ((product, scales), to) in groups {
                let product = N::plus::<B>(product, query.correction);
                product.mul(scales).mul(Lanes::splat(query.factor)).store(to.as_mut_ptr());
            }
        }
    }

    /// Sums the scores of a query below its edge, and lists the others; of the groups behind so many it sees a part.
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
            // What is not below the edge may be anything.
            let below = scores.lt(edge);
            let weight = bits.max(nothing).as_bits().keep(below);
            sum = sum.add(weight);
            sum_of_squares = weight.mul_add(weight, sum_of_squares);
            // What is no number is not below, and is looked at again.
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

impl<N: Number, const Q: usize, const K: usize> BytePass for Split<'_, '_, N, Q, K> {
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
    /// Scores at most [`SPLIT_KEYS`] keys for some queries as [`Simd::scan_codes`] does, and splits them at the edge of each. What lies
    /// below an edge does not exceed its shift. `first` is the position of the first key, and each query sees those before its
    /// prefix.
    pub(crate) fn split_codes<N: Number, const Q: usize, const K: usize>(
        self,
        (lines, scales, first): (&[u8], &[bf16], usize),
        queries: [Coarse<'_, N>; Q],
        prefixes: [usize; Q],
        passing: &mut Passing<Q>,
        mut to: [&mut Above; Q],
    ) {
        let steps = queries[0].steps.len();
        assert!(steps > 0 && scales.len().is_multiple_of(LANES) && scales.len() <= SPLIT_KEYS);
        assert!(lines.len() == scales.len() / LANES * steps * LINE);
        assert!(queries.iter().all(|query| query.steps.len() == steps));
        for to in &mut to {
            // Both have as many: a key more, a score more.
            assert!(to.positions.len() == to.scores.len() && to.edge <= to.shift);
            let room = |held: usize| held - to.positions.len() >= scales.len() + LANES;
            assert!(room(to.positions.capacity()) && room(to.scores.capacity()));
        }
        let to = &mut to;
        self.run_bytes(Split::<N, Q, K> { lines, scales, first, queries, prefixes, passing, to });
    }
}
