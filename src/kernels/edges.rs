//! Surveys of some scores, for a guess of an edge.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for slices of whole groups.

use super::isa::{LANES, Lanes, Level};
use super::simd::{Pass, Simd};

/// Pass for the largest of some scores, and a flag for NaN.
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

/// Pass for the sum of some numbers, and of their squares.
struct Sums<'a>(&'a [f32]);

impl Pass<(f32, f32)> for Sums<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> (f32, f32) {
        let (mut sum, mut squares) = (L::F32::splat(0.0), L::F32::splat(0.0));
        for group in self.0.chunks_exact(LANES) {
            let group = L::F32::load(group.as_ptr());
            sum = sum.add(group);
            squares = group.mul_add(group, squares);
        }
        (sum.sum(), squares.sum())
    }
}

/// Edges tried at a time.
pub(crate) const EDGES: usize = 8;

struct BelowEach<'a> {
    scores: &'a [f32],
    weights: &'a [f32],
    edges: [f32; EDGES],
}

/// Weights below an edge, and their squares, lane by lane.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BelowEdge {
    weights: [f32; LANES],
    squares: [f32; LANES],
}

impl BelowEdge {
    pub(crate) fn weights(&self) -> f64 {
        sum(&self.weights)
    }

    pub(crate) fn squares(&self) -> f64 {
        sum(&self.squares)
    }
}

/// Sums lanes in a tree.
fn sum(lanes: &[f32; LANES]) -> f64 {
    let eight: [f32; 8] = std::array::from_fn(|i| lanes[i] + lanes[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    ((four[0] + four[2]) + (four[1] + four[3])).into()
}

/// Edges whose sums fit into few registers.
const FEW: usize = 2;

impl BelowEach<'_> {
    #[inline(always)]
    unsafe fn some<L: Level, const N: usize>(&self, edges: &[f32; N], to: &mut [BelowEdge]) {
        let nothing = L::F32::splat(0.0);
        let (mut sums, mut squares) = ([nothing; N], [nothing; N]);
        let groups = self.scores.chunks_exact(LANES).zip(self.weights.chunks_exact(LANES));
        for (scores, weights) in groups {
            let scores = L::F32::load(scores.as_ptr());
            let weights = L::F32::load(weights.as_ptr());
            let square = weights.mul(weights);
            for ((sum, squares), &edge) in sums.iter_mut().zip(&mut squares).zip(edges) {
                let below = scores.lt(L::F32::splat(edge));
                *sum = sum.add_where(below, weights);
                *squares = squares.add_where(below, square);
            }
        }
        for ((to, sum), squares) in to.iter_mut().zip(sums).zip(squares) {
            *to = BelowEdge { weights: sum.array(), squares: squares.array() };
        }
    }
}

impl Pass<[BelowEdge; EDGES]> for BelowEach<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> [BelowEdge; EDGES] {
        let mut found = [BelowEdge { weights: [0.0; LANES], squares: [0.0; LANES] }; EDGES];
        if L::ROOMY {
            self.some::<L, EDGES>(&self.edges, &mut found);
            return found;
        }
        let (pairs, _) = self.edges.as_chunks::<FEW>();
        for (edges, to) in pairs.iter().zip(found.chunks_mut(FEW)) {
            self.some::<L, FEW>(edges, to);
        }
        found
    }
}

impl Simd {
    /// Returns the largest of whole groups of scores, -inf if there is none, and `true` if one is NaN.
    pub(crate) fn top(self, scores: &[f32]) -> (f32, bool) {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(Top(scores))
    }

    /// Returns rough sums of whole groups of numbers and of their squares, which decide nothing.
    pub(crate) fn sums(self, numbers: &[f32]) -> (f32, f32) {
        assert!(numbers.len().is_multiple_of(LANES));
        self.run(Sums(numbers))
    }

    /// Returns rough sums of the weights below each of some edges, and of their squares, over whole groups. They decide
    /// nothing.
    pub(crate) fn below_each(
        self,
        scores: &[f32],
        weights: &[f32],
        edges: [f32; EDGES],
    ) -> [BelowEdge; EDGES] {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        self.run(BelowEach { scores, weights, edges })
    }
}
