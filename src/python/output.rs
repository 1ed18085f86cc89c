//! `output_error` and `select_output`.

use numpy::PyArray1;
use pyo3::prelude::*;

use super::arguments;
use super::arrays::{Budgets, KeepArray, Rows, Stored, column};
use super::errors::detached;
use crate::bounds::output as core;
use crate::rows::Values;
use crate::threads::default_floats;

type Floats<'py> = Bound<'py, PyArray1<f64>>;
type Errors<'py> = (
    Floats<'py>,
    Floats<'py>,
    Floats<'py>,
    Floats<'py>,
    Floats<'py>,
    Floats<'py>,
    Bound<'py, PyArray1<u8>>,
    Bound<'py, PyArray1<bool>>,
);
type Chosen<'py> = (
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Floats<'py>,
    Floats<'py>,
    Floats<'py>,
    Bound<'py, PyArray1<bool>>,
);

fn borrowed<'a>(values: &'a Stored<'_>) -> PyResult<Values<'a>> {
    let (data, strides) = values.data("values")?;
    Ok(Values::strided(data, values.shape(), &strides)?)
}

#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn output_error<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    values: &Bound<'py, PyAny>,
    values_dtype: &str,
    keep: KeepArray<'py>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Errors<'py>> {
    let _modes = default_floats();
    let scores = rows.scores()?;
    let values = Stored::new(values, values_dtype)?;
    let values = borrowed(&values)?;
    let threads = arguments::threads(threads)?;
    let mut strides = Vec::new();
    let keep = keep.keep(&mut strides)?;
    let found = detached(py, || core::output_error(&scores, &values, &keep, threads))?;
    Ok((
        PyArray1::from_vec(py, found.exact),
        PyArray1::from_vec(py, found.diameter),
        PyArray1::from_vec(py, found.ball),
        PyArray1::from_vec(py, found.spectral),
        PyArray1::from_vec(py, found.variance),
        PyArray1::from_vec(py, found.best),
        column(py, "scores", found.which.into_iter().map(|which| which as u8))?,
        PyArray1::from_vec(py, found.farthest_pair),
    ))
}

#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn select_output<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    values: &Bound<'py, PyAny>,
    values_dtype: &str,
    out_tol: Budgets<'py>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Chosen<'py>> {
    let _modes = default_floats();
    let scores = rows.scores()?;
    let values = Stored::new(values, values_dtype)?;
    let values = borrowed(&values)?;
    let out_tol = out_tol.slice()?;
    let threads = arguments::threads(threads)?;
    let found = detached(py, || core::select_output(&scores, &values, out_tol, threads))?;
    Ok((
        PyArray1::from_vec(py, found.indptr),
        column(py, "scores", found.indices.into_iter().map(i64::from))?,
        PyArray1::from_vec(py, found.error_upper),
        PyArray1::from_vec(py, found.tail_mass_upper),
        PyArray1::from_vec(py, found.tail_mass_lower),
        PyArray1::from_vec(py, found.minimal),
    ))
}
