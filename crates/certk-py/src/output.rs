//! `output_error` and `select_output`.

use pyo3::prelude::*;

use super::arguments;
use super::arrays::{Budgets, KeepArray, Rows, Stored};
use super::errors::{Raise, detached};
use super::results::{OutputBounds, OutputSelected};
use certk_rs as core;
use certk_rs::bindings::default_floats;

#[pyfunction]
pub(super) fn output_error<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    values: Stored<'py>,
    keep: KeepArray<'py>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<OutputBounds> {
    let _modes = default_floats();
    let (scores, values) = (rows.scores()?, values.values()?);
    let options = core::OutputOptions::new().threads(arguments::threads(threads)?);
    let mut strides = Vec::new();
    let keep = keep.keep(&mut strides)?;
    let found = detached(py, || core::output_error(&scores, &values, &keep, &options))?;
    Ok(OutputBounds::new(found, &scores))
}

#[pyfunction]
pub(super) fn select_output<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    values: Stored<'py>,
    out_tol: Budgets<'py>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<OutputSelected> {
    let _modes = default_floats();
    let (scores, values) = (rows.scores()?, values.values()?);
    let budgets = out_tol.slice()?;
    let options = core::OutputOptions::new().threads(arguments::threads(threads)?);
    let found = detached(py, || core::select_output(&scores, &values, budgets, &options))?;
    OutputSelected::new(found, &scores, &out_tol).raise()
}
