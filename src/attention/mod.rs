//! Certified sparse attention: scores a few keys exactly, and bounds the mass of the others.
//!
//! `driver` groups rows; `few` answers a few of them by an index or by exact scores, and `average` averages their
//! values; `tile` answers many at once in f32; `ahead` requests their reads of mapped files; `error_bound` bounds the
//! error of an output.

mod ahead;
mod average;
mod ball;
mod coded;
mod coded_bound;
mod driver;
mod error_bound;
mod exact_rows;
mod f32_error;
mod few;
mod from_codes;
mod heavy_keys;
mod job;
mod kept_rows;
mod listed;
mod many;
mod narrow;
mod options;
mod outputs;
mod pending;
mod pruned;
mod query_rows;
mod result;
mod score_changes;
mod sink;
mod stretches;
mod tile;
#[cfg(feature = "ndarray")]
mod views;
mod weighed;

pub use ball::ValueBall;
pub use driver::{attention, attention_of_ragged};
pub use from_codes::attention_from_codes;
pub use kept_rows::KeptRows;
pub use options::{AttentionOptions, Budget, Precision, Weights};
pub use outputs::Outputs;
pub use result::Attention;
