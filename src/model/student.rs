//! Quantiles of Student's t law, for intervals of fitted lines.

use libm::{exp, lgamma, log1p};

/// `t` with `P(|T| <= t) = level` for Student's T with `freedom >= 1` degrees; relative error below 1e-10.
///
/// `level` in (0, 1). The probability `P(|T| > t)` is the incomplete beta function `I_x(freedom / 2, 1 / 2)` at
/// `x = freedom / (freedom + t^2)`, and it is inverted by bisection of `ln t`.
pub(super) fn two_sided(level: f64, freedom: f64) -> f64 {
    let beyond = 1.0 - level;
    let (mut low, mut high) = (-700.0, 350.0);
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        let t = exp(middle);
        let (inside, outside) = split(t, freedom);
        // The smaller of the two probabilities is compared: it has the digits.
        let beyond_t = if level < 0.5 { inside < level } else { outside > beyond };
        if beyond_t { low = middle } else { high = middle }
    }
    exp(0.5 * (low + high))
}

/// `P(|T| <= t)` and `P(|T| > t)`.
fn split(t: f64, freedom: f64) -> (f64, f64) {
    let (a, b) = (0.5 * freedom, 0.5);
    // ln x and ln (1 - x) of x = freedom / (freedom + t^2), neither by a difference.
    let ratio = t * t / freedom;
    let log_x = -log1p(ratio);
    let log_y = -log1p(1.0 / ratio);
    let front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log_x + b * log_y);
    if exp(log_x) < (a + 1.0) / (a + b + 2.0) {
        let outside = front * fraction(a, b, exp(log_x)) / a;
        (1.0 - outside, outside)
    } else {
        let inside = front * fraction(b, a, exp(log_y)) / b;
        (inside, 1.0 - inside)
    }
}

/// The continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's method.
fn fraction(a: f64, b: f64, x: f64) -> f64 {
    const LEAST_MAGNITUDE: f64 = 1e-300;
    let away = |v: f64| if v.abs() < LEAST_MAGNITUDE { LEAST_MAGNITUDE } else { v };
    let mut c = 1.0;
    let mut d = 1.0 / away(1.0 - (a + b) * x / (a + 1.0));
    let mut value = d;
    for m in 1..=2000 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        d = 1.0 / away(1.0 + even * d);
        c = away(1.0 + even / c);
        value *= d * c;
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        d = 1.0 / away(1.0 + odd * d);
        c = away(1.0 + odd / c);
        value *= d * c;
        if (d * c - 1.0).abs() < 1e-16 {
            break;
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use libm::sqrt;

    #[test]
    fn table_values() {
        // One degree: tan(pi level / 2). Two: level sqrt(2 / (1 - level^2)).
        for level in [1e-6, 0.1, 0.5, 0.95, 0.999_999] {
            let one = libm::tan(std::f64::consts::FRAC_PI_2 * level);
            assert!((two_sided(level, 1.0) / one - 1.0).abs() < 1e-9, "{level}");
            let two = level * sqrt(2.0 / ((1.0 - level) * (1.0 + level)));
            assert!((two_sided(level, 2.0) / two - 1.0).abs() < 1e-9, "{level}");
        }
        assert!((two_sided(0.95, 10.0) - 2.228_138_851_964_939).abs() < 1e-9);
        assert!((two_sided(0.95, 1e7) - 1.959_964_2).abs() < 1e-6);
    }
}
