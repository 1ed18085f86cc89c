//! Sums on both sides of a bracket of scores, with the scores inside, and sums of a given set and its rest.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for slices of whole groups; of the
//! room behind a raw pointer it says what it asks for.

use crate::kernels::isa::{Element, LANES, Lanes, LanesOf, Level, Scalar};
use crate::kernels::simd::{Pass, Simd};
use crate::kernels::weights::{DEPTH, Sum, WeightFn};
use crate::numerics::certified_sums::CHUNK;
use crate::runtime::held::held;

/// A growing list of scores and their weights, padded so that whole groups can be read and written.
#[derive(Debug, Default)]
pub(crate) struct Bracket<S> {
    scores: Vec<S>,
    weights: Vec<S>,
    len: usize,
}

held!(Bracket<S> { scores, weights; len });

impl<S: Scalar> Bracket<S> {
    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Makes room for `more` entries, and for a group beyond them.
    pub(crate) fn reserve(&mut self, more: usize) {
        let room = (self.len + more).next_multiple_of(LANES) + 2 * LANES;
        if self.scores.len() < room {
            self.scores.resize(room.max(2 * self.scores.len()), S::NEG_INFINITY);
            self.weights.resize(self.scores.len(), S::default());
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn scores(&self) -> &[S] {
        &self.scores[..self.len]
    }

    /// Appends another list's scores; the weights are left to be computed.
    pub(crate) fn append(&mut self, other: &Bracket<S>) {
        self.reserve(other.len);
        let end = self.len + other.len;
        self.scores[self.len..end].copy_from_slice(other.scores());
        self.len = end;
    }

    /// Returns scores and weights in whole groups of `lanes`, padded with masked entries.
    pub(crate) fn padded(&mut self, lanes: usize) -> (&[S], &[S]) {
        self.reserve(lanes);
        let end = self.len.next_multiple_of(lanes).max(lanes);
        self.scores[self.len..end].fill(S::NEG_INFINITY);
        self.weights[self.len..end].fill(S::default());
        (&self.scores[..end], &self.weights[..end])
    }
}

/// Sums on both sides of a bracket and inside.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct PartitionSums {
    /// Weight strictly below the bracket.
    pub(crate) below: f64,
    /// Weight inside; 0 from [`Simd::split`], which does not weigh it.
    pub(crate) within: f64,
    /// Weight at or above its upper end.
    pub(crate) above: f64,
    /// Scores at or above its upper end.
    pub(crate) count_above: usize,
    /// Scores inside.
    pub(crate) inside: usize,
}

/// Address to prefetch: the next row's scores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefetch(*const u8);

// SAFETY: the address is only a hint to the caches; nothing is ever read through it.
unsafe impl Send for Prefetch {}
// SAFETY: as above.
unsafe impl Sync for Prefetch {}

impl Prefetch {
    pub(crate) fn new<E>(next: *const E) -> Self {
        Prefetch(next.cast())
    }

    /// Prefetches for the group at an entry.
    #[inline(always)]
    pub(super) unsafe fn fetch<L: Level, E>(self, at: usize) {
        L::prefetch(self.0.wrapping_add(at * size_of::<E>()));
    }

    /// Returns the same from a later entry on.
    pub(crate) fn from<E>(self, at: usize) -> Self {
        Prefetch(self.0.wrapping_add(at * size_of::<E>()))
    }
}

/// [`Simd::split`]; `to` has room for all scores inside and sixteen more.
struct Split<'a, E: Element, W> {
    scores: &'a [E],
    weight_fn: W,
    bracket: (E::Scalar, E::Scalar),
    prefetch: Prefetch,
    to: *mut E::Scalar,
}

impl<E: Element, W: WeightFn<E::Scalar>> Pass<PartitionSums> for Split<'_, E, W> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> PartitionSums {
        let Split { scores, weight_fn, bracket, prefetch, to } = self;
        let (lo, hi) = (LanesOf::<L, E>::splat(bracket.0), LanesOf::<L, E>::splat(bracket.1));
        let (mut below, mut above) = (Sum::new(), Sum::new());
        let (mut count_above, mut inside) = (0usize, 0usize);
        for (b, block) in scores.chunks(LANES * DEPTH).enumerate() {
            // The scores inside are only marked here, and collected afterwards from groups that have any: a branch in
            // this loop would be mispredicted half the time, and compressing without one costs half as much as the
            // exponential.
            let (mut marks, mut marked) = ([0u16; DEPTH], 0u16);
            for (g, group) in block.chunks_exact(LANES).enumerate() {
                // This pass is bound by computation, so memory is idle.
                prefetch.fetch::<L, E>((b * DEPTH + g) * LANES);
                let scores = E::load::<L>(group.as_ptr());
                let weights = weight_fn.weigh(scores);
                let (under, over) = (scores.lt(lo), scores.ge(hi));
                below.add_where(under, weights);
                above.add_where(over, weights);
                let over = LanesOf::<L, E>::number(over);
                let within = !(LanesOf::<L, E>::number(under) | over);
                count_above += over.count_ones() as usize;
                marks[g] = within;
                marked |= u16::from(within != 0) << g;
            }
            below.flush();
            above.flush();
            while marked != 0 {
                let g = marked.trailing_zeros() as usize;
                marked &= marked - 1;
                let scores = E::load::<L>(block.as_ptr().add(g * LANES));
                scores.compress_store(marks[g], to.add(inside));
                inside += marks[g].count_ones() as usize;
            }
        }
        PartitionSums {
            below: below.total(),
            within: 0.0,
            above: above.total(),
            count_above,
            inside,
        }
    }
}

