//! Scratch that outlives a call, so that a warm call asks for no memory.
//!
//! Every kind of scratch is kept by its type. A small one stays with the thread that used it, which needs no lock; a large one
//! goes to a workspace, where any thread finds it again and from where it can be given back: that of the process, or one that a
//! [`Context`](crate::Context) was given.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use crate::runtime::ambient;
use crate::runtime::workspace::{MOST_IDLE, Scratch, Shelf, process};

/// What a thread may keep for itself, of each kind.
const SMALL: usize = 1 << 20;

thread_local! {
    static THREAD: RefCell<Shelf> = const { RefCell::new(Shelf::EMPTY) };
}

/// Runs with scratch of a kind; a nested call of the same kind gets other scratch.
pub(crate) fn with_scratch<T: Scratch, R>(work: impl FnOnce(&mut T) -> R) -> R {
    work(&mut Lent::new())
}

/// The same for work of a moment, which uses no scratch itself: on the thread's own it works where that lies.
pub(crate) fn at_once<T: Scratch, R>(work: impl FnOnce(&mut T) -> R) -> R {
    if ambient::has_workspace() {
        return with_scratch(work);
    }
    let mut work = Some(work);
    let mut run = |scratch: &mut T| work.take().map(|work| work(scratch));
    match on_this_thread(|shelf| shelf.on(SMALL, &mut run)).flatten() {
        Some((Some(found), large)) => {
            if large {
                // What is large goes to where others find it.
                drop(Lent::<T>::new());
            }
            found
        }
        _ => with_scratch(work.expect("it has not run yet")),
    }
}

/// Scratch of a kind, for as long as this lives. It is to be dropped on the thread, and under the context, that it was made in.
pub(crate) struct Lent<T: Scratch> {
    scratch: Option<Box<T>>,
    /// Whether it was made because nobody could look for another.
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
        // What a panic leaves may be anything.
        let Some(scratch) = self.scratch.take().filter(|_| !std::thread::panicking()) else {
            return;
        };
        let bytes = scratch.bytes();
        match ambient::workspace() {
            Some(workspace) => workspace.put_back(scratch, (bytes, self.extra), None),
            None if bytes <= SMALL => {
                on_this_thread(|shelf| shelf.put(scratch, bytes));
            }
            None => process().put_back(scratch, (bytes, self.extra), Some(MOST_IDLE)),
        }
    }
}

/// What this thread keeps, unless it ends just now.
fn on_this_thread<R>(what: impl FnOnce(&mut Shelf) -> R) -> Option<R> {
    THREAD.try_with(|shelf| Some(what(&mut *shelf.try_borrow_mut().ok()?))).ok()?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Context;
    use crate::runtime::workspace::Workspace;

    #[derive(Default)]
    struct Numbers(Vec<u8>);

    impl Scratch for Numbers {
        fn bytes(&self) -> usize {
            self.0.capacity()
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
        // Of two, the one used last goes last.
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

    /// Threads that share a workspace meet at its lock all the time: it holds what they use at a time, and no more.
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
        // One for each thread, and one more that was made while all others were out.
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
