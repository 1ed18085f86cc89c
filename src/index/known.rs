//! Keys that have been scored exactly, and which of them are the best.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::numerics::sorting;
use crate::runtime::ambient::asked;
use crate::runtime::reused::Reused;

/// Keys that have been scored.
#[derive(Default)]
pub(super) struct Known {
    pub(super) keys: Reused<u32>,
    pub(super) scores: Reused<f64>,
}

impl Known {
    /// The largest score.
    pub(super) fn largest(&self) -> f64 {
        self.scores.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
}

/// Orders two known keys: by score, then by position.
fn better(known: &Known, a: usize, b: usize) -> Ordering {
    known.scores[b].total_cmp(&known.scores[a]).then_with(|| known.keys[a].cmp(&known.keys[b]))
}

/// Known keys, the best first.
pub(super) fn ranked(known: &Known) -> Reused<usize> {
    let mut order: Reused<usize> = (0..known.keys.len()).collect();
    sorting::sort(&mut order, |&a, &b| better(known, a, b));
    order
}

/// Known keys that are not settled: their scores, as bits that rise with them, their positions and where they are listed.
type Unsettled = (u64, Reverse<u32>, usize);

/// Places of known keys of which the best comes first.
pub(super) struct Pending {
    heap: BinaryHeap<Unsettled>,
    memory: Reused<Unsettled>,
    /// So many known keys have been taken in.
    taken: usize,
}

impl Pending {
    pub(super) fn new() -> Self {
        let mut memory: Reused<Unsettled> = Reused::new();
        Pending { heap: BinaryHeap::from(std::mem::take(&mut *memory)), memory, taken: 0 }
    }

    /// Takes in the keys that have been scored since it was last asked to.
    pub(super) fn take(&mut self, known: &Known) {
        let place = |i: usize| (rising(known.scores[i]), Reverse(known.keys[i]), i);
        self.heap.extend(asked(self.taken..known.keys.len()).map(place));
        self.taken = known.keys.len();
    }

    /// The place of the best.
    pub(super) fn best(&self) -> Option<usize> {
        self.heap.peek().map(|entry| entry.2)
    }

    pub(super) fn drop_best(&mut self) {
        self.heap.pop();
    }

    /// All of them, in any order.
    pub(super) fn places(&self) -> impl Iterator<Item = usize> {
        self.heap.iter().map(|entry| entry.2)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        *self.memory = std::mem::take(&mut self.heap).into_vec();
    }
}

/// Bits that rise with the number.
fn rising(score: f64) -> u64 {
    let bits = score.to_bits();
    if score.is_sign_negative() { !bits } else { bits | 1 << 63 }
}
