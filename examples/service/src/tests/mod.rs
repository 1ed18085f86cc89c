//! The service as its clients see it.

mod connections;
mod describe;
mod files;
mod hostile;
mod limits;
mod select;
mod sessions;
pub(crate) mod support;
mod together;
