//! Uniform draws from a row's tail, without replacement.

use super::tail::Urn;
use crate::error::Error;
use crate::mass::{self, Compensated, Slack};
use crate::memory::{filled, list};
use crate::random::Random;
use crate::scores::{Keep, Law, Scores};

/// A row's tail in the order in which it will be drawn, as far as it has been drawn.
pub(super) struct Uniform {
    keys: Vec<f64>,
    top: f64,
    law: Law,
    /// What comes before `drawn` has been drawn.
    drawn: usize,
    random: Random,
}

impl Uniform {
    /// Reads the whole row: the sum of the kept weights and the largest weight of the tail, which bounds all of it.
    ///
    /// # Errors
    /// Whatever is wrong with the row or the kept set.
    pub(super) fn new(
        scores: &Scores<'_>,
        keep: &Keep<'_>,
        row: usize,
        random: Random,
    ) -> Result<(Self, Urn), Error> {
        let mut keys = Vec::new();
        let meaning = scores.keys64(row, &mut keys)?;
        let mut bytes = filled("scores", keys.len(), 0)?;
        keep.lay(scores, row, &mut bytes)?;
        // Two quotients or two exponentials make up a weight of the tail: 2 x 2132v with the head's < 6500v of 8192v.
        let slack = match meaning.law {
            Law::Exp { .. } => Slack::f64(0, meaning.error),
            Law::Weight => Slack { flush: Slack::f64(0, 0.0).flush, ..Slack::weights(0) },
        };
        let law = meaning.law;
        let (mut head, mut kept) = (Compensated::default(), 0);
        let (mut least, mut top) = (f64::INFINITY, f64::NEG_INFINITY);
        let mut tail = list("scores", keys.len())?;
        for (&key, &byte) in keys.iter().zip(&bytes) {
            if key == f64::NEG_INFINITY {
                continue;
            }
            if byte != 0 {
                head.add(weigh(law, key, meaning.largest));
                kept += 1;
            } else {
                (least, top) = (least.min(key), top.max(key));
                tail.push(key);
            }
        }
        let dropped = tail.len();
        let unit =
            if dropped == 0 { 0.0 } else { dropped as f64 * weigh(law, top, meaning.largest) };
        let urn = Urn {
            population: Some(dropped),
            dropped,
            kept,
            head: head.value(),
            unit,
            equal: dropped > 0 && least == top,
            slack,
        };
        Ok((Uniform { keys: tail, top, law, drawn: 0, random }, urn))
    }

    /// Draws that many more, each a weight relative to the tail's largest.
    pub(super) fn draw(&mut self, count: usize, values: &mut Vec<f64>) {
        for _ in 0..count {
            let left = self.keys.len() - self.drawn;
            let other = self.drawn + self.random.below(left as u64) as usize;
            self.keys.swap(self.drawn, other);
            values.push(weigh(self.law, self.keys[self.drawn], self.top).min(1.0));
            self.drawn += 1;
        }
    }
}

/// A key's weight, relative to that of a larger one.
fn weigh(law: Law, key: f64, unit: f64) -> f64 {
    match law {
        Law::Weight => key / unit,
        // Halves, because the difference may overflow where the product does not.
        Law::Exp { scale } => mass::exp((0.5 * key - 0.5 * unit) * scale * 2.0),
    }
}
