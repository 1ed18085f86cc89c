//! `keep_set`, of scores and of queries.

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use super::arguments::{self, count, limit};
use super::arrays::{Budgets, Rows, Stored};
use super::errors::{CertkError, Raise, detached};
use super::key_index::vectors;
use super::results::Kept;
use certk_rs::bindings::default_floats;
use certk_rs::{self as core, Options};

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
    effort: &Bound<'py, PyAny>,
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
        .effort(arguments::effort(effort)?)
        .threads(arguments::threads(threads)?);
    let set = detached(py, || core::keep_set(&scores, budgets, &options))?;
    Kept::new(set, &scores, &eps).raise()
}

#[pyfunction]
#[expect(clippy::too_many_arguments)] // the Python wrapper's options, one for one
pub(super) fn keep_set_of_queries<'py>(
    py: Python<'py>,
    blocks: Vec<(Stored<'py>, Stored<'py>, f64)>,
    eps: Budgets<'py>,
    counted: Option<PyReadonlyArray1<'py, bool>>,
    given: Option<PyReadonlyArray1<'py, bool>>,
    slack: f64,
    roundings: u32,
    causal_offset: Option<&Bound<'py, PyAny>>,
    max_keep: Option<&Bound<'py, PyAny>>,
    keep_first: &Bound<'py, PyAny>,
    keep_last: &Bound<'py, PyAny>,
    block_size: &Bound<'py, PyAny>,
    effort: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Kept> {
    let _modes = default_floats();
    let stored: Vec<core::Block<'_>> = (blocks.iter())
        .map(|(queries, keys, scale)| {
            let (queries, keys) = (vectors(queries, "queries")?, vectors(keys, "keys")?);
            Ok(core::Block::new(queries, keys, *scale))
        })
        .collect::<PyResult<_>>()?;
    let offset = causal_offset
        .map(|offset| arguments::integer("causal_offset", offset, -(1 << 62)))
        .transpose()?;
    let counted = counted.as_ref().map(|counted| counted.as_slice()).transpose();
    let counted = counted.map_err(|_| CertkError::new_err("counted must be contiguous"))?;
    let given = given.as_ref().map(|given| given.as_slice()).transpose();
    let given = given.map_err(|_| CertkError::new_err("given must be contiguous"))?;
    let rows = core::QueryOptions::new()
        .causal_offset(offset)
        .counted(counted)
        .given(given)
        .slack(slack)
        .roundings(roundings);
    let options = Options::new()
        .max_keep(limit(max_keep)?)
        .keep_first(count("keep_first", keep_first, 0)?)
        .keep_last(count("keep_last", keep_last, 0)?)
        .block_size(count("block_size", block_size, 1)?)
        .effort(arguments::effort(effort)?)
        .threads(arguments::threads(threads)?);
    // One block's rows have the shape of its queries.
    let batch: Vec<usize> = match &blocks[..] {
        [(queries, _, _)] => queries.shape().iter().rev().skip(1).rev().copied().collect(),
        _ => vec![
            blocks.iter().map(|(q, _, _)| q.shape().iter().rev().skip(1).product::<usize>()).sum(),
        ],
    };
    let n = stored.first().map_or(0, core::Block::keys);
    let budgets = eps.slice()?;
    let set = detached(py, || core::keep_set_of_queries(&stored, budgets, &rows, &options))?;
    Kept::of_queries(set, batch, n, &eps).raise()
}
