//! Soundness of certificates: every answer of the public functions is compared with exact arithmetic.

// Counts are small and never negative, and bytes are counted in a few hundred.
#![allow(clippy::cast_sign_loss, clippy::naive_bytecount)]

mod attention;
mod bounds;
mod exact;
mod histories;
mod keep_set;
mod levels;
mod masks;
mod montecarlo;
mod radius;
mod rows;
mod same_bits;
mod search;
mod seen;
mod snapshots;
