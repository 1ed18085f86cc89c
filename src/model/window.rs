//! Windows of size `alpha n^C`: the policy, and its fit to measured pairs of n and k.
//!
//! Source: arXiv 2404.02690. Its first version is Deng, Song, Yang, "Attention is Naturally Sparse with Gaussian Distributed
//! Input"; later ones are Deng, Song, Xiong, Yang, "How Sparse Attention Approximates Exact Attention? Your Attention is
//! Naturally n^C-Sparse". That a window of `n^C` keys suffices is a claim of the later ones, by a summary of one of them,
//! about their own model; this module computes with the law and claims nothing.

use crate::error::{Error, Place};
use crate::numerics::certified_sums::Compensated;
use crate::runtime::memory::list;
use crate::runtime::threads;

use super::student;

fn refuse(argument: &'static str, place: &[usize], value: f64, problem: &'static str) -> Error {
    Error::Number { argument, place: Place(place.to_vec()), value, problem }
}

/// How many keys to keep of n: `ceil(alpha n^C)`.
///
/// ```
/// use certk_rs::model::WindowPolicy;
/// assert_eq!(WindowPolicy::new(0.1, 0.5)?.size(10_000)?, 10);
/// assert!(WindowPolicy::new(0.1, 1.5).is_err());
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WindowPolicy {
    alpha: f64,
    exponent: f64,
}

impl WindowPolicy {
    /// A policy of factor `alpha > 0` and exponent `C` in (0, 1).
    ///
    /// # Errors
    /// [`Error::Number`] if either is outside its range.
    pub fn new(alpha: f64, exponent: f64) -> Result<Self, Error> {
        let _modes = threads::default_floats();
        if !(alpha > 0.0 && alpha < f64::INFINITY) {
            return Err(refuse("alpha", &[], alpha, "pass a finite factor > 0"));
        }
        if !(exponent > 0.0 && exponent < 1.0) {
            return Err(refuse("C", &[], exponent, "pass an exponent strictly between 0 and 1"));
        }
        Ok(WindowPolicy { alpha, exponent })
    }

    /// `ceil(alpha n^C)`, at least 1 and at most n.
    ///
    /// A value that lies above an integer by no more than the rounding of `alpha`, `C` and the power explains counts as that
    /// integer: `0.1 * 10000^0.5` is 10, although the float64 nearest to 0.1 is a little more than a tenth.
    ///
    /// # Errors
    /// [`Error::Number`] for `n = 0`.
    #[allow(clippy::cast_sign_loss)] // the size is that of a positive number
    pub fn size(&self, n: u64) -> Result<u64, Error> {
        let _modes = threads::default_floats();
        if n == 0 {
            return Err(refuse("n", &[], 0.0, "pass a number of keys of at least 1"));
        }
        let log_n = libm::log(n as f64);
        let value = self.alpha * libm::pow(n as f64, self.exponent);
        if value >= n as f64 {
            return Ok(n);
        }
        // Half a unit of alpha, of the power, of n and of the product, and of C, which counts ln n times.
        let doubt = value * (4.0 + log_n) * f64::EPSILON;
        let whole = value.floor();
        let size = if value - whole <= doubt { whole } else { whole + 1.0 };
        Ok((size as u64).clamp(1, n))
    }
}

/// A fitted law `k = alpha n^C`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Line {
    /// The factor.
    pub alpha: f64,
    /// The exponent.
    pub exponent: f64,
    /// Ends of the interval of the factor.
    pub alpha_interval: (f64, f64),
    /// Ends of the interval of the exponent.
    pub exponent_interval: (f64, f64),
    /// Standard deviation of `ln k` about the line, with `points - 2` degrees of freedom.
    pub residual: f64,
    /// Pairs.
    pub points: usize,
}

