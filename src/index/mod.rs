//! Keys scored by what is known about them: codes, the Gram certificate, and searches that end exact.

mod best_first;
mod cells;
mod codes;
mod element;
mod estimate;
mod exact;
mod fingerprint;
mod found;
mod frame;
mod gram;
mod key_index;
mod options;
#[cfg(feature = "python")]
mod products;
mod query;
mod search;
mod threshold_search;

pub use found::Rung;
pub use key_index::KeyIndex;
pub use options::{IndexOptions, Over, Rule, SearchOptions};
pub use search::SearchResult;

#[cfg(feature = "python")]
pub(crate) use codes::saved::{Saved, Trust};
pub(crate) use codes::{Codes, Prepared};
pub(crate) use element::{Coded, by_type, matrix};
#[cfg(feature = "python")]
pub(crate) use products::products;
pub(crate) use query::{Query, RowVisibility};
pub(crate) use threshold_search::{Chosen, QueryScratch, Search, Step, ThresholdState};
