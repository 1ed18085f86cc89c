//! A row whose keys are weighed: by codes, by both planes, or exactly.

use super::coded_bound::{CodedWeights, Group, Roundings};
use super::heavy_keys::Candidates;
use super::listed::Listed;
use crate::error::Error;
use crate::index::{CodeError, CodeSums, Codes, Prepared};
use crate::kernels::{Exp, LANES, Simd, WeightSums};
use crate::numerics::certified_sums::exp;
use crate::runtime::memory::room;
use crate::runtime::reused::{Reused, filled_again};

/// Share of the budget that keys scored by both planes may take before some of them are scored exactly.
pub(super) const FINELY: f64 = 0.9;
/// Share of all weights from which a listed key's value is exact as well: no more than so many keys have it.
const HEAVY: f64 = 1.0 / 32.0;
/// Largest distance of exact scores above those by codes, in nats, at which weights are compared.
pub(super) const HIGHEST: f64 = 600.0;
/// Keys that are weighed exactly at a time.
const BLOCK: usize = 256;
/// Sums of weights up to which each is a number of f32 that products do not overflow.
const WEIGHABLE: f64 = 1e30;

/// A row whose keys are weighed.
pub(super) struct Weighed {
    /// Largest score by code, to which weights are relative; and the same with the codes' offset.
    pub(super) shift: f32,
    pub(super) at: f64,
    /// Number of keys that it sees.
    pub(super) seen: usize,
    /// Sums of the weights that come from codes.
    pub(super) sums: WeightSums,
    /// Keys that are scored exactly, those that are to be, and those that are scored by both planes.
    pub(super) exact: Listed,
    pub(super) more: Reused<u32>,
    pub(super) fine: Listed,
    pub(super) candidates: Candidates,
    /// Keys of these whose values are exact, and the sums of the weights of the others and of their squares.
    pub(super) heavy: Listed,
    pub(super) light: [f64; 2],
    /// The query in f32, in whole groups; nothing where exact scores take f64.
    pub(super) narrow: Reused<f32>,
    pub(super) sink: f64,
    pub(super) roundings: Roundings,
    /// Errors of scores by codes, and of keys that have finer ones, by both planes; or whose exact ones may be missing.
    pub(super) code: CodeError,
    pub(super) low: Option<CodeError>,
    /// `true` if what a low plane says can be added to scores.
    pub(super) has_plane: bool,
    /// Most that weights may weigh which became nothing.
    pub(super) flushed: f64,
}

impl Weighed {
    /// Returns the sum of all weights.
    pub(super) fn total(&self) -> f64 {
        self.sums.weights + self.fine.total() + self.exact.total() + self.sink
    }

    /// Adds keys whose exact scores, relative to the codes' offset, are behind the exact weights, and turns these into weights.
    pub(super) fn weigh_exact(&mut self, simd: Simd, keys: &[u32]) {
        let sorted = self.exact.keys.len();
        let (mut padded, mut weights) = ([0.0; BLOCK], [0.0; BLOCK]);
        for scores in self.exact.weights[sorted..].chunks_mut(BLOCK) {
            let top = scores.iter().copied().fold(f64::MIN, f64::max);
            let nan = scores.iter().any(|score| score.is_nan());
            let groups = scores.len().next_multiple_of(LANES);
            padded[..scores.len()].copy_from_slice(scores);
            padded[scores.len()..groups].fill(f64::NEG_INFINITY);
            simd.weights(&padded[..groups], Exp(top), &mut weights[..groups]);
            let above = top - f64::from(self.shift);
            // Weights that cannot be compared with those of codes bound nothing.
            let fine = !nan && above <= HIGHEST;
            let unit = if fine { exp(above.max(-HIGHEST)) } else { f64::INFINITY };
            scores.iter_mut().zip(&weights).for_each(|(score, weight)| *score = weight * unit);
        }
        self.exact.keys.extend_from_slice(keys);
        self.exact.sort(sorted);
    }

