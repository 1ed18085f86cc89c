//! Keys scored by what is known about them: codes, the Gram certificate, and searches that end exact.

mod best_first;
mod cells;
mod codes;
mod estimate;
mod exact;
mod fingerprint;
mod gram;
mod key_index;
#[cfg(feature = "python")]
mod products;
mod search;
mod threshold_search;

pub use best_first::{Over, Rule};
pub use key_index::{IndexOptions, KeyIndex};
pub use search::{SearchOptions, SearchResult};
pub use threshold_search::Rung;

#[cfg(feature = "python")]
pub(crate) use codes::saved::{Saved, Trust};
pub(crate) use codes::{Codes, Prepared};
pub(crate) use key_index::{Coded, by_type, matrix};
#[cfg(feature = "python")]
pub(crate) use products::products;
pub(crate) use threshold_search::{
    Chosen, Query, QueryScratch, RowVisibility, Search, Step, ThresholdState,
};
