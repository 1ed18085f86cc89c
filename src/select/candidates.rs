//! Scores of a row that compete for a place, and the boundary of the kept ones.

use super::scratch::SearchScratch;
use super::weight_fn::InvertibleWeightFn;
use crate::error::Error;
use crate::kernels::{Bracket, Element, PartitionSums, Prefetch, Simd, WeightFn};
use crate::numerics::certified_sums::{CHUNK, SplitSums};
use crate::runtime::ambient;
use crate::runtime::memory::check_memory;
use crate::runtime::threads;

/// Scores that compete for a place, padded with masked entries, and the totals of the forced keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidates<'a, E: Element> {
    pub(crate) simd: Simd,
    pub(crate) scores: &'a [E],
    /// Unmasked keys among the scores.
    pub(crate) visible: usize,
    pub(crate) largest: E::Scalar,
    /// Approximate mass of the keys relative to the largest, if known.
    pub(crate) rough: Option<f64>,
    /// Lower bound on every visible key.
    pub(crate) smallest: E::Scalar,
    /// Memory worth prefetching during this row.
    pub(crate) prefetch: Option<Prefetch>,
    /// Weight and number of the forced keys.
    pub(crate) forced: (f64, usize),
    /// Number of threads that share the chunks.
    pub(crate) threads: usize,
}

/// A set, described by its worst member.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Boundary<S> {
    pub(crate) split: SplitSums,
    /// Worst key kept, with its position; `None` if only forced keys are kept.
    pub(crate) worst: Option<(S, u32)>,
    /// `true` if every smaller set is proven to lose more than the budget, or is excluded by `min_keep`.
    pub(crate) minimal: bool,
    /// `true` if exact arithmetic decided, so that the budget itself bounds the tail mass.
    pub(crate) exact: bool,
}

impl<E: Element> Candidates<'_, E> {
    pub(super) fn fold<R: Send>(
        &self,
        pass: impl Fn(&[E]) -> R + Sync + Send,
        mut combine: impl FnMut(R),
    ) -> Result<(), Error> {
        if self.threads == 1 {
            for chunk in self.scores.chunks(CHUNK) {
                ambient::check()?;
                combine(pass(chunk));
            }
        } else {
            let parts = threads::map(self.threads, self.scores.chunks(CHUNK), 1, pass)?;
            parts.into_iter().for_each(combine);
        }
        Ok(())
    }

    /// Returns the mass of the keys, to within a few per cent.
    pub(super) fn rough_mass<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
    ) -> Result<f64, Error> {
        if let Some(mass) = self.rough {
            return Ok(mass);
        }
        let Some(scale) = weight_fn.scale() else { return self.mass(weight_fn) };
        let mut total = 0.0;
        let pass = |scores: &[E]| self.simd.rough(scores, self.largest, scale);
        self.fold(pass, |part| total += part)?;
        Ok(total)
    }

    pub(crate) fn mass<W: WeightFn<E::Scalar>>(&self, weight_fn: W) -> Result<f64, Error> {
        let mut total = 0.0;
        self.fold(|scores| self.simd.mass(scores, weight_fn), |part| total += part)?;
        Ok(total)
    }

    /// Sums both sides of a range of the row and collects the keys inside, unweighed.
    pub(super) fn split<W: WeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        range: (E::Scalar, E::Scalar),
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Result<PartitionSums, Error> {
        let SearchScratch { bracket, parts, .. } = scratch;
        bracket.clear();
        let mut total = PartitionSums::default();
        let mut add = |part: &PartitionSums| {
            total.below += part.below;
            total.above += part.above;
            total.count_above += part.count_above;
            total.inside += part.inside;
        };
        if self.threads == 1 {
            let mut asked = 0;
            for (c, chunk) in self.scores.chunks(CHUNK).enumerate() {
                ambient::check()?;
                ask::<E::Scalar>(bracket.len() + chunk.len(), &mut asked)?;
                bracket.reserve(chunk.len());
                let prefetch = self.prefetch.map(|prefetch| prefetch.from::<E>(c * CHUNK));
                add(&self.simd.split(chunk, weight_fn, range, prefetch, bracket));
            }
            return Ok(total);
        }
        let share = threads::share(self.scores.len(), CHUNK, self.threads);
        let number = self.scores.len().div_ceil(share);
        if parts.len() < number {
            parts.resize_with(number, Bracket::default);
        }
        let shares = self.scores.chunks(share).zip(parts.iter_mut());
        let found = threads::map(self.threads, shares, 1, |(scores, part)| {
            part.clear();
            let mut asked = 0;
            let pass = |chunk: &[E]| {
                ambient::check()?;
                ask::<E::Scalar>(part.len() + chunk.len(), &mut asked)?;
                part.reserve(chunk.len());
                Ok(self.simd.split(chunk, weight_fn, range, None, part))
            };
            scores.chunks(CHUNK).map(pass).collect()
        })?;
        let found = found.into_iter().collect::<Result<Vec<Vec<PartitionSums>>, Error>>()?;
        let all: usize = parts[..found.len()].iter().map(Bracket::len).sum();
        ask::<E::Scalar>(all, &mut 0)?;
        for (sides, part) in found.iter().zip(parts.iter()) {
            bracket.append(part);
            sides.iter().for_each(&mut add);
        }
        Ok(total)
    }
}

/// Checks for the memory of a bracket of that many keys, doubling each time: scores and weights, and the old ones
/// during a move.
fn ask<S>(scores: usize, asked: &mut usize) -> Result<(), Error> {
    if scores <= *asked {
        return Ok(());
    }
    *asked = scores.saturating_mul(2);
    check_memory("scores", *asked, 3 * size_of::<S>())
}
