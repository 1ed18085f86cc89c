//! Uniform draws from a row's tail, without replacement.

use super::population::Population;
use crate::error::Error;
use crate::numerics::certified_sums::{self, Compensated, ErrorBound};
use crate::numerics::random::Random;
use crate::rows::{Keep, Scores, WeightKind};
use crate::runtime::ambient::{self, asked};
use crate::runtime::memory::{filled, list};

/// A row's tail, in drawn order up to `drawn`.
pub(super) struct Uniform {
    keys: Vec<f64>,
    top: f64,
    weight_kind: WeightKind,
    /// Number of entries drawn; they come first.
    drawn: usize,
    random: Random,
}

impl Uniform {
    /// Reads the whole row: the sum of the kept weights and the largest weight of the tail, which bounds all of it.
    ///
    /// # Errors
    /// The error of an invalid row or kept set.
    pub(super) fn new(
        scores: &Scores<'_>,
        keep: &Keep<'_>,
        row: usize,
        random: Random,
    ) -> Result<(Self, Population), Error> {
        let mut keys = Vec::new();
        let about = scores.wide_scores(row, &mut keys)?;
        let mut bytes = filled("scores", keys.len(), 0)?;
        keep.lay(scores, row, &mut bytes)?;
        // Two quotients or two exponentials make up a weight of the tail: 2 x 2132v with the head's < 6500v of 8192v.
        let slack = match about.weight_kind {
            WeightKind::Exp { .. } => ErrorBound::f64(0, about.error),
            WeightKind::Weight => {
                ErrorBound { flush: ErrorBound::f64(0, 0.0).flush, ..ErrorBound::weights(0) }
            }
        };
        let weight_kind = about.weight_kind;
        let (mut head, mut kept) = (Compensated::default(), 0);
        let (mut least, mut top) = (f64::INFINITY, f64::NEG_INFINITY);
        let mut tail = list("scores", keys.len())?;
        for (&key, &byte) in asked(keys.iter().zip(&bytes)) {
            if key == f64::NEG_INFINITY {
                continue;
            }
            if byte != 0 {
                head.add(weigh(weight_kind, key, about.largest));
                kept += 1;
            } else {
                (least, top) = (least.min(key), top.max(key));
                tail.push(key);
            }
        }
        ambient::check()?;
        let dropped = tail.len();
        let unit = if dropped == 0 {
            0.0
        } else {
            dropped as f64 * weigh(weight_kind, top, about.largest)
        };
        let drawn_from = Population {
            items: Some(dropped),
            dropped,
            kept,
            head: head.value(),
            unit,
            equal: dropped > 0 && least == top,
            slack,
        };
        Ok((Uniform { keys: tail, top, weight_kind, drawn: 0, random }, drawn_from))
    }

    /// Draws `count` more values, each a weight relative to the tail's largest.
    pub(super) fn draw(&mut self, count: usize, values: &mut Vec<f64>) {
        for _ in asked(0..count) {
            let left = self.keys.len() - self.drawn;
            let other = self.drawn + self.random.below(left as u64) as usize;
            self.keys.swap(self.drawn, other);
            values.push(weigh(self.weight_kind, self.keys[self.drawn], self.top).min(1.0));
            self.drawn += 1;
        }
    }
}

/// Returns a key's weight, relative to that of a larger one.
fn weigh(weight_kind: WeightKind, key: f64, unit: f64) -> f64 {
    match weight_kind {
        WeightKind::Weight => key / unit,
        // Halves, because the difference may overflow where the product does not.
        WeightKind::Exp { scale } => certified_sums::exp((0.5 * key - 0.5 * unit) * scale * 2.0),
    }
}
