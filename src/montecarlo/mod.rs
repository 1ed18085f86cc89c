//! Monte-Carlo bounds of tail masses: confidence bounds of a mean in [0, 1], and what they say about a row.
//!
//! A finite population in [0, 1] has the mean mu; draws from it, with or without replacement, give one-sided confidence bounds
//! of mu, each of which fails with probability at most delta. The values are floats and the population is what those floats
//! are, so what the bounds promise has nothing to do with rounding; their own arithmetic is rounded outward. `hoeffding`,
//! `bernstein` and `betting` hold one bound each; `uniform` and `importance` draw from a row; `tail` makes tail masses of it.

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
pub use population::Fetch;
pub use tail::{TailEstimate, TailOptions, tail_mass, tail_mass_of_drawn};
