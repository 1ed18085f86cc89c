//! Errors of rows computed in f32, and in pieces of bf16, which some CPUs multiply faster.
//!
//! A piece of a number is the nearest bf16 of it, or of what earlier pieces leave. With queries q1 + q2 + r and keys in
//! two pieces a score lacks q2 k2 and the products with either rest, each at most 2^-16 |q| |k|. Short weights and values
//! have one piece. All levels state these errors, though on few they are made: certificates are the same everywhere.

use super::ball::UP;
use super::job::AttentionJob;
use crate::kernels::PANEL_RUN;
use crate::rows::Stored;

/// One rounding of f32.
pub(super) const U: f64 = 1.0 / 16_777_216.0;
/// Sizes of products and scales up to which nothing overflows in f32.
const SAFE: f64 = 1e36;
/// Relative error of a weight of a given score, the difference from the largest included (`mass` has less).
pub(super) const WEIGHT: f64 = 216.0 * U;
/// Relative error of a weight, and of a value.
pub(super) const SHORT_WEIGHT: f64 = 1.0 / 256.0 + WEIGHT * 1.01;
pub(super) const SHORT_VALUE: f64 = 1.0 / 256.0;
/// Relative error of a weight of two pieces.
pub(super) const TWO_PIECES: f64 = 1.0 / 65_536.0 + WEIGHT * 1.01;
/// Error of a score, relative to the norms of query and key.
const SHORT_SCORE: f64 = 3.03 / 65_536.0;
/// Error of f32 scores, in nats, beyond which a row that may drop something is not computed with others, if its budget is less.
pub(super) const ROUGH: f64 = 1e-3;
/// Length of a value up to which nothing overflows, nor rounds to infinity.
pub(super) const LONGEST: f64 = 1e36;
/// Factor for the roundings of a product of lengths.
const ALMOST: f64 = 1.0 + 1e-12;
/// Share of the mass of keys whose weights are rounded to nothing.
const FLUSHED: f64 = 1e-27;

/// A query, and its length.
#[derive(Clone, Copy)]
pub(super) struct Measured<'a> {
    entries: &'a [f64],
    length: f64,
}

impl<'a> Measured<'a> {
    pub(super) fn of(entries: &'a [f64]) -> Self {
        Measured { entries, length: length(entries) }
    }
}

/// Returns a bound on the relative error of weights whose scores are off by at most `error` nats, and which have another
/// relative error.
pub(super) fn weight_error(error: f64, own: f64) -> f64 {
    // e^x - 1 is at most x + x^2 there.
    let grown = if error < 1.0 { (error + error * error) * UP } else { error.exp_m1() };
    grown + own * (1.0 + grown)
}

/// Returns a bound on the total variation distance of shares whose weights are off by factors within 1 +- delta, as
/// docs/soundness.md proves.
fn distance(delta: f64) -> f64 {
    if delta < 0.5 { delta / (2.0 - 2.0 * delta) * UP + FLUSHED } else { 1.0 }
}

impl AttentionJob<'_> {
    /// Returns the largest size of a query's products with keys of at most `norm`, times the scale.
    pub(super) fn most(&self, query: &[f64], norm: f64) -> f64 {
        length(query) * norm * self.scale.abs() * ALMOST
    }

    /// Returns a bound on the error of a query's f32 scores beside keys of at most `norm`, for sums `deep` terms deep.
    /// `None` where f32 cannot hold the stored numbers, or may overflow.
    pub(super) fn narrow_error(&self, query: Measured<'_>, norm: f64, deep: usize) -> Option<f64> {
        let (scale, Measured { entries: query, length: own }) = (self.scale.abs(), query);
        // What a sum of products can be at most, whichever of its terms are added (Cauchy, Schwarz).
        let most = own * norm * ALMOST;
        let exact = !matches!(self.queries.data, Stored::F64(_))
            || query.iter().all(|&entry| f64::from(entry as f32) == entry);
        let scale_fits = scale == 0.0 || (1.0 / SAFE..SAFE).contains(&scale);
        if !(exact && scale_fits && most < SAFE && most * scale < SAFE) {
            return None;
        }
        // The scale's rounding, and the product's.
        let roundings = (deep + 4) as f64 * U;
        let roundings = roundings / (1.0 - roundings).max(0.0) * 1.001;
        // Terms that are subnormal.
        let flushed = query.len() as f64 * 2f64.powi(-148) * scale + 2f64.powi(-148);
        Some(scale * most * roundings + flushed)
    }

    /// Returns a bound on the total variation distance of a row with short weights, whose scores of at most `most` in size are off
    /// by `error` nats. It depends on no computed score, so that it is the same at every level.
    pub(super) fn short_distance(&self, row: usize, most: f64, error: f64) -> f64 {
        // The sink's place among the scores, as in `with_sink`.
        let slip =
            self.sink(row).map_or(0.0, |sink| 2.0 * f64::EPSILON * (sink.abs() + most + error));
        distance(weight_error(error + slip, SHORT_WEIGHT))
    }

    /// Returns a bound on what pieces add to the error of scores of keys of at most `norm`; `None` where they may overflow.
    pub(super) fn error_of_pieces(
        &self,
        query: Measured<'_>,
        norm: f64,
        short: bool,
    ) -> Option<f64> {
        let Measured { entries: query, length: own } = query;
        if !(own < SAFE && norm < SAFE) {
            return None;
        }
        let steps = query.len().div_ceil(PANEL_RUN) as f64;
        // Two more sums for each step, of pieces that are together a little longer.
        let more = if short { SHORT_SCORE + 2.1 * steps * U } else { 0.0 };
        // Pieces and sums that are subnormal.
        let flushed = query.len() as f64 * 2f64.powi(-122) * (1.0 + own + norm);
        Some((own * norm * more + flushed) * self.scale.abs() * UP)
    }
}

/// Returns the Euclidean norm of a vector, in several sums.
pub(super) fn length(vector: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (eights, rest) = vector.as_chunks::<8>();
    for eight in eights {
        for (sum, entry) in sums.iter_mut().zip(eight) {
            *sum += entry * entry;
        }
    }
    let rest: f64 = rest.iter().map(|entry| entry * entry).sum();
    (sums.iter().sum::<f64>() + rest).sqrt()
}
