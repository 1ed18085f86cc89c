//! Constraints on a kept set.

use crate::numerics::certified_sums::{ErrorBound, SplitSums};

/// Below such a budget it matters how many keys were flushed.
pub(super) const TINY_BUDGET: f64 = 1e-28;

/// Constraints on a kept set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Constraints {
    pub(super) eps: f64,
    pub(super) slack: ErrorBound,
    /// Least number of keys, forced ones included.
    pub(super) min_keep: usize,
    /// Number of keys at which a set is accepted, over budget or not.
    pub(super) max_keep: usize,
    pub(super) decide_on: DecideOn,
    /// `true` if equal scores have exactly equal real weights, so that integers decide where the tail mass may equal
    /// the budget.
    pub(super) exact_ties: bool,
}

/// End of the interval for the tail mass that decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DecideOn {
    /// The upper end: the set found is certified.
    Upper,
    /// The lower end: no smaller set than the one found can hold.
    Lower,
}

impl Constraints {
    /// Returns the constraints of a certified set of at least one key, without ties in integers.
    pub(super) fn new(eps: f64, slack: ErrorBound) -> Self {
        let (decide_on, exact_ties) = (DecideOn::Upper, false);
        Constraints { eps, slack, min_keep: 1, max_keep: usize::MAX, decide_on, exact_ties }
    }

    pub(super) fn accepts(&self, split: &SplitSums) -> bool {
        split.kept >= self.min_keep && (split.kept >= self.max_keep || self.affords(split))
    }

    /// Returns `true` if the mass alone allows the set.
    fn affords(&self, split: &SplitSums) -> bool {
        match self.decide_on {
            DecideOn::Upper => split.upper(self.slack.select, self.slack.flush) <= self.eps,
            DecideOn::Lower => !self.refutes(split),
        }
    }

    /// Returns `true` if the set provably loses more than the budget.
    pub(super) fn refutes(&self, split: &SplitSums) -> bool {
        split.lower(self.slack.certify, self.slack.flush) > self.eps
    }

    /// Returns `true` if a set that is not accepted has enough keys and may lose exactly the budget.
    pub(super) fn may_tie(&self, split: &SplitSums) -> bool {
        self.exact_ties && split.kept >= self.min_keep && !self.refutes(split)
    }

    /// Returns the approximate largest tail that is allowed, for a row of this total mass.
    pub(super) fn target(&self, total: f64) -> f64 {
        let slack = match self.decide_on {
            DecideOn::Upper => 1.0 + self.slack.select,
            DecideOn::Lower => 1.0 / (1.0 + self.slack.certify),
        };
        total * self.eps / (self.eps + slack * (1.0 - self.eps))
    }

    /// Returns `true` if decisions depend on numbers of keys, not on masses alone.
    pub(super) fn counts(&self, scores: usize) -> bool {
        self.min_keep > 1 || self.max_keep < scores || self.eps < TINY_BUDGET
    }
}
