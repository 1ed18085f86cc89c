//! Kept part of a row: positions from an edge upward, and the sums on both sides of it.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for slices of whole groups; of the
//! room behind a raw pointer it says what it asks for.

use super::scan::AHEAD;
use crate::kernels::isa::{Element, LANES, Lanes, LanesOf, Level};
use crate::kernels::simd::{Pass, Simd};
use crate::kernels::weights::{DEPTH, Sum};

/// Scores per call of the emitting pass.
const EMIT: usize = 4096;

/// Source of the positions of scores.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Positions<'a> {
    /// Consecutive from this one.
    From(u32),
    /// Listed, one per score.
    Listed(&'a [u32]),
}

impl<'a> Positions<'a> {
    /// Returns the list, if there is one.
    pub(crate) fn listed(self) -> Option<&'a [u32]> {
        match self {
            Positions::From(_) => None,
            Positions::Listed(list) => Some(list),
        }
    }

    /// Writes the chosen positions of the group at `at`, one behind another, to sixteen writable places.
    #[inline(always)]
    unsafe fn compress<L: Level>(self, at: usize, chosen: u16, to: *mut u32) {
        L::prefetch_to_write(to.cast::<u8>().wrapping_add(AHEAD));
        match self {
            Positions::From(first) => {
                L::compress_count(first.wrapping_add(at as u32), chosen, to);
            }
            Positions::Listed(list) => {
                L::compress_positions(list.as_ptr().add(at), chosen, to);
            }
        }
    }
}

/// [`Simd::emit`]; there is room for all positions written and sixteen more, and a list has one for each score.
struct Emit<'a, E: Element> {
    scores: &'a [E],
    positions: Positions<'a>,
    edge: E::Scalar,
    inclusive: bool,
    to: *mut u32,
}

impl<E: Element> Pass<usize> for Emit<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> usize {
        let Emit { scores, positions, edge, inclusive, to } = self;
        let lanes = LanesOf::<L, E>::splat(edge);
        let mut written = 0;
        for (g, group) in scores.chunks_exact(LANES).enumerate() {
            let scores = E::load::<L>(group.as_ptr());
            let kept = if inclusive { scores.ge(lanes) } else { scores.gt(lanes) };
            let kept = LanesOf::<L, E>::bits(kept);
            let to = to.add(written);
            positions.compress::<L>(g * LANES, kept, to);
            written += kept.count_ones() as usize;
        }
        written
    }
}

struct FindEqual<'a, E: Element> {
    scores: &'a [E],
    score: E::Scalar,
    nth: usize,
}

impl<E: Element> Pass<Result<usize, usize>> for FindEqual<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> Result<usize, usize> {
        let FindEqual { scores, score, nth } = self;
        let wanted = LanesOf::<L, E>::splat(score);
        let mut seen = 0;
        for (g, group) in scores.chunks_exact(LANES).enumerate() {
            let mut equal = LanesOf::<L, E>::bits(E::load::<L>(group.as_ptr()).eq(wanted));
            let here = equal.count_ones() as usize;
            if seen + here < nth {
                seen += here;
                continue;
            }
            for _ in seen + 1..nth {
                equal &= equal - 1;
            }
            return Ok(g * LANES + equal.trailing_zeros() as usize);
        }
        Err(seen)
    }
}

/// Sums of [`Simd::sum_and_emit`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct KeptSums {
    /// Weight of the scores below the edge.
    pub(crate) below: f64,
    /// Weight of the scores above the edge, without those at it.
    pub(crate) above: f64,
    /// Number of scores at the edge or above, which is the number of listed positions.
    pub(crate) kept: usize,
}

/// [`Simd::sum_and_emit`]; room and list as for [`Emit`].
struct SumAndEmit<'a, E: Element> {
    scores: &'a [E],
    weights: &'a [E::Scalar],
    edge: E::Scalar,
    positions: Positions<'a>,
    to: *mut u32,
}

impl<E: Element> Pass<KeptSums> for SumAndEmit<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> KeptSums {
        let SumAndEmit { scores, weights, edge, positions, to } = self;
        let edge = LanesOf::<L, E>::splat(edge);
        let (mut below, mut above, mut kept) = (Sum::new(), Sum::new(), 0usize);
        let blocks = scores.chunks(LANES * DEPTH).zip(weights.chunks(LANES * DEPTH));
        for (b, (scores, weights)) in blocks.enumerate() {
            let groups = scores.chunks_exact(LANES).zip(weights.chunks_exact(LANES));
            for (g, (scores, weights)) in groups.enumerate() {
                let scores = E::load::<L>(scores.as_ptr());
                let weights = LanesOf::<L, E>::load(weights.as_ptr());
                let under = scores.lt(edge);
                below.add_where(under, weights);
                above.add_where(scores.gt(edge), weights);
                let over = !LanesOf::<L, E>::bits(under);
                positions.compress::<L>((b * DEPTH + g) * LANES, over, to.add(kept));
                kept += over.count_ones() as usize;
            }
            below.flush();
            above.flush();
        }
        KeptSums { below: below.total(), above: above.total(), kept }
    }
}

