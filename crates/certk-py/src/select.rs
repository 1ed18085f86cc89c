//! `select`, `certify` and the instruction-set level.

use pyo3::prelude::*;

use super::arguments::{self, count, flag, limit};
use super::arrays::{Budgets, KeepArray, Rows};
use super::errors::{Raise, run};
use super::results::{Certified, Selected};
use certk_rs::bindings::default_floats;
use certk_rs::{self as core, Options};

#[pyfunction]
#[expect(clippy::too_many_arguments)] // the Python wrapper's options, one for one
pub(super) fn select<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    eps: Budgets<'py>,
    min_keep: &Bound<'py, PyAny>,
    max_keep: Option<&Bound<'py, PyAny>>,
    keep_first: &Bound<'py, PyAny>,
    keep_last: &Bound<'py, PyAny>,
    block_size: &Bound<'py, PyAny>,
    prove_minimal: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Selected> {
    let _modes = default_floats();
    let scores = rows.scores()?;
    let budgets = eps.slice()?;
    let options = Options::new()
        .min_keep(count("min_keep", min_keep, 0)?)
        .max_keep(limit(max_keep)?)
        .keep_first(count("keep_first", keep_first, 0)?)
        .keep_last(count("keep_last", keep_last, 0)?)
        .block_size(count("block_size", block_size, 1)?)
        .prove_minimal(flag("prove_minimal", prove_minimal)?)
        .threads(arguments::threads(threads)?);
    let found = run(py, &scores, || core::select(&scores, budgets, &options))?;
    Selected::new(found, &scores, &eps, rows.starts()).raise()
}

#[pyfunction]
pub(super) fn certify<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    eps: Option<Budgets<'py>>,
    keep: KeepArray<'py>,
    independent: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Certified> {
    let _modes = default_floats();
    let scores = rows.scores()?;
    let independent = flag("independent", independent)?;
    let threads = arguments::threads(threads)?;
    let mut strides = Vec::new();
    let keep = keep.keep(&mut strides)?;
    let mut options = core::CertifyOptions::new().independent(independent).threads(threads);
    options.eps = eps.as_ref().map(Budgets::slice).transpose()?;
    let found = run(py, &scores, || core::certify(&scores, &keep, &options))?;
    Ok(Certified::new(found, &scores, eps.as_ref()))
}

#[pyfunction]
pub(super) fn simd_level() -> PyResult<&'static str> {
    core::simd_level().raise()
}

#[pyfunction]
pub(super) fn set_simd_level(level: Option<&str>) -> PyResult<()> {
    core::force_simd_level(level).raise()
}
