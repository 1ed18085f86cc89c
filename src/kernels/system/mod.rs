//! What is asked of the operating system, and memory that is not a slice yet.

mod address_space;
mod concat;
mod float_modes;
#[cfg(feature = "python")]
mod foreign;
mod forks;
mod huge_pages;
#[cfg(feature = "python")]
mod mapped_pieces;
mod pages;

pub(crate) use address_space::left as address_space_left;
pub(crate) use concat::{Piece, append_all};
pub(crate) use float_modes::DefaultFloats;
#[cfg(feature = "python")]
pub(crate) use foreign::extent;
pub(crate) use forks::forks;
pub(crate) use huge_pages::ask_for as ask_for_huge_pages;
#[cfg(feature = "python")]
pub(crate) use mapped_pieces::{MappedPiece, MappedPieces};
pub(crate) use pages::{ask_for_pages, page_size};
