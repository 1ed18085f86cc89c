//! Keys scored by what is known about them: codes, the Gram certificate, and searches that end exact.

mod cells;
mod codes;
mod estimate;
mod exact;
mod explore;
mod fingerprint;
mod gram;
mod index;
mod mass;
#[cfg(feature = "python")]
mod products;
mod search;

pub use explore::{Over, Rule};
pub use index::{IndexOptions, KeyIndex};
pub use mass::Rung;
pub use search::{SearchOptions, SearchResult};

#[cfg(feature = "python")]
pub(crate) use codes::saved::{Saved, Trust};
pub(crate) use codes::{Codes, Prepared};
pub(crate) use index::{Coded, by_type, matrix};
pub(crate) use mass::{Chosen, Query, QueryScratch, RowVisibility, Search, Step, ThresholdState};
#[cfg(feature = "python")]
pub(crate) use products::products;
