//! Detection of forks of this process.

use std::sync::atomic::{AtomicUsize, Ordering};

static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Returns a number that differs from the parent's in every child forked after the first call, where the system
/// supports that. Process ids do not suffice: in its own namespace a child may have the id that its parent has in
/// another.
pub(crate) fn forks() -> usize {
    #[cfg(unix)]
    {
        extern "C" fn in_the_child() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        // A fork handler whose code was unloaded crashes the process. If this code may be unloaded, as in a plug-in,
        // process ids must suffice.
        if ASKED.swap(1, Ordering::Relaxed) == 0 && stays(in_the_child as *const ()) {
            // SAFETY: the handler touches an atomic number and nothing else, and its code stays as long as the process. Where it
            // is refused, process numbers must do.
            unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
        }
    }
    FORKS.load(Ordering::Relaxed)
}

/// Keeps code from being unloaded. Returns `false` if that fails.
#[cfg(any(target_os = "linux", target_vendor = "apple"))]
fn stays(code: *const ()) -> bool {
    // A static program loads nothing.
    if cfg!(target_feature = "crt-static") {
        return true;
    }
    let Some(object) = object_of(code) else { return false };
    if object_of(of_the_program()).is_some_and(|program| program.dli_fbase == object.dli_fbase) {
        return true;
    }
    if object.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the name is that of an object that is loaded, which holds this very code. It is not loaded anew.
    let same = unsafe {
        libc::dlopen(object.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE)
    };
    !same.is_null()
}

#[cfg(all(unix, not(any(target_os = "linux", target_vendor = "apple"))))]
fn stays(_code: *const ()) -> bool {
    false
}

/// Returns the program or library that an address belongs to.
#[cfg(any(target_os = "linux", target_vendor = "apple"))]
fn object_of(address: *const ()) -> Option<libc::Dl_info> {
    let mut object = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked about. What is written is valid where something was found, and so are zeros.
    unsafe {
        (libc::dladdr(address.cast(), object.as_mut_ptr()) != 0).then(|| object.assume_init())
    }
}

/// Returns an address in the program itself: that of its headers.
#[cfg(target_os = "linux")]
fn of_the_program() -> *const () {
    // SAFETY: it reads what the system has told the process; 0 if nothing.
    unsafe { libc::getauxval(libc::AT_PHDR) as *const () }
}

#[cfg(target_vendor = "apple")]
fn of_the_program() -> *const () {
    // SAFETY: the first image is the program's.
    unsafe { libc::_dyld_get_image_header(0).cast() }
}

#[cfg(all(
    test,
    any(target_os = "linux", target_vendor = "apple"),
    not(target_feature = "crt-static")
))]
mod tests {
    use super::*;

    #[test]
    fn code_of_the_program_and_of_libraries_stays_and_other_memory_may_not() {
        assert!(stays(forks as *const ()));
        // SAFETY: it looks for a name that every process has.
        let in_a_library = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"getpid".as_ptr()) };
        assert!(!in_a_library.is_null() && stays(in_a_library.cast_const().cast()));
        assert!(!stays((&raw const *Box::new(0u64)).cast()));
        assert!(!stays(std::ptr::null()));
    }
}
