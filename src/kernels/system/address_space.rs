//! Remaining address space of this process.

/// Returns the bytes left under a limit (`ulimit -v`, `RLIMIT_AS`); `None` without one, or if the system does not
/// report it.
#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) fn left() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: the system writes one such struct, which this is.
    if unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) } != 0
        || limit.rlim_cur == libc::RLIM_INFINITY
    {
        return None;
    }
    // SAFETY: a question without pointers.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = text.split(' ').next()?.parse().ok()?;
    let limit = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX);
    Some(limit.saturating_sub(pages.saturating_mul(page)))
}

/// Returns `None`: only Linux enforces the limit, and Miri has none.
#[cfg(any(not(target_os = "linux"), miri))]
pub(crate) fn left() -> Option<usize> {
    None
}
