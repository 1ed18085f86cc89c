//! Passes over stored vectors: products with queries, weighted sums, and both together over tiles of rows.

mod average;
mod coded;
mod dot;
mod few;
mod listed;
mod narrow;
mod pieces;
#[cfg(test)]
mod tests;
mod tile;
mod weighed;

pub(crate) use coded::{CodedSums, LIGHTEST, WeightSums};
pub(crate) use few::{FEW_KEYS, Scored, Weighed};
pub(crate) use narrow::BESIDE;
pub(crate) use pieces::Cutting;
pub(crate) use tile::{BlockScratch, Precise, RUN as PANEL_RUN, Rows as PanelRows, WeightScratch};
pub(crate) use weighed::{BLOCK as PANEL_KEYS, BlockMask, ROWS as PANEL_ROWS};
