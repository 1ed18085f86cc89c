//! Changes of scores before the softmax: a soft cap, then a bias.
//!
//! The cap's slope is at most 1, and adding a number moves no two scores apart: bounds on the error of a score hold for what it
//! becomes. Added to them is the rounding of the changes themselves.

use super::f32_error::{LONGEST, U};
use super::job::AttentionJob;
use super::options::AttentionOptions;
use crate::error::Error;
use crate::kernels::{Element, LANES, Picked, Scalar, SoftCap};
use crate::rows::for_dtype;

/// One rounding of f64.
const V: f64 = f64::EPSILON / 2.0;
/// Error of a soft cap as a share of it, in f32 and in f64.
const CAP: f64 = 12.0 * U;
const CAP_WIDE: f64 = 128.0 * V;
/// Distance below a row's largest score, in nats, from which weights are nothing in f64.
const FAR: f64 = 800.0;
/// Factor for the second order of a few roundings.
const ROUND: f64 = 1.0 + 1e-3;

/// Sizes of a row's biases; 0 without one.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Biases {
    largest: f64,
    /// Largest absolute value; infinite where one is not finite.
    farthest: f64,
}

impl Biases {
    fn add(&mut self, bias: f64) {
        let size = if bias.is_nan() { f64::INFINITY } else { bias.abs() };
        self.join(&Biases { largest: bias, farthest: size });
    }

    fn join(&mut self, other: &Biases) {
        let greater = |a: f64, b: f64| if b > a { b } else { a };
        self.largest = greater(self.largest, other.largest);
        self.farthest = greater(self.farthest, other.farthest);
    }
}

impl AttentionJob<'_> {
    /// Returns `true` if scores are not products alone.
    pub(super) fn changes_scores(&self) -> bool {
        let AttentionOptions { soft_cap, bias, .. } = &self.query_rows.options;
        soft_cap.is_some() || bias.is_some()
    }

    /// Returns the soft cap in the lanes of a type.
    pub(super) fn soft_cap<S: Scalar>(&self) -> Option<SoftCap<S>> {
        self.query_rows.options.soft_cap.map(SoftCap::new)
    }

    /// Changes a row's scores in f64.
    pub(super) fn change(&self, row: usize, keys: Picked<'_>, scores: &mut [f64]) {
        if let Some(cap) = self.soft_cap() {
            self.simd.cap(scores, cap);
        }
        let Some(bias) = self.query_rows.options.bias else { return };
        for_dtype!(bias.data, rows => {
            let biases = rows.row(row);
            for (at, score) in scores.iter_mut().enumerate() {
                *score += Into::<f64>::into(biases[keys.row(at)].widen());
            }
        });
    }

    /// Changes a row's exact scores, and returns a bound on the error that this adds.
    ///
    /// # Errors
    /// [`Error::Number`] for a bias that is not finite, or with which a score overflows.
    pub(super) fn change_exact(
        &self,
        row: usize,
        keys: Picked<'_>,
        scores: &mut [f64],
    ) -> Result<f64, Error> {
        if !self.changes_scores() {
            return Ok(0.0);
        }
        let most = scores.iter().fold(0.0f64, |most, score| most.max(score.abs()));
        let biases = self.biases(row)?;
        self.change(row, keys, scores);
        if let Some(at) = scores.iter().position(|score| !score.is_finite()) {
            let problem = "added to a score it overflows float64; pass a smaller one";
            return Err(self.wrong_bias(row, (keys.row(at), scores[at]), problem));
        }
        Ok(self.change_error(biases, most, false))
    }

    /// Changes a row's scores, from a key on, in f32.
    pub(super) fn change_single(&self, row: usize, from: usize, scores: &mut [f32]) {
        if let Some(cap) = self.soft_cap() {
            self.simd.cap(scores, cap);
        }
        let Some(bias) = self.query_rows.options.bias else { return };
        for_dtype!(bias.data, rows => {
            for (score, bias) in scores.iter_mut().zip(&rows.row(row)[from..]) {
                let sum = *score + Into::<f64>::into(bias.widen()) as f32;
                // An overflow is not to look like a mask.
                *score = if sum == f32::NEG_INFINITY { f32::MIN } else { sum };
            }
        });
    }

    /// Returns how large a row's biases are.
    ///
    /// # Errors
    /// [`Error::Number`] for one that is not finite.
    pub(super) fn biases(&self, row: usize) -> Result<Biases, Error> {
        let Some(bias) = self.query_rows.options.bias else { return Ok(Biases::default()) };
        let sees = self.query_rows.row_visibility(row);
        let mut found = Biases { largest: f64::NEG_INFINITY, farthest: 0.0 };
        for_dtype!(bias.data, rows => {
            let biases = &rows.row(row)[..sees.prefix];
            let wide = |&bias: &_| Into::<f64>::into(Element::widen(bias));
            if let Some(allowed) = sees.allowed {
                let seen = biases.iter().zip(allowed).filter(|(_, allowed)| **allowed != 0);
                seen.for_each(|(bias, _)| found.add(wide(bias)));
            } else {
                // Side by side, for speed.
                let (groups, rest) = biases.as_chunks::<LANES>();
                let mut lanes = [found; LANES];
                for group in groups {
                    lanes.iter_mut().zip(group).for_each(|(lane, bias)| lane.add(wide(bias)));
                }
                for bias in rest {
                    found.add(wide(bias));
                }
                for lane in &lanes {
                    found.join(lane);
                }
            }
        });
        if found.farthest < f64::INFINITY {
            return Ok(found);
        }
        let wrong = |&key: &usize| sees.sees(key) && !bias.data.get(row, key).is_finite();
        let key = (0..sees.prefix).find(wrong).unwrap_or(0);
        let problem = "pass finite numbers, and a mask for keys that are not seen";
        Err(self.wrong_bias(row, (key, bias.data.get(row, key)), problem))
    }

    fn wrong_bias(&self, row: usize, (key, value): (usize, f64), problem: &'static str) -> Error {
        let mut place = self.query_rows.place(row);
        place.0.push(key);
        Error::Number { argument: "bias", place, value, problem }
    }

    /// Returns the largest size of scores that were at most `most` in size.
    pub(super) fn changed_size(&self, biases: Biases, most: f64) -> f64 {
        self.capped_size(most) + biases.farthest
    }

    fn capped_size(&self, most: f64) -> f64 {
        self.query_rows.options.soft_cap.map_or(most, |cap| most.min(cap * ROUND))
    }

    /// Returns a bound, in nats, on the error that changes in f32 or in f64 add to scores of at most `most` in size. It holds for
    /// all whose weights are more than nothing. Infinite where f32 cannot hold them.
    pub(super) fn change_error(&self, biases: Biases, most: f64, single: bool) -> f64 {
        if !self.changes_scores() {
            return 0.0;
        }
        let (unit, of_cap) = if single { (U, CAP) } else { (V, CAP_WIDE) };
        let (size, Biases { largest, farthest }) = (self.capped_size(most), biases);
        // A key of less than the largest bias less that is too far below the key of the largest one.
        let reach = farthest.min(largest.abs() + 2.0 * size + FAR);
        if single && size + reach > LONGEST {
            return f64::INFINITY;
        }
        // A bias and a sum are rounded.
        let of_bias = if farthest > 0.0 { unit * (size + 2.0 * reach) } else { 0.0 };
        let of_cap = self.query_rows.options.soft_cap.map_or(0.0, |cap| of_cap * cap);
        (of_cap + of_bias) * ROUND + 2f64.powi(-148)
    }
}
