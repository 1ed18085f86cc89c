//! Inputs that end where memory ends, so that a read beyond them ends the process.

#[cfg(unix)]
mod guard_pages;
#[cfg(unix)]
mod guarded;
