//! Monte-Carlo bounds of tail masses, by confidence bounds of a mean in [0, 1].
//!
//! A finite population in [0, 1] has the mean mu. Draws from it, with or without replacement, give one-sided confidence
//! bounds of mu, each of which fails with probability at most delta. The population is the floats themselves, so
//! rounding of values is no part of the statement; the arithmetic of the bounds is rounded outward. `hoeffding`,
//! `bernstein` and `betting` hold one bound each; `uniform` and `importance` draw from a row; `tail` derives tail
//! masses.

mod bernstein;
mod betting;
mod confidence;
mod hoeffding;
mod importance;
mod population;
mod sample;
mod tail;
mod uniform;

pub use confidence::{Confidence, Method, mean_bounds};
pub use tail::{TailEstimate, TailOptions, tail_mass};
