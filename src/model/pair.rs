//! Numbers in two parts, some 105 bits, for the few comparisons that f64 leaves open.

use std::f64::consts::LOG2_E;

/// A number as the sum of two, the second below half a unit in the last place of the first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pair {
    pub(super) high: f64,
    low: f64,
}

impl Pair {
    pub(super) const ZERO: Self = Pair { high: 0.0, low: 0.0 };

    /// The exact sum of two numbers, if it does not overflow.
    pub(super) fn sum(a: f64, b: f64) -> Self {
        let high = a + b;
        let back = high - a;
        Pair { high, low: (a - (high - back)) + (b - back) }
    }

    /// The exact product of two numbers, if it neither overflows nor comes near the subnormal numbers.
    pub(super) fn product(a: f64, b: f64) -> Self {
        let high = a * b;
        Pair { high, low: a.mul_add(b, -high) }
    }

    fn settled(high: f64, low: f64) -> Self {
        let sum = high + low;
        Pair { high: sum, low: low - (sum - high) }
    }

    /// Relative to the sizes of the terms the error is below 2^-104.
    pub(super) fn plus(self, other: Self) -> Self {
        let high = Pair::sum(self.high, other.high);
        let low = Pair::sum(self.low, other.low);
        let first = Pair::settled(high.high, high.low + low.high);
        Pair::settled(first.high, first.low + low.low)
    }

    /// Relative error below 2^-103.
    pub(super) fn times(self, factor: f64) -> Self {
        let high = Pair::product(self.high, factor);
        Pair::settled(high.high, self.low.mul_add(factor, high.low))
    }

    fn by(self, other: Self) -> Self {
        let high = Pair::product(self.high, other.high);
        let low = self.high.mul_add(other.low, self.low * other.high);
        Pair::settled(high.high, high.low + low)
    }

    fn over(self, divisor: f64) -> Self {
        let first = self.high / divisor;
        let rest = (-first).mul_add(divisor, self.high) + self.low;
        Pair::settled(first, rest / divisor)
    }

    pub(super) fn abs(self) -> Self {
        if self.high < 0.0 { Pair { high: -self.high, low: -self.low } } else { self }
    }

    /// `e^x - 1` for |x| <= 1/2; relative error below 2^-98.
    pub(super) fn exp_m1(self) -> Self {
        // The remainder after 29 terms is below 2^-29 / 30! < 2^-130, relative to x.
        let one = Pair { high: 1.0, low: 0.0 };
        let series = (2..=29).rev().fold(one, |sum, i| one.plus(self.by(sum).over(f64::from(i))));
        self.by(series)
    }

    /// `e^x` for |x| <= 700; relative error below 2^-94.
    pub(super) fn exp(self) -> Self {
        const LN_2: Pair = Pair { high: std::f64::consts::LN_2, low: 2.319_046_813_846_299_6e-17 };
        let k = (self.high * LOG2_E).round_ties_even();
        let rest = self.plus(LN_2.times(-k));
        let value = Pair { high: 1.0, low: 0.0 }.plus(rest.exp_m1());
        // In two steps, because 2^k alone may be subnormal or overflow.
        let half = (k * 0.5).floor();
        let (first, second) = (2f64.powi(half as i32), 2f64.powi((k - half) as i32));
        Pair { high: value.high * first * second, low: value.low * first * second }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_add_up() {
        // e^x e^-x = 1, and e^x = 1 + (e^x - 1), far beyond f64.
        for x in [0.3, -0.49, 1.0, 17.25, -300.125, 555.5] {
            let product = Pair::sum(x, 0.0).exp().by(Pair::sum(-x, 0.0).exp());
            let off = product.plus(Pair::sum(-1.0, 0.0));
            assert!((off.high + off.low).abs() < 2f64.powi(-92), "{x}");
        }
        let small = Pair::sum(0.3, 0.0);
        let off = Pair::sum(1.0, 0.0).plus(small.exp_m1()).plus(small.exp().times(-1.0));
        assert!(off.high.abs() < 2f64.powi(-96));
        // e = 2.718281828459045235360287471352662...
        let e = Pair::sum(1.0, 0.0).exp();
        assert_eq!(e.high, std::f64::consts::E);
        assert!((e.low / 1.445_646_891_729_250_2e-16 - 1.0).abs() < 1e-14);
    }
}
