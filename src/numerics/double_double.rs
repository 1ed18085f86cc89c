//! Double-double numbers, with a logarithm and an exponential accurate to 2^-90.

use std::sync::LazyLock;

/// Returns the sum of two floats and its rounding error.
pub(crate) fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let back = sum - a;
    (sum, (a - (sum - back)) + (b - back))
}

/// Returns the same for two floats of which the first is not smaller in size.
pub(crate) fn fast_two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    (sum, b - (sum - a))
}

/// Unevaluated sum of two floats, the first being the rounded sum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DoubleDouble {
    pub(crate) high: f64,
    pub(crate) low: f64,
}

pub(crate) const ONE: DoubleDouble = DoubleDouble { high: 1.0, low: 0.0 };
/// ln 2 to 107 bits.
pub(crate) const LN2: DoubleDouble =
    DoubleDouble { high: std::f64::consts::LN_2, low: 2.319_046_813_846_299_6e-17 };
/// Bound on the relative error of the functions below.
const DOUBT: f64 = 1.0 / (1u128 << 85) as f64;

/// Reciprocals: 1 / i at i, from 1 on.
static RECIPROCALS: LazyLock<[DoubleDouble; 44]> =
    LazyLock::new(|| std::array::from_fn(|i| if i == 0 { ONE } else { ONE.over(i as f64) }));

impl From<f64> for DoubleDouble {
    fn from(high: f64) -> Self {
        DoubleDouble { high, low: 0.0 }
    }
}

impl DoubleDouble {
    /// Returns the exact product of two floats, unless its low part underflows.
    pub(crate) fn product(a: f64, b: f64) -> Self {
        let high = a * b;
        DoubleDouble { high, low: a.mul_add(b, -high) }
    }

    pub(crate) fn plus(self, other: impl Into<DoubleDouble>) -> Self {
        let other = other.into();
        let (high, mut low) = two_sum(self.high, other.high);
        let (tail, lost) = two_sum(self.low, other.low);
        low += tail;
        let (high, low) = fast_two_sum(high, low);
        let (high, low) = fast_two_sum(high, low + lost);
        DoubleDouble { high, low }
    }

    pub(crate) fn negated(self) -> Self {
        DoubleDouble { high: -self.high, low: -self.low }
    }

    pub(crate) fn times(self, other: impl Into<DoubleDouble>) -> Self {
        let other = other.into();
        let exact = DoubleDouble::product(self.high, other.high);
        let cross = self.high.mul_add(other.low, self.low * other.high);
        let (high, low) = fast_two_sum(exact.high, exact.low + cross);
        DoubleDouble { high, low }
    }

    pub(crate) fn over(self, other: impl Into<DoubleDouble>) -> Self {
        let other = other.into();
        let first = self.high / other.high;
        let rest = self.plus(other.times(first).negated());
        let second = rest.high / other.high;
        let rest = rest.plus(other.times(second).negated());
        let (high, low) = fast_two_sum(first, second);
        DoubleDouble { high, low }.plus(rest.high / other.high)
    }

    /// Returns a float not below the real number that this approximates.
    pub(crate) fn up(self) -> f64 {
        let (high, low) = two_sum(self.high, self.low + self.high.abs() * DOUBT);
        if low > 0.0 { high.next_up() } else { high }
    }

    /// Returns a float not above the real number that this approximates.
    pub(crate) fn down(self) -> f64 {
        -self.negated().up()
    }
}

/// Returns `2 atanh(f)` for |f| < .18: the omitted terms are below 2^-109 of the first.
fn twice_atanh(f: DoubleDouble) -> DoubleDouble {
    let square = f.times(f);
    let mut sum = DoubleDouble::from(0.0);
    for j in (0..=21).rev() {
        sum = sum.times(square).plus(RECIPROCALS[2 * j + 1]);
    }
    let half = sum.times(f);
    half.plus(half)
}

/// Returns a positive finite float as `m 2^e` with 1 <= m < 2.
pub(crate) fn split(value: f64) -> (f64, i32) {
    const FRACTION: u64 = (1 << 52) - 1;
    let (value, lifted) =
        if value < f64::MIN_POSITIVE { (value * 2f64.powi(64), 64) } else { (value, 0) };
    let bits = value.to_bits();
    let exponent = (bits >> 52) as i32 - 1023 - lifted;
    (f64::from_bits(bits & FRACTION | 1023 << 52), exponent)
}

/// Returns `ln(a / b) + exponent ln 2` of positive numbers of ordinary size, accurate near 0 too.
pub(crate) fn ln_ratio(a: DoubleDouble, b: DoubleDouble, exponent: i32) -> DoubleDouble {
    let (mantissa, mut shift) = split(a.high / b.high);
    if mantissa > std::f64::consts::SQRT_2 {
        shift += 1;
    }
    let power = 2f64.powi(shift);
    let b = DoubleDouble { high: b.high * power, low: b.low * power };
    let rest = twice_atanh(a.plus(b.negated()).over(a.plus(b)));
    match exponent + shift {
        0 => rest,
        e => LN2.times(f64::from(e)).plus(rest),
    }
}

/// Returns `1 - e^{-x}` for 0 < x < 40.
pub(crate) fn one_minus_exp(x: f64) -> DoubleDouble {
    let halvings = (x * std::f64::consts::LOG2_E).round_ties_even();
    let rest = LN2.times(halvings).plus(-x);
    // (e^rest - 1) / rest, where |rest| < .35; the terms left out are below 2^-125.
    let mut sum = ONE;
    for i in (2..=26).rev() {
        sum = sum.times(rest.times(RECIPROCALS[i])).plus(ONE);
    }
    let grown = rest.times(sum);
    if halvings == 0.0 {
        return grown.negated();
    }
    let power = -2f64.powi(-(halvings as i32));
    let exp = grown.plus(ONE);
    ONE.plus(DoubleDouble { high: exp.high * power, low: exp.low * power })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: DoubleDouble, high: f64, low: f64) {
        let miss = (got.high - high) + (got.low - low);
        assert!(miss.abs() <= 2f64.powi(-95) * high.abs(), "{got:?} is not {high} + {low}");
    }

    #[test]
    fn known_values_to_a_hundred_bits() {
        // mpmath at 60 digits: the float nearest, and what is left.
        near(
            ln_ratio(DoubleDouble::from(3.0), ONE, 0),
            1.098_612_288_668_109_8,
            -9.071_297_235_001_53e-17,
        );
        near(
            ln_ratio(ONE, DoubleDouble::from(10.0), 0),
            -std::f64::consts::LN_10,
            2.170_756_223_382_249_4e-16,
        );
        near(ln_ratio(ONE, ONE, 0), 0.0, 0.0);
        near(one_minus_exp(1.0), 0.632_120_558_828_557_7, 1.242_875_367_278_836_3e-17);
        near(one_minus_exp(0.125), 0.117_503_097_415_404_6, -3.265_882_063_901_196_5e-18);
    }

    #[test]
    fn parts_of_small_and_large_floats() {
        for value in [5e-324, 1e-310, f64::MIN_POSITIVE, 0.75, 1.0, 3.5, f64::MAX] {
            let (m, e) = split(value);
            assert!((1.0..2.0).contains(&m));
            assert_eq!(m * 2f64.powi(e / 2) * 2f64.powi(e - e / 2), value);
        }
    }

    #[test]
    fn rounding_encloses() {
        let third = ONE.over(3.0);
        assert_eq!(third.up(), (1.0f64 / 3.0).next_up());
        assert_eq!(third.down(), 1.0 / 3.0);
    }
}
