//! Models of attention scores: what a distribution of scores says about the number of keys that matter.
//!
//! `gaussian` is the design rule for scores that are normal, with `normal` for the law itself and `finite` for rows of
//! finite length; `window` holds the windows of size `n^C`, their fit (`student`), and the entries of a row that carry weight
//! (`effective`). Nothing here certifies a kept set: these are laws and measurements, and each says how exact it is.

mod effective;
mod exponential;
mod finite;
mod gaussian;
mod normal;
mod student;
mod window;

pub use effective::{Effective, effective_entries, participation};
pub use finite::{Expected, expected_k};
pub use gaussian::{
    RowFit, effective_exponent, fit, freezing_sigma, keep_fraction, log_log_slope, tail_mass,
    threshold,
};
pub use normal::{quantile, survival};
pub use window::{Line, WindowPolicy, fit_window};
