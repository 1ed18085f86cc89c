//! Certified sparse attention: scores a few keys exactly, and proves what the others carry.
//!
//! `driver` puts rows into groups; `few` answers a few of them by what an index or exact scores say, and `average` averages
//! their values; `tile` answers many at once in f32; `ahead` asks for what they will read of mapped files; `error_bound` says
//! how far an output may be off.

mod ahead;
mod average;
mod ball;
mod driver;
mod error_bound;
mod few;
mod job;
mod many;
mod narrow;
mod options;
mod outputs;
mod own_index;
mod pending;
mod pruned;
mod query_rows;
mod result;
mod sink;
mod stretches;
mod thinned;
mod tile;
#[cfg(feature = "ndarray")]
mod views;

pub use ball::ValueBall;
pub use driver::attention;
pub use options::{AttentionOptions, Budget, Precision};
pub use outputs::Outputs;
pub use result::Attention;
