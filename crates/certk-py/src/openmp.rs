//! Use of the host's OpenMP threads by calls of a thread.

use std::cell::Cell;

use certk_rs::bindings::beside_openmp;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

thread_local! {
    /// Number of blocks that this thread is in.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// Makes native calls of the thread that runs a `with` block use OpenMP's threads.
#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct OpenMpTeam;

#[pymethods]
impl OpenMpTeam {
    #[new]
    fn new() -> Self {
        OpenMpTeam
    }

    #[allow(clippy::unused_self)] // as Python has it
    fn __enter__(&self) {
        INSIDE.set(INSIDE.get() + 1);
    }

    #[allow(clippy::unused_self)]
    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, _raised: &Bound<'_, PyTuple>) {
        INSIDE.set(INSIDE.get().saturating_sub(1));
    }
}

/// Runs work with or without OpenMP's threads, as this thread's blocks set it.
pub(super) fn as_entered<R>(work: impl FnOnce() -> R) -> R {
    if INSIDE.get() > 0 { beside_openmp(work) } else { work() }
}
