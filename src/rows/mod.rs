//! Borrowed rows of scores: the only place where shapes and values are checked.
//!
//! A row is a run of `n` stored numbers, contiguous along the last axis. Rows may be strided, broadcast (stride 0),
//! ragged (`indptr`), cut to a prefix (`lengths`, `causal_offset`) and masked. The selector and the checker read rows
//! through this module only, so they agree on the meaning of a row.

mod data;
#[cfg(feature = "montecarlo")]
mod entries;
mod keep;
mod mask;
mod per_row;
mod ragged;
mod read;
mod scores;
mod strides;
mod values;
mod vectors;
#[cfg(feature = "ndarray")]
mod views;
mod wide;

pub use data::{Data, Number};
pub use keep::Keep;
pub use mask::{Mask, MaskEntry};
pub use ragged::Ragged;
pub use scores::{Kind, Scores};
pub use values::Values;
pub use vectors::Vectors;
#[cfg(feature = "ndarray")]
pub use views::whole_bytes;

pub(crate) use data::{Stored, for_dtype};
pub(crate) use mask::StoredMask;
pub(crate) use per_row::PerRow;

pub(crate) use strides::contiguous;
pub(crate) use strides::{check_strides, offset};
pub(crate) use wide::{WeightKind, WideScores, drop_masked};
