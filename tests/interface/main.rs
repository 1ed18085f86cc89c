//! The public interface: refusals, files of indexes, draws, serde, and rows that were once answered wrongly.

mod draws;
mod errors;
mod index_files;
mod reviewed;
#[cfg(feature = "serde")]
mod serialized;
