//! `ValueIndex`.

use std::sync::{RwLock, RwLockReadGuard};

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::arguments;
use super::arrays::{Stored, contiguous};
use super::errors::{CertkError, detached, guarded};
use super::key_index::{HALF_CHANGED, KeyIndex, PyFile, vectors};
use certk_rs::bindings::{default_floats, with_threads};
use certk_rs::{self as core};

#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct ValueIndex(RwLock<core::ValueIndex<'static>>);

impl ValueIndex {
    /// Locks the index for reading, as [`KeyIndex::read`]; lock that of the keys before.
    ///
    /// # Panics
    /// If an earlier call failed unexpectedly while it changed the index.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, core::ValueIndex<'static>> {
        self.0.read().expect(HALF_CHANGED)
    }

    /// Returns a snapshot of the index, so that no call holds the lock while it waits for the interpreter.
    pub(super) fn now(&self, py: Python<'_>) -> PyResult<core::ValueIndex<'static>> {
        py.detach(|| guarded(|| self.read().snapshot()))
    }
}

/// Bounds of the matrices of a head.
type Tops = [[f64; 3]; 2];

/// An index that was built here, or what [`ValueIndex::to_operators`] returned.
#[derive(FromPyObject)]
pub(super) enum Values<'py> {
    Built(Bound<'py, ValueIndex>),
    Written(PyReadonlyArray1<'py, u8>),
}

impl Values<'_> {
    /// Returns a snapshot of the index, or an index that reads its bytes where they are.
    pub(super) fn now(&self, py: Python<'_>) -> PyResult<core::ValueIndex<'_>> {
        match self {
            Values::Built(index) => index.get().now(py),
            Values::Written(bytes) => {
                let bytes = contiguous(bytes, "index.values")?;
                let (file, tops) = parts(bytes).ok_or_else(|| {
                    CertkError::new_err("index.values is cut off; pass what index_tensors returned")
                })?;
                detached(py, || core::ValueIndex::from_trusted_parts(file, &tops))
            }
        }
    }
}

/// Splits a file from the bounds behind it, whose number comes last.
fn parts(bytes: &[u8]) -> Option<(&[u8], Vec<Tops>)> {
    let (rest, count) = bytes.split_last_chunk()?;
    let count = usize::try_from(u64::from_le_bytes(*count)).ok()?;
    let at = rest.len().checked_sub(count.checked_mul(size_of::<Tops>())?)?;
    let (file, tops) = rest.split_at(at);
    // Not aligned. Files are refused where numbers are not little-endian.
    Some((file, bytemuck::pod_collect_to_vec(tops)))
}

#[pymethods]
impl ValueIndex {
    #[staticmethod]
    fn build(
        py: Python<'_>,
        values: Stored<'_>,
        bits: u32,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let _modes = default_floats();
        let values = vectors(&values, "values")?;
        let threads = arguments::threads(threads)?;
        let build = || core::ValueIndex::with_bits(&values, bits);
        let index = detached(py, || with_threads(threads, build))?;
        Ok(ValueIndex(RwLock::new(index)))
    }

    /// Appends to both indexes or to neither.
    fn append_beside(
        &self,
        py: Python<'_>,
        values: Stored<'_>,
        index: &KeyIndex,
        keys: Stored<'_>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _modes = default_floats();
        let (keys, values) = (vectors(&keys, "keys")?, vectors(&values, "values")?);
        let threads = arguments::threads(threads)?;
        detached(py, || {
            let (mut index, mut own) = (index.write(), self.0.write().expect(HALF_CHANGED));
            with_threads(threads, || own.append_beside(&values, &mut index, &keys))
        })
    }

    fn crop(&self, py: Python<'_>, len: usize) -> PyResult<()> {
        detached(py, || self.0.write().expect(HALF_CHANGED).crop(len))
    }

    fn take(&self, py: Python<'_>, entries: Vec<usize>) -> PyResult<Self> {
        let taken = detached(py, || self.read().take(&entries))?;
        Ok(ValueIndex(RwLock::new(taken)))
    }

    fn check(
        &self,
        py: Python<'_>,
        values: Stored<'_>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _modes = default_floats();
        let values = vectors(&values, "values")?;
        let threads = arguments::threads(threads)?;
        detached(py, || with_threads(threads, || self.read().check(&values)))
    }

    fn write_to(&self, py: Python<'_>, file: Bound<'_, PyAny>) -> PyResult<()> {
        let _modes = default_floats();
        // Others may append meanwhile.
        let snapshot = detached(py, || Ok(self.read().snapshot()))?;
        PyFile::lend(file, |file| snapshot.write_to(file))
    }

    /// Returns the bytes of a file, and behind them bounds of its matrices, which a call of an operator has no time to find.
    fn to_operators<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let _modes = default_floats();
        let bytes = detached(py, || {
            let (snapshot, mut bytes) = (self.read().snapshot(), Vec::new());
            snapshot.write_to(&mut bytes)?;
            let tops = snapshot.tops();
            bytes.extend_from_slice(bytemuck::cast_slice(&tops));
            bytes.extend((tops.len() as u64).to_le_bytes());
            Ok(bytes)
        })?;
        Ok(bytes.into_pyarray(py))
    }

    #[staticmethod]
    fn read_from(file: Bound<'_, PyAny>) -> PyResult<Self> {
        let _modes = default_floats();
        let index = PyFile::lend(file, |file| core::ValueIndex::read_from(file))?;
        Ok(ValueIndex(RwLock::new(index)))
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let shape = detached(py, || {
            let index = self.read();
            let last = [index.len(), index.dim()];
            Ok(index.batch_shape().iter().copied().chain(last).collect::<Vec<_>>())
        })?;
        PyTuple::new(py, shape)
    }

    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<&'static str> {
        detached(py, || Ok(self.read().dtype()))
    }

    #[getter]
    fn bits(&self, py: Python<'_>) -> PyResult<u32> {
        detached(py, || Ok(self.read().bits()))
    }

    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || Ok(self.read().bytes()))
    }
}
