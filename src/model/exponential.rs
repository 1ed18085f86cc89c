//! The exponential of a number in two parts, for the few comparisons that f64 leaves open.

use std::f64::consts::LOG2_E;

use crate::numerics::double_double::{DoubleDouble, LN2, ONE, fast_two_sum};

/// Relative error below 2^-103.
pub(super) fn scaled(x: DoubleDouble, factor: f64) -> DoubleDouble {
    let high = DoubleDouble::product(x.high, factor);
    let (high, low) = fast_two_sum(high.high, x.low.mul_add(factor, high.low));
    DoubleDouble { high, low }
}

fn divided(x: DoubleDouble, divisor: f64) -> DoubleDouble {
    let first = x.high / divisor;
    let rest = (-first).mul_add(divisor, x.high) + x.low;
    let (high, low) = fast_two_sum(first, rest / divisor);
    DoubleDouble { high, low }
}

/// `e^x - 1` for |x| <= 1/2; relative error below 2^-98.
pub(super) fn exp_m1(x: DoubleDouble) -> DoubleDouble {
    // The remainder after 29 terms is below 2^-29 / 30! < 2^-130, relative to x.
    let term = |sum: DoubleDouble, i: u32| ONE.plus(divided(x.times(sum), f64::from(i)));
    x.times((2..=29).rev().fold(ONE, term))
}

/// `e^x` for |x| <= 700; relative error below 2^-94.
pub(super) fn exp(x: DoubleDouble) -> DoubleDouble {
    let k = (x.high * LOG2_E).round_ties_even();
    let value = ONE.plus(exp_m1(x.plus(scaled(LN2, -k))));
    // In two steps, because 2^k alone may be subnormal or overflow.
    let half = (k * 0.5).floor();
    let (first, second) = (2f64.powi(half as i32), 2f64.powi((k - half) as i32));
    DoubleDouble { high: value.high * first * second, low: value.low * first * second }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_add_up() {
        // e^x e^-x = 1, and e^x = 1 + (e^x - 1), far beyond f64.
        for x in [0.3, -0.49, 1.0, 17.25, -300.125, 555.5] {
            let product = exp(x.into()).times(exp((-x).into()));
            let off = product.plus(-1.0);
            assert!((off.high + off.low).abs() < 2f64.powi(-92), "{x}");
        }
        let small = DoubleDouble::from(0.3);
        let off = ONE.plus(exp_m1(small)).plus(scaled(exp(small), -1.0));
        assert!(off.high.abs() < 2f64.powi(-96));
        // e = 2.718281828459045235360287471352662...
        let e = exp(ONE);
        assert_eq!(e.high, std::f64::consts::E);
        assert!((e.low / 1.445_646_891_729_250_2e-16 - 1.0).abs() < 1e-14);
    }
}
