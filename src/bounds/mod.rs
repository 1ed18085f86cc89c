//! Upper bounds on the tail mass from a few ordered scores, and the identity between tail mass and divergence.
//!
//! Everything here follows "A Mathematical Theory of Top-k Sparse Attention via Total Variation Distance"
//! (arXiv 2512.07647). A row has scores `s_1..s_n` (natural-log units; masked entries are not counted in `n`) and weights
//! `e^{s_i}`; the tail mass `tau` of a kept set is the share of the total weight that lies outside of it, which is the total
//! variation distance between the full and the truncated softmax.
//!
//! Every bound is rounded outward: it holds for the real-number softmax of exactly the stored scores. For two-level rows
//! the gap bounds are equalities, and are met to within 1e-12. These bounds are diagnostics and building blocks: on real
//! attention rows the single gap keeps far more keys than the exact test of [`select`](crate::select()) does.

mod blockwise;
mod cuts;
mod gap;
mod identity;
mod levels;
mod measure;
mod multi_gap;
pub(crate) mod output;
mod rows;
mod smallest;

pub use blockwise::{Blocks, blockwise};
pub use gap::{required_gap, score_gap, single_gap};
pub use identity::{bretagnolle_huber, kl_from_tail_mass, pinsker, tail_mass_from_kl};
pub use multi_gap::{Cuts, best_cuts, multi_gap};
pub use smallest::{GapRule, smallest_k};

#[doc(hidden)]
pub use gap::required_gaps;
#[doc(hidden)]
pub use identity::{kl_from_tail_masses, of_divergences};
