//! Candidates for the boundary of a row: pivots, the sums below them, and the ranking of the last few scores.
//!
//! All sums here are rough and decide nothing.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use super::partition::Bracket;
use crate::kernels::isa::{LANES, Lanes, Level, Scalar};
use crate::kernels::simd::{Pass, Simd};
use crate::kernels::weights::LOOSE;

/// Pivots per round of the search.
pub(crate) const PIVOTS: usize = 8;
/// Range, in natural-log units, in which mass is spread evenly enough for a guess of its end.
pub(crate) const GUESSABLE_SPAN: f64 = 4.0;
/// Most scores that [`Simd::candidate`] ranks.
pub(crate) const RANKED: usize = 2 * LANES;

/// Target of a row's tail, and quantities for the guess of a normal row's boundary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TailTarget {
    /// Approximate share of the mass that may be dropped.
    pub(crate) share: f64,
    /// Logarithm of `share`.
    pub(crate) ln_share: f64,
    /// Distance below the largest score beyond which all scores together have negligible weight.
    pub(crate) reach: f64,
    /// Factor from scores to natural-log units.
    pub(crate) scale: f64,
}

/// A candidate for the worst score kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Edge<S> {
    pub(crate) score: S,
    /// Weight of the score.
    pub(crate) weight: S,
    /// Number of scores equal to it.
    pub(crate) ties: usize,
}

/// Result of [`Simd::find_candidate`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate<S> {
    /// `None` if the row must be searched in general.
    pub(crate) edge: Option<Edge<S>>,
    pub(crate) largest: S,
    pub(super) plain: bool,
    /// Sums of distances from the largest score, and of their squares, over whole groups.
    pub(super) moments: (f64, f64),
    pub(super) total: f64,
    pub(super) below: f64,
    pub(super) inside: usize,
}

/// Copies one entry from each part of length `stride`, at varying places in the part: rows of attention have structure.
#[inline(always)]
pub(crate) fn sample<T: Copy>(all: &[T], stride: usize, to: &mut [T]) {
    for (q, (one, part)) in to.iter_mut().zip(all.chunks_exact(stride)).enumerate() {
        let random = (q as u32).wrapping_mul(0x9E37_79B9) >> 8;
        *one = part[(random as usize * stride) >> 24];
    }
}

/// Returns the range from the last of the first `accepted` pivots to the next, within an outer range.
#[inline(always)]
pub(crate) fn around<S: Copy, const N: usize>(
    pivots: &[S; N],
    accepted: usize,
    outer: (S, S),
) -> (S, S) {
    let lo = if accepted == 0 { outer.0 } else { pivots[accepted - 1] };
    let hi = if accepted == N { outer.1 } else { pivots[accepted] };
    (lo, hi)
}

/// Returns pivots around a share of a range, closer together near it, ascending.
pub(crate) fn values_around<S: Scalar>(least: S, most: S, share: f64) -> [S; PIVOTS] {
    const STEPS: [f64; PIVOTS] = [-0.25, -0.1, -0.03, -0.01, 0.01, 0.03, 0.1, 0.25];
    let (least, most): (f64, f64) = (least.into(), most.into());
    let share = if share.is_nan() { 0.5 } else { share.clamp(0.0, 1.0) };
    STEPS.map(|step| {
        let share = (share + step).clamp(0.0, 1.0);
        S::nearest(least * (1.0 - share) + most * share)
    })
}

/// Returns pivots spaced evenly among the floats of a range, ascending; the last lies above its lower end.
pub(crate) fn ranks_between<S: Scalar>(least: S, most: S) -> [S; PIVOTS] {
    let (least, most) = (i128::from(least.rank()), i128::from(most.rank()));
    std::array::from_fn(|i| {
        let step = ((most - least) * (i as i128 + 1) + PIVOTS as i128) / (PIVOTS as i128 + 1);
        S::from_rank((least + step) as i64)
    })
}

