//! The Gaussian design rule: for scores that are iid `N(mu, sigma^2)` the share of keys to keep has a closed form.
//!
//! Keeping everything above `mu + c sigma` keeps the share `Phi_c(c)` of the keys and, since the weighted law is
//! `N(mu + sigma^2, sigma^2)`, drops the mass `Phi(c - sigma)`. A budget `eps` therefore asks for `c = sigma + Phi^-1(eps)`
//! (Tzachristas et al., arXiv 2512.07647, the Gaussian score model). It is a law for long rows: [`super::expected_k`] is the
//! one for rows of finite length.

use crate::error::{Error, Place};
use crate::numerics::certified_sums::Compensated;
use crate::numerics::sorting;
use crate::rows::{Scores, WeightKind, WideScores, drop_masked};
use crate::runtime::ambient::asked;
use crate::runtime::memory::{check_memory, check_memory_in_each, list};
use crate::runtime::threads;

use super::normal::{hazard, log_survival, quantile, survival};

/// Refuses a standard deviation that is negative, infinite or NaN.
pub(super) fn check_sigma(sigma: f64) -> Result<(), Error> {
    if (0.0..f64::INFINITY).contains(&sigma) {
        return Ok(());
    }
    let problem = "pass a finite standard deviation >= 0, in natural-log units";
    Err(Error::Number { argument: "sigma", place: Place(vec![]), value: sigma, problem })
}

/// Refuses a budget outside (0, 1).
pub(super) fn check_eps(eps: f64) -> Result<(), Error> {
    if eps > 0.0 && eps < 1.0 {
        return Ok(());
    }
    let problem = "pass a tail mass strictly between 0 and 1";
    Err(Error::Number { argument: "eps", place: Place(vec![]), value: eps, problem })
}

/// The share of keys that a budget needs, `Phi_c(sigma + Phi^-1(eps))`, for scores of standard deviation `sigma`
/// (natural-log units).
///
/// Relative error about `1e-15 c^2`, `c` the threshold; exactly `1 - eps` (rounded) for `sigma = 0`.
///
/// ```
/// use certk_rs::model::keep_fraction;
/// assert!((keep_fraction(3.0, 0.01)? - 0.2502).abs() < 1e-3);
/// assert_eq!(keep_fraction(0.0, 0.25)?, 0.75);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Number`] for a `sigma` that is negative or not finite, or an `eps` outside (0, 1).
pub fn keep_fraction(sigma: f64, eps: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    check_sigma(sigma)?;
    check_eps(eps)?;
    Ok(rule(sigma, eps))
}

/// The threshold `c = sigma + Phi^-1(eps)`, in standard deviations above the mean.
///
/// ```
/// use certk_rs::model::{keep_fraction, survival, threshold};
/// assert_eq!(survival(threshold(3.0, 0.01)?), keep_fraction(3.0, 0.01)?);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// As [`keep_fraction`].
pub fn threshold(sigma: f64, eps: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    check_sigma(sigma)?;
    check_eps(eps)?;
    Ok(sigma + quantile(eps))
}

/// The tail mass that remains when the best `fraction` of the keys is kept; the inverse of [`keep_fraction`].
///
/// ```
/// use certk_rs::model::{keep_fraction, tail_mass};
/// assert!((tail_mass(3.0, keep_fraction(3.0, 0.01)?)? - 0.01).abs() < 1e-12);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Number`] for a `sigma` that is negative or not finite, or a `fraction` outside [0, 1].
pub fn tail_mass(sigma: f64, fraction: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    check_sigma(sigma)?;
    if !(0.0..=1.0).contains(&fraction) {
        let problem = "pass a share of the keys in [0, 1]";
        let place = Place(vec![]);
        return Err(Error::Number { argument: "fraction", place, value: fraction, problem });
    }
    // Kept above c means fraction = Phi_c(c), so Phi(c - sigma) = Phi_c(sigma + Phi^-1(fraction)): the same function.
    Ok(rule(sigma, fraction))
}

fn rule(sigma: f64, share: f64) -> f64 {
    if sigma == 0.0 { 1.0 - share } else { survival(sigma + quantile(share)) }
}

/// The standard deviation `sqrt(2 ln n)` past which a row of `n` Gaussian scores freezes onto few entries.
///
/// ```
/// assert!((certk_rs::model::freezing_sigma(131_072) - 4.8546).abs() < 1e-3);
/// ```
pub fn freezing_sigma(n: u64) -> f64 {
    libm::sqrt(2.0 * libm::log(n.max(1) as f64))
}

fn check_long(n: u64) -> Result<(), Error> {
    if n >= 2 {
        return Ok(());
    }
    let problem = "an exponent of n needs n of at least 2";
    Err(Error::Number { argument: "n", place: Place(vec![]), value: n as f64, problem })
}

