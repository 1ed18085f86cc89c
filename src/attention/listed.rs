//! Keys of a row that have weights of their own, not those by codes.

use crate::error::Error;
use crate::index::CodeSums;
use crate::runtime::memory::room;
use crate::runtime::reused::Reused;

/// Relative error of a weight and of sums of weights in f64, generously, beside that of each addition.
const SUMS: f64 = 1e-12;

/// Sums what numbers become, in eight lanes: no number is rounded more often than one after another.
fn sum(numbers: &[f64], of: impl Fn(f64) -> f64) -> f64 {
    let (groups, rest) = numbers.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for group in groups {
        sums.iter_mut().zip(group).for_each(|(sum, &number)| *sum += of(number));
    }
    sums.into_iter().chain(rest.iter().map(|&number| of(number))).sum()
}

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

    /// Puts keys that were appended behind the first `sorted`, ascending as well, where they belong.
    pub(super) fn sort(&mut self, sorted: usize) {
        if sorted == 0 || sorted == self.keys.len() {
            return;
        }
        let tail = self.keys[sorted..].iter().copied().zip(self.weights[sorted..].iter().copied());
        let mut tail: Reused<(u32, f64)> = tail.collect();
        // From the back, where there is room.
        let mut front = sorted;
        for to in (0..self.keys.len()).rev() {
            let Some(&(key, weight)) = tail.last() else { break };
            if front > 0 && self.keys[front - 1] > key {
                front -= 1;
                (self.keys[to], self.weights[to]) = (self.keys[front], self.weights[front]);
            } else {
                (self.keys[to], self.weights[to]) = (key, weight);
                tail.pop();
            }
        }
    }

    /// Returns the sum of the weights.
    pub(super) fn total(&self) -> f64 {
        sum(&self.weights, |weight| weight)
    }

    /// Returns the sum of their squares, rounded up.
    pub(super) fn squares(&self) -> f64 {
        sum(&self.weights, |weight| weight * weight)
            * (1.0 + self.weights.len() as f64 * f64::EPSILON)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_keys_are_put_where_they_belong() {
        for seed in 1..200u32 {
            // Keys that are no multiples of three come first, both ascending.
            let keys = (0..seed % 40).map(|at| at * (1 + seed % 3));
            let (tail, front): (Vec<u32>, Vec<u32>) = keys.partition(|key| key % 3 == 0);
            let all: Vec<u32> = front.iter().chain(&tail).copied().collect();
            let mut list = Listed {
                keys: all.iter().copied().collect(),
                weights: all.iter().map(|&key| f64::from(key) / 7.0).collect(),
            };
            list.sort(front.len());
            let mut sorted = all.clone();
            sorted.sort_unstable();
            assert_eq!(list.keys[..], sorted[..], "{seed}");
            assert!(list.keys.iter().zip(&*list.weights).all(|(&k, &w)| w == f64::from(k) / 7.0));
            let sums = [list.total(), list.squares()];
            let wanted =
                [1, 2].map(|power| list.weights.iter().map(|w| w.powi(power)).sum::<f64>());
            assert!(
                sums.iter().zip(wanted).all(|(sum, wanted)| (sum - wanted).abs() <= 1e-14 * wanted)
            );
        }
    }
}
