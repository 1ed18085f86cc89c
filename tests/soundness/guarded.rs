//! Memory between two pages that nobody may touch.
#![allow(unsafe_code)]

use std::ptr::{NonNull, null_mut};

/// Pages that may be read and written, with one on either side that may not: who reads a byte beyond what is put at an end is
/// stopped by the system.
pub(crate) struct Guarded {
    /// Start of the first page, which may not be touched.
    base: NonNull<u8>,
    page: usize,
    /// Bytes between.
    len: usize,
}

/// Place of a list between the pages that may not be touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Directly behind a page that may not be touched, but for so many elements.
    Behind(usize),
    /// Directly before one, but for so many elements.
    Before(usize),
}

impl Guarded {
    pub(crate) fn new(bytes: usize) -> Self {
        // SAFETY: a question.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let len = bytes.next_multiple_of(page).max(page);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory, that nothing else knows of.
        let base = unsafe { libc::mmap(null_mut(), len + 2 * page, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let base = NonNull::new(base.cast::<u8>()).unwrap();
        // SAFETY: these pages are inside of what was just mapped.
        let opened = unsafe {
            let inside = base.as_ptr().add(page).cast();
            libc::mprotect(inside, len, libc::PROT_READ | libc::PROT_WRITE)
        };
        assert_eq!(opened, 0);
        Guarded { base, page, len }
    }

    /// A copy of a list at a place. What lies beside it is all ones, which is NaN in every type.
    pub(crate) fn put<T: Copy>(&mut self, list: &[T], place: Place) -> &[T] {
        let size = size_of_val(list);
        let (Place::Behind(off) | Place::Before(off)) = place;
        let off = off * size_of::<T>();
        assert!(size + off <= self.len);
        let at = match place {
            Place::Behind(_) => off,
            Place::Before(_) => self.len - size - off,
        };
        // SAFETY: of the pages between, which are ours alone as long as `self` is borrowed; pages begin at multiples of any
        // alignment, and `at` is one of that of T since the length of the pages and that of the list are.
        unsafe {
            let start = self.base.as_ptr().add(self.page);
            start.write_bytes(0xff, self.len);
            let to = start.add(at).cast::<T>();
            assert!(to.is_aligned());
            to.copy_from_nonoverlapping(list.as_ptr(), list.len());
            std::slice::from_raw_parts(to, list.len())
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: what was mapped, of which no borrow is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len + 2 * self.page) };
    }
}

/// A read beyond either end ends the process, which is asked of a child.
#[test]
fn the_pages_beside_may_not_be_read() {
    for place in [Place::Before(0), Place::Behind(0)] {
        let mut memory = Guarded::new(1);
        let inside = memory.put(&[1u8, 2, 3], place);
        let beyond = match place {
            Place::Before(_) => inside.as_ptr().wrapping_add(3),
            Place::Behind(_) => inside.as_ptr().wrapping_sub(1),
        };
        // SAFETY: the child only reads a byte, and ends.
        let ended = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
                std::hint::black_box(beyond.read_volatile());
                libc::_exit(0);
            }
            assert!(child > 0);
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            libc::WIFSIGNALED(status)
        };
        assert!(ended, "{place:?}: nobody was stopped");
        assert_eq!(inside, [1, 2, 3]);
    }
}