/// The exponent `ln k / ln n = 1 + ln Phi_c(c) / ln n` of the rule's k at a fixed `sigma`.
///
/// ```
/// use certk_rs::model::{effective_exponent, keep_fraction};
/// let n = 131_072_f64;
/// let k = n * keep_fraction(3.0, 0.01)?;
/// assert!((effective_exponent(131_072, 3.0, 0.01)? - k.ln() / n.ln()).abs() < 1e-12);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// As [`keep_fraction`], and [`Error::Number`] for `n < 2`.
pub fn effective_exponent(n: u64, sigma: f64, eps: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    check_long(n)?;
    Ok(1.0 + log_survival(threshold(sigma, eps)?) / libm::log(n as f64))
}

/// The slope `d ln k / d ln n` that a log-log fit sees when `sigma = beta sqrt(2 ln n)` grows with n:
/// `1 - [phi(c) / Phi_c(c)] sigma / (2 ln n)`.
///
/// ```
/// use certk_rs::model::{effective_exponent, log_log_slope};
/// let slope = log_log_slope(131_072, 3.0, 0.01)?;
/// assert!((slope - 0.838).abs() < 0.01);
/// assert!(slope < effective_exponent(131_072, 3.0, 0.01)?);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// As [`effective_exponent`].
pub fn log_log_slope(n: u64, sigma: f64, eps: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    check_long(n)?;
    Ok(1.0 - hazard(threshold(sigma, eps)?) * sigma / (2.0 * libm::log(n as f64)))
}

/// What a row looks like beside a normal law. NaN where nothing is visible; shape figures are NaN where all scores are equal.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RowFit {
    /// Visible scores.
    pub n: usize,
    /// Their mean (natural-log units, after scale and mask). With an additive mask whose sums exceed 2^26 in size it is
    /// relative to the row's largest score.
    pub mean: f64,
    /// Their population standard deviation (divided by n, not n - 1).
    pub sigma: f64,
    /// Kolmogorov-Smirnov distance between the visible scores and `N(mean, sigma^2)`: the largest difference of the two
    /// distribution functions, in [0, 1]; 0 if all scores are equal.
    pub ks_distance: f64,
    /// Third standardised central moment; 0 for a normal law.
    pub skewness: f64,
    /// Fourth standardised central moment, minus 3; 0 for a normal law.
    pub excess_kurtosis: f64,
    /// The share of keys that the rule predicts from `sigma`, if a budget was given.
    pub predicted: f64,
}

impl RowFit {
    const EMPTY: Self = RowFit {
        n: 0,
        mean: f64::NAN,
        sigma: f64::NAN,
        ks_distance: f64::NAN,
        skewness: f64::NAN,
        excess_kurtosis: f64::NAN,
        predicted: f64::NAN,
    };
}

/// Fits a normal law to each row by its mean and standard deviation, and says how good the fit is.
///
/// For `Kind::Probs` the scores are the logarithms of the weights. Relative error of `sigma` below 1e-12. With budgets (one,
/// or one per row, in [0, 1)) the rule's share of keys is added.
///
/// ```
/// use certk_rs::{Scores, model::fit};
/// let found = fit(&Scores::new(&[1.0_f32, 2.0, 3.0], &[1, 3])?, Some(&[0.1]), None)?[0];
/// assert!((found.mean - 2.0).abs() < 1e-12);
/// assert!((found.sigma - (2.0 / 3f64).sqrt()).abs() < 1e-12);
/// assert!(0.0 < found.predicted && found.predicted < 1.0);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// Whatever is wrong with the scores or the budgets, by variant.
pub fn fit(
    scores: &Scores<'_>,
    eps: Option<&[f64]>,
    threads: Option<usize>,
) -> Result<Vec<RowFit>, Error> {
    let _modes = threads::default_floats();
    let eps = eps.map(|eps| scores.budgets(eps)).transpose()?;
    per_row(scores, threads, |row| {
        let mut keys = Vec::new();
        let about = scores.wide_scores(row, &mut keys)?;
        Ok(fit_row(keys, about, eps.map(|eps| eps.of(row))))
    })
}

/// Scores between two checks for an interrupt, and per task.
const PORTION: usize = 1 << 23;
/// What a row counts at least: what is found of it waits for the rest of the portion.
const LEAST: usize = 128;
const TASK: usize = 1 << 14;

/// Does something for every row, on several threads where that is worth it.
pub(super) fn per_row<R: Send>(
    scores: &Scores<'_>,
    threads: Option<usize>,
    one: impl Fn(usize) -> Result<R, Error> + Sync + Send,
) -> Result<Vec<R>, Error> {
    let (rows, n) = (scores.rows(), scores.longest().max(1));
    let threads = threads::count(threads, rows.saturating_mul(n) > 2 * TASK)?;
    check_memory_in_each("scores", threads, (rows, n), size_of::<f64>())?;
    check_memory("scores", rows, size_of::<R>())?;
    let mut all = list("scores", rows)?;
    let sizes = ((PORTION / n.max(LEAST)).max(1), (TASK / n).max(1));
    threads::in_portions(threads, rows, sizes, one, |row| all.push(row))?;
    Ok(all)
}

