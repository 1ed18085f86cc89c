//! The Gaussian rule, fits of rows, and windows.

use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;

use super::arguments::{count, real, threads as thread_count};
use super::arrays::{Budgets, Rows, column, contiguous, flat};
use super::errors::{CertkError, Raise, detached, run};
use certk_rs::bindings::{self, bad_number, default_floats};
use certk_rs::model as core;
use certk_rs::{Error, Place};

/// Applies a function of sigma and of another array of its shape; an error names the place.
fn broadcast<'py>(
    py: Python<'py>,
    sigma: &PyReadonlyArrayDyn<'py, f64>,
    (argument, second): (&str, &PyReadonlyArrayDyn<'py, f64>),
    rule: impl Fn(f64, f64) -> Result<f64, Error>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let shape = sigma.shape();
    let (a, b) = (flat(sigma, "sigma")?, flat(second, argument)?);
    if shape != second.shape() {
        return Err(CertkError::new_err(format!(
            "sigma and {argument} must have one shape; broadcast them"
        )));
    }
    let mut values = bindings::list("sigma", a.len()).raise()?;
    for (flat, (&a, &b)) in a.iter().zip(b).enumerate() {
        values.push(rule(a, b).map_err(|error| at(error, flat, shape)).raise()?);
    }
    Ok(PyArray1::from_vec(py, values))
}

/// Puts the multi-index of a flat position into an error that has none.
fn at(error: Error, flat: usize, shape: &[usize]) -> Error {
    match error {
        Error::Number { argument, value, problem, .. } => {
            bad_number(argument, Place::unravel(shape, flat), value, problem)
        }
        other => other,
    }
}

#[pyfunction]
pub(super) fn keep_fraction<'py>(
    py: Python<'py>,
    sigma: PyReadonlyArrayDyn<'py, f64>,
    eps: PyReadonlyArrayDyn<'py, f64>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let _modes = default_floats();
    broadcast(py, &sigma, ("eps", &eps), core::keep_fraction)
}

#[pyfunction]
pub(super) fn threshold<'py>(
    py: Python<'py>,
    sigma: PyReadonlyArrayDyn<'py, f64>,
    eps: PyReadonlyArrayDyn<'py, f64>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let _modes = default_floats();
    broadcast(py, &sigma, ("eps", &eps), core::threshold)
}

#[pyfunction]
pub(super) fn tail_mass_of_fraction<'py>(
    py: Python<'py>,
    sigma: PyReadonlyArrayDyn<'py, f64>,
    fraction: PyReadonlyArrayDyn<'py, f64>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let _modes = default_floats();
    broadcast(py, &sigma, ("fraction", &fraction), core::tail_mass)
}