/// The same from `len` scores and their weights (whole groups), writing both, with room for all inside and sixteen
/// more. The outputs may be the very buffers that are read: a group is in registers before anything is written over it.
struct Narrow<S> {
    scores: *const S,
    weights: *const S,
    len: usize,
    bracket: (S, S),
    to: *mut S,
    to_weights: *mut S,
}

impl<S: Scalar> Pass<PartitionSums> for Narrow<S> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> PartitionSums {
        let Narrow { scores, weights, len, bracket, to, to_weights } = self;
        let (lo, hi) = (S::Lanes::<L>::splat(bracket.0), S::Lanes::<L>::splat(bracket.1));
        let (mut below, mut within, mut above) = (Sum::new(), Sum::new(), Sum::new());
        let (mut count_above, mut inside) = (0usize, 0usize);
        let mut at = 0;
        while at < len {
            let end = (at + LANES * DEPTH).min(len);
            while at < end {
                let scores = S::Lanes::<L>::load(scores.add(at));
                let weights = S::Lanes::<L>::load(weights.add(at));
                let (under, over) = (scores.lt(lo), scores.ge(hi));
                below.add_where(under, weights);
                above.add_where(over, weights);
                let over = S::Lanes::<L>::bits(over);
                let chosen = !(S::Lanes::<L>::bits(under) | over);
                within.add_where(S::Lanes::<L>::mask(chosen), weights);
                count_above += over.count_ones() as usize;
                scores.compress_store(chosen, to.add(inside));
                weights.compress_store(chosen, to_weights.add(inside));
                inside += chosen.count_ones() as usize;
                at += LANES;
            }
            below.flush();
            within.flush();
            above.flush();
        }
        let (below, within, above) = (below.total(), within.total(), above.total());
        PartitionSums { below, within, above, count_above, inside }
    }
}

/// Sums of [`Simd::given`] for a kept set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Given<S> {
    /// Weight of the kept set.
    pub(crate) head: f64,
    /// Number of unmasked scores in it.
    pub(crate) kept: usize,
    /// Weight of the rest.
    pub(crate) tail: f64,
    /// Number of unmasked scores in the rest.
    pub(crate) dropped: usize,
    /// Smallest kept score, +inf if none.
    pub(crate) worst_kept: S,
    /// Largest dropped score, -inf if none.
    pub(crate) best_dropped: S,
}

struct SumGiven<'a, E, W> {
    scores: &'a [E],
    keep: &'a [u8],
    weight_fn: W,
}

impl<E: Element, W: WeightFn<E::Scalar>> Pass<Given<E::Scalar>> for SumGiven<'_, E, W> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> Given<E::Scalar> {
        let SumGiven { scores, keep, weight_fn } = self;
        let bottom = LanesOf::<L, E>::splat(E::Scalar::NEG_INFINITY);
        let top = LanesOf::<L, E>::splat(E::Scalar::INFINITY);
        let (mut head, mut tail) = (Sum::new(), Sum::new());
        let (mut kept, mut dropped) = (0usize, 0usize);
        let (mut worst, mut best) = (top, bottom);
        for (block, bytes) in scores.chunks(LANES * DEPTH).zip(keep.chunks(LANES * DEPTH)) {
            for (group, bytes) in block.chunks_exact(LANES).zip(bytes.chunks_exact(LANES)) {
                let scores = E::load::<L>(group.as_ptr());
                let weights = weight_fn.weigh(scores);
                let visible = LanesOf::<L, E>::bits(scores.gt(bottom));
                let chosen = L::nonzero_bytes(bytes.as_ptr()) & visible;
                let rest = visible & !chosen;
                let (inside, outside) =
                    (LanesOf::<L, E>::mask(chosen), LanesOf::<L, E>::mask(rest));
                head.add_where(inside, weights);
                tail.add_where(outside, weights);
                kept += chosen.count_ones() as usize;
                dropped += rest.count_ones() as usize;
                worst = worst.min(scores.select(inside, top));
                best = best.max(scores.select(outside, bottom));
            }
            head.flush();
            tail.flush();
        }
        let (worst_kept, best_dropped) = (worst.smallest(), best.largest());
        Given { head: head.total(), kept, tail: tail.total(), dropped, worst_kept, best_dropped }
    }
}