/// Sums below and counts from each pivot upward.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct PivotSums {
    /// Weight of the scores strictly below pivot i, to within some units of the lanes' precision per score.
    pub(crate) below: [f64; PIVOTS],
    /// Number of scores at or above pivot i; 0 if not requested.
    pub(crate) at_least: [usize; PIVOTS],
}

struct SumBelowPivots<'a, S, const COUNT: bool> {
    scores: &'a [S],
    weights: &'a [S],
    pivots: &'a [S; PIVOTS],
}

impl<S: Scalar, const COUNT: bool> Pass<PivotSums> for SumBelowPivots<'_, S, COUNT> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> PivotSums {
        let SumBelowPivots { scores, weights, .. } = self;
        let mut pivots = [S::Lanes::<L>::splat(S::default()); PIVOTS];
        for (lanes, &pivot) in pivots.iter_mut().zip(self.pivots) {
            *lanes = S::Lanes::<L>::splat(pivot);
        }
        let mut below = [0.0; PIVOTS];
        let mut under = [0usize; PIVOTS];
        for (scores, weights) in scores.chunks(LANES * LOOSE).zip(weights.chunks(LANES * LOOSE)) {
            let mut sums = [S::Lanes::<L>::splat(S::default()); PIVOTS];
            for (scores, weights) in scores.chunks_exact(LANES).zip(weights.chunks_exact(LANES)) {
                let scores = S::Lanes::<L>::load(scores.as_ptr());
                let weights = S::Lanes::<L>::load(weights.as_ptr());
                for i in 0..PIVOTS {
                    let less = scores.lt(pivots[i]);
                    sums[i] = sums[i].add_where(less, weights);
                    if COUNT {
                        under[i] += S::Lanes::<L>::number(less).count_ones() as usize;
                    }
                }
            }
            for i in 0..PIVOTS {
                below[i] += sums[i].sum().into();
            }
        }
        let at_least = if COUNT { under.map(|count| scores.len() - count) } else { under };
        PivotSums { below, at_least }
    }
}

/// [`Simd::candidate`], comparing all pairs.
struct Rank<'a, S> {
    scores: &'a [S],
    weights: &'a [S],
    visible: usize,
    room: S,
}

impl<S: Scalar> Pass<S> for Rank<'_, S> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> S {
        let Rank { scores, weights, visible, room } = self;
        let groups =
            [S::Lanes::<L>::load(scores.as_ptr()), S::Lanes::<L>::load(scores.as_ptr().add(LANES))];
        let mut below = [S::Lanes::<L>::splat(S::default()); 2];
        for (&score, &weight) in scores[..visible].iter().zip(weights) {
            let (score, weight) = (S::Lanes::<L>::splat(score), S::Lanes::<L>::splat(weight));
            for g in 0..2 {
                below[g] = below[g].add_where(groups[g].gt(score), weight);
            }
        }
        let (room, bottom) = (S::Lanes::<L>::splat(room), S::Lanes::<L>::splat(S::NEG_INFINITY));
        let one = groups[0].select(room.ge(below[0]), bottom);
        let other = groups[1].select(room.ge(below[1]), bottom);
        one.max(other).largest()
    }
}

impl Simd {
    /// Sums strictly below each of eight pivots over whole groups of scores and their weights, and on request counts
    /// from each upward. The sums are rough.
    pub(crate) fn pivot_sums<S: Scalar>(
        self,
        scores: &[S],
        weights: &[S],
        pivots: &[S; PIVOTS],
        count: bool,
    ) -> PivotSums {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        if count {
            self.run(SumBelowPivots::<S, true> { scores, weights, pivots })
        } else {
            self.run(SumBelowPivots::<S, false> { scores, weights, pivots })
        }
    }

    /// Returns the largest score of a bracket of at most [`RANKED`] whose strictly smaller scores weigh at most `room`,
    /// up to the rounding of a few additions; -inf if there is none.
    pub(crate) fn candidate<S: Scalar>(self, bracket: &mut Bracket<S>, room: S) -> S {
        let visible = bracket.len();
        assert!(visible <= RANKED);
        let (scores, weights) = bracket.padded(RANKED);
        self.run(Rank { scores, weights, visible, room })
    }
}
