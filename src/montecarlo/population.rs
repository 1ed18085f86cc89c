//! Population of a tail to draw from.

use crate::numerics::certified_sums::{ErrorBound, SplitSums};

/// Facts about a row before the first draw.
pub(super) struct Population {
    /// Items to draw from without replacement; `None` with replacement.
    pub(super) items: Option<usize>,
    pub(super) dropped: usize,
    pub(super) kept: usize,
    /// Sum of the kept weights.
    pub(super) head: f64,
    /// Ratio of the tail's sum to the mean of the drawn values.
    pub(super) unit: f64,
    /// `true` if all items are 1.
    pub(super) equal: bool,
    /// Error bound of computed sums and weights.
    pub(super) slack: ErrorBound,
}

impl Population {
    pub(super) fn split(&self, mean: f64) -> SplitSums {
        let Population { dropped, kept, head, unit, .. } = *self;
        SplitSums { tail: unit * mean, dropped, head, kept }
    }
}