/// Sums of [`Simd::sum_around_ties`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TieSums {
    /// Weight of the scores below a score.
    pub(crate) below: f64,
    /// Number of scores below, with masked ones and padding.
    pub(crate) count_below: usize,
    /// Weight of the scores above it.
    pub(crate) above: f64,
    /// Number of scores above.
    pub(crate) count_above: usize,
}

struct SumAroundTies<'a, E: Element> {
    scores: &'a [E],
    weights: &'a [E::Scalar],
    score: E::Scalar,
}

impl<E: Element> Pass<TieSums> for SumAroundTies<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> TieSums {
        let SumAroundTies { scores, weights, score } = self;
        let score = LanesOf::<L, E>::splat(score);
        let (mut below, mut above) = (Sum::new(), Sum::new());
        let (mut count_below, mut count_above) = (0usize, 0usize);
        let blocks = scores.chunks(LANES * DEPTH).zip(weights.chunks(LANES * DEPTH));
        for (scores, weights) in blocks {
            for (scores, weights) in scores.chunks_exact(LANES).zip(weights.chunks_exact(LANES)) {
                let scores = E::load::<L>(scores.as_ptr());
                let weights = LanesOf::<L, E>::load(weights.as_ptr());
                let (under, over) = (scores.lt(score), scores.gt(score));
                below.add_where(under, weights);
                above.add_where(over, weights);
                count_below += LanesOf::<L, E>::number(under).count_ones() as usize;
                count_above += LanesOf::<L, E>::number(over).count_ones() as usize;
            }
            below.flush();
            above.flush();
        }
        TieSums { below: below.total(), count_below, above: above.total(), count_above }
    }
}

impl Simd {
    /// Appends, in order, the positions of the scores (whole groups) that are above an edge, or at it if `inclusive`.
    pub(crate) fn emit<E: Element>(
        self,
        scores: &[E],
        positions: Positions<'_>,
        edge: E::Scalar,
        inclusive: bool,
        to: &mut Vec<u32>,
    ) {
        assert!(scores.len().is_multiple_of(LANES));
        if let Positions::Listed(list) = positions {
            assert!(list.len() >= scores.len());
        }
        for (c, scores) in scores.chunks(EMIT).enumerate() {
            let positions = match positions {
                Positions::From(first) => Positions::From(first.wrapping_add((c * EMIT) as u32)),
                Positions::Listed(list) => Positions::Listed(&list[c * EMIT..][..scores.len()]),
            };
            to.reserve(scores.len() + LANES);
            let out = to.spare_capacity_mut().as_mut_ptr().cast();
            let written = self.run(Emit { scores, positions, edge, inclusive, to: out });
            assert!(written <= scores.len());
            // SAFETY: the pass wrote that many positions behind the old ones, within the room reserved.
            unsafe { to.set_len(to.len() + written) };
        }
    }

    /// Finds the `nth` score (from 1) that equals `score` among whole groups; without one, returns the number of equal
    /// scores.
    pub(crate) fn find_equal<E: Element>(
        self,
        scores: &[E],
        score: E::Scalar,
        nth: usize,
    ) -> Result<usize, usize> {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(FindEqual { scores, score, nth })
    }

    /// Sums a row (whole groups) on both sides of an edge and appends the positions of the scores from the edge upward.
    pub(crate) fn sum_and_emit<E: Element>(
        self,
        scores: &[E],
        weights: &[E::Scalar],
        edge: E::Scalar,
        positions: Positions<'_>,
        to: &mut Vec<u32>,
    ) -> KeptSums {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        if let Positions::Listed(list) = positions {
            assert!(list.len() >= scores.len());
        }
        to.reserve(scores.len() + LANES);
        let out = to.spare_capacity_mut().as_mut_ptr().cast();
        let kept_sums = self.run(SumAndEmit { scores, weights, edge, positions, to: out });
        assert!(kept_sums.kept <= scores.len());
        // SAFETY: the pass wrote that many positions behind the old ones, within the room reserved.
        unsafe { to.set_len(to.len() + kept_sums.kept) };
        kept_sums
    }

    /// Sums a row (whole groups) on both sides of the scores that equal one.
    pub(crate) fn sum_around_ties<E: Element>(
        self,
        scores: &[E],
        weights: &[E::Scalar],
        score: E::Scalar,
    ) -> TieSums {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        self.run(SumAroundTies { scores, weights, score })
    }
}
