//! Interruption of long calls, which check between portions of work whether to continue.
//!
//! Every thread of a call checks the flags and deadlines of its context. A further check, such as one for an
//! interpreter's signals, runs only on the calling thread, so it needs no lock of its own.

use std::cell::Cell;

use crate::error::Error;
use crate::runtime::ambient;

type Check = Box<dyn Fn() -> Result<(), Error>>;

thread_local! {
    static CHECK: Cell<Option<Check>> = const { Cell::new(None) };
}

/// Runs `work` with a check: every call of this crate that it makes on this thread runs `check` between portions, and
/// ends with the error that it returns ([`Error::Interrupted`] is meant for that). Such a call returns nothing else,
/// and leaves no partial state.
///
/// ```
/// use certk_rs::{Error, Options, Scores, interruptible, select};
///
/// let row = [1.0_f32, 2.0];
/// let scores = Scores::new(&row[..], &[1, 2])?;
/// let stopped = interruptible(|| Err(Error::Interrupted), || select(&scores, &[0.1], &Options::new()));
/// assert_eq!(stopped, Err(Error::Interrupted));
/// assert!(select(&scores, &[0.1], &Options::new()).is_ok());
/// # Ok::<(), Error>(())
/// ```
pub fn interruptible<R>(
    check: impl Fn() -> Result<(), Error> + 'static,
    work: impl FnOnce() -> R,
) -> R {
    let _before = Before(CHECK.replace(Some(Box::new(check))));
    work()
}

/// Previous check, restored on drop, also by a panic.
struct Before(Option<Check>);

impl Drop for Before {
    fn drop(&mut self) {
        CHECK.set(self.0.take());
    }
}

/// Checks whether to continue. Calls made by the check itself, such as those of a signal handler, are not checked.
///
/// # Errors
/// The error of the caller's check or of the context.
pub(crate) fn check() -> Result<(), Error> {
    ambient::check()?;
    let Some(check) = CHECK.take() else { return Ok(()) };
    let answer = check();
    CHECK.set(Some(check));
    answer
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn what_a_check_calls_is_not_asked() {
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        let nested = move || {
            count.set(count.get() + 1);
            check()
        };
        interruptible(nested, || {
            assert_eq!((check(), check()), (Ok(()), Ok(())));
            assert_eq!(interruptible(|| Err(Error::Interrupted), check), Err(Error::Interrupted));
            assert_eq!(check(), Ok(()));
        });
        assert_eq!((asked.get(), check()), (3, Ok(())));
    }
}
