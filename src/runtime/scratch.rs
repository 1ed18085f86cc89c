//! Scratch that outlives a call, so that a warm call allocates nothing.
//!
//! Scratch is kept by type. Small scratch stays with the thread that used it, without a lock. Large scratch goes to a
//! workspace, where any thread finds it and from where it can be freed: that of the process, or that of a
//! [`Context`](crate::Context).

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use crate::runtime::ambient;
use crate::runtime::workspace::{MOST_IDLE, Scratch, Shelf, process};

/// Bytes that a thread may keep of each kind.
const SMALL: usize = 1 << 20;

thread_local! {
    static THREAD: RefCell<Shelf> = const { RefCell::new(Shelf::EMPTY) };
}

/// Runs `work` with scratch of a kind; a nested call of the same kind gets other scratch.
pub(crate) fn with_scratch<T: Scratch, R>(work: impl FnOnce(&mut T) -> R) -> R {
    work(&mut Lent::new())
}

/// Runs short `work` that uses no scratch itself; the thread's own scratch is used in place.
pub(crate) fn at_once<T: Scratch, R>(work: impl FnOnce(&mut T) -> R) -> R {
    if ambient::has_workspace() {
        return with_scratch(work);
    }
    let mut work = Some(work);
    let mut run = |scratch: &mut T| work.take().map(|work| work(scratch));
    match on_this_thread(|shelf| shelf.on(SMALL, &mut run)).flatten() {
        Some((Some(found), large)) => {
            if large {
                // Large scratch goes to the workspace, where other threads find it.
                drop(Lent::<T>::new());
            }
            found
        }
        _ => with_scratch(work.expect("it has not run yet")),
    }
}

/// Scratch of a kind, borrowed until dropped. Drop it on the thread, and under the context, that it was made in.
pub(crate) struct Lent<T: Scratch> {
    scratch: Option<Box<T>>,
    /// `true` if it was made because the workspace was locked.
    extra: bool,
}

impl<T: Scratch> Lent<T> {
    pub(crate) fn new() -> Self {
        let (found, extra) = match ambient::workspace() {
            Some(workspace) => workspace.take(),
            None => match on_this_thread(Shelf::take).flatten() {
                Some(found) => (Some(found), false),
                None => process().take(),
            },
        };
        Lent { scratch: Some(found.unwrap_or_default()), extra }
    }
}

impl<T: Scratch> Deref for Lent<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.scratch.as_deref().expect("it is there until it is dropped")
    }
}

impl<T: Scratch> DerefMut for Lent<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.scratch.as_deref_mut().expect("it is there until it is dropped")
    }
}

impl<T: Scratch> Drop for Lent<T> {
    fn drop(&mut self) {
        // A panic may leave it in any state.
        let Some(scratch) = self.scratch.take().filter(|_| !std::thread::panicking()) else {
            return;
        };
        let bytes = scratch.held();
        match ambient::workspace() {
            Some(workspace) => workspace.put_back(scratch, (bytes, self.extra), None),
            None if bytes <= SMALL => {
                on_this_thread(|shelf| shelf.put(scratch, bytes));
            }
            None => process().put_back(scratch, (bytes, self.extra), Some(MOST_IDLE)),
        }
    }
}

/// Reads this thread's scratch, unless the thread is just ending.
fn on_this_thread<R>(what: impl FnOnce(&mut Shelf) -> R) -> Option<R> {
    THREAD.try_with(|shelf| Some(what(&mut *shelf.try_borrow_mut().ok()?))).ok()?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Context;
    use crate::runtime::held::Held;
    use crate::runtime::workspace::Workspace;

    #[derive(Default)]
    struct Numbers(Vec<u8>);

    impl Held for Numbers {
        fn held(&self) -> usize {
            self.0.held()
        }
    }

    fn used(bytes: usize) -> usize {
        with_scratch(|numbers: &mut Numbers| {
            let before = numbers.0.capacity();
            numbers.0.resize(numbers.0.len().max(bytes), 0);
            before
        })
    }

    #[test]
    fn scratch_is_used_again_and_given_back() {
        let workspace = Workspace::new();
        let context = Context::new().workspace(&workspace);
        context.run(|| {
            assert_eq!(used(1000), 0);
            assert!(used(10) >= 1000);
        });
        assert!(workspace.bytes() >= 1000);
        // Of two, the one used last is put last.
        context.run(|| {
            with_scratch(|_: &mut Numbers| used(5000));
        });
        assert!(workspace.bytes() >= 6000);
        workspace.shrink_to(5999);
        assert!((1000..6000).contains(&workspace.bytes()));
        workspace.clone().shrink_to(0);
        assert_eq!(workspace.bytes(), 0);
        assert_eq!(context.run(|| used(1)), 0);
    }

    #[test]
    fn a_thread_keeps_little_and_the_process_no_more_than_its_share() {
        std::thread::spawn(|| {
            assert_eq!(used(SMALL / 2), 0);
            assert!(used(1) >= SMALL / 2);
            assert!(used(2 * SMALL) >= SMALL / 2);
            THREAD.with_borrow(|shelf| assert_eq!(shelf.bytes(), 0));
            used(2 * MOST_IDLE);
            assert!(Workspace::of_process().bytes() <= MOST_IDLE);
        })
        .join()
        .unwrap();
    }

    /// Threads that share a workspace often meet at its lock. It holds only as much as they use at a time.
    #[test]
    fn a_workspace_does_not_grow_with_how_often_threads_meet() {
        let workspace = Workspace::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let context = Context::new().workspace(&workspace);
                scope.spawn(move || {
                    context.run(|| {
                        for _ in 0..200_000 {
                            used(1000);
                        }
                    });
                });
            }
        });
        // One per thread, and one more that was made while all others were in use.
        assert!(workspace.bytes() <= 5 * 1000, "{}", workspace.bytes());
    }

    #[test]
    fn what_a_panic_leaves_is_not_used_again() {
        let workspace = Workspace::new();
        let context = Context::new().workspace(&workspace);
        let panic = std::panic::catch_unwind(|| {
            context.run(|| with_scratch(|_: &mut Numbers| panic!("as it should be")));
        });
        assert!(panic.is_err());
        assert_eq!((workspace.bytes(), context.run(|| used(7))), (0, 0));
    }
}
