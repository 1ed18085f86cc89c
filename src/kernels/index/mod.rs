//! Quantized keys: encoding, outer products of the residuals, and scores.

mod encode;
mod form;
mod low;
mod outer;
mod scan;
mod split;
#[cfg(test)]
mod tests;
mod triangle;

pub(super) use encode::ROUND;
pub(crate) use encode::{BIAS, Encoded, Frame};
pub(crate) use low::{low_step, pack_low};
pub(crate) use outer::{PANEL, Packed};
pub(crate) use scan::Coarse;
pub(crate) use split::{Above, Passing, SPLIT_KEYS};
pub(crate) use triangle::Triangle;
