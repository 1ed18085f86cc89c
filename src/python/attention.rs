//! `attention`.

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use super::arguments;
use super::arrays::{Budgets, Stored, contiguous};
use super::errors::detached;
use super::key_index::{KeyIndex, vectors};
use crate::attention::{self as core, AttentionOptions};

/// Output, upper ends, k, scored, rung, error of the weights.
type Answers<'py> = (
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<u8>>,
    Bound<'py, PyArray1<f64>>,
);

#[pyfunction]
#[allow(clippy::too_many_arguments)] // the Python wrapper's options, one for one
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn attention<'py>(
    py: Python<'py>,
    queries: &Bound<'py, PyAny>,
    queries_dtype: &str,
    keys: &Bound<'py, PyAny>,
    keys_dtype: &str,
    values: &Bound<'py, PyAny>,
    values_dtype: &str,
    eps: Budgets<'py>,
    index: Option<&Bound<'py, KeyIndex>>,
    scale: Option<&Bound<'py, PyAny>>,
    causal: bool,
    lengths: Option<PyReadonlyArray1<'py, i64>>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Answers<'py>> {
    let stored = [
        Stored::new(queries, queries_dtype)?,
        Stored::new(keys, keys_dtype)?,
        Stored::new(values, values_dtype)?,
    ];
    let queries = vectors(&stored[0], "q")?;
    let keys = vectors(&stored[1], "k")?;
    let values = vectors(&stored[2], "v")?;
    let scale = scale.map(|scale| arguments::real("scale", scale)).transpose()?;
    let lengths = lengths.as_ref().map(|lengths| contiguous(lengths, "lengths")).transpose()?;
    let threads = arguments::threads(threads)?;
    let options = AttentionOptions { scale, causal, lengths, mask: None, threads };
    let eps = eps.slice()?;
    let index = index.map(Bound::get);
    let found = detached(py, |hook| {
        let index = index.map(KeyIndex::read);
        core::attention_with(&queries, &keys, &values, eps, index.as_deref(), &options, hook)
    })?;
    Ok((
        PyArray1::from_vec(py, found.out),
        PyArray1::from_vec(py, found.tail_mass_upper),
        PyArray1::from_vec(py, found.k),
        PyArray1::from_vec(py, found.scored),
        PyArray1::from_iter(py, found.rung.into_iter().map(|rung| rung as u8)),
        PyArray1::from_vec(py, found.weight_error),
    ))
}
