//! Scores of encoded keys.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use half::bf16;

use crate::kernels::isa::{ByteDots, LANES, LINE, Lanes, Level, STEP, Step, ask_for};
use crate::kernels::simd::{BytePass, Simd};

/// A quantized query: [`Step`]s have 16 bits, [`Bytes`] eight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coarse<'a, N = Step> {
    /// Four numbers for each line of sixteen keys.
    pub(crate) steps: &'a [N],
    /// Contribution of the bytes' bias to a product, negated.
    pub(crate) correction: i32,
    /// Factor of a product of numbers and codes, together with the key's scale.
    pub(crate) factor: f32,
}

impl<N> Default for Coarse<'_, N> {
    fn default() -> Self {
        Coarse { steps: &[], correction: 0, factor: 0.0 }
    }
}

/// Four numbers of a query in eight bits each.
pub(crate) type Bytes = [i8; STEP];

/// Multiplication of a query's numbers with bytes of keys.
pub(crate) trait Number: Copy {
    type Sums<B: ByteDots>: Copy;
    unsafe fn zero<B: ByteDots>() -> Self::Sums<B>;
    unsafe fn add<B: ByteDots>(sums: Self::Sums<B>, line: *const u8, four: Self) -> Self::Sums<B>;
    unsafe fn plus<B: ByteDots>(sums: Self::Sums<B>, number: i32) -> <B::Level as Level>::F32;
}

impl Number for Step {
    type Sums<B: ByteDots> = B::Sums;
    #[inline(always)]
    unsafe fn zero<B: ByteDots>() -> B::Sums {
        B::zero()
    }
    #[inline(always)]
    unsafe fn add<B: ByteDots>(sums: B::Sums, line: *const u8, four: Self) -> B::Sums {
        B::add(sums, line, four)
    }
    #[inline(always)]
    unsafe fn plus<B: ByteDots>(sums: B::Sums, number: i32) -> <B::Level as Level>::F32 {
        B::plus(sums, number)
    }
}

impl Number for Bytes {
    type Sums<B: ByteDots> = B::Short;
    #[inline(always)]
    unsafe fn zero<B: ByteDots>() -> B::Short {
        B::short_zero()
    }
    #[inline(always)]
    unsafe fn add<B: ByteDots>(sums: B::Short, line: *const u8, four: Self) -> B::Short {
        B::short_add(sums, line, four)
    }
    #[inline(always)]
    unsafe fn plus<B: ByteDots>(sums: B::Short, number: i32) -> <B::Level as Level>::F32 {
        B::short_plus(sums, number)
    }
}

/// Queries whose sums fit in the registers of every level; a larger number must be a multiple.
const FEW: usize = 4;

/// Bytes of lines that are prefetched ahead.
const AHEAD: usize = 4096;

struct Scan<'a, N, const Q: usize> {
    lines: &'a [u8],
    scales: &'a [bf16],
    queries: [Coarse<'a, N>; Q],
    to: [&'a mut [f32]; Q],
}

impl<N: Number, const Q: usize> Scan<'_, N, Q> {
    /// Computes the scores of `R` queries from `first` on.
    #[inline(always)]
    unsafe fn some<B: ByteDots, const R: usize>(&mut self, first: usize) {
        let steps = self.queries[0].steps.len();
        let blocks = self.lines.chunks_exact(steps * LINE).zip(self.scales.chunks_exact(LANES));
        let queries: [Coarse<'_, N>; R] = std::array::from_fn(|r| self.queries[first + r]);
        // `scan_codes` has checked that each has as many: a check of each number would take as long as the products.
        let numbers = queries.map(|query| query.steps.as_ptr());
        for (b, (lines, scales)) in blocks.enumerate() {
            let mut sums = [N::zero::<B>(); R];
            for (s, line) in lines.chunks_exact(LINE).enumerate() {
                ask_for(line.as_ptr().wrapping_add(AHEAD));
                for (sum, numbers) in sums.iter_mut().zip(numbers) {
                    *sum = N::add::<B>(*sum, line.as_ptr(), *numbers.add(s));
                }
            }
            let scales = B::Level::load_bf16(scales.as_ptr());
            for (r, (sum, query)) in sums.into_iter().zip(queries).enumerate() {
                let products = N::plus::<B>(sum, query.correction);
                let factor = Lanes::splat(query.factor);
                let scores = products.mul(scales).mul(factor);
                scores.store(self.to[first + r][b * LANES..][..LANES].as_mut_ptr());
            }
        }
    }
}

impl<N: Number, const Q: usize> BytePass for Scan<'_, N, Q> {
    #[inline(always)]
    unsafe fn run<B: ByteDots>(mut self) {
        if Q <= FEW || B::Level::ROOMY {
            self.some::<B, Q>(0);
        } else {
            for first in (0..Q).step_by(FEW) {
                self.some::<B, FEW>(first);
            }
        }
    }
}

impl Simd {
    /// Computes the scores of quantized keys: the product of each with a query's numbers, times its scale, times the
    /// query's factor. Three roundings.
    pub(crate) fn scan_codes<N: Number, const Q: usize>(
        self,
        lines: &[u8],
        scales: &[bf16],
        queries: [Coarse<'_, N>; Q],
        to: [&mut [f32]; Q],
    ) {
        let steps = queries[0].steps.len();
        const { assert!(Q <= FEW || Q.is_multiple_of(FEW)) };
        assert!(steps > 0 && scales.len().is_multiple_of(LANES));
        assert!(lines.len() == scales.len() / LANES * steps * LINE);
        assert!(queries.iter().all(|query| query.steps.len() == steps));
        assert!(to.iter().all(|to| to.len() >= scales.len()));
        self.run_bytes(Scan { lines, scales, queries, to });
    }
}
