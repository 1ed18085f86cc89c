//! What a tail is drawn from.

use crate::error::Error;
use crate::numerics::certified_sums::{ErrorBound, SplitSums};

/// Computes the scores at some positions of a row, natural-log units, -inf where masked.
pub type Fetch<'a> = dyn FnMut(&[usize]) -> Result<Vec<f64>, Error> + 'a;

/// What is known of a row before the first draw.
pub(super) struct Population {
    /// Items to draw from without replacement; `None` with replacement.
    pub(super) items: Option<usize>,
    pub(super) dropped: usize,
    pub(super) kept: usize,
    /// The kept weights' sum.
    pub(super) head: f64,
    /// What the tail's sum is times the mean of what is drawn.
    pub(super) unit: f64,
    /// Whether all items are 1.
    pub(super) equal: bool,
    /// How far computed sums and weights may be off.
    pub(super) slack: ErrorBound,
}

impl Population {
    pub(super) fn split(&self, mean: f64) -> SplitSums {
        let Population { dropped, kept, head, unit, .. } = *self;
        SplitSums { tail: unit * mean, dropped, head, kept }
    }
}
