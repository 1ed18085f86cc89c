//! Keys scored by what is known about them: codes, the Gram certificate, and searches that end exact.

mod codes;
mod gram;
mod index;
mod mass;
mod search;

pub use index::{IndexOptions, KeyIndex};
pub use mass::Rung;
pub use search::{SearchOptions, SearchResult};

pub(crate) use codes::{Codes, Prepared};
pub(crate) use index::{Coded, by_type, matrix};
pub(crate) use mass::{Chosen, Climb, Query, Room, Search, Sight, Step};
