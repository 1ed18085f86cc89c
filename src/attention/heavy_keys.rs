//! Keys of a row that weigh too much for their codes.
//!
//! Those above an edge are scored by their low plane, or exactly: the highest edge below which codes are likely to do. It is
//! sought among candidates, the keys above a floor somewhat lower, so that the weights of all others are summed once.

use super::coded_bound::CodedWeights;
use super::listed::Listed;
use crate::error::Error;
use crate::kernels::{EDGES, LANES, Positions, Simd, WeightSums};
use crate::numerics::certified_sums::exp;
use crate::runtime::memory::room;
use crate::runtime::reused::Reused;

/// Share of the budget that a choice aims at.
const AIM: f64 = 0.97;
/// Distance of the lowest edge below the heaviest weight, in nats.
const DEPTH: f64 = 16.0;
/// Distance of a floor below the edge that is expected, in nats.
const MARGIN: f64 = 0.5;
/// Rounds of narrowing an edge, each of `EDGES` steps.
const ROUNDS: usize = 2;

/// Candidates of a row, and the other weights.
#[derive(Default)]
pub(super) struct Candidates {
    /// Ascending, and their weights, which are set to zero among the others.
    keys: Reused<u32>,
    weights: Reused<f32>,
    others: WeightSums,
    /// No other weight is above it; infinite before candidates are collected.
    floor: f32,
}

/// Edges of a row's weights: which are low enough.
struct Edges<'a> {
    simd: Simd,
    certificate: &'a CodedWeights,
    eps: f64,
}

impl Edges<'_> {
    /// Returns `true` if codes are likely to do below an edge, where weights have these squares.
    fn enough(&self, squares: f64, edge: f32) -> bool {
        self.certificate.likely(squares, edge.into()) <= AIM * self.eps
    }

    /// Returns the highest of some edges below `high`, down to `nats` below it, that is low enough beside weights of these
    /// squares: the lowest if none is.
    fn find(&self, weights: &[f32], beside: f64, (high, nats): (f32, f64)) -> f32 {
        let (mut high, mut low, mut nats) = (high, high, nats);
        for _ in 0..ROUNDS {
            // The same on every machine, as sets depend on it.
            nats /= EDGES as f64;
            let (step, mut edge) = (exp(-nats) as f32, high);
            let mut edges = [0.0; EDGES];
            for to in &mut edges {
                edge *= step;
                *to = edge;
            }
            let below = self.simd.below_each(weights, weights, edges);
            let enough = |at: usize| self.enough(beside + below[at].squares(), edges[at]);
            // Bounds fall with the edge.
            let (mut at, mut end) = (0, EDGES - 1);
            while at < end {
                let middle = usize::midpoint(at, end);
                (at, end) = if enough(middle) { (at, middle) } else { (middle + 1, end) };
            }
            (low, high) = (edges[at], if at == 0 { high } else { edges[at - 1] });
        }
        low
    }
}

impl Candidates {
    /// Returns candidates that are still to be collected.
    pub(super) fn new() -> Self {
        Candidates { floor: f32::INFINITY, ..Candidates::default() }
    }

    /// Moves the keys that are too heavy, and their weights, to a list, and returns the sums of all other weights. `share` is
    /// the edge of an earlier row as a share of all its weights, and becomes that of this row; `sum` sums weights.
    pub(super) fn name(
        &mut self,
        (simd, certificate, eps): (Simd, &CodedWeights, f64),
        (weights, listed): (&mut [f32], &mut Vec<u32>),
        share: &mut Option<f64>,
        to: &mut Listed,
        sum: impl Fn(&mut [f32]) -> Result<WeightSums, Error>,
    ) -> Result<WeightSums, Error> {
        let edges = Edges { simd, certificate, eps };
        let (total, top) = (certificate.masses().high, certificate.coded.sums.largest as f32);
        let low_enough =
            |this: &Self| this.floor.is_finite() && edges.enough(this.others.squares, this.floor);
        if !low_enough(self)
            && let Some(share) = share
        {
            let floor = *share * total * exp(-MARGIN);
            self.collect(simd, (weights, listed), (floor as f32).min(self.floor), &sum)?;
        }
        if !low_enough(self) {
            self.put_back(weights);
            let floor = edges.find(weights, 0.0, (top, DEPTH));
            self.collect(simd, (weights, listed), floor * exp(-MARGIN) as f32, &sum)?;
        }
        let depth = libm::log(f64::from(top) / f64::from(self.floor)).clamp(0.0, 2.0 * DEPTH);
        let edge = edges.find(&self.weights, self.others.squares, (top, depth));
        *share = Some(f64::from(edge) / total).filter(|share| share.is_finite());
        let count = self.keys.len();
        to.keys.clear();
        to.weights.clear();
        to.reserve(count)?;
        to.keys.resize(count, 0);
        to.weights.resize(count, 0.0);
        let (mut named, mut kept) = (0, 0);
        let (mut sum_rest, mut squares, mut largest) = (0.0, 0.0, 0.0f32);
        // Weights fall on either side as by chance: no branch could be foreseen.
        for at in 0..count {
            let (key, weight) = (self.keys[at], self.weights[at]);
            let above = weight >= edge;
            let rest = if above { 0.0 } else { weight };
            (to.keys[named], to.weights[named]) = (key, weight.into());
            (self.keys[kept], self.weights[kept]) = (key, weight);
            named += usize::from(above);
            kept += usize::from(!above);
            let wide = f64::from(rest);
            sum_rest += wide;
            squares += wide * wide;
            largest = largest.max(rest);
        }
        to.keys.truncate(named);
        to.weights.truncate(named);
        let mut sums = self.others;
        sums.join(&WeightSums { weights: sum_rest, squares, largest });
        self.keys.truncate(kept);
        self.weights.truncate(kept);
        self.weights.resize(kept.next_multiple_of(LANES), 0.0);
        Ok(sums)
    }

    /// Collects the keys from a floor upward.
    fn collect(
        &mut self,
        simd: Simd,
        (weights, listed): (&mut [f32], &mut Vec<u32>),
        floor: f32,
        sum: impl Fn(&mut [f32]) -> Result<WeightSums, Error>,
    ) -> Result<(), Error> {
        self.put_back(weights);
        // Keys that a row does not see weigh nothing.
        let floor = floor.max(f32::MIN_POSITIVE);
        listed.clear();
        room("k", listed, weights.len() + LANES)?;
        simd.emit(weights, Positions::From(0), floor, true, listed);
        room("k", &mut self.keys, listed.len())?;
        room("k", &mut self.weights, listed.len() + LANES)?;
        self.keys.extend_from_slice(listed);
        for &key in &*listed {
            self.weights.push(std::mem::take(&mut weights[key as usize]));
        }
        self.weights.resize(listed.len().next_multiple_of(LANES), 0.0);
        (self.others, self.floor) = (sum(weights)?, floor);
        Ok(())
    }

    /// Puts the weights of candidates back beside all others.
    pub(super) fn put_back(&mut self, weights: &mut [f32]) {
        for (&key, &weight) in self.keys.iter().zip(&*self.weights) {
            weights[key as usize] = weight;
        }
        self.keys.clear();
        self.weights.clear();
    }
}
