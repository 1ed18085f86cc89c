//! Pieces of files, mapped side by side, as an array.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use certk_rs::bindings::{MappedPiece, MappedPieces as Pieces};

/// Memory that NumPy uses as an array of bytes, and keeps alive.
#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct MappedPieces(Pieces);

#[pymethods]
impl MappedPieces {
    /// Takes per piece its offset in memory, its length, the descriptor of its file, the offset in the file, and
    /// whether changes are written to the file. All numbers of bytes are multiples of the page size.
    #[new]
    #[pyo3(signature = (len, pieces, /))]
    fn new(
        py: Python<'_>,
        len: usize,
        pieces: Vec<(usize, usize, i32, u64, bool)>,
    ) -> PyResult<Self> {
        let pieces: Vec<MappedPiece> = pieces
            .into_iter()
            .map(|(at, len, descriptor, offset, shared)| MappedPiece {
                at,
                len,
                descriptor,
                offset,
                shared,
            })
            .collect();
        Ok(Self(py.detach(|| Pieces::new(len, &pieces))?))
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let about = PyDict::new(py);
        about.set_item("version", 3)?;
        about.set_item("typestr", "|u1")?;
        about.set_item("shape", (self.0.len(),))?;
        about.set_item("data", (self.0.start(), false))?;
        Ok(about)
    }

    /// Releases the pages, which are read again from their files when needed.
    fn let_go(&self, py: Python<'_>) {
        py.detach(|| self.0.let_go());
    }
}
