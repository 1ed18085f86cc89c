//! Confidence bounds of a mean in [0, 1].

use super::sample::Sample;
use super::{bernstein, betting, hoeffding};
use crate::builders::builders;
use crate::error::Error;
use crate::names::names;
use crate::runtime::memory::check_memory;
use crate::runtime::threads;

/// Method of a confidence bound. Methods have names:
///
/// ```
/// use certk_rs::montecarlo::Method;
/// assert_eq!("betting".parse::<Method>()?, Method::default());
/// assert!("chernoff".parse::<Method>().is_err());
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Method {
    /// Hoeffding (with replacement) or Hoeffding-Serfling (without).
    Hoeffding,
    /// Empirical Bernstein: Maurer and Pontil with replacement, Bardenet and Maillard without.
    Bernstein,
    /// Hedged capital of Waudby-Smith and Ramdas. Its bounds alone are valid at any time during the draws.
    #[default]
    Betting,
}

names! { Method, "method", "use \"betting\", \"bernstein\" or \"hoeffding\"", {
    "betting" => Method::Betting,
    "bernstein" => Method::Bernstein,
    "hoeffding" => Method::Hoeffding,
} }

/// Options of confidence bounds.
///
/// ```
/// use certk_rs::montecarlo::{Confidence, Method, mean_bounds};
/// let confidence = Confidence::new(Method::Betting, 0.05, 4).population(100);
/// let (lower, upper) = mean_bounds(&[0.5, 0.25, 0.75, 0.5], &confidence)?;
/// assert!(lower < 0.5 && upper > 0.5);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Confidence {
    /// Method of the bounds.
    pub method: Method,
    /// Failure probability of each of the two bounds, in (0, 1).
    pub delta: f64,
    /// Number of values to draw from without replacement; `None` for draws with replacement.
    pub population: Option<usize>,
    /// Number of draws that betting is tuned for; its bounds hold for any number.
    pub horizon: usize,
}

impl Confidence {
    /// Returns options for draws with replacement: bounds that each fail with probability `delta`, tuned for `horizon`
    /// draws.
    #[must_use]
    pub fn new(method: Method, delta: f64, horizon: usize) -> Self {
        Confidence { method, delta, population: None, horizon }
    }
}

builders! { Confidence {
    /// Sets the number of values to draw from without replacement; `None` for draws with replacement.
    population(values: impl Into<Option<usize>>) = values.into();
} }

/// Returns a lower and an upper confidence bound of the mean of a population in [0, 1], from values in the order drawn.
///
/// Each fails with probability at most `delta`. For [`Method::Betting`] this holds for all numbers of draws at once;
/// for the other two, for a number of draws fixed in advance.
///
/// ```
/// use certk_rs::montecarlo::{Confidence, Method, mean_bounds};
/// let confidence = Confidence::new(Method::Hoeffding, 0.05, 200);
/// let (lower, upper) = mean_bounds(&[0.5; 200], &confidence)?;
/// let half = (20f64.ln() / 400.0).sqrt();
/// assert!((upper - 0.5 - half).abs() < 1e-9 && (0.5 - half - lower).abs() < 1e-9);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Option`] if delta is outside (0, 1), a value outside [0, 1], or there are more values than the population has.
pub fn mean_bounds(values: &[f64], confidence: &Confidence) -> Result<(f64, f64), Error> {
    let _modes = threads::default_floats();
    let Confidence { method, delta, population, horizon } = *confidence;
    check_delta(delta)?;
    if population.is_some_and(|population| population < values.len()) {
        return Err(Error::Option {
            argument: "population",
            value: population.unwrap_or(0).to_string(),
            problem: "without replacement there cannot be more draws than items",
        });
    }
    if let Some(bad) = values.iter().find(|value| !(0.0..=1.0).contains(*value)) {
        return Err(Error::Option {
            argument: "values",
            value: bad.to_string(),
            problem: "a drawn value must lie in [0, 1]",
        });
    }
    if values.is_empty() {
        return Ok((0.0, 1.0));
    }
    // Their complements, and the bets on each.
    check_memory("values", values.len(), 6 * size_of::<f64>())?;
    let upper = |sample: Sample<'_>| {
        let upper = match method {
            Method::Hoeffding => hoeffding::upper(sample, delta),
            Method::Bernstein => bernstein::upper(sample, delta),
            Method::Betting => betting::upper(sample, delta, horizon),
        };
        upper.min(sample.ceiling())
    };
    let sample = Sample { values, population };
    // The complements are floats, too; rounding them moves their mean by 2^-54 at most.
    let complements: Vec<f64> = values.iter().map(|value| 1.0 - value).collect();
    let other = upper(Sample { values: &complements, population });
    let lower = (1.0 - other - f64::EPSILON).max(sample.floor()).max(0.0);
    Ok((lower, upper(sample)))
}

pub(super) fn check_delta(delta: f64) -> Result<(), Error> {
    if delta > 0.0 && delta < 1.0 {
        return Ok(());
    }
    Err(Error::Option {
        argument: "delta",
        value: delta.to_string(),
        problem: "a failure probability must lie in (0, 1)",
    })
}