/// Every row's n, mean, sigma, distance, skewness, excess kurtosis and prediction.
type Fits<'py> = (Bound<'py, PyArray1<i64>>, [Bound<'py, PyArray1<f64>>; 6]);

#[pyfunction]
pub(super) fn fit_gaussian<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    eps: Option<Budgets<'py>>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Fits<'py>> {
    let _modes = default_floats();
    let scores = rows.scores()?;
    let budgets = eps.as_ref().map(Budgets::slice).transpose()?;
    let threads = thread_count(threads)?;
    let fits = run(py, &scores, || core::fit(&scores, budgets, threads))?;
    let numbers = |of: fn(&core::RowFit) -> f64| column(py, "scores", fits.iter().map(of));
    Ok((
        column(py, "scores", fits.iter().map(|fit| fit.n as i64))?,
        [
            numbers(|fit| fit.mean)?,
            numbers(|fit| fit.sigma)?,
            numbers(|fit| fit.ks_distance)?,
            numbers(|fit| fit.skewness)?,
            numbers(|fit| fit.excess_kurtosis)?,
            numbers(|fit| fit.predicted)?,
        ],
    ))
}

/// Mean k, its standard error, rows simulated.
#[pyfunction]
pub(super) fn expected_k(
    py: Python<'_>,
    n: &Bound<'_, PyAny>,
    sigma: &Bound<'_, PyAny>,
    eps: &Bound<'_, PyAny>,
    seed: &Bound<'_, PyAny>,
    threads: Option<&Bound<'_, PyAny>>,
) -> PyResult<(f64, f64, usize)> {
    let _modes = default_floats();
    let (n, sigma, eps) = (count("n", n, 1)? as u64, real("sigma", sigma)?, real("eps", eps)?);
    let (seed, threads) = (count("seed", seed, 0)? as u64, thread_count(threads)?);
    let found = detached(py, || core::expected_k(n, sigma, eps, seed, threads))?;
    Ok((found.k, found.standard_error, found.rows))
}

#[pyfunction]
pub(super) fn freezing_sigma(n: &Bound<'_, PyAny>) -> PyResult<f64> {
    Ok(core::freezing_sigma(count("n", n, 1)? as u64))
}

#[pyfunction]
pub(super) fn effective_exponent(
    n: &Bound<'_, PyAny>,
    sigma: &Bound<'_, PyAny>,
    eps: &Bound<'_, PyAny>,
) -> PyResult<f64> {
    let _modes = default_floats();
    let n = count("n", n, 1)? as u64;
    core::effective_exponent(n, real("sigma", sigma)?, real("eps", eps)?).raise()
}

#[pyfunction]
pub(super) fn log_log_slope(
    n: &Bound<'_, PyAny>,
    sigma: &Bound<'_, PyAny>,
    eps: &Bound<'_, PyAny>,
) -> PyResult<f64> {
    let _modes = default_floats();
    let n = count("n", n, 1)? as u64;
    core::log_log_slope(n, real("sigma", sigma)?, real("eps", eps)?).raise()
}

/// Judges a policy; gives its numbers back as floats.
#[pyfunction]
pub(super) fn window_policy(
    alpha: &Bound<'_, PyAny>,
    exponent: &Bound<'_, PyAny>,
) -> PyResult<(f64, f64)> {
    let _modes = default_floats();
    let (alpha, exponent) = (real("alpha", alpha)?, real("C", exponent)?);
    core::WindowPolicy::new(alpha, exponent).raise()?;
    Ok((alpha, exponent))
}

#[pyfunction]
pub(super) fn window_sizes<'py>(
    py: Python<'py>,
    alpha: f64,
    exponent: f64,
    n: PyReadonlyArrayDyn<'py, i64>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let _modes = default_floats();
    let policy = core::WindowPolicy::new(alpha, exponent).raise()?;
    let shape = n.shape();
    let n = flat(&n, "n")?;
    let mut sizes = bindings::list("n", n.len()).raise()?;
    for (flat, &n) in n.iter().enumerate() {
        // The policy refuses 0, and with it whatever is no count.
        let size = policy
            .size(n.max(0).unsigned_abs())
            .map_err(|error| match at(error, flat, shape) {
                Error::Number { argument, place, problem, .. } => {
                    bad_number(argument, place, n as f64, problem)
                }
                other => other,
            })
            .raise()?;
        sizes.push(size.cast_signed());
    }
    Ok(PyArray1::from_vec(py, sizes))
}

type LineParts = ((f64, f64), (f64, f64), (f64, f64), f64);

#[pyfunction]
pub(super) fn fit_window<'py>(
    n: PyReadonlyArray1<'py, f64>,
    k: PyReadonlyArray1<'py, f64>,
    level: &Bound<'py, PyAny>,
) -> PyResult<LineParts> {
    let _modes = default_floats();
    let level = real("level", level)?;
    let line = core::fit_window(contiguous(&n, "n")?, contiguous(&k, "k")?, level).raise()?;
    Ok(((line.alpha, line.exponent), line.alpha_interval, line.exponent_interval, line.residual))
}

type Counts<'py> =
    (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>);

#[pyfunction]
pub(super) fn effective_entries<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    eps: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Counts<'py>> {
    let _modes = default_floats();
    let scores = rows.scores()?;
    let (eps, threads) = (real("eps", eps)?, thread_count(threads)?);
    let found = run(py, &scores, || core::effective_entries(&scores, eps, threads))?;
    let counts = |of: fn(&core::Effective) -> usize| {
        column(py, "scores", found.iter().map(|row| of(row) as i64))
    };
    Ok((counts(|row| row.count)?, counts(|row| row.count_upper)?, counts(|row| row.n)?))
}

#[pyfunction]
pub(super) fn participation<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let _modes = default_floats();
    let scores = rows.scores()?;
    let threads = thread_count(threads)?;
    let found = run(py, &scores, || core::participation(&scores, threads))?;
    Ok(PyArray1::from_vec(py, found))
}
