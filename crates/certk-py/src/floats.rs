//! Services for Python's own arithmetic: floating-point modes, and the default scale of attention.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::arguments::count;
use certk_rs::bindings::{self, default_floats};

/// Sets default floating-point modes on the thread that runs a `with` block: no flush-to-zero, rounding to nearest.
#[pyclass(unsendable, module = "certk_rs._native")]
pub(super) struct DefaultFloats(Option<bindings::DefaultFloats>);

#[pymethods]
impl DefaultFloats {
    #[new]
    fn new() -> Self {
        DefaultFloats(None)
    }

    fn __enter__(&mut self) {
        // Only the first entry knows the thread's own modes.
        if self.0.is_none() {
            self.0 = Some(default_floats());
        }
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&mut self, _raised: &Bound<'_, PyTuple>) {
        self.0 = None;
    }
}

/// Returns the float64 nearest to `d^-1/2`.
#[pyfunction]
pub(super) fn nearest_rsqrt(d: &Bound<'_, PyAny>) -> PyResult<f64> {
    Ok(bindings::nearest_rsqrt(count("d", d, 1)?))
}
