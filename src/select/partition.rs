//! Sums of a row on both sides of a bracket.

use crate::kernels::{PartitionSums, Scalar};
use crate::numerics::certified_sums::SplitSums;

/// Sums and counts on both sides of a bracket, and the mass inside.
#[derive(Debug, Clone, Copy)]
pub(super) struct Partition<S> {
    pub(super) below: f64,
    pub(super) dropped: usize,
    /// Mass inside the bracket.
    pub(super) within: f64,
    pub(super) above: f64,
    pub(super) kept: usize,
    /// Keys at or above this lie above the bracket.
    pub(super) edge: S,
}

impl<S: Scalar> Partition<S> {
    /// Returns the worst member of a set that keeps no key of the bracket, if it keeps a competing key.
    pub(super) fn boundary(&self) -> Option<(S, u32)> {
        (self.edge < S::INFINITY).then_some((self.edge, u32::MAX))
    }

    /// Records that a bracket of `len` keys was narrowed.
    pub(super) fn narrow(&mut self, len: usize, sides: &PartitionSums, end: S) {
        self.below += sides.below;
        // Negative only if another thread writes to the row meanwhile, which `Decide` detects.
        self.dropped += len.saturating_sub(sides.inside + sides.count_above);
        self.within = sides.within;
        self.above += sides.above;
        self.kept += sides.count_above;
        if end < S::INFINITY {
            self.edge = end;
        }
    }

    pub(super) fn total(&self) -> f64 {
        self.below + self.within + self.above
    }

    pub(super) fn with(&self, tail: f64, dropped: usize, head: f64, kept: usize) -> SplitSums {
        SplitSums {
            tail: self.below + tail,
            dropped: self.dropped + dropped,
            head: self.above + head,
            kept: self.kept + kept,
        }
    }
}

/// Exact mass of a row, and of its keys below an edge.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known<S> {
    pub(super) edge: S,
    pub(super) below: f64,
    pub(super) total: f64,
}
