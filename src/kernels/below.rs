//! Weight of a row's scores below an edge.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use super::isa::{LANES, Lanes, Level};
use super::simd::{Pass, Simd};
use super::weights::{DEPTH, Exp, Sum, WeightFn};

/// Sums over scores that lie below an edge and are not masked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Below {
    /// Sum of their weights, relative to the shift.
    pub(crate) weights: f64,
    /// Sum of the squares of their weights, in f32 lanes.
    pub(crate) squares: f64,
    pub(crate) count: usize,
    /// Largest of them; -inf if there is none.
    pub(crate) largest: f32,
    /// Sum of the weights of all others, and of their squares.
    pub(crate) rest: f64,
    pub(crate) rest_squares: f64,
}

struct Sums<'a> {
    scores: &'a [f32],
    shift: f32,
    edge: f32,
}

impl Pass<Below> for Sums<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> Below {
        let (weight_fn, edge) = (Exp(self.shift), L::F32::splat(self.edge));
        let masked = L::F32::splat(f32::NEG_INFINITY);
        let (mut weights, mut squares) = (Sum::<L::F32>::new(), Sum::<L::F32>::new());
        let (mut rest, mut rest_squares) = (Sum::<L::F32>::new(), Sum::<L::F32>::new());
        let (mut count, mut largest) = (0, masked);
        for block in self.scores.chunks(LANES * DEPTH) {
            for scores in block.chunks_exact(LANES) {
                let scores = L::F32::load(scores.as_ptr());
                let below = scores.lt(edge);
                let weight = weight_fn.weigh(scores);
                weights.add_where(below, weight);
                let square = weight.mul(weight);
                squares.add_where(below, square);
                let above = scores.ge(edge);
                rest.add_where(above, weight);
                rest_squares.add_where(above, square);
                largest = scores.select(below, masked).max(largest);
                let visible = L::F32::number(below) & L::F32::number(scores.gt(masked));
                count += visible.count_ones() as usize;
            }
            weights.flush();
            squares.flush();
            rest.flush();
            rest_squares.flush();
        }
        Below {
            weights: weights.total(),
            squares: squares.total(),
            count,
            largest: largest.largest(),
            rest: rest.total(),
            rest_squares: rest_squares.total(),
        }
    }
}

/// The same for a row whose scores all lie below the edge.
struct Whole<'a> {
    scores: &'a [f32],
    shift: f32,
}

impl Pass<Below> for Whole<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> Below {
        let weight_fn = Exp(self.shift);
        let masked = L::F32::splat(f32::NEG_INFINITY);
        let (mut weights, mut squares) = (Sum::<L::F32>::new(), Sum::<L::F32>::new());
        let (mut count, mut largest) = (0, masked);
        for block in self.scores.chunks(LANES * DEPTH) {
            for scores in block.chunks_exact(LANES) {
                let scores = L::F32::load(scores.as_ptr());
                let weight = weight_fn.weigh(scores);
                weights.add(weight);
                squares.add(weight.mul(weight));
                largest = scores.max(largest);
                count += L::F32::number(scores.gt(masked)).count_ones() as usize;
            }
            weights.flush();
            squares.flush();
        }
        Below {
            weights: weights.total(),
            squares: squares.total(),
            count,
            largest: largest.largest(),
            rest: 0.0,
            rest_squares: 0.0,
        }
    }
}

impl Simd {
    /// Returns the result of [`Simd::below`] for an edge above all scores, which are finite or masked and at most the
    /// shift.
    pub(crate) fn whole(self, scores: &[f32], shift: f32) -> Below {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(Whole { scores, shift })
    }

    /// Sums whole groups of scores below an edge; no score exceeds the shift.
    pub(crate) fn below(self, scores: &[f32], shift: f32, edge: f32) -> Below {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(Sums { scores, shift, edge })
    }
}