impl Simd {
    /// Computes the weights of a bracket, and returns their sum.
    pub(crate) fn weigh<S: Scalar + Element<Scalar = S>, W: WeightFn<S>>(
        self,
        bracket: &mut Bracket<S>,
        weight_fn: W,
    ) -> f64 {
        let end = bracket.padded(LANES).0.len();
        let Bracket { scores, weights, .. } = bracket;
        let mut total = 0.0;
        // In chunks, like every pass whose sums end in a certificate: their f64 sums are added in order.
        for (scores, weights) in scores[..end].chunks(CHUNK).zip(weights[..end].chunks_mut(CHUNK)) {
            total += self.weights(scores, weight_fn, weights);
        }
        total
    }

    /// Sums both sides of `[lo, hi)` over whole groups of scores and appends the scores inside to `to`, in order. `to`
    /// must have room for `scores.len()` more entries. Prefetches meanwhile.
    pub(crate) fn split<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        weight_fn: W,
        bracket: (E::Scalar, E::Scalar),
        prefetch: Option<Prefetch>,
        to: &mut Bracket<E::Scalar>,
    ) -> PartitionSums {
        assert!(scores.len().is_multiple_of(LANES));
        let prefetch = prefetch.unwrap_or(Prefetch::new(scores.as_ptr()));
        assert!(to.scores.len() >= to.len + scores.len() + LANES);
        let output = to.scores[to.len..].as_mut_ptr();
        // The room asserted above is what the pass needs: everything inside, and one group more.
        let sides = self.run(Split { scores, weight_fn, bracket, prefetch, to: output });
        to.len += sides.inside;
        sides
    }

    /// Sums both sides of `[lo, hi)` over whole groups of scores and weights, and writes the entries inside to `to`.
    pub(crate) fn narrow_into<S: Scalar>(
        self,
        scores: &[S],
        weights: &[S],
        bracket: (S, S),
        to: &mut Bracket<S>,
    ) -> PartitionSums {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        to.clear();
        to.reserve(scores.len());
        let from = (scores.as_ptr(), weights.as_ptr(), scores.len());
        let out = (to.scores.as_mut_ptr(), to.weights.as_mut_ptr());
        // SAFETY: both lists hold as many as there are scores, and a group more.
        let sides = unsafe { self.narrow_between(from, bracket, out) };
        to.len = sides.inside;
        sides
    }

    /// Narrows a bracket in place to `[lo, hi)`, and sums both sides and the inside.
    pub(crate) fn narrow<S: Scalar>(
        self,
        within: &mut Bracket<S>,
        bracket: (S, S),
    ) -> PartitionSums {
        let len = within.padded(LANES).0.len();
        assert!(within.scores.len() >= len + LANES && within.weights.len() >= len + LANES);
        let out = (within.scores.as_mut_ptr(), within.weights.as_mut_ptr());
        let from = (out.0.cast_const(), out.1.cast_const(), len);
        // SAFETY: both lists hold `len` entries and a group more, and what is written never overtakes what is read.
        let sides = unsafe { self.narrow_between(from, bracket, out) };
        within.len = sides.inside;
        sides
    }

    /// Runs the pass in chunks.
    ///
    /// # Safety
    /// There are `len` entries to read, and room for as many and a group more to write.
    unsafe fn narrow_between<S: Scalar>(
        self,
        (scores, weights, len): (*const S, *const S, usize),
        bracket: (S, S),
        out: (*mut S, *mut S),
    ) -> PartitionSums {
        let mut sides = PartitionSums::default();
        for at in (0..len).step_by(CHUNK) {
            let here = CHUNK.min(len - at);
            let (scores, weights) = (scores.wrapping_add(at), weights.wrapping_add(at));
            let to = out.0.wrapping_add(sides.inside);
            let to_weights = out.1.wrapping_add(sides.inside);
            let part = self.run(Narrow { scores, weights, len: here, bracket, to, to_weights });
            sides.below += part.below;
            sides.within += part.within;
            sides.above += part.above;
            sides.count_above += part.count_above;
            sides.inside += part.inside;
        }
        sides
    }

    /// Sums a kept set, given as one byte per score, and its tail, over whole groups.
    pub(crate) fn given<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        keep: &[u8],
        weight_fn: W,
    ) -> Given<E::Scalar> {
        assert!(scores.len().is_multiple_of(LANES) && keep.len() == scores.len());
        self.run(SumGiven { scores, keep, weight_fn })
    }
}
