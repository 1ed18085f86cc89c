//! A query: what it sees, and its exact scores.

use crate::error::Error;
use crate::kernels::{Element, Keys, LANES, Picked, Simd};
use crate::runtime::reused::Reused;
use crate::runtime::threads;

/// Exact scores that are off by more say nothing.
pub(super) const BLURRED: f64 = 300.0;

/// Listed keys that one thread scores at a time.
const LISTED: usize = 512;

/// Keys of a head that a query sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowVisibility<'a> {
    /// Keys before this position.
    pub(crate) prefix: usize,
    /// A byte per key, zero where it is masked.
    pub(crate) allowed: Option<&'a [u8]>,
}

impl RowVisibility<'_> {
    /// Returns the number of keys that it sees.
    pub(crate) fn count(&self) -> usize {
        let seen =
            |allowed: &[u8]| allowed[..self.prefix].iter().filter(|byte| **byte != 0).count();
        self.allowed.map_or(self.prefix, seen)
    }

    pub(crate) fn sees(&self, key: usize) -> bool {
        key < self.prefix && self.allowed.is_none_or(|allowed| allowed[key] != 0)
    }
}

/// A query.
#[derive(Debug, Clone)]
pub(crate) struct Query {
    /// In whole groups.
    pub(crate) entries: Reused<f64>,
    pub(crate) scale: f64,
    /// Bound on the error of the f64 product with a key, times the scale.
    pub(crate) error: f64,
}

impl Query {
    /// Of keys whose entries are at most `largest` in size.
    pub(crate) fn new(entries: &[f64], scale: f64, largest: f64) -> Self {
        let mut padded: Reused<f64> = entries.iter().copied().collect();
        padded.resize(entries.len().next_multiple_of(LANES), 0.0);
        let sum = entries.iter().map(|entry| entry.abs()).sum();
        let error = Self::error_of(entries.len(), sum, scale, largest);
        Query { entries: padded, scale, error }
    }

    /// Returns a bound on the error of scores, if absolute entries add up to at most `sum`, and those of keys are at
    /// most `largest`.
    pub(crate) fn error_of(dim: usize, sum: f64, scale: f64, largest: f64) -> f64 {
        // Terms of a sum in lanes and a tree, the scale, an offset of the same size (a compensated sum) and subtracting it;
        // v = 2^-53. Each of these may also underflow, and so may every product, here and in the offset.
        let roundings = (dim / LANES + 2 * dim.ilog2() as usize + 16) as f64;
        let underflow = f64::from_bits(1) * (roundings + dim as f64);
        (sum * largest * f64::EPSILON * roundings + underflow) * scale.abs() + f64::MIN_POSITIVE
    }

    /// The exact scores of some keys less the codes' offset.
    pub(crate) fn score<E: Element>(
        &self,
        simd: Simd,
        keys: Keys<'_, E>,
        picked: Picked<'_>,
        offset: f64,
        to: &mut [f64],
    ) {
        simd.products_f64(keys, picked, &self.entries, to);
        for score in to {
            *score = *score * self.scale - offset;
        }
    }

    /// The exact scores of listed keys less the codes' offset, over threads.
    ///
    /// # Errors
    /// That of the context that ends the call.
    pub(crate) fn score_listed<E: Element>(
        &self,
        (simd, threads): (Simd, usize),
        keys: Keys<'_, E>,
        list: &[u32],
        offset: f64,
        to: &mut [f64],
    ) -> Result<(), Error> {
        if threads == 1 || list.len() < 2 * LISTED {
            self.score(simd, keys, Picked::Listed(list), offset, to);
            return Ok(());
        }
        let tasks = to.chunks_mut(LISTED).enumerate();
        let one = |(part, to): (usize, &mut [f64])| {
            self.score(simd, keys, Picked::Listed(&list[part * LISTED..]), offset, to);
        };
        threads::map(threads, tasks, 1, one)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each product is just below half of the smallest number, so that a sum of any length is 0; a scale makes it matter.
    #[test]
    fn products_that_underflow_are_in_the_error() {
        let simd = Simd::current().unwrap();
        let key = 0.499 * 2f32.powi(-74);
        for dim in [1, 16, 100, 1024, 65536] {
            let query = vec![2f64.powi(-1000); dim];
            let query = Query::new(&query, 2f64.powi(900), f64::from(key));
            let (keys, mut score) = (vec![key; dim], [1.0]);
            query.score(simd, Keys::new(&keys[..], dim, dim), Picked::From(0), 0.0, &mut score);
            let real = f64::from(key) * 2f64.powi(-100) * dim as f64;
            assert_eq!(score[0], 0.0);
            assert!(real <= query.error, "{dim}: {real:e} is more than {:e}", query.error);
        }
    }
}
