//! Kernels: the only room with `unsafe` code.
//!
//! # Contract
//! Scores are read in whole groups of sixteen, padded with masked entries (-inf). Each pass is written once over
//! sixteen virtual lanes (`isa`), implemented by portable code, which defines the bits, and by each instruction set.
//! Every level executes the same correctly rounded operations in the same order, so all levels return the same bits for
//! the same input. `simd` detects the CPU once and holds the only entry points. A pass is a struct of its arguments;
//! beside it is the method of [`Simd`] that checks them and runs it.
//!
//! Weights are e^x for x <= 0 with a proven error, or exactly 0 where x is below the cut. (`weights` has the
//! exponential, `certified_sums` its share of a slack; an ignored test enumerates every f32.) Sums behind a final
//! decision run at most sixteen terms deep before they go to f64. Rough sums may run deeper; they too are the same at
//! all levels.
#![allow(unsafe_code)]
// The body of a pass is lanes from end to end: a block around it would mark nothing. The head of each file says under
// the word SAFETY what its `unsafe` functions ask for; blocks are for the safe functions that enter them.
#![allow(unsafe_op_in_unsafe_fn)]
// Code shared by all levels is compiled with a level's features only if it is inlined into its entry.
#![allow(clippy::inline_always)]

mod attention;
mod below;
mod edges;
mod index;
mod isa;
mod matrix;
mod mixture;
mod row;
mod simd;
mod soft_cap;
mod strided;
mod system;
#[cfg(test)]
mod tests;
mod weights;

pub(crate) use attention::BESIDE;
pub(crate) use attention::{
    BlockMask, BlockScratch, Cutting, PANEL_KEYS, PANEL_ROWS, PANEL_RUN, PanelRows, Precise,
    WeightScratch,
};
pub(crate) use attention::{CodedSums, LIGHTEST, WeightSums};
pub(crate) use attention::{FEW_KEYS, Scored, Weighed};
pub(crate) use below::Below;
pub(crate) use edges::EDGES;
pub(crate) use index::{Above, BIAS, Coarse, Encoded, Frame, PANEL, Packed, Passing, SPLIT_KEYS};
pub(crate) use index::{Triangle, low_step, pack_low};
#[cfg(test)]
pub(crate) use isa::Doubled;
pub(crate) use isa::{Element, InDouble, LANES, LINE, STEP, Scalar, Step};
pub(crate) use matrix::{Keys, Picked};
pub(crate) use mixture::{MIXED, Panel, SUMMED, padded_stride};
pub(crate) use row::{
    BATCH, BatchScratch, Bracket, Edge, GUESSABLE_SPAN, Given, KeptSums, PIVOTS, PartitionSums,
    PivotSums, Positions, Prefetch, RANKED, Survey, TailTarget, around, ranks_between, sample,
    values_around,
};
pub(crate) use simd::Simd;
pub(crate) use soft_cap::SoftCap;
pub(crate) use strided::Strided;
#[cfg(feature = "ndarray")]
pub use strided::with_bits;
pub use system::{DefaultFloats, MappedPiece, MappedPieces};
pub(crate) use system::{
    Gate, Piece, address_space_left, append_all, ask_for_huge_pages, ask_for_pages, forks, lend,
    page_size, with_openmp_team,
};
pub(crate) use weights::{Exp, Identity, ScaledBy, ScaledExp, Unscaled, WeightFn, WeightFnOf};
