//! How a long call is stopped from outside: between portions of its work it asks whether it shall go on.
//!
//! Flags and deadlines of a context are asked on every thread that works on the call. Beside it there may be a check that is
//! asked on the thread that called, wherever the portions are worked on, so that it needs no lock of its own: an interpreter's
//! signals, say.

use std::cell::Cell;

use crate::error::Error;
use crate::runtime::ambient;

type Check = Box<dyn Fn() -> Result<(), Error>>;

thread_local! {
    static CHECK: Cell<Option<Check>> = const { Cell::new(None) };
}

/// Runs `work`; every call of this crate that it makes on this thread asks `check` between portions, and ends with the error
/// that it returns ([`Error::Interrupted`] is made for that). Nothing is returned then, and nothing is left half-done.
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

/// What was asked before, and is again when this is dropped, also by a panic.
struct Before(Option<Check>);

impl Drop for Before {
    fn drop(&mut self) {
        CHECK.set(self.0.take());
    }
}

/// Asks whether to go on. Calls that the check itself makes, such as those of a handler of signals, are not asked.
///
/// # Errors
/// Whatever the caller's check returns.
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
