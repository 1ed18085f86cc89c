//! Passes over a row of scores, in whole groups of sixteen padded with masked entries. Masked entries weigh nothing and
//! are below every finite pivot.

mod batch;
mod candidates;
mod emit;
mod guess;
mod partition;
mod scan;

pub(crate) use batch::{BATCH, BatchScratch};
pub(crate) use candidates::{
    Edge, GUESSABLE_SPAN, PIVOTS, PivotSums, RANKED, TailTarget, around, ranks_between, sample,
    values_around,
};
pub(crate) use emit::{KeptSums, Positions};
pub(crate) use partition::{Bracket, Given, PartitionSums, Prefetch};
pub(crate) use scan::Survey;
