//! Scores as NumPy reads them, for what promises nothing about a row.

use numpy::PyArray1;
use pyo3::prelude::*;

use super::arguments::threads as thread_count;
use super::arrays::Rows;
use super::errors::run;
use certk_rs::bindings::{self, default_floats};

/// Visible scores, and per row their number, scale and radius.
type Visible<'py> = (
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<f64>>,
);

#[pyfunction]
pub(super) fn visible_rows<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    first: usize,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Visible<'py>> {
    let _modes = default_floats();
    thread_count(threads)?;
    let scores = rows.scores()?;
    let found = run(py, &scores, || bindings::visible_rows(&scores, first))?;
    Ok((
        PyArray1::from_vec(py, found.scores),
        PyArray1::from_vec(py, found.counts),
        PyArray1::from_vec(py, found.scales),
        PyArray1::from_vec(py, found.radii),
    ))
}
