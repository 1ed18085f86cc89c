//! How a long call is stopped from outside: between portions of its work it asks whether it shall go on.
//!
//! It asks on the thread that called, wherever the portions are worked on, so what is asked needs no lock of its own.

use std::cell::RefCell;
use std::rc::Rc;

use crate::error::Error;

type Check = Rc<dyn Fn() -> Result<(), Error>>;

thread_local! {
    static CHECK: RefCell<Option<Check>> = const { RefCell::new(None) };
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
    let _before = Before(CHECK.replace(Some(Rc::new(check))));
    work()
}

/// What was asked before, and is again when this is dropped, also by a panic.
struct Before(Option<Check>);

impl Drop for Before {
    fn drop(&mut self) {
        CHECK.set(self.0.take());
    }
}

/// Asks whether to go on.
///
/// # Errors
/// Whatever the caller's check returns.
pub(crate) fn check() -> Result<(), Error> {
    let check = CHECK.with_borrow(Clone::clone);
    check.map_or(Ok(()), |check| check())
}
