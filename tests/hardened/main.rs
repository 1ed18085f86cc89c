//! What is asked of the whole: inputs that end where memory ends, properties that hold for all inputs, and what a fuzzer found.

#[cfg(unix)]
mod guard_pages;
#[cfg(unix)]
mod guarded;
