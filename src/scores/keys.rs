//! A row as keys in f64, for whatever the passes over stored numbers do not cover.

use super::{Kind, Mask, Scores, Span};
use crate::error::Error;

/// How a key becomes a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Law {
    /// `w = exp(scale * (key - shift))`, `scale > 0`; the shift is the largest key of the row.
    Exp { scale: f64 },
    /// `w = key`.
    Weight,
}

/// What [`Scores::keys64`] says about the keys it wrote.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys64 {
    pub(crate) law: Law,
    /// The largest key, -inf for a row without visible entries.
    pub(crate) largest: f64,
    /// How far a key may lie from the real score (natural-log units), beyond what the law itself rounds.
    pub(crate) error: f64,
}

/// Entries further than this below the largest carry no weight in f64.
const DEPTH: f64 = 1000.0;
/// Up to this size a biased score is its own key.
const OWN_KEY: f64 = 67_108_864.0;
/// Up to this size of its terms, the two parts of a biased score are as good as exact: 2^60.
const COVERED: f64 = 1_152_921_504_606_846_976.0;
/// What two parts may be off by then, twice: 2^-105 of 2^60, rounded up generously.
const PAIR_ERROR: f64 = 1.0 / 17_592_186_044_416.0;

/// A number in two parts, the first being the sum rounded.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
struct Pair {
    high: f64,
    low: f64,
}

