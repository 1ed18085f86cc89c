//! Keys scored by what is known about them: codes, the Gram certificate, and searches that end exact.

mod best_first;
mod chunks;
mod codes;
mod content;
mod element;
mod exact;
#[cfg(feature = "files")]
mod file;
mod fingerprint;
mod found;
mod frame;
mod gram;
mod key_index;
mod known;
mod listed_search;
#[cfg(test)]
mod made;
mod options;
mod panel;
mod parts;
mod prepared;
mod products;
mod query;
mod queue;
mod recall;
mod scan;
mod search;
mod shared;
mod shrink;
mod spread;
mod threshold_search;
mod threshold_state;
mod value_index;
mod visible;

pub use found::Rung;
pub use key_index::KeyIndex;
pub use options::{IndexOptions, RecallOptions, Rule, SearchOptions};
pub use recall::Recall;
pub use search::SearchResult;
pub use value_index::ValueIndex;

pub use codes::saved::{Saved, Trust};
pub(crate) use codes::{Codes, SEGMENT};
pub(crate) use element::{Coded, for_coded_dtype, matrix};
pub(crate) use gram::{CodeError, Sums as CodeSums};
pub(crate) use listed_search::MISSES;
pub(crate) use panel::{FROM, Guess, PanelRow};
pub(crate) use prepared::Prepared;
pub use products::products;
pub(crate) use query::{Query, RowVisibility};
pub(crate) use spread::ValueBounds;
pub(crate) use threshold_search::ThresholdSearch;
pub(crate) use threshold_state::{Chosen, QueryScratch, Step, ThresholdState};
pub(crate) use visible::Visible;
