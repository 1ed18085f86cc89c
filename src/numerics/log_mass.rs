//! Joint weight of some keys, as the logarithm of the sum of e^score. It combines parts of one softmax that are
//! computed apart, on other machines or from other evidence.

use crate::numerics::certified_sums::exp;

/// Interval that contains the natural logarithm of a sum of e^score, in the scores' own units (nats).
///
/// ```
/// use certk_rs::LogMass;
/// let two = LogMass::new(2f64.ln(), 2f64.ln()); // two keys with scores of 0
/// assert!(LogMass::NONE.upper < two.lower && two.upper < LogMass::UNKNOWN.upper);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LogMass {
    /// Lower end; negative infinity if there may be no weight at all.
    #[cfg_attr(feature = "serde", serde(with = "crate::numerics::extended"))]
    pub lower: f64,
    /// Upper end.
    #[cfg_attr(feature = "serde", serde(with = "crate::numerics::extended"))]
    pub upper: f64,
}

/// Relative error of a logarithm and of sums of two: generous, because the terms may cancel.
const ROUNDING: f64 = 1.0 / 1_125_899_906_842_624.0;

/// Largest distance of ends, in nats, at which they are weighed against each other.
const MOST: f64 = 700.0;

impl LogMass {
    /// Returns the interval of weights whose logarithm lies between these ends.
    ///
    /// ```
    /// use certk_rs::LogMass;
    /// assert_eq!(LogMass::new(-1.0, 2.5).upper, 2.5);
    /// ```
    #[must_use]
    pub const fn new(lower: f64, upper: f64) -> Self {
        LogMass { lower, upper }
    }

    /// Mass of no key.
    pub const NONE: LogMass = LogMass { lower: f64::NEG_INFINITY, upper: f64::NEG_INFINITY };
    /// Unknown mass.
    pub const UNKNOWN: LogMass = LogMass { lower: f64::NEG_INFINITY, upper: f64::INFINITY };

    /// Returns the mass of weights relative to `e^at` whose real sum is between two numbers, for scores that may all be
    /// off by `error` nats.
    pub(crate) fn of(lower: f64, upper: f64, at: f64, error: f64) -> Self {
        if upper == 0.0 {
            return Self::NONE;
        }
        let moved = |ln: f64, way: f64| {
            let rounded = (ln.abs() + at.abs()) * ROUNDING;
            ln + at + way * (error + rounded) * (1.0 + ROUNDING)
        };
        let above = ln(upper);
        let below = if lower == upper { above } else { ln(lower) };
        let (low, high) = (moved(below, -1.0), moved(above, 1.0));
        LogMass {
            lower: if low.is_nan() { f64::NEG_INFINITY } else { low },
            upper: if high.is_nan() { f64::INFINITY } else { high },
        }
    }

    /// Returns the mass of a computed sum with a relative error.
    pub(crate) fn summed(sum: f64, rounding: f64, at: f64, error: f64) -> Self {
        // The logarithms of both ends lie within this of that of the sum.
        let apart = if rounding < 0.5 { rounding / (1.0 - rounding) } else { f64::INFINITY };
        Self::of(sum, sum, at, error + apart)
    }

    /// Returns the same mass if all scores may be off by `error` nats more.
    pub(crate) fn widened(self, error: f64) -> Self {
        let (lower, upper) = (self.lower - error, self.upper + error);
        LogMass { lower: lower.next_down(), upper: upper.next_up() }
    }

    /// Returns the mass of these keys together with others.
    pub(crate) fn plus(self, other: LogMass) -> Self {
        let ends = [self.lower, self.upper, other.lower, other.upper];
        let at = ends.into_iter().filter(|end| end.is_finite()).fold(f64::NEG_INFINITY, f64::max);
        if at == f64::NEG_INFINITY {
            let upper = self.upper.max(other.upper);
            return LogMass { lower: self.lower.max(other.lower), upper };
        }
        let (one, two) = (self.weights(at), other.weights(at));
        LogMass::of(one.0 + two.0, one.1 + two.1, at, ROUNDING)
    }

