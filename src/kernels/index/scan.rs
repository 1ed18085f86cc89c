//! Scores of encoded keys.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use half::bf16;

use crate::kernels::isa::{ByteDots, LANES, LINE, Lanes, Level, Step, ask_for};
use crate::kernels::simd::{BytePass, Simd};

/// A query in 16-bit numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coarse<'a> {
    /// One for each line of sixteen keys.
    pub(crate) steps: &'a [Step],
    /// What the bytes' bias adds to a product, negated.
    pub(crate) correction: i32,
    /// What a product of numbers and codes is to be multiplied by, together with the key's scale.
    pub(crate) factor: f32,
}

/// Bytes of lines that are on their way while one is computed with.
const AHEAD: usize = 4096;

struct Scan<'a, const Q: usize> {
    lines: &'a [u8],
    scales: &'a [bf16],
    queries: [Coarse<'a>; Q],
    to: [&'a mut [f32]; Q],
}

impl<const Q: usize> BytePass for Scan<'_, Q> {
    #[inline(always)]
    unsafe fn run<B: ByteDots>(mut self) {
        let steps = self.queries[0].steps.len();
        let blocks = self.lines.chunks_exact(steps * LINE).zip(self.scales.chunks_exact(LANES));
        let steps = self.queries.map(|query| &query.steps[..steps]);
        for (b, (lines, scales)) in blocks.enumerate() {
            let mut sums = [B::zero(); Q];
            for (s, line) in lines.chunks_exact(LINE).enumerate() {
                ask_for(line.as_ptr().wrapping_add(AHEAD));
                for (sum, steps) in sums.iter_mut().zip(steps) {
                    *sum = B::add(*sum, line.as_ptr(), steps[s]);
                }
            }
            let scales = B::Level::load_bf16(scales.as_ptr());
            for ((sum, query), to) in sums.into_iter().zip(self.queries).zip(&mut self.to) {
                let products = B::plus(sum, query.correction);
                let factor = Lanes::splat(query.factor);
                let scores = products.mul(scales).mul(factor);
                scores.store(to[b * LANES..][..LANES].as_mut_ptr());
            }
        }
    }
}

impl Simd {
    /// What keys score, as far as their codes know: the product of each with a query's numbers, times its scale, times
    /// the query's factor; three roundings.
    pub(crate) fn scan_codes<const Q: usize>(
        self,
        lines: &[u8],
        scales: &[bf16],
        queries: [Coarse<'_>; Q],
        to: [&mut [f32]; Q],
    ) {
        let steps = queries[0].steps.len();
        assert!(steps > 0 && scales.len().is_multiple_of(LANES));
        assert!(lines.len() == scales.len() / LANES * steps * LINE);
        assert!(queries.iter().all(|query| query.steps.len() == steps));
        assert!(to.iter().all(|to| to.len() >= scales.len()));
        self.run_bytes(Scan { lines, scales, queries, to });
    }
}
