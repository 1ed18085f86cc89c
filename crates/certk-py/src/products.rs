//! `products`.

use numpy::{PyArray1, PyReadwriteArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;

use super::arguments;
use super::arrays::{Stored, not_contiguous};
use super::errors::detached;
use super::key_index::vectors;
use certk_rs::bindings::{self, default_floats, with_threads};

#[pyfunction]
pub(super) fn products<'py>(
    py: Python<'py>,
    queries: Stored<'py>,
    keys: Stored<'py>,
    causal_offset: Option<&Bound<'py, PyAny>>,
    mut out: PyReadwriteArrayDyn<'py, f64>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let _modes = default_floats();
    let (queries, keys) = (vectors(&queries, "queries")?, vectors(&keys, "keys")?);
    let offset = causal_offset
        .map(|offset| arguments::integer("causal_offset", offset, -(1 << 62)))
        .transpose()?;
    let threads = arguments::threads(threads)?;
    if !out.is_c_contiguous() {
        return Err(not_contiguous("out"));
    }
    let to = out.as_slice_mut().map_err(|_| not_contiguous("out"))?;
    let products = || bindings::products(&queries, &keys, offset, to);
    let reach = detached(py, || with_threads(threads, products))?;
    Ok(PyArray1::from_vec(py, reach))
}
