//! `keep_set`.

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use super::arguments::{self, count, limit};
use super::arrays::{Budgets, Rows};
use super::errors::detached;
use super::results::Kept;
use crate::keepset as core;
use crate::select::Options;
use crate::threads::default_floats;

#[pyfunction]
#[expect(clippy::too_many_arguments)] // the Python wrapper's options, one for one
pub(super) fn keep_set<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    eps: Budgets<'py>,
    radius: Option<PyReadonlyArray1<'py, f64>>,
    max_keep: Option<&Bound<'py, PyAny>>,
    keep_first: &Bound<'py, PyAny>,
    keep_last: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Kept> {
    let _modes = default_floats();
    let rows = rows.within(radius);
    let scores = rows.scores()?;
    let budgets = eps.slice()?;
    let options = Options::new()
        .max_keep(limit(max_keep)?)
        .keep_first(count("keep_first", keep_first, 0)?)
        .keep_last(count("keep_last", keep_last, 0)?)
        .threads(arguments::threads(threads)?);
    let set = detached(py, || core::keep_set(&scores, budgets, &options))?;
    Ok(Kept::new(set, &scores, &eps)?)
}