    /// Adds keys with their weights by codes, made finer by the low plane.
    pub(super) fn add_fine(
        &mut self,
        codes: &Codes<'_>,
        (simd, query): (Simd, &Prepared),
        named: &Listed,
    ) -> Result<(), Error> {
        let (Listed { keys, weights }, sorted) = (named, self.fine.keys.len());
        self.fine.reserve(keys.len())?;
        let mut scores: Reused<f64> = filled_again("k", keys.len(), 0.0)?;
        if self.has_plane {
            codes.add_low(simd, query, keys, &mut scores);
        }
        let fine = weights.iter().zip(&scores).map(|(weight, &score)| weight * libm::exp(score));
        self.fine.weights.extend(fine);
        self.fine.keys.extend_from_slice(keys);
        self.fine.sort(sorted);
        Ok(())
    }

    /// Names keys to be scored exactly which both planes do not suffice for: the heaviest that are there, as few as are likely to
    /// do, or all of them. Returns `false` if none is there.
    pub(super) fn score_exactly(
        &mut self,
        eps: f64,
        there: impl Fn(u32) -> bool,
    ) -> Result<bool, Error> {
        let Listed { keys, weights } = &self.fine;
        let mut order: Reused<usize> = (0..keys.len()).filter(|&at| there(keys[at])).collect();
        order.sort_unstable_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
        let mut stays: Reused<bool> = std::iter::repeat_n(true, keys.len()).collect();
        let without = |count: usize, stays: &mut [bool]| {
            stays.fill(true);
            order[..count].iter().for_each(|&at| stays[at] = false);
            let sums =
                Listed::sums(weights.iter().zip(&*stays).filter(|(_, s)| **s).map(|(w, _)| w));
            let gone = Listed::sums(order[..count].iter().map(|&at| &weights[at]));
            let mut certificate = self.certificate_with(sums);
            certificate.exact += gone.upper;
            certificate.exact_squares += gone.squares;
            certificate.total_variation()
        };
        let (mut few, mut enough) = (1, order.len());
        while few < enough {
            let middle = usize::midpoint(few, enough);
            let does = without(middle, &mut stays) <= eps * FINELY;
            (few, enough) = if does { (few, middle) } else { (middle + 1, enough) };
        }
        without(enough, &mut stays);
        room("k", &mut self.more, enough)?;
        let mut rest = Listed::with_hint(keys.len() - enough);
        for ((&key, &weight), &stays) in keys.iter().zip(&**weights).zip(&stays) {
            if stays {
                rest.keys.push(key);
                rest.weights.push(weight);
            } else {
                self.more.push(key);
            }
        }
        self.fine = rest;
        Ok(enough > 0)
    }

    /// Puts the weights of listed keys that have little of the mass, or whose values are not there exactly, beside those by codes,
    /// so that their values come from codes as well. Returns `false` if f32 does not hold the weights.
    pub(super) fn code_light_values(
        &mut self,
        weights: &mut [f32],
        there: impl Fn(u32) -> bool,
    ) -> bool {
        let total = self.total();
        if total.is_nan() || total > WEIGHABLE {
            return false;
        }
        let mut sorted = 0;
        for list in [&self.exact, &self.fine] {
            sorted = self.heavy.keys.len();
            for (&key, &weight) in list.keys.iter().zip(&*list.weights) {
                if weight >= HEAVY * total && there(key) {
                    self.heavy.keys.push(key);
                    self.heavy.weights.push(weight);
                } else {
                    weights[key as usize] = weight as f32;
                    self.light[0] += weight;
                    self.light[1] += weight * weight;
                }
            }
        }
        self.heavy.sort(sorted);
        true
    }

    /// Returns what is known of the row's weights.
    pub(super) fn certificate(&self) -> CodedWeights {
        self.certificate_with(Listed::sums(self.fine.weights.iter()))
    }

    /// Returns the same if the keys with finer weights had these sums.
    pub(super) fn certificate_with(&self, fine: CodeSums) -> CodedWeights {
        let WeightSums { weights, squares, largest } = self.sums;
        let coded = CodeSums::computed(weights, squares, largest.into(), self.seen);
        CodedWeights {
            roundings: self.roundings,
            coded: Group::new(self.code, coded),
            fine: self.low.map(|low| Group::new(low, fine)),
            flushed: self.flushed,
            exact: self.exact.total(),
            exact_squares: self.exact.squares(),
            sink: self.sink,
        }
    }
}
