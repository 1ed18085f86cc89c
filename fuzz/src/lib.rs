//! Fuzz targets: the library is called with inputs that a fuzzer makes up, and its answers are judged by other means.
//!
//! Each target is a function of bytes that panics where an answer is wrong. Truths are computed here, in plain f64 with wide
//! margins, and for rows of a few keys in wide integers. Nothing of the library is used for them.

// Counts are small and never negative.
#![allow(clippy::cast_sign_loss)]

pub mod attention;
pub mod certify;
#[allow(dead_code)]
#[path = "../../tests/soundness/exact.rs"]
mod exact;
mod heads;
pub mod index_file;
mod rows;
pub mod saved_index;
pub mod search;
pub mod select;
mod stored;
mod tape;
mod truth;

/// A target's name and what it does with bytes.
pub type Target = (&'static str, fn(&[u8]));

pub const TARGETS: [Target; 6] = [
    ("attention", attention::run),
    ("certify", certify::run),
    ("index_file", index_file::run),
    ("saved_index", saved_index::run),
    ("search", search::run),
    ("select", select::run),
];
