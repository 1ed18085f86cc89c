//! Soundness of certificates: every answer of the public functions is compared with exact arithmetic.

// Counts are small and never negative, and bytes are counted in a few hundred.
#![allow(clippy::cast_sign_loss, clippy::naive_bytecount)]

mod attention;
mod bounds;
#[cfg(unix)]
mod guard_pages;
#[cfg(unix)]
mod guarded;
mod histories;
/// The fuzz targets with their judges; their workspace has lints of its own.
#[allow(clippy::all, clippy::pedantic, dead_code, unreachable_pub)]
#[path = "../../fuzz/src/lib.rs"]
mod judges;
mod keep_set;
mod long_search;
mod masks;
mod radius;
mod rows;
mod same_bits;
mod search;
mod vectors;

use judges::{exact, levels, stored};
