//! Execution of calls: threads, cancellation, deadlines and memory.

pub(crate) mod ambient;
pub(crate) mod context;
pub(crate) mod held;
pub(crate) mod interrupt;
pub(crate) mod memory;
pub(crate) mod recycled;
pub(crate) mod reused;
pub(crate) mod scratch;
pub(crate) mod threads;
pub(crate) mod workspace;
