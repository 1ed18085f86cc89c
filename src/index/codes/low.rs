//! Scores of a few keys by both planes of their codes.

use half::bf16;

use super::super::prepared::Prepared;
use super::Codes;
use crate::kernels::{Simd, low_step};
use crate::runtime::reused::Reused;

/// Keys that are scored at a time.
const BLOCK: usize = 256;

impl Codes<'_> {
    /// Adds the scores of the low plane alone to those by codes of listed keys, ascending, that have a code: in nats, and
    /// exact but for the error that [`Prepared::fine_error`] has.
    pub(crate) fn add_low(&self, simd: Simd, query: &Prepared, list: &[u32], to: &mut [f64]) {
        let bits = self.content().low_bits();
        let mut numbers: Reused<i16> = query.numbers().collect();
        numbers.resize(self.frame.mean.len(), 0);
        let factor = f64::from(query.factor);
        let mut products = [0; BLOCK];
        let (mut list, mut to, mut first) = (list, to, 0usize);
        for part in self.chunks.parts() {
            let end = first + part.scales.len();
            let here = list.partition_point(|key| (*key as usize) < end);
            let (keys, behind) = list.split_at(here);
            let (scores, rest) = std::mem::take(&mut to).split_at_mut(here);
            for (keys, scores) in keys.chunks(BLOCK).zip(scores.chunks_mut(BLOCK)) {
                let products = &mut products[..keys.len()];
                simd.low_products((part.low, bits, first as u32), keys, &numbers, products);
                for ((score, product), key) in scores.iter_mut().zip(products).zip(keys) {
                    let scale: bf16 = part.scales[*key as usize - first];
                    let step = f64::from(low_step(scale.to_f32(), bits));
                    *score += f64::from(*product) * (step * factor);
                }
            }
            (list, to, first) = (behind, rest, end);
        }
    }
}
