//! Bounds on what is lost by dropping keys.

pub(crate) mod output;
