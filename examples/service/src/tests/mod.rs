//! The service as its clients see it.

mod describe;
mod files;
mod hostile;
mod limits;
mod select;
mod sessions;
mod support;
mod together;
