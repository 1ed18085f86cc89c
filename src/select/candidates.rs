//! Scores of a row that compete for a place, and the boundary of the kept ones.

use std::ops::Range;

use super::constraints::Constraints;
use super::scratch::SearchScratch;
use super::selection::Decision;
use super::weight_fn::InvertibleWeightFn;
use crate::error::Error;
use crate::kernels::{
    Bracket, Element, LANES, PartitionSums, Piece, Positions, Prefetch, Scalar, Simd, WeightFn,
    append_all,
};
use crate::numerics::certified_sums::{CHUNK, SplitSums};
use crate::numerics::order;
use crate::runtime::ambient;
use crate::runtime::memory::check_memory;
use crate::runtime::threads;

/// Scores that compete for a place, padded with masked entries, and the totals of the forced keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidates<'a, E: Element> {
    pub(super) simd: Simd,
    pub(super) scores: &'a [E],
    /// Unmasked keys among the scores.
    pub(super) visible: usize,
    pub(super) largest: E::Scalar,
    /// Approximate mass of the keys relative to the largest, if known.
    pub(super) rough: Option<f64>,
    /// Lower bound on every visible key.
    pub(super) smallest: E::Scalar,
    /// Memory worth prefetching during this row.
    pub(super) prefetch: Option<Prefetch>,
    /// Weight and number of the forced keys.
    pub(super) forced: (f64, usize),
    /// Number of threads that share the chunks.
    pub(super) threads: usize,
}

/// A set, described by its worst member.
#[derive(Debug, Clone, Copy)]
pub(super) struct Boundary<S> {
    pub(super) split: SplitSums,
    /// Worst key kept, with its position; `None` if only forced keys are kept.
    pub(super) worst: Option<(S, u32)>,
    /// `true` if every smaller set is proven to lose more than the budget, or is excluded by `min_keep`.
    pub(super) minimal: bool,
    /// `true` if exact arithmetic decided, so that the budget itself bounds the tail mass.
    pub(super) exact: bool,
}

impl<S> Boundary<S> {
    pub(super) fn decision(&self, constraints: &Constraints) -> Decision {
        Decision::new(&self.split, self.minimal, self.exact, constraints)
    }
}

impl<'a, E: Element> Candidates<'a, E> {
    /// Returns a row that one thread searches, with no forced keys, of which no more is known.
    pub(super) fn new(simd: Simd, scores: &'a [E], visible: usize, largest: E::Scalar) -> Self {
        Candidates {
            simd,
            scores,
            visible,
            largest,
            rough: None,
            smallest: E::Scalar::NEG_INFINITY,
            prefetch: None,
            forced: (0.0, 0),
            threads: 1,
        }
    }

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

    pub(super) fn mass<W: WeightFn<E::Scalar>>(&self, weight_fn: W) -> Result<f64, Error> {
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

    /// Lists the kept positions down to a boundary; `kept` is their expected number.
    ///
    /// # Errors
    /// [`Error::NoMemory`], or the error that ends the call.
    pub(super) fn emit(
        &self,
        positions: Option<&[u32]>,
        kept: usize,
        boundary: (E::Scalar, u32),
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let &Candidates { simd, scores, threads, .. } = self;
        let list = |range: Range<usize>, inclusive: bool, out: &mut Vec<u32>| {
            let from = match positions {
                Some(list) => Positions::Listed(&list[range.clone()]),
                None => Positions::From(range.start as u32),
            };
            simd.emit(&scores[range], from, boundary.0, inclusive, out);
        };
        // Ties are kept up to the boundary's position, and dropped behind it.
        let edge = (boundary.1 as usize).min(scores.len());
        let (before, behind) = (edge / LANES * LANES, (edge + 1).next_multiple_of(LANES));
        if threads == 1 {
            for start in (0..before).step_by(CHUNK) {
                ambient::check()?;
                list(start..(start + CHUNK).min(before), true, out);
            }
        } else {
            // Parts of the list, filled by kernels.
            check_memory("scores", scores.len(), 2 * size_of::<u32>())?;
            let share = threads::share(before, CHUNK, threads);
            let parts = threads::map(threads, (0..before).step_by(share), 1, |start| {
                // About the part's share, so that lists rarely move while they grow.
                let mut part = Vec::with_capacity((kept * share / scores.len()).min(share) + CHUNK);
                list(start..(start + share).min(before), true, &mut part);
                part
            })?;
            let parts: Vec<&[u32]> = parts.iter().map(Vec::as_slice).collect();
            append_all(out, &parts, |pieces| threads::map_all(threads, pieces, 1, Piece::copy));
        }
        if before < scores.len() {
            for j in before..behind {
                if order::kept(&(scores[j].widen(), j as u32), &boundary) {
                    out.push(positions.map_or(j as u32, |list| list[j]));
                }
            }
            for start in (behind..scores.len()).step_by(CHUNK) {
                ambient::check()?;
                list(start..(start + CHUNK).min(scores.len()), false, out);
            }
        }
        Ok(())
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
