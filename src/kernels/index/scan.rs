//! Scores of encoded keys.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use half::bf16;

use crate::kernels::isa::{ByteDots, LANES, LINE, Lanes, Level, Step, ask_for};
use crate::kernels::simd::{BytePass, Simd};

/// A quantized query.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Coarse<'a> {
    /// Four numbers for each line of sixteen keys.
    pub(crate) steps: &'a [Step],
    /// Contribution of the bytes' bias to a product, negated.
    pub(crate) correction: i32,
    /// Factor of a product of numbers and codes, together with the key's scale.
    pub(crate) factor: f32,
}

/// Queries whose sums fit in the registers of every level; a larger number must be a multiple.
const FEW: usize = 4;

/// Bytes of lines that are prefetched ahead.
const AHEAD: usize = 4096;

struct Scan<'a, const Q: usize> {
    lines: &'a [u8],
    scales: &'a [bf16],
    queries: [Coarse<'a>; Q],
    to: [&'a mut [f32]; Q],
}

impl<const Q: usize> Scan<'_, Q> {
    /// Computes the scores of `R` queries from `first` on.
    #[inline(always)]
    unsafe fn some<B: ByteDots, const R: usize>(&mut self, first: usize) {
        let steps = self.queries[0].steps.len();
        let blocks = self.lines.chunks_exact(steps * LINE).zip(self.scales.chunks_exact(LANES));
        let queries: [Coarse<'_>; R] = std::array::from_fn(|r| self.queries[first + r]);
        // `scan_codes` has checked that each has as many: a check of each number would take as long as the products.
        let numbers = queries.map(|query| query.steps.as_ptr());
        for (b, (lines, scales)) in blocks.enumerate() {
            let mut sums = [B::zero(); R];
            for (s, line) in lines.chunks_exact(LINE).enumerate() {
                ask_for(line.as_ptr().wrapping_add(AHEAD));
                for (sum, numbers) in sums.iter_mut().zip(numbers) {
                    *sum = B::add(*sum, line.as_ptr(), *numbers.add(s));
                }
            }
            let scales = B::Level::load_bf16(scales.as_ptr());
            for (r, (sum, query)) in sums.into_iter().zip(queries).enumerate() {
                let products = B::plus(sum, query.correction);
                let factor = Lanes::splat(query.factor);
                let scores = products.mul(scales).mul(factor);
                scores.store(self.to[first + r][b * LANES..][..LANES].as_mut_ptr());
            }
        }
    }
}

impl<const Q: usize> BytePass for Scan<'_, Q> {
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
    pub(crate) fn scan_codes<const Q: usize>(
        self,
        lines: &[u8],
        scales: &[bf16],
        queries: [Coarse<'_>; Q],
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
