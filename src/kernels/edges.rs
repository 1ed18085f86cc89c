//! Looks at some scores that show where an edge may be.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for slices of whole groups.

use super::isa::{LANES, Lanes, Level};
use super::simd::{Pass, Simd};

/// The largest of some scores, and whether one of them is NaN.
struct Top<'a>(&'a [f32]);

impl Pass<(f32, bool)> for Top<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> (f32, bool) {
        let mut largest = [L::F32::splat(f32::NEG_INFINITY); 2];
        let mut nan = 0;
        for pair in self.0.chunks(2 * LANES) {
            let one = L::F32::load(pair.as_ptr());
            let other =
                if pair.len() == 2 * LANES { L::F32::load(pair[LANES..].as_ptr()) } else { one };
            // The second operand wins where a comparison fails, so a NaN never becomes the largest.
            largest = [one.max(largest[0]), other.max(largest[1])];
            nan |= L::F32::bits(one.unordered(other));
        }
        (largest[0].max(largest[1]).largest(), nan != 0)
    }
}

/// Edges that are tried at a time.
pub(crate) const EDGES: usize = 8;

struct BelowEach<'a> {
    scores: &'a [f32],
    weights: &'a [f32],
    edges: [f32; EDGES],
}

impl Pass<[(f64, f64); EDGES]> for BelowEach<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> [(f64, f64); EDGES] {
        let nothing = L::F32::splat(0.0);
        let (mut sums, mut squares) = ([nothing; EDGES], [nothing; EDGES]);
        let groups = self.scores.chunks_exact(LANES).zip(self.weights.chunks_exact(LANES));
        for (scores, weights) in groups {
            let scores = L::F32::load(scores.as_ptr());
            let weights = L::F32::load(weights.as_ptr());
            let square = weights.mul(weights);
            for ((sum, squares), edge) in sums.iter_mut().zip(&mut squares).zip(self.edges) {
                let below = scores.lt(L::F32::splat(edge));
                *sum = sum.add_where(below, weights);
                *squares = squares.add_where(below, square);
            }
        }
        let mut totals = [(0.0, 0.0); EDGES];
        for (total, (sum, squares)) in totals.iter_mut().zip(sums.into_iter().zip(squares)) {
            *total = (sum.sum().into(), squares.sum().into());
        }
        totals
    }
}

impl Simd {
    /// The largest of whole groups of scores, -inf if there is none, and whether one is NaN.
    pub(crate) fn top(self, scores: &[f32]) -> (f32, bool) {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(Top(scores))
    }

    /// What the scores below each of some edges weigh, and the squares of that, of whole groups of scores and their weights, roughly:
    /// it decides nothing.
    pub(crate) fn below_each(
        self,
        scores: &[f32],
        weights: &[f32],
        edges: [f32; EDGES],
    ) -> [(f64, f64); EDGES] {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        self.run(BelowEach { scores, weights, edges })
    }
}
