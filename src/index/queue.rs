//! Priority queue of keys by the upper bounds of their scores.

use crate::numerics::sorting;
use crate::runtime::reused::Reused;

/// A key and the bounds of its score.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    pub(super) upper: f64,
    pub(super) lower: f64,
    /// Estimate of the score.
    pub(super) guess: f64,
    pub(super) key: u32,
}

/// Units in decreasing order of their upper bounds, put in order as far as they are asked for.
pub(super) struct Queue {
    pub(super) units: Reused<Unit>,
    pub(super) at: usize,
    pub(super) sorted: usize,
}

/// Units that are put in order first.
const FIRST_SORT: usize = 1024;

impl Queue {
    pub(super) fn new(units: Reused<Unit>, at: usize) -> Self {
        Queue { units, at, sorted: at }
    }

    pub(super) fn peek(&mut self) -> Option<Unit> {
        if self.at == self.sorted && self.sorted < self.units.len() {
            let order =
                |a: &Unit, b: &Unit| b.upper.total_cmp(&a.upper).then_with(|| a.key.cmp(&b.key));
            let rest = &mut self.units[self.sorted..];
            let more = FIRST_SORT.max(2 * self.sorted);
            let more = if more < rest.len() {
                sorting::place(rest, more, order);
                more
            } else {
                rest.len()
            };
            sorting::sort(&mut rest[..more], order);
            self.sorted += more;
        }
        self.units.get(self.at).copied()
    }

    /// The largest open bound.
    pub(super) fn upper(&mut self) -> f64 {
        self.peek().map_or(f64::NEG_INFINITY, |unit| unit.upper)
    }

    pub(super) fn open(&self) -> &[Unit] {
        &self.units[self.at..]
    }
}
