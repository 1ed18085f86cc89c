//! Differences of keys in natural-log units, and their weights, each rounded to a chosen side.

use crate::numerics::certified_sums;
use crate::numerics::double_double::{DoubleDouble, ln_ratio, split, two_sum};
use crate::rows::{WeightKind, WideScores};

/// Rule from the keys of a row to gaps and weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measure {
    pub(super) weight_kind: WeightKind,
    /// Bound on the distance of a stored key from the real score, in natural-log units.
    pub(super) error: f64,
}

impl From<WideScores> for Measure {
    fn from(about: WideScores) -> Self {
        Measure { weight_kind: about.weight_kind, error: about.error }
    }
}

/// Bound on the weight of anything further below the reference: e^-708 < 2^-1021.
const FLUSH: f64 = 2.0 * f64::MIN_POSITIVE;
/// More than the relative error of `certified_sums::exp` (2^-50) and the rounding of the product with it.
const EXP_DOUBT: f64 = 1.0 / (1u64 << 49) as f64;
/// Below this the error of a product may underflow.
const SMALL: f64 = 1e-280;

impl Measure {
    /// Unchanged scores in natural-log units.
    pub(super) const LOGITS: Measure =
        Measure { weight_kind: WeightKind::Exp { scale: 1.0 }, error: 0.0 };

    /// Returns a lower bound of the real gap between two stored keys, `high >= low`.
    pub(super) fn gap_down(&self, high: f64, low: f64) -> f64 {
        if high == low {
            return 0.0;
        }
        match self.weight_kind {
            WeightKind::Weight => ln_gap(high, low).down().max(0.0),
            WeightKind::Exp { scale } => {
                let (gap, lost) = two_sum(high, -low);
                // Two finite keys have a finite gap, even where the difference overflows.
                let gap = if lost < 0.0 { gap.next_down() } else { gap.min(f64::MAX) };
                let product = gap * scale;
                if product == f64::INFINITY {
                    return f64::MAX;
                }
                let below = product < SMALL || gap.mul_add(scale, -product) < 0.0;
                if below && product > 0.0 { product.next_down() } else { product }
            }
        }
    }

    /// Returns an upper bound of the real gap between two stored keys, `high >= low`.
    fn gap_up(&self, high: f64, low: f64) -> f64 {
        if high == low {
            return 0.0;
        }
        match self.weight_kind {
            WeightKind::Weight => ln_gap(high, low).up(),
            WeightKind::Exp { scale } => {
                let (gap, lost) = two_sum(high, -low);
                let gap = if lost > 0.0 { gap.next_up() } else { gap };
                let product = gap * scale;
                let above = product < SMALL || gap.mul_add(scale, -product) > 0.0;
                if above { product.next_up() } else { product }
            }
        }
    }

    /// Returns an upper bound on the weight of an entry at `level`, relative to one at `reference >= level`.
    pub(super) fn weight_up(&self, reference: f64, level: f64) -> f64 {
        if self.weight_kind == WeightKind::Weight {
            return level;
        }
        let gap = self.gap_down(reference, level);
        if gap == 0.0 {
            return 1.0;
        }
        let weight = certified_sums::exp(-gap);
        if weight > 0.0 { weight * (1.0 + EXP_DOUBT) } else { FLUSH }
    }

    /// Returns a lower bound on the weight of an entry at `level`, relative to one at `reference >= level`.
    pub(super) fn weight_down(&self, reference: f64, level: f64) -> f64 {
        if self.weight_kind == WeightKind::Weight {
            return level;
        }
        let gap = self.gap_up(reference, level);
        if gap == 0.0 { 1.0 } else { certified_sums::exp(-gap) * (1.0 - EXP_DOUBT) }
    }

    /// Returns the factor by which the ratio of two weights may grow because stored keys differ from the real scores.
    pub(super) fn inflation(&self) -> f64 {
        if self.error == 0.0 { 1.0 } else { (2.0 * self.error).exp() * (1.0 + 64.0 * f64::EPSILON) }
    }
}

/// Returns `ln(high / low)` of positive numbers.
fn ln_gap(high: f64, low: f64) -> DoubleDouble {
    let ((a, above), (b, below)) = (split(high), split(low));
    ln_ratio(DoubleDouble::from(a), DoubleDouble::from(b), above - below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_round_to_the_side_asked_for() {
        let unit = Measure::LOGITS;
        assert_eq!((unit.gap_down(3.0, 1.0), unit.gap_up(3.0, 1.0)), (2.0, 2.0));
        assert_eq!(unit.gap_down(1.0, -1e-30), 1.0);
        assert_eq!(unit.gap_up(1.0, -1e-30), 1.0f64.next_up());
        assert_eq!(unit.gap_down(1.0, 1e-30), 1.0f64.next_down());
        assert_eq!(unit.gap_up(1.0, 1e-30), 1.0);
        assert_eq!(unit.gap_down(1e308, -1e308), f64::MAX);
        let tenth = Measure { weight_kind: WeightKind::Exp { scale: 0.1 }, error: 0.0 };
        // The f64 nearest .1 lies above it, and three times that is no float.
        assert!(tenth.gap_down(3.0, 0.0) < tenth.gap_up(3.0, 0.0));
        let weights = Measure { weight_kind: WeightKind::Weight, error: 0.0 };
        assert_eq!(weights.gap_down(0.5, 0.5), 0.0);
        assert!(weights.gap_down(1.0, 0.5) <= std::f64::consts::LN_2);
        assert!(weights.gap_up(1.0, 0.5) > std::f64::consts::LN_2);
        assert!(weights.gap_up(1e308, 5e-324) < 1454.0);
    }

    #[test]
    fn weights_enclose() {
        let unit = Measure::LOGITS;
        for level in [-1e-17, -1.0, -50.5, -700.0, -708.0, -709.0, -1e300] {
            let (low, high) = (unit.weight_down(0.0, level), unit.weight_up(0.0, level));
            assert!(low <= level.exp() && level.exp() <= high && low < high, "{level}");
            assert!(level < -708.0 || high / low - 1.0 < 1e-14);
        }
        assert_eq!((unit.weight_down(2.0, 2.0), unit.weight_up(2.0, 2.0)), (1.0, 1.0));
    }
}
