//! The frame in which keys are coded: moved by their mean, and turned.

use std::borrow::Cow;

use super::gram::norm;
use crate::kernels::Frame;
use crate::runtime::reused::Reused;

/// Factor for what moving a key into its frame, and a bound's own arithmetic, may round a norm by.
pub(super) const MOVED: f64 = 1.0 + 1e-5;

/// Transformation of keys before they are rounded, and of queries with them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OwnFrame<'a> {
    pub(super) mean: Cow<'a, [f32]>,
    pub(super) block: usize,
    pub(super) signs: Vec<f32>,
}

impl OwnFrame<'_> {
    /// Returns the number of f32 roundings of an entry.
    pub(super) fn moves(&self) -> usize {
        1 + self.block.trailing_zeros() as usize
    }

    pub(super) fn borrow(&self) -> Frame<'_> {
        Frame { mean: &self.mean, block: self.block, signs: &self.signs }
    }

    /// Returns the largest length of a key whose length in the frame is at most so much.
    pub(super) fn longest(&self, in_frame: f64) -> f64 {
        let mean: Reused<f64> = self.mean.iter().map(|&entry| entry.into()).collect();
        (in_frame / (self.block as f64).sqrt() + norm(&mean)) * MOVED
    }

    /// The query in the frame, f64, and what products in the frame are to be divided by.
    pub(super) fn query(&self, query: &[f64]) -> (Reused<f64>, f64) {
        let mut moved: Reused<f64> = query.iter().copied().collect();
        if self.block > 1 {
            for (entry, sign) in moved.iter_mut().zip(&self.signs) {
                *entry *= f64::from(*sign);
            }
            moved.chunks_exact_mut(self.block).for_each(hadamard);
        }
        (moved, self.block as f64)
    }
}

/// The Hadamard matrix of a power of two, not normalised, in place.
pub(super) fn hadamard(block: &mut [f64]) {
    let mut half = 1;
    while half < block.len() {
        for pair in block.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

/// A fixed sign for a dimension, as if by chance.
pub(super) fn sign(dimension: usize) -> bool {
    let mut bits = (dimension as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits ^= bits >> 29;
    bits.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 63 != 0
}
