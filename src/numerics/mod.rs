//! Arithmetic with proven roundings, and orders of numbers.

pub(crate) mod certified_sums;
pub(crate) mod double_double;
pub(crate) mod exact_share;
#[cfg(feature = "serde")]
pub(crate) mod extended;
pub(crate) mod finite;
pub(crate) mod log_mass;
pub(crate) mod order;
pub(crate) mod random;
pub(crate) mod scale;
pub(crate) mod sorting;
