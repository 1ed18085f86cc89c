//! Rows as f64 scores, where the passes over stored numbers do not apply.

use half::{bf16, f16};

use super::{Kind, Scores, Stored, StoredMask};
use crate::error::Error;
use crate::numerics::double_double::{DoubleDouble, two_sum};
use crate::runtime::ambient::{self, PIECE, asked, pieces, pieces_mut};
use crate::runtime::memory::room;
use crate::runtime::reused::{Reused, filled_again};

/// Rule that turns a score into a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum WeightKind {
    /// `w = exp(scale * (score - shift))`, `scale > 0`; the shift is the largest score of the row.
    Exp { scale: f64 },
    /// `w = score`.
    Weight,
}

/// Description of the scores that [`Scores::wide_scores`] wrote.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WideScores {
    pub(crate) weight_kind: WeightKind,
    /// Largest score, -inf for a row without visible entries.
    pub(crate) largest: f64,
    /// Bound on the distance of a score from the real score (natural-log units), without the rounding of the weight
    /// rule.
    pub(crate) error: f64,
}

/// Spare entries beyond a row's scores, for whole groups of lanes.
const SPARE: usize = 64;
/// Entries further than this below the largest carry no weight in f64.
const DEPTH: f64 = 1000.0;
/// Up to this size of the largest, biased scores are written as they are, beyond it as their distances to the largest.
const UNSHIFTED: f64 = 67_108_864.0;
/// Up to this size of its terms, the two parts of a biased score are as good as exact: 2^60.
const COVERED: f64 = 1_152_921_504_606_846_976.0;
/// Twice the error of the two parts at that size: 2^-105 of 2^60, rounded up generously.
const PAIR_ERROR: f64 = 1.0 / 17_592_186_044_416.0;

/// Number in two parts: the rounded sum and its remainder.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
struct Pair {
    high: f64,
    low: f64,
}

/// Returns the largest of some numbers, -inf for none.
fn largest(scores: &[f64]) -> f64 {
    let of = |largest, piece: &[f64]| piece.iter().fold(largest, |a, &b| if b > a { b } else { a });
    pieces(scores).fold(f64::NEG_INFINITY, of)
}

/// Removes masked scores, keeping the order.
pub(crate) fn drop_masked(scores: &mut Vec<f64>) {
    let mut kept = 0;
    for at in asked(0..scores.len()) {
        let score = scores[at];
        scores[kept] = score;
        kept += usize::from(score > f64::NEG_INFINITY);
    }
    scores.truncate(kept);
}

/// Marks the entries that are zero. Returns `true` if all others mask.
fn admit<T: Copy>(mask: &[T], judge: impl Fn(T) -> (bool, bool), admitted: &mut [u8]) -> bool {
    // Bytes throughout, so that the compiler vectorizes the loop.
    let mut only = 1;
    for (byte, &bias) in admitted.iter_mut().zip(mask) {
        let (zero, masked) = judge(bias);
        *byte = u8::from(zero);
        only &= u8::from(zero) | u8::from(masked);
    }
    only == 1
}

