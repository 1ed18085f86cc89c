//! Cancellation of calls by another thread: signals reach the main thread only.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyTuple;

thread_local! {
    /// Flags that this thread has entered.
    static ENTERED: RefCell<Vec<Arc<AtomicBool>>> = const { RefCell::new(Vec::new()) };
}

/// Flag that ends the calls of the threads that have entered it, once any thread raises it.
#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct Cancellation(Arc<AtomicBool>);

#[pymethods]
impl Cancellation {
    #[new]
    fn new() -> Self {
        Cancellation(Arc::new(AtomicBool::new(false)))
    }

    fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    #[getter]
    fn cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn __enter__(this: Bound<'_, Self>) -> Bound<'_, Self> {
        ENTERED.with_borrow_mut(|entered| entered.push(Arc::clone(&this.get().0)));
        this
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, _raised: &Bound<'_, PyTuple>) {
        ENTERED.with_borrow_mut(|entered| {
            if let Some(at) = entered.iter().rposition(|flag| Arc::ptr_eq(flag, &self.0)) {
                entered.remove(at);
            }
        });
    }
}

/// Returns `true` if the calls of this thread are to end.
pub(super) fn is_cancelled() -> bool {
    ENTERED.with_borrow(|entered| entered.iter().any(|flag| flag.load(Ordering::Relaxed)))
}
