//! A bound of what keys weigh by their codes, for few heavy keys and many light ones.
//!
//! All errors together are at most X, whichever keys they are of: where a few keys carry the sum, that is more than each of them
//! may be off by, D. So the heaviest count with e^D each, and only the others with X; where the heaviest end is tried.

use super::gram::{CodeError, Sums};
use crate::kernels::{Below, Simd};

/// Distances below the largest score that may separate heavy keys from light ones.
const DEPTHS: [f32; 4] = [1.0, 2.0, 3.0, 4.0];
/// A bound that is no larger than so many times what codes say is not looked at again.
const CLOSE: f64 = 1.05;

/// An upper bound of the real mass of those scores by codes that `below` was summed of, relative to `shift`.
pub(super) fn mass_upper_in_parts(
    simd: Simd,
    error: &CodeError,
    scores: &[f32],
    shift: f32,
    below: &Below,
) -> f64 {
    if below.count == 0 {
        return 0.0;
    }
    let of = |sums: &Below| {
        let largest = f64::from(sums.largest - shift).exp() * (1.0 + 1e-5);
        Sums::computed(sums.weights, sums.squares, largest, sums.count)
    };
    let all = of(below);
    let mut bound = error.mass_upper(&all);
    for depth in DEPTHS {
        if bound <= CLOSE * all.lower {
            break;
        }
        let part = simd.below(scores, shift, below.largest - depth);
        // What the two sums differ by lies between their edges.
        let light = if part.count == 0 { Sums::default() } else { of(&part) };
        let heavy = Sums { upper: (all.upper - light.lower).max(0.0), ..Sums::default() };
        bound = bound.min(error.mass_upper_in_parts(&heavy, &light));
    }
    bound
}
