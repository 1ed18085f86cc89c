//! Requests to the operating system, and memory that is not a slice yet.

mod address_space;
mod concat;
mod float_modes;
mod forks;
mod gate;
mod huge_pages;
mod mapped_pieces;
mod openmp;
mod pages;

pub(crate) use address_space::left as address_space_left;
pub(crate) use concat::{Piece, append_all};
pub use float_modes::DefaultFloats;
pub(crate) use forks::forks;
pub(crate) use gate::{Gate, lend};
pub(crate) use huge_pages::ask_for as ask_for_huge_pages;
pub use mapped_pieces::{MappedPiece, MappedPieces};
pub(crate) use openmp::with_team as with_openmp_team;
pub(crate) use pages::{ask_for_pages, page_size};
