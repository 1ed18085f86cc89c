//! Conversion of the crate's errors to Python's.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;

use super::cancellation::is_cancelled;
use super::openmp::as_entered;
use certk_rs::{Error, ErrorClass, Scores, interruptible};

pyo3::import_exception!(certk_rs.errors, CertkError);

/// Returns the Python exception for an error of the crate.
pub(super) fn raised(error: Error) -> PyErr {
    if error.class() == ErrorClass::Cancelled {
        return PyKeyboardInterrupt::new_err(());
    }
    CertkError::new_err(error.to_string())
}

/// Conversion of a result of the crate to one of Python's.
pub(super) trait Raise<T> {
    fn raise(self) -> PyResult<T>;
}

impl<T> Raise<T> for Result<T, Error> {
    fn raise(self) -> PyResult<T> {
        self.map_err(raised)
    }
}

/// Runs `work`, and turns a panic into an exception that `except Exception` catches, which PyO3's own is not.
///
/// Afterwards borrowed data are only read, except for the locks of an index and a ball, which are poisoned.
pub(super) fn guarded<R>(work: impl FnOnce() -> R) -> PyResult<R> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let message = message_of(&*panic);
        PyRuntimeError::new_err(format!(
            "certk_rs failed unexpectedly: {message}; this is a defect of certk_rs, please report it with the call"
        ))
    })
}

fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// Number of scores that are decided well before another thread's turn (every 5 ms), even on the slowest path and as
/// rows of one key.
const BRIEF: usize = 1 << 12;

/// Runs `work` on these scores: attached if they are few, else [`detached`].
///
/// Releasing the interpreter for a few microseconds of work gains nothing. A waiting thread may take its whole turn in
/// between, a thousand times as long.
pub(super) fn run<R: Send>(
    py: Python<'_>,
    scores: &Scores<'_>,
    work: impl Send + FnOnce() -> Result<R, Error>,
) -> PyResult<R> {
    let brief = scores.rows().saturating_mul(scores.longest().max(1)) <= BRIEF;
    if brief { guarded(work)?.raise() } else { detached(py, work) }
}

/// Releases the interpreter while `work` runs, and lets it handle signals and other threads between portions.
pub(super) fn detached<R: Send>(
    py: Python<'_>,
    work: impl Send + FnOnce() -> Result<R, Error>,
) -> PyResult<R> {
    let (result, raised) = py.detach(move || {
        let raised = Rc::new(RefCell::new(None));
        let told = Rc::clone(&raised);
        let check = move || {
            if is_cancelled() {
                return Err(Error::Interrupted);
            }
            #[allow(clippy::redundant_closure_for_method_calls)]
            // the method alone is not general enough
            Python::attach(|py| py.check_signals()).map_err(|error| {
                told.replace(Some(error));
                Error::Interrupted
            })
        };
        let result = guarded(|| as_entered(|| interruptible(check, work)));
        (result, raised.take())
    });
    match raised {
        Some(error) => Err(error),
        None => result?.raise(),
    }
}
