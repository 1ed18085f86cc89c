//! Drawn values, and bounds on their mean for any values not drawn.

use crate::numerics::certified_sums::Compensated;

/// Covers the roundings of the few operations that a closed formula is made of, logarithm and square root included (each is
/// off by a few 2^-53).
pub(super) const ROUNDED: f64 = 1.0 + 1.0 / 281_474_976_710_656.0;
/// Two results that underflow lose no more.
const LEAST: f64 = f64::from_bits(1);

/// Values in the order drawn, each in [0, 1].
#[derive(Clone, Copy)]
pub(super) struct Sample<'a> {
    pub(super) values: &'a [f64],
    pub(super) population: Option<usize>,
}

impl Sample<'_> {
    pub(super) fn sum(&self) -> f64 {
        self.values.iter().copied().collect::<Compensated>().value()
    }

    pub(super) fn mean(&self) -> f64 {
        self.sum() / self.values.len() as f64
    }

    /// Returns a bound rounded up. It is made of at most two compensated sums, each of which loses (m 2^-53)^2.
    pub(super) fn up(&self, bound: f64) -> f64 {
        bound * self.rounded() + LEAST
    }

    fn rounded(&self) -> f64 {
        let lost = self.values.len() as f64 * f64::EPSILON;
        ROUNDED + lost * lost
    }

    /// Returns the factor by which a variance of a mean shrinks without replacement, rounded up (Bardenet and Maillard,
    /// Bernoulli 21(3), 2015, Corollary 2.5 and Theorem 4.3; the first form is Serfling's).
    pub(super) fn shrinking(&self) -> f64 {
        let Some(population) = self.population else { return 1.0 };
        let (m, population) = (self.values.len() as f64, population as f64);
        let serfling = (population - m + 1.0) / population;
        let reverse = (population - m) / population * (1.0 + 1.0 / m);
        serfling.min(reverse) * ROUNDED
    }

    /// Returns the largest possible mean, rounded up: all values not drawn are at most 1.
    pub(super) fn ceiling(&self) -> f64 {
        let Some(population) = self.population else { return 1.0 };
        let rest = (population - self.values.len()) as f64;
        self.up((self.sum() + rest) / population as f64).min(1.0)
    }

    /// Returns the least possible mean, rounded down: no value is negative.
    pub(super) fn floor(&self) -> f64 {
        let least = |population| self.sum() / population as f64 / self.rounded() - LEAST;
        self.population.map_or(0.0, least)
    }
}
