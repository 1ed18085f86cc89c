//! `KeyIndex`.

use std::sync::RwLock;

use numpy::PyArray1;
use pyo3::prelude::*;

use super::arguments;
use super::arrays::{Budgets, Stored};
use super::errors::detached;
use crate::keys::{self as core, IndexOptions, SearchOptions};
use crate::scores::Vectors;

pub(super) fn vectors<'a>(stored: &'a Stored<'_>, argument: &'static str) -> PyResult<Vectors<'a>> {
    let (data, strides) = stored.data(argument)?;
    Ok(Vectors::strided(argument, data, stored.shape(), &strides)?)
}

#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct KeyIndex(RwLock<core::KeyIndex>);

/// k, indptr, indices, upper and lower ends, minimal, status, scored, rung.
type Answers<'py> = (
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<bool>>,
    Bound<'py, PyArray1<u8>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<u8>>,
);

impl KeyIndex {
    pub(super) fn read(&self) -> std::sync::RwLockReadGuard<'_, core::KeyIndex> {
        self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[pymethods]
impl KeyIndex {
    #[staticmethod]
    fn build(
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        dtype: &str,
        rotate: Option<bool>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let stored = Stored::new(keys, dtype)?;
        let keys = vectors(&stored, "keys")?;
        let options = IndexOptions { rotate, threads: arguments::threads(threads)? };
        let index = detached(py, |_| core::KeyIndex::build(&keys, &options))?;
        Ok(KeyIndex(RwLock::new(index)))
    }

    fn append(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        dtype: &str,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let stored = Stored::new(keys, dtype)?;
        let keys = vectors(&stored, "keys")?;
        let threads = arguments::threads(threads)?;
        detached(py, |_| {
            let mut index = self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            index.append(&keys, threads)
        })
    }

    #[allow(clippy::too_many_arguments)] // the Python wrapper's options, one for one
    fn search<'py>(
        &self,
        py: Python<'py>,
        queries: &Bound<'py, PyAny>,
        dtype: &str,
        keys: Option<&Bound<'py, PyAny>>,
        keys_dtype: Option<&str>,
        eps: Budgets<'py>,
        scale: Option<&Bound<'py, PyAny>>,
        threads: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Answers<'py>> {
        let stored = Stored::new(queries, dtype)?;
        let queries = vectors(&stored, "queries")?;
        let lent = match (keys, keys_dtype) {
            (Some(keys), Some(dtype)) => Some(Stored::new(keys, dtype)?),
            _ => None,
        };
        let keys = lent.as_ref().map(|stored| vectors(stored, "keys")).transpose()?;
        let scale = scale.map(|scale| arguments::real("scale", scale)).transpose()?;
        let options = SearchOptions { scale, threads: arguments::threads(threads)? };
        let eps = eps.slice()?;
        let found = detached(py, |hook| {
            self.read().search_with(&queries, keys.as_ref(), eps, &options, hook)
        })?;
        let selection = found.selection;
        Ok((
            PyArray1::from_vec(py, selection.k),
            PyArray1::from_vec(py, selection.indptr),
            PyArray1::from_iter(py, selection.indices.into_iter().map(i64::from)),
            PyArray1::from_vec(py, selection.tail_mass_upper),
            PyArray1::from_vec(py, selection.tail_mass_lower),
            PyArray1::from_vec(py, selection.minimal),
            PyArray1::from_iter(py, selection.status.into_iter().map(|status| status as u8)),
            PyArray1::from_vec(py, found.scored),
            PyArray1::from_iter(py, found.rung.into_iter().map(|rung| rung as u8)),
        ))
    }

    #[getter]
    fn len(&self) -> usize {
        self.read().len()
    }

    #[getter]
    fn bytes(&self) -> usize {
        self.read().bytes()
    }
}
