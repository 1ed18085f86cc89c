//! The one conversion from the crate's errors to Python's.

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::error::Error;

pyo3::import_exception!(certk_rs.errors, CertkError);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Interrupted => PyKeyboardInterrupt::new_err(()),
            _ => CertkError::new_err(error.to_string()),
        }
    }
}

/// As many scores are decided before another thread of the interpreter would get its turn anyway (every 5 ms), even at
/// the slowest.
const BRIEF: usize = 1 << 12;

/// Runs `work` on so many scores: briefly and attached, or [`detached`].
///
/// Releasing the interpreter takes as long as some hundred scores. And where another thread waits for it, getting it
/// back takes until that thread's turn is over, which is a thousand times as long.
pub(super) fn run<R: Send>(
    py: Python<'_>,
    scores: usize,
    work: impl Send + FnOnce(&mut dyn FnMut() -> Result<(), Error>) -> Result<R, Error>,
) -> PyResult<R> {
    if scores <= BRIEF { Ok(work(&mut || Ok(()))?) } else { detached(py, work) }
}

/// Releases the interpreter while `work` runs, and lets it hear the interpreter's signals between portions.
pub(super) fn detached<R: Send>(
    py: Python<'_>,
    work: impl Send + FnOnce(&mut dyn FnMut() -> Result<(), Error>) -> Result<R, Error>,
) -> PyResult<R> {
    let mut raised = None;
    let result = py.detach(|| {
        work(&mut || {
            #[allow(clippy::redundant_closure_for_method_calls)]
            // the method alone is not general enough
            Python::attach(|py| py.check_signals()).map_err(|error| {
                raised = Some(error);
                Error::Interrupted
            })
        })
    });
    match raised {
        Some(error) => Err(error),
        None => Ok(result?),
    }
}