impl Scores<'_> {
    /// Writes a row's keys in f64: larger is better, -inf is masked, invisible entries are masked too.
    ///
    /// # Errors
    /// Whatever `judge` finds; sums of weights that overflow; biased scores too large to be told apart.
    pub(crate) fn keys64(&self, row: usize, keys: &mut Vec<f64>) -> Result<Keys64, Error> {
        self.judge(row)?;
        let span = self.span(row);
        keys.clear();
        keys.resize(span.n, f64::NEG_INFINITY);
        if matches!(self.mask, Some(Mask::Additive(_))) && self.is_biased(&span) {
            return self.biased_keys(row, &span, keys);
        }
        let mut largest = f64::NEG_INFINITY;
        let mut total = 0.0;
        for (j, key) in keys.iter_mut().enumerate().take(span.visible) {
            let value = self.data.get(span.start + j);
            if value.is_nan() && !self.masked(&span, j) {
                // Judged a moment ago: somebody is writing to the buffer.
                return Err(Error::ScoreNan { place: self.place(row, Some(j)) });
            }
            let hidden = value == f64::NEG_INFINITY || (self.kind == Kind::Probs && value == 0.0);
            if hidden || self.masked(&span, j) {
                continue;
            }
            *key = match self.scale {
                0.0 => 0.0,
                scale if scale < 0.0 => -value,
                _ => value,
            };
            largest = if *key > largest { *key } else { largest };
            total += *key;
        }
        let law = match self.kind {
            Kind::Probs => Law::Weight,
            _ if self.scale == 0.0 => Law::Exp { scale: 1.0 },
            _ => Law::Exp { scale: self.scale.abs() },
        };
        // No order of summation may overflow.
        if law == Law::Weight && total > f64::MAX / 4.0 {
            return Err(Error::ProbabilityTotal { place: self.place(row, None) });
        }
        Ok(Keys64 { law, largest, error: self.row_radius(row) })
    }

    /// Whether an additive mask does more than mask.
    fn is_biased(&self, span: &Span) -> bool {
        let Some(Mask::Additive(mask)) = self.mask else { return false };
        (0..span.visible).any(|j| !self.masked(span, j) && mask.get(span.mask_start + j) != 0.0)
    }

    /// Keys of `scale * score + bias`. The sum is carried in two parts, so what the keys lose is one rounding of the sum, or,
    /// where the sums are large, of their distance to the largest.
    fn biased_keys(&self, row: usize, span: &Span, keys: &mut [f64]) -> Result<Keys64, Error> {
        let Some(Mask::Additive(mask)) = self.mask else { unreachable!("the caller looked") };
        let too_large = |j, value| Error::MaskedScore { place: self.place(row, j), value };
        let pair_at = |j: usize| {
            let value = self.data.get(span.start + j);
            let hidden = self.masked(span, j) || value == f64::NEG_INFINITY;
            (!hidden).then(|| self.biased(value, mask.get(span.mask_start + j)))
        };
        let mut largest: Option<Pair> = None;
        for (pair, _) in (0..span.visible).filter_map(pair_at) {
            if largest.is_none_or(|best| pair > best) {
                largest = Some(pair);
            }
        }
        let law = Law::Exp { scale: 1.0 };
        let Some(best) = largest else {
            return Ok(Keys64 { law, largest: f64::NEG_INFINITY, error: 0.0 });
        };
        if !best.high.is_finite() {
            return Err(too_large(None, best.high));
        }
        let near = best.high.abs() <= OWN_KEY;
        for (j, key) in keys.iter_mut().enumerate().take(span.visible) {
            let Some((pair, size)) = pair_at(j) else { continue };
            // Two parts of numbers this large are not exact; that is harmless only far below the largest.
            let doubt = if size <= COVERED { 0.0 } else { size * f64::EPSILON };
            if doubt > 0.0 && (pair.high - best.high) + doubt >= -DEPTH {
                return Err(too_large(Some(j), pair.high));
            }
            let own = if near {
                pair.high + pair.low
            } else {
                (pair.high - best.high) + (pair.low - best.low)
            };
            // `max` also turns a NaN, of a buffer that somebody writes to, into an entry without weight.
            *key = own.max(f64::MIN);
        }
        let size = if near { best.high.abs() + DEPTH } else { DEPTH };
        let error = self.row_radius(row) + size * f64::EPSILON + PAIR_ERROR;
        Ok(Keys64 { law, largest: if near { best.high } else { 0.0 }, error })
    }

    /// `scale * score + bias` in two parts, and the size of the larger term.
    fn biased(&self, score: f64, bias: f64) -> (Pair, f64) {
        let product = self.scale * score;
        let product_low = self.scale.mul_add(score, -product);
        let sum = product + bias;
        let back = sum - product;
        let low = (product - (sum - back)) + (bias - back) + product_low;
        let high = sum + low;
        if !high.is_finite() {
            return (Pair { high: sum, low: 0.0 }, f64::INFINITY);
        }
        (Pair { high, low: (sum - high) + low }, product.abs().max(bias.abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Data;
    use super::*;

    fn keys(data: &[f64], bias: &[f64], scale: f64) -> Result<(Keys64, Vec<f64>), Error> {
        let scores = Scores::new(data, &[data.len()])?.scale(scale)?;
        let scores = scores.mask(Mask::Additive(Data::F64(bias)), &[])?;
        let mut keys = Vec::new();
        Ok((scores.keys64(0, &mut keys)?, keys))
    }

    #[test]
    fn biased_sums_round_once() {
        let scale = 1.0 + f64::EPSILON;
        let (_, keys) = keys(&[1e8, 3.0], &[-1e8 + 0.5, 1e-17], scale).unwrap();
        assert_eq!(keys[0], 0.5 + 1e8 * f64::EPSILON);
    }

    #[test]
    fn large_sums_become_distances() {
        let (meaning, keys) = keys(&[0.1, 0.3, 0.2], &[-1e9, -1e9, -2e9], 1.0).unwrap();
        assert_eq!((meaning.largest, keys[1]), (0.0, 0.0));
        assert!((keys[0] + 0.2).abs() < 1e-16 && keys[2] < -9.9e8);
        assert!(meaning.error < 1e-12);
    }

    #[test]
    fn a_mask_of_zeros_is_no_bias() {
        let (meaning, keys) = keys(&[1.0, 2.0, 3.0], &[0.0, f64::MIN, -0.0], 0.5).unwrap();
        assert_eq!(meaning.law, Law::Exp { scale: 0.5 });
        assert_eq!(meaning.error, 0.0);
        assert_eq!(keys, [1.0, f64::NEG_INFINITY, 3.0]);
    }

    #[test]
    fn sums_beyond_all_digits_are_refused_unless_they_weigh_nothing() {
        assert!(keys(&[1e30, 0.0], &[1.0, 0.0], 1.0).is_err());
        let (meaning, keys) = keys(&[-1e30, 0.0], &[1.0, 0.5], 1.0).unwrap();
        assert_eq!((meaning.largest, keys[0]), (0.5, -1e30));
        assert!(super::tests::keys(&[1e300, 0.0], &[1.0, 0.0], 1e300).is_err());
        assert!(super::tests::keys(&[-1e300, 0.0], &[1.0, 0.0], 1e300).is_ok());
    }
}
