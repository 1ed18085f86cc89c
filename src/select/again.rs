//! Decides a set again in f64 where f32 leaves it open.
//!
//! The boundary that f32 found is right but for a few keys: the two precisions differ by some thousandths of a per cent
//! of the tail. One f64 pass over the stored scores sums both sides of a narrow range there. The usual rule then
//! decides among the keys inside. If the boundary is not in the range, the search continues as after any wrong guess.

use super::candidates::{Boundary, Candidates};
use super::constraints::Constraints;
use super::scratch::SearchScratch;
use super::weight_fn::InvertibleWeightFn;
use crate::error::Error;
use crate::kernels::{InDouble, Scalar};

/// Width of the range above the f32 boundary that is searched in f64, in natural-log units. Together the slacks of f32
/// come to 7e-5 of the tail's mass. That much lies within 7e-5 of the boundary where the density of mass there is the
/// tail's mass per unit, and rows whose density is fifty times smaller have few keys to look at.
const WIDTH: f64 = 1.0 / 256.0;

/// Decides by f64 sums, given the worst score that f32 keeps. `forced` are the scores of forced keys, in whole groups.
///
/// # Errors
/// As [`Candidates::search`].
pub(super) fn in_double<E: InDouble, W: InvertibleWeightFn<E::Scalar>>(
    candidates: &Candidates<'_, E>,
    forced: &[E],
    weight_fn: W,
    constraints: &Constraints,
    worst: Option<E::Scalar>,
    scratch: &mut SearchScratch<f64>,
) -> Result<Boundary<E::Scalar>, Error> {
    let &Candidates { simd, scores, visible, largest, rough, smallest, threads, .. } = candidates;
    let weight_fn = weight_fn.double();
    let whole = Candidates {
        simd,
        scores: E::in_double(scores),
        visible,
        largest: largest.into(),
        rough,
        smallest: smallest.into(),
        prefetch: None,
        forced: (0.0, 0),
        threads,
    };
    let own = Candidates { scores: E::in_double(forced), threads: 1, ..whole };
    let fixed = if forced.is_empty() { 0.0 } else { own.mass(weight_fn)? };
    let candidates = Candidates { forced: (fixed, candidates.forced.1), ..whole };
    let range = worst.filter(|&worst| worst > E::Scalar::LOWEST).map(|worst| {
        let worst: f64 = worst.into();
        let scale = weight_fn.scale().unwrap_or(1.0);
        (worst, worst + WIDTH / scale)
    });
    // An empty range, where floats are far apart, is ignored.
    let range = range.filter(|range| range.0 < range.1);
    let Boundary { split, worst, minimal, exact } =
        candidates.search_from(weight_fn, constraints, range, scratch)?;
    // A key is at or above a number exactly if it is at or above the next float of its own type.
    let worst = worst.map(|(score, last)| (E::Scalar::at_least(score), last));
    Ok(Boundary { split, worst, minimal, exact })
}
