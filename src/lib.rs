//! Certified top-k and top-p selection of attention scores.
//!
//! Attention looks at `n` keys, but a few carry almost all of the softmax mass. This crate selects the smallest set of keys
//! whose dropped mass is **proven** to be at most `eps`, and reports an interval for that mass which holds for the
//! real-number softmax of exactly the stored inputs: rounding is inside. The dropped mass is the total variation distance
//! between the full and the truncated attention.
//!
//! ```
//! use certk_rs::{Options, Scores, Status, select};
//!
//! let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
//! let scores = Scores::new(&row[..], &[1, 6])?;
//! let selection = select(&scores, &[0.1], &Options::new())?;
//! assert_eq!(selection.row(0), [0, 2]);
//! assert_eq!(selection.status[0], Status::Certified);
//! assert!(selection.tail_mass_upper[0] <= 0.1 && selection.minimal[0]);
//! # Ok::<(), certk_rs::Error>(())
//! ```
//!
//! Rows may be f32, f64, f16 or bf16, strided, ragged, masked and scaled: see [`Scores`]. [`certify`] judges any given set,
//! with the same kernels or with an independent checker that shares none of them. [`keep_set`] finds one set for many
//! rows, with a proven lower bound on the size of any such set. [`bounds`] and [`output_error`] bound what truncation loses from
//! less than a whole row, [`montecarlo`] from some of its keys. Results have the same bits on every instruction set and for any
//! number of threads; outputs of [`attention`] have other last bits where products go by AMX.
//!
//! # Threads
//! A call runs on its calling thread and on free workers of the crate's own pool. The pool starts when a call first
//! needs it, with one worker fewer than `RAYON_NUM_THREADS`, or else than the threads that the system grants.
//! Concurrent calls share the workers and never wait for one another. On a worker of a rayon pool, the host's or the
//! global one, a call uses no other thread unless it was given a number. It never runs tasks of that pool while it
//! waits, so it may be made under a lock.
//!
//! # Features
//! None is on by default. `files`: indexes as files ([`KeyIndex::write_to`]). `montecarlo`: estimates from draws ([`montecarlo`]).
//! `ndarray`: its views are read where they lie ([`Scores::of`]). `serde`: results and options are serialised.

// The code blocks of these pages are compiled and run with the documentation tests.
#[cfg(all(doctest, feature = "ndarray"))]
#[doc = include_str!("../README.md")]
struct Readme;
#[cfg(doctest)]
#[doc = include_str!("../docs/package.md")]
struct PackagePage;
#[cfg(doctest)]
#[doc = include_str!("../docs/howto/rust.md")]
struct RustPage;

mod attention;
#[doc(hidden)]
pub mod bindings;
pub mod bounds;
mod builders;
mod certificate;
mod error;
mod index;
mod keepset;
mod kernels;
#[cfg(feature = "montecarlo")]
pub mod montecarlo;
mod names;
mod numerics;
mod rows;
mod runtime;
mod select;

pub use attention::{
    Attention, AttentionOptions, Budget, Outputs, Precision, ValueBall, Weights, attention,
};
pub use attention::{KeptRows, attention_from_codes, attention_of_ragged};
pub use bounds::output::{
    OutputBound, OutputError, OutputOptions, OutputSelection, output_error, select_output,
};
pub use certificate::{Certificate, Status};
pub use error::{Error, ErrorClass, Place};
/// Crate of the half-precision types: `half::f16`, `half::bf16`.
pub use half;
pub use index::{
    IndexOptions, KeyIndex, Recall, RecallOptions, Rule, Rung, SearchOptions, SearchResult,
    ValueIndex,
};
pub use keepset::{Block, KeepSet, QueryOptions, keep_set, keep_set_of_queries};
/// Crate of the array views that rows are read from.
#[cfg(feature = "ndarray")]
pub use ndarray;
pub use numerics::log_mass::LogMass;
/// Crate of the thread pools that a [`Context`] takes.
pub use rayon;
pub use rows::{Data, Keep, Kind, Mask, MaskEntry, Number, Ragged, Scores, Values, Vectors};
pub use runtime::ambient::CancelToken;
pub use runtime::context::Context;
pub use runtime::interrupt::interruptible;
pub use runtime::workspace::Workspace;
pub use select::{
    CertifyOptions, Effort, MaxKeep, Options, Selection, certify, force_simd_level, select,
    simd_level,
};