fn fit_row(mut keys: Vec<f64>, about: WideScores, eps: Option<f64>) -> RowFit {
    drop_masked(&mut keys);
    let scale = match about.weight_kind {
        WeightKind::Exp { scale } => scale,
        WeightKind::Weight => {
            for key in asked(&mut keys) {
                *key = libm::log(*key);
            }
            1.0
        }
    };
    sorting::sort(&mut keys, f64::total_cmp);
    let (Some(&low), Some(&high)) = (keys.first(), keys.last()) else {
        return RowFit::EMPTY;
    };
    let n = keys.len();
    let count = n as f64;
    // Halves, because a difference of two float64 numbers can overflow.
    let centre = 0.5 * low + 0.5 * high;
    let half = 0.5 * high - 0.5 * low;
    let predicted = |sigma: f64| eps.map_or(f64::NAN, |eps| rule(sigma, eps));
    if half == 0.0 {
        return RowFit {
            n,
            mean: scale * low,
            sigma: 0.0,
            ks_distance: 0.0,
            predicted: predicted(0.0),
            ..RowFit::EMPTY
        };
    }
    for key in asked(&mut keys) {
        *key = (0.5 * *key - 0.5 * centre) / half;
    }
    let mean = asked(&keys).copied().collect::<Compensated>().value() / count;
    let moment = |power: i32| {
        asked(&keys).map(|t| (t - mean).powi(power)).collect::<Compensated>().value() / count
    };
    let variance = moment(2);
    let deviation = libm::sqrt(variance);
    let sigma = scale * half * 2.0 * deviation;
    let mut ks_distance = 0.0f64;
    for (i, t) in asked(keys.iter().enumerate()) {
        let below = survival((mean - t) / deviation);
        let gap = (below - i as f64 / count).max((i + 1) as f64 / count - below);
        ks_distance = ks_distance.max(gap);
    }
    RowFit {
        n,
        // Between the ends of the row, so that only the last product may overflow.
        mean: scale * (2.0 * (0.5 * centre + half * mean)),
        sigma,
        ks_distance,
        skewness: moment(3) / (variance * deviation),
        excess_kurtosis: moment(4) / (variance * variance) - 3.0,
        predicted: predicted(sigma),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_paper() {
        let rows = [
            (1e-2, [0.908, 0.628, 0.431, 0.250, 0.120, 0.047, 0.004]),
            (1e-3, [0.982, 0.862, 0.722, 0.536, 0.341, 0.181, 0.028]),
        ];
        for (eps, want) in rows {
            for (sigma, want) in [1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0].into_iter().zip(want) {
                assert!((keep_fraction(sigma, eps).unwrap() - want).abs() <= 5.1e-4);
            }
        }
        let exponent = effective_exponent(65536, 4.0, 0.01).unwrap();
        let slope = log_log_slope(65536, 4.0, 0.01).unwrap();
        assert!((exponent - 0.724).abs() < 5e-4 && (slope - 0.624).abs() < 5e-4);
    }

    #[test]
    fn the_rule_is_its_own_inverse() {
        for sigma in [0.0, 0.3, 2.0, 6.0] {
            for eps in [1e-9, 0.01, 0.5, 0.99] {
                let kept = keep_fraction(sigma, eps).unwrap();
                assert!((tail_mass(sigma, kept).unwrap() / eps - 1.0).abs() < 1e-6);
            }
        }
        assert_eq!((tail_mass(1.0, 0.0).unwrap(), tail_mass(1.0, 1.0).unwrap()), (1.0, 0.0));
    }

    #[test]
    fn a_row_of_two_values() {
        let scores = [-1.0e308, 1.0e308, f64::NEG_INFINITY];
        let scores = Scores::new(&scores[..], &[3]).unwrap().scale(-1e-308).unwrap();
        let fit = fit(&scores, Some(&[0.25]), None).unwrap()[0];
        assert_eq!(fit.n, 2);
        assert!(fit.mean.abs() < 1e-15 && (fit.sigma - 1.0).abs() < 1e-15);
        assert!((fit.excess_kurtosis + 2.0).abs() < 1e-14 && fit.skewness == 0.0);
        assert_eq!(fit.predicted, keep_fraction(fit.sigma, 0.25).unwrap());
    }

    #[test]
    fn bad_numbers_are_refused() {
        for sigma in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(
                keep_fraction(sigma, 0.1),
                Err(Error::Number { argument: "sigma", .. })
            ));
        }
        for eps in [0.0, 1.0, -0.1, f64::NAN] {
            assert!(matches!(threshold(1.0, eps), Err(Error::Number { argument: "eps", .. })));
        }
        assert!(tail_mass(1.0, 1.5).is_err() && effective_exponent(1, 1.0, 0.1).is_err());
    }
}