impl Scores<'_> {
    /// Writes a row's scores in f64: larger is better, masked and invisible entries are -inf.
    ///
    /// # Errors
    /// As [`Scores::judge`]; [`Error::ProbabilityTotal`]; [`Error::MaskedScore`]; [`Error::NoMemory`].
    pub(crate) fn wide_scores(
        &self,
        row: usize,
        scores: &mut Vec<f64>,
    ) -> Result<WideScores, Error> {
        let span = self.span(row);
        let probs = self.kind == Kind::Probs;
        let hidden = if probs { 0.0 } else { f64::NEG_INFINITY };
        scores.clear();
        room("scores", scores, span.n.saturating_add(SPARE))?;
        let (at, start) = self.stored_at(row);
        for from in (start..start + span.prefix).step_by(PIECE) {
            ambient::check()?;
            self.data.widen(at, from..(start + span.prefix).min(from + PIECE), scores);
        }
        let bias = self.hide(row, hidden, scores)?;
        let good = if probs {
            pieces(scores)
                .all(|piece| piece.iter().all(|score| (0.0..f64::INFINITY).contains(score)))
        } else {
            let finite = |piece: &[f64]| piece.iter().all(|value| *value < f64::INFINITY);
            pieces(scores).chain(pieces(&bias)).all(finite)
        };
        ambient::check()?;
        if !good {
            // The check names the place. If it finds nothing, the buffer changed meanwhile, and nothing is certified.
            let place = self.place(row, None);
            return Err(self.judge(row).err().unwrap_or(Error::Changed { place }));
        }
        while scores.len() < span.n {
            ambient::check()?;
            scores.resize(span.n.min(scores.len() + PIECE), hidden);
        }
        if !bias.is_empty() {
            return self.biased_scores(row, bias, scores);
        }
        if probs {
            // No order of summation may overflow.
            if pieces(scores).flatten().sum::<f64>() > f64::MAX / 4.0 {
                return Err(Error::ProbabilityTotal { place: self.place(row, None) });
            }
            for score in pieces_mut(scores).flatten().filter(|score| **score == 0.0) {
                *score = f64::NEG_INFINITY;
            }
        } else if self.scale <= 0.0 {
            let scale = self.scale;
            for score in pieces_mut(scores).flatten().filter(|score| **score > f64::NEG_INFINITY) {
                *score = if scale == 0.0 { 0.0 } else { -*score };
            }
        }
        let largest = largest(scores);
        ambient::check()?;
        let weight_kind = match self.kind {
            Kind::Probs => WeightKind::Weight,
            _ if self.scale == 0.0 => WeightKind::Exp { scale: 1.0 },
            _ => WeightKind::Exp { scale: self.scale.abs() },
        };
        Ok(WideScores { weight_kind, largest, error: self.row_radius(row) })
    }

    /// Marks the visible entries that an additive mask admits, a byte each. Returns `false` if the mask adds a bias.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn only_masks(&self, row: usize, admitted: &mut Vec<u8>) -> Result<bool, Error> {
        // Of the sixteen-bit floats the bits tell: no magnitude, or a sign and a large one.
        const MAGNITUDE: u16 = 0x7fff;
        let Some(StoredMask::Additive(mask)) = &self.mask else { return Ok(false) };
        let prefix = self.span(row).prefix;
        admitted.clear();
        room("mask", admitted, prefix)?;
        admitted.resize(prefix, 0);
        let masked_below = mask.masked_below();
        let bits = |bits: u16, below: u16, infinity: u16| {
            let magnitude = bits & MAGNITUDE;
            let large = (below & MAGNITUDE..=infinity).contains(&magnitude);
            (magnitude == 0, bits > MAGNITUDE && large)
        };
        Ok(match mask {
            Stored::F32(mask) => {
                let below = f32::MIN / 2.0;
                admit(&mask.row(row)[..prefix], |bias| (bias == 0.0, bias <= below), admitted)
            }
            Stored::F64(mask) => {
                let below = f64::MIN / 2.0;
                admit(&mask.row(row)[..prefix], |bias| (bias == 0.0, bias <= below), admitted)
            }
            Stored::F16(mask) => {
                let below = f16::from_f64(masked_below).to_bits();
                let infinity = f16::INFINITY.to_bits();
                admit(
                    &mask.row(row)[..prefix],
                    |bias| bits(bias.to_bits(), below, infinity),
                    admitted,
                )
            }
            Stored::Bf16(mask) => {
                let below = bf16::from_f64(masked_below).to_bits();
                let infinity = bf16::INFINITY.to_bits();
                admit(
                    &mask.row(row)[..prefix],
                    |bias| bits(bias.to_bits(), below, infinity),
                    admitted,
                )
            }
        })
    }

    /// Hides the entries that the mask hides. Returns the biases of an additive mask that does more.
    fn hide(&self, row: usize, hidden: f64, scores: &mut [f64]) -> Result<Reused<f64>, Error> {
        let mut bias = Reused::with_hint(scores.len());
        match &self.mask {
            None => {}
            Some(StoredMask::Allowed(bytes)) => {
                for (scores, bytes) in pieces_mut(scores).zip(bytes.row(row).chunks(PIECE)) {
                    for (score, &byte) in scores.iter_mut().zip(bytes) {
                        *score = if byte == 0 { hidden } else { *score };
                    }
                }
            }
            Some(StoredMask::Additive(mask)) => {
                let prefix = scores.len();
                room("mask", &mut bias, prefix)?;
                for from in (0..prefix).step_by(PIECE) {
                    ambient::check()?;
                    mask.widen(row, from..prefix.min(from + PIECE), &mut bias);
                }
                let masked = mask.masked_below();
                for (score, bias) in asked(scores.iter_mut().zip(&mut bias)) {
                    if *bias <= masked {
                        (*score, *bias) = (hidden, 0.0);
                    }
                }
                if pieces(&bias).flatten().all(|bias| *bias == 0.0) {
                    bias.clear();
                }
            }
        }
        Ok(bias)
    }

    /// Turns scores into `scale * score + bias`. Sums are carried in two parts, so each loses one rounding, or, where
    /// sums are large, the rounding of its distance to the largest.
    fn biased_scores(
        &self,
        row: usize,
        bias: Reused<f64>,
        scores: &mut [f64],
    ) -> Result<WideScores, Error> {
        let too_large = |j, value| Error::MaskedScore { place: self.place(row, j), value };
        let mut best = Pair { high: f64::NEG_INFINITY, low: 0.0 };
        // The low parts, and the sizes of the larger terms; the high parts are in `scores`.
        let mut lows = filled_again("mask", bias.len(), 0.0)?;
        let mut sizes = bias;
        for ((score, low), size) in asked(scores.iter_mut().zip(&mut lows).zip(&mut sizes)) {
            if *score == f64::NEG_INFINITY {
                continue;
            }
            let pair;
            (pair, *size) = self.biased(*score, *size);
            best = if pair > best { pair } else { best };
            // An overflow downward must not look like a mask.
            (*score, *low) = (pair.high.max(f64::MIN), pair.low);
        }
        ambient::check()?;
        let weight_kind = WeightKind::Exp { scale: 1.0 };
        if best.high == f64::NEG_INFINITY && scores.iter().all(|score| *score == f64::NEG_INFINITY)
        {
            return Ok(WideScores { weight_kind, largest: f64::NEG_INFINITY, error: 0.0 });
        }
        if !best.high.is_finite() {
            return Err(too_large(None, best.high));
        }
        let near = best.high.abs() <= UNSHIFTED;
        for (j, ((score, low), size)) in asked(scores.iter_mut().zip(&lows).zip(&sizes).enumerate())
        {
            if *score == f64::NEG_INFINITY {
                continue;
            }
            // Two parts of numbers this large are not exact; that is harmless only far below the largest.
            let doubt = if *size <= COVERED { 0.0 } else { *size * f64::EPSILON };
            if doubt > 0.0 && (*score - best.high) + doubt >= -DEPTH {
                return Err(too_large(Some(j), *score));
            }
            let own = if near { *score + low } else { (*score - best.high) + (low - best.low) };
            *score = own.max(f64::MIN);
        }
        let size = if near { best.high.abs() + DEPTH } else { DEPTH };
        let error = self.row_radius(row) + size * f64::EPSILON + PAIR_ERROR;
        Ok(WideScores { weight_kind, largest: if near { best.high } else { 0.0 }, error })
    }

    /// Returns `scale * score + bias` in two parts, and the size of the larger term.
    fn biased(&self, score: f64, bias: f64) -> (Pair, f64) {
        let DoubleDouble { high: product, low: product_low } =
            DoubleDouble::product(self.scale, score);
        let (sum, lost) = two_sum(product, bias);
        let low = lost + product_low;
        let high = sum + low;
        if !high.is_finite() {
            // Upward no finite number holds it; downward it has no weight beside any finite score.
            return (Pair { high: sum, low: 0.0 }, 0.0);
        }
        (Pair { high, low: (sum - high) + low }, product.abs().max(bias.abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Data, Mask};
    use super::*;

    fn widened(data: &[f64], bias: &[f64], scale: f64) -> Result<(WideScores, Vec<f64>), Error> {
        let scores = Scores::new(data, &[data.len()])?.scale(scale)?;
        let scores = scores.mask(Mask::Additive(Data::F64(bias)), &[])?;
        let mut read = Vec::new();
        Ok((scores.wide_scores(0, &mut read)?, read))
    }

    #[test]
    fn biased_sums_round_once() {
        let scale = 1.0 + f64::EPSILON;
        let (_, read) = widened(&[1e8, 3.0], &[-1e8 + 0.5, 1e-17], scale).unwrap();
        assert_eq!(read[0], 0.5 + 1e8 * f64::EPSILON);
    }

    #[test]
    fn large_sums_become_distances() {
        let (about, read) = widened(&[0.1, 0.3, 0.2], &[-1e9, -1e9, -2e9], 1.0).unwrap();
        assert_eq!((about.largest, read[1]), (0.0, 0.0));
        assert!((read[0] + 0.2).abs() < 1e-16 && read[2] < -9.9e8);
        assert!(about.error < 1e-12);
    }

    #[test]
    fn a_mask_of_zeros_is_no_bias() {
        let (about, read) = widened(&[1.0, 2.0, 3.0], &[0.0, f64::MIN, -0.0], 0.5).unwrap();
        assert_eq!(about.weight_kind, WeightKind::Exp { scale: 0.5 });
        assert_eq!(about.error, 0.0);
        assert_eq!(read, [1.0, f64::NEG_INFINITY, 3.0]);
    }

    #[test]
    fn sums_beyond_all_digits_are_refused_unless_they_weigh_nothing() {
        assert!(widened(&[1e30, 0.0], &[1.0, 0.0], 1.0).is_err());
        let (about, read) = widened(&[-1e30, 0.0], &[1.0, 0.5], 1.0).unwrap();
        assert_eq!((about.largest, read[0]), (0.5, -1e30));
        assert!(widened(&[1e300, 0.0], &[1.0, 0.0], 1e300).is_err());
        assert!(widened(&[-1e300, 0.0], &[1.0, 0.0], 1e300).is_ok());
    }
}