/// Fits `ln k = ln alpha + C ln n` by least squares, with intervals of Student's t at the confidence `level` each.
///
/// The intervals hold if the residuals of `ln k` are independent normal variates of one variance.
///
/// ```
/// let line = certk_rs::model::fit_window(&[1e2, 1e4, 1e6], &[20.0, 200.0, 2000.0], 0.95)?;
/// assert!((line.alpha - 2.0).abs() < 1e-9 && (line.exponent - 0.5).abs() < 1e-9);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`] if `n` and `k` differ in length; [`Error::Option`] for fewer than three pairs or a single n;
/// [`Error::Number`] for an entry that is not a finite number >= 1 (`n`) or > 0 (`k`), or a `level` outside (0, 1).
pub fn fit_window(n: &[f64], k: &[f64], level: f64) -> Result<Line, Error> {
    let _modes = threads::default_floats();
    if n.len() != k.len() {
        let remedy = "pass one k for each n";
        return Err(Error::Length { argument: "k", got: k.len(), expected: n.len(), remedy });
    }
    for (i, (&n, &k)) in n.iter().zip(k).enumerate() {
        if !(1.0..f64::INFINITY).contains(&n) {
            return Err(refuse("n", &[i], n, "pass finite numbers of keys of at least 1"));
        }
        if !(k > 0.0 && k < f64::INFINITY) {
            return Err(refuse("k", &[i], k, "pass finite numbers of kept keys above 0"));
        }
    }
    if !(level > 0.0 && level < 1.0) {
        return Err(refuse("level", &[], level, "pass a confidence strictly between 0 and 1"));
    }
    let points = n.len();
    if points < 3 || n.iter().all(|other| *other == n[0]) {
        return Err(Error::Option {
            argument: "n",
            value: format!("{points} values, {} of them distinct", distinct(n)),
            problem: "a line with intervals needs three pairs or more, with at least two different n",
        });
    }
    let count = points as f64;
    let mean = |values: &[f64]| values.iter().copied().collect::<Compensated>().value() / count;
    let (mut x, mut y) = (list("n", points)?, list("k", points)?);
    x.extend(n.iter().map(|&n| libm::log(n)));
    y.extend(k.iter().map(|&k| libm::log(k)));
    let (x_mean, y_mean) = (mean(&x), mean(&y));
    let dot = |f: &dyn Fn(f64, f64) -> f64| {
        x.iter().zip(&y).map(|(x, y)| f(x - x_mean, y - y_mean)).collect::<Compensated>().value()
    };
    let spread = dot(&|x, _| x * x);
    let exponent = dot(&|x, y| x * y) / spread;
    let freedom = count - 2.0;
    let variance = dot(&|x, y| (y - exponent * x) * (y - exponent * x)) / freedom;
    let t = student::two_sided(level, freedom);
    let intercept = y_mean - exponent * x_mean;
    let slope_error = t * libm::sqrt(variance / spread);
    let intercept_error = t * libm::sqrt(variance * (1.0 / count + x_mean * x_mean / spread));
    Ok(Line {
        alpha: libm::exp(intercept),
        exponent,
        alpha_interval: (
            libm::exp(intercept - intercept_error),
            libm::exp(intercept + intercept_error),
        ),
        exponent_interval: (exponent - slope_error, exponent + slope_error),
        residual: libm::sqrt(variance),
        points,
    })
}

fn distinct(values: &[f64]) -> usize {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    values.dedup();
    values.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_powers_stay_whole() {
        for (alpha, exponent, n, size) in [
            (1.0, 0.5, 65536, 256),
            (0.1, 0.5, 10_000, 10),
            (1.0, 1.0 / 3.0, 1000, 10),
            (1.0, 0.9, 1024, 512),
            (1.0, 0.5, 65537, 257),
            (1.0, 0.5, (1 << 40) + 1, (1 << 20) + 1),
            (1e-9, 0.5, 7, 1),
            (1e9, 0.5, 7, 7),
            (1.0, 0.5, 1, 1),
        ] {
            assert_eq!(WindowPolicy::new(alpha, exponent).unwrap().size(n).unwrap(), size);
        }
        for (alpha, exponent) in [(0.0, 0.5), (f64::NAN, 0.5), (1.0, 0.0), (1.0, 1.0), (-1.0, 0.5)]
        {
            assert!(WindowPolicy::new(alpha, exponent).is_err());
        }
        assert!(WindowPolicy::new(1.0, 0.5).unwrap().size(0).is_err());
    }

    #[test]
    fn a_perfect_law_is_found() {
        let n: Vec<f64> = (4..20).map(|i| 2f64.powi(i)).collect();
        let k: Vec<f64> = n.iter().map(|n| 3.0 * n.powf(0.7)).collect();
        let line = fit_window(&n, &k, 0.95).unwrap();
        assert!((line.alpha - 3.0).abs() < 1e-12 && (line.exponent - 0.7).abs() < 1e-13);
        assert!(line.exponent_interval.0 <= line.exponent && line.residual < 1e-13);
        assert!(fit_window(&n, &k[1..], 0.95).is_err());
        assert!(fit_window(&n[..2], &k[..2], 0.95).is_err());
        assert!(fit_window(&[5.0; 3], &[1.0; 3], 0.95).is_err());
        assert!(fit_window(&n, &k, 1.0).is_err());
    }
}
