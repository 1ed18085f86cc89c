//! `keep_set`.

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use super::arguments::{self, count, limit};
use super::arrays::{Budgets, Rows, column};
use super::errors::detached;
use crate::keepset as core;
use crate::select::Options;
use crate::threads::default_floats;

type Kept<'py> = (
    Bound<'py, PyArray1<i64>>,
    u8,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<f64>>,
    usize,
    Bound<'py, PyArray1<f64>>,
);

#[pyfunction]
#[expect(clippy::too_many_arguments)] // the Python wrapper's options, one for one
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn keep_set<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    eps: Budgets<'py>,
    radius: Option<PyReadonlyArray1<'py, f64>>,
    max_keep: Option<&Bound<'py, PyAny>>,
    keep_first: &Bound<'py, PyAny>,
    keep_last: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Kept<'py>> {
    let _modes = default_floats();
    let rows = rows.within(radius);
    let scores = rows.scores()?;
    let eps = eps.slice()?;
    let options = Options::new()
        .max_keep(limit(max_keep)?)
        .keep_first(count("keep_first", keep_first, 0)?)
        .keep_last(count("keep_last", keep_last, 0)?)
        .threads(arguments::threads(threads)?);
    let set = detached(py, || core::keep_set(&scores, eps, &options))?;
    Ok((
        column(py, "scores", set.indices.into_iter().map(i64::from))?,
        set.status as u8,
        PyArray1::from_vec(py, set.tail_mass_upper),
        PyArray1::from_vec(py, set.tail_mass_lower),
        set.lower_bound,
        PyArray1::from_vec(py, set.weights),
    ))
}
