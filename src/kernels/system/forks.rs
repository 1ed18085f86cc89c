//! How often this process is a child of a fork.

use std::sync::atomic::{AtomicUsize, Ordering};

static FORKS: AtomicUsize = AtomicUsize::new(0);

/// A number that differs from that of the parent in every forked child from the first call on. Process numbers do not
/// suffice: in a namespace of its own a child may have the number that its parent has in another.
pub(crate) fn forks() -> usize {
    #[cfg(unix)]
    {
        extern "C" fn in_the_child() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        if ASKED.swap(1, Ordering::Relaxed) == 0 {
            // SAFETY: the handler touches an atomic number and nothing else, and lives as long as the process: neither
            // this crate nor an extension of Python is ever unloaded. Where it is refused, process numbers must do.
            unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
        }
    }
    FORKS.load(Ordering::Relaxed)
}
