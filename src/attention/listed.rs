//! Keys of a row that have weights of their own, not those by codes.

use crate::error::Error;
use crate::index::CodeSums;
use crate::runtime::memory::room;
use crate::runtime::reused::Reused;

/// Relative error of a weight and of sums of weights in f64, generously, beside that of each addition.
const SUMS: f64 = 1e-12;

/// Keys, ascending, and their weights.
#[derive(Default)]
pub(super) struct Listed {
    pub(super) keys: Reused<u32>,
    pub(super) weights: Reused<f64>,
}

impl Listed {
    /// Returns a list with memory for some keys.
    pub(super) fn with_hint(keys: usize) -> Self {
        Listed { keys: Reused::with_hint(keys), weights: Reused::with_hint(keys) }
    }

    /// Makes room for more keys.
    pub(super) fn reserve(&mut self, count: usize) -> Result<(), Error> {
        room("k", &mut self.keys, count)?;
        room("k", &mut self.weights, count)
    }

    /// Puts keys that were appended behind the first `sorted` where they belong.
    pub(super) fn sort(&mut self, sorted: usize) {
        if sorted == 0 || sorted == self.keys.len() {
            return;
        }
        let pairs = self.keys.iter().copied().zip(self.weights.iter().copied());
        let mut pairs: Reused<(u32, f64)> = pairs.collect();
        pairs.sort_unstable_by_key(|pair| pair.0);
        for ((key, weight), pair) in self.keys.iter_mut().zip(&mut *self.weights).zip(&pairs) {
            (*key, *weight) = *pair;
        }
    }

    /// Returns the sum of the weights.
    pub(super) fn total(&self) -> f64 {
        self.weights.iter().sum()
    }

    /// Returns the sum of their squares, rounded up.
    pub(super) fn squares(&self) -> f64 {
        let sum: f64 = self.weights.iter().map(|weight| weight * weight).sum();
        sum * (1.0 + self.weights.len() as f64 * f64::EPSILON)
    }

    /// Returns bounds of the sums over some of the weights.
    pub(super) fn sums<'w>(weights: impl Iterator<Item = &'w f64>) -> CodeSums {
        let (mut total, mut squares, mut largest, mut count) = (0.0, 0.0, 0.0f64, 0usize);
        for weight in weights {
            total += weight;
            squares += weight * weight;
            largest = if *weight > largest { *weight } else { largest };
            count += 1;
        }
        let round = SUMS + count as f64 * f64::EPSILON;
        CodeSums {
            upper: total * (1.0 + round),
            lower: total * (1.0 - round),
            squares: squares * (1.0 + 2.0 * round),
            largest: largest * (1.0 + SUMS),
        }
    }
}
