//! What is known of a row on both sides of a bracket.

use crate::kernels::{PartitionSums, Scalar};
use crate::numerics::certified_sums::SplitSums;

/// What is known outside the bracket, and of it as a whole.
#[derive(Debug, Clone, Copy)]
pub(super) struct Partition<S> {
    pub(super) below: f64,
    pub(super) dropped: usize,
    /// What the bracket weighs.
    pub(super) within: f64,
    pub(super) above: f64,
    pub(super) kept: usize,
    /// Keys from here on lie above the bracket.
    pub(super) edge: S,
}

impl<S: Scalar> Partition<S> {
    /// The worst member of a set that keeps nothing of the bracket, if it keeps any competing key.
    pub(super) fn boundary(&self) -> Option<(S, u32)> {
        (self.edge < S::INFINITY).then_some((self.edge, u32::MAX))
    }

    /// Takes note of how a bracket of `len` keys was narrowed.
    pub(super) fn narrow(&mut self, len: usize, sides: &PartitionSums, end: S) {
        self.below += sides.below;
        // Fewer than none only if another thread writes to the row meanwhile, which `Decide` finds out.
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

/// The exact mass of a row, and of its keys below an edge.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known<S> {
    pub(super) edge: S,
    pub(super) below: f64,
    pub(super) total: f64,
}
