//! Fuzz targets: the library is called with inputs that a fuzzer makes up, and its answers are judged by other means.
//!
//! Each target is a function of bytes that panics where an answer is wrong. Truths are computed here, in plain f64 with wide
//! margins, and for rows of a few keys in wide integers. Nothing of the library is used for them. The tests of soundness
//! (`tests/soundness`) include this file, and run every target over its seeds and random bytes.

// Counts are small and never negative.
#![allow(clippy::cast_sign_loss)]

pub mod attention;
pub mod certify;
#[allow(dead_code)]
#[path = "../../tests/soundness/exact.rs"]
pub(crate) mod exact;
mod heads;
pub mod index_file;
#[allow(dead_code)]
#[path = "../../tests/soundness/levels.rs"]
pub(crate) mod levels;
#[cfg(test)]
mod replay;
mod rows;
pub mod saved_index;
pub mod search;
pub mod select;
#[allow(dead_code)]
pub(crate) mod stored;
mod tape;
mod truth;

/// A target's name and its function.
pub type Target = (&'static str, fn(&[u8]));

/// The targets, by name.
pub const TARGETS: [Target; 6] = [
    ("attention", attention::run),
    ("certify", certify::run),
    ("index_file", index_file::run),
    ("saved_index", saved_index::run),
    ("search", search::run),
    ("select", select::run),
];
