//! Kernels: the only room with `unsafe` code.
//!
//! # The contract
//! Keys are read in whole groups of sixteen, padded with masked entries (-inf). Each pass is written once
//! (`passes`) over sixteen virtual lanes (`lanes`), implemented by the portable code, which defines the bits, and by each
//! instruction set; every level executes the same correctly rounded operations in the same order, so all levels return
//! the same bits for the same input. `dispatch` detects the CPU once and holds the only entry points.
//!
//! Weights are e^x for x <= 0 with a proven error (`mass` states it, and an ignored test enumerates every f32), or
//! exactly 0 where x is below the cut. Sums that a decision ends with run at most sixteen terms deep before they go to
//! f64; sums that only show the way may run deeper, and are the same at all levels, too.
#![allow(unsafe_code)]
// The body of a pass is lanes from end to end: a block around it would mark nothing. The head of each file says under the
// word SAFETY what its `unsafe` functions ask for; blocks are for the safe functions that enter them.
#![allow(unsafe_op_in_unsafe_fn)]
// Code that is written once for all levels is compiled with a level's features only if it is inlined into its entry.
#![allow(clippy::inline_always)]

mod address_space;
mod average;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod below;
mod bytes;
mod codes;
mod concat;
mod dispatch;
mod float_modes;
#[cfg(feature = "python")]
mod foreign;
mod forks;
mod huge_pages;
mod lanes;
mod mixture;
mod panel;
mod passes;
mod portable;
mod products;
#[cfg(any(test, feature = "python"))]
mod rows_by_keys;
mod short;
#[cfg(test)]
mod tests;

pub(crate) use address_space::left as address_space_left;
pub(crate) use bytes::{LINE, STEP, Step};
pub(crate) use codes::{BIAS, Coarse, Encoded, Frame, Keys, PANEL, Packed};
pub(crate) use concat::{Piece, append_all};
pub(crate) use dispatch::{Bracket, Simd};
pub(crate) use float_modes::DefaultFloats;
#[cfg(feature = "python")]
pub(crate) use foreign::extent;
pub(crate) use forks::forks;
pub(crate) use huge_pages::ask_for as ask_for_huge_pages;
pub(crate) use lanes::{Element, LANES, Scalar};
pub(crate) use mixture::{MIXED, Panel, SUMMED, padded_stride};
pub(crate) use panel::{
    BLOCK as PANEL_KEYS, BlockMask, ROWS as PANEL_ROWS, RUN as PANEL_RUN, Rows as PanelRows,
};
pub(crate) use passes::{
    Exp, GUESSABLE_SPAN, Given, Identity, PIVOTS, PartitionSums, PivotSums, Positions, Prefetch,
    RANKED, ScaledExp, Survey, WeightFn, around, ranks_between, sample, values_around,
};
pub(crate) use products::Picked;
#[cfg(feature = "python")]
pub(crate) use rows_by_keys::{DEPTH, Queries, SIDE};
pub(crate) use short::{
    BATCH, BatchScratch, Edge, KeptSums, ScaledBy, TailTarget, Unscaled, WeightFnOf,
};
