//! Scores of all keys by their codes.

use super::codes::{Codes, SEGMENT};
use super::prepared::Prepared;
use crate::error::Error;
use crate::kernels::{Coarse, LANES, Simd};
use crate::runtime::threads;

impl Codes<'_> {
    /// A query as codes are scored with; `scale` multiplies all products.
    pub(crate) fn prepare(&self, simd: Simd, query: &[f64], scale: f64) -> Prepared {
        Prepared::new(simd, query, scale, self.frame(), self.grams())
    }

    /// Scores keys by their codes, whole groups of them, as many as there is room for; those without a code, and what is behind the
    /// last key, score -inf.
    ///
    /// # Errors
    /// That of the context that ends the call.
    pub(crate) fn scan<const Q: usize>(
        &self,
        simd: Simd,
        queries: [Coarse<'_>; Q],
        to: [&mut [f32]; Q],
        threads: usize,
    ) -> Result<(), Error> {
        let groups = self.len().div_ceil(LANES).min(to[0].len() / LANES);
        let mut to = to;
        let segments = self.pieces(groups, SEGMENT / LANES).count();
        if threads == 1 || segments < 2 {
            for (lines, scales, first) in self.pieces(groups, usize::MAX) {
                let here = to.each_mut().map(|to| &mut to[first..first + scales.len()]);
                simd.scan_codes(lines, scales, queries, here);
            }
        } else {
            let mut rest = to.each_mut().map(|to| &mut **to);
            let mut tasks = Vec::with_capacity(segments);
            for (lines, scales, _) in self.pieces(groups, SEGMENT / LANES) {
                let here = rest.each_mut().map(|rest| {
                    let (here, behind) = std::mem::take(rest).split_at_mut(scales.len());
                    *rest = behind;
                    here
                });
                tasks.push((lines, scales, here));
            }
            let one = |(lines, scales, to)| simd.scan_codes(lines, scales, queries, to);
            threads::map(threads, tasks, 1, one)?;
        }
        for to in to {
            for uncoded in self.uncoded() {
                if let Some(score) = to.get_mut(uncoded as usize) {
                    *score = f32::NEG_INFINITY;
                }
            }
            let end = self.len().min(to.len());
            to[end..].fill(f32::NEG_INFINITY);
        }
        Ok(())
    }
}