    /// Returns bounds on the weight relative to `e^at`; neither end is infinite as long as the interval's are not some
    /// 700 nats above `at`.
    pub(crate) fn weights(self, at: f64) -> (f64, f64) {
        let weight = |end: f64, way: f64| {
            // NaN bounds nothing.
            let above = if (end - at).is_nan() { way * f64::INFINITY } else { end - at };
            // Beyond this a weight is negligible, or outweighs all others.
            if above < -MOST {
                return if way > 0.0 { exp(-MOST) * (1.0 + ROUNDING) } else { 0.0 };
            }
            if above > MOST {
                return if way > 0.0 { f64::INFINITY } else { exp(MOST) * (1.0 - ROUNDING) };
            }
            let slack = (end.abs() + at.abs() + 8.0) * ROUNDING;
            exp(above) * (1.0 + way * 2.0 * slack)
        };
        let upper = if self.upper == f64::NEG_INFINITY { 0.0 } else { weight(self.upper, 1.0) };
        (weight(self.lower, -1.0).max(0.0), upper)
    }
}

/// Returns the natural logarithm, to a few roundings, with the same bits on every machine.
fn ln(value: f64) -> f64 {
    if value == 0.0 {
        return f64::NEG_INFINITY;
    }
    if !(value > 0.0 && value < f64::INFINITY) {
        return value;
    }
    // Within an ulp, and the same on every machine.
    libm::log(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::double_double::DoubleDouble;

    #[test]
    fn ends_hold_what_they_are_of() {
        for sum in [5e-324, 1e-300, 0.3, 1.0, 2.5, 1e9, 1e300] {
            for at in [-1e6, -0.7, 0.0, 3.0, 1e12] {
                let LogMass { lower, upper } = LogMass::of(sum, sum, at, 1e-9);
                let real = DoubleDouble::from(ln(sum)).plus(at).high;
                assert!(lower < real - 0.9e-9 && real + 0.9e-9 < upper, "{sum} {at}");
                assert!(upper - lower < 3e-9 + 1e-14 * (real.abs() + at.abs()) * 2.0);
            }
        }
        assert_eq!(LogMass::of(0.0, 0.0, 5.0, 0.1), LogMass::NONE);
        assert_eq!(LogMass::of(0.0, 1.0, 5.0, f64::NAN), LogMass::UNKNOWN);
        assert_eq!(LogMass::of(0.0, 1.0, 0.0, 0.0).lower, f64::NEG_INFINITY);
    }

    #[test]
    fn ends_are_widened_outward() {
        let one = LogMass::new(1.0, 1.0).widened(1e-17);
        assert!(one.lower < 1.0 && one.upper > 1.0);
        assert_eq!(LogMass::UNKNOWN.widened(0.5), LogMass::UNKNOWN);
    }

    #[test]
    fn weights_are_outside_of_what_they_are_of() {
        for at in [-300.0, 0.0, 77.0] {
            let (low, high) = LogMass { lower: at - 1.0, upper: at + 1.0 }.weights(at);
            assert!(low < (-1f64).exp() && high > 1f64.exp());
            assert!(low > 0.999 * (-1f64).exp() && high < 1.001 * 1f64.exp());
        }
        // Also where weights are hardly any numbers, or hardly finite.
        for tenth in 6900..7200 {
            let end = f64::from(tenth) / 10.0;
            let (_, high) = LogMass { lower: -end, upper: -end }.weights(0.0);
            let (low, _) = LogMass { lower: end, upper: end }.weights(0.0);
            assert!(high > (-end).exp() && low < end.exp(), "{end}");
        }
        assert_eq!(LogMass::NONE.weights(0.0), (0.0, 0.0));
        assert_eq!(LogMass::UNKNOWN.weights(0.0), (0.0, f64::INFINITY));
        let (low, high) = LogMass { lower: -2000.0, upper: -2000.0 }.weights(0.0);
        assert!(low == 0.0 && high > 0.0);
        let (low, high) = LogMass { lower: 2000.0, upper: 2000.0 }.weights(0.0);
        assert!(low > 1e300 && high == f64::INFINITY);
    }
}
