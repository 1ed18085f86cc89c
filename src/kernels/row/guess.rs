//! Guesses of the boundary of a short row: from its moments, as if it were normal, and from sums below pivots.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for as many scores and weights
//! behind pointers as it is told, in whole groups.

use super::candidates::{Candidate, PIVOTS, TailTarget, around, sample};
use super::scan::ExtentWithin;
use crate::kernels::isa::{Element, LANES, Lanes, LanesOf, Level, Scalar};
use crate::kernels::simd::Pass;

/// Half the width of the first guess for a short row, in standard errors of its mean.
const WIDTH: f64 = 2.1;
/// Scores of a sample.
const SAMPLE: usize = 256;

/// Returns a range around the boundary of a normal row with these moments and this total.
#[inline(always)]
pub(super) fn normal<S: Scalar>(found: &Candidate<S>, n: usize, target: &TailTarget) -> (S, S) {
    let count = n as f64;
    let mean = found.moments.0 / count;
    let variance = (found.moments.1 / count - mean * mean).max(0.0);
    let deviation = variance.sqrt();
    // In a normal population the scores below mean + variance + q * deviation, in natural-log units, have the normal
    // probability of q as their share of the weight; the row's share differs.
    let (mean, variance) = (target.scale * mean, target.scale * target.scale * variance);
    let excess = rough_ln(found.total / count) - (mean + 0.5 * variance);
    let middle = mean + variance + target.scale * deviation * quantile(target.ln_share + excess);
    let width = WIDTH * target.scale * deviation / count.sqrt();
    let largest: f64 = found.largest.into();
    (
        S::nearest(largest + (middle - width) / target.scale),
        S::nearest(largest + (middle + width) / target.scale),
    )
}

/// Returns a range around the boundary of a sample of the row.
#[inline(always)]
pub(super) unsafe fn sampled<L: Level, E: Element>(
    scores: &[E],
    weights: &[E::Scalar],
    found: &Candidate<E::Scalar>,
    target: &TailTarget,
) -> (E::Scalar, E::Scalar) {
    let mut raw = [E::MASKED; SAMPLE];
    let mut sample_weights = [E::Scalar::default(); SAMPLE];
    let stride = scores.len() / SAMPLE;
    sample(scores, stride, &mut raw);
    sample(weights, stride, &mut sample_weights);
    let (scores, weights) = (raw.as_ptr(), sample_weights.as_ptr());
    let limit = target.share * found.total * (SAMPLE as f64 / (stride * SAMPLE) as f64);
    let largest: f64 = found.largest.into();
    let coarse: [E::Scalar; PIVOTS] = evenly(largest - target.reach, largest);
    let sums = below::<L, E, PIVOTS>(scores, weights, SAMPLE, &coarse);
    let (first, (lo, hi)) = crossing(&coarse, &sums, limit);
    let (least, most) = ExtentWithin { scores: &raw, lo, hi }.run::<L>();
    let fine: [E::Scalar; PIVOTS] = if least < most {
        evenly(least.into(), most.into())
    } else {
        let from: f64 = if first == 0 { largest - target.reach } else { lo.into() };
        evenly(from, if first == PIVOTS { largest } else { hi.into() })
    };
    let fine_sums = below::<L, E, PIVOTS>(scores, weights, SAMPLE, &fine);
    let (second, _) = crossing(&fine, &fine_sums, limit);
    // Relative deviation of a sum of weights, none of which is above the heaviest.
    let at = second.min(PIVOTS - 1);
    let heaviest: f64 = heaviest_below::<L, E>(scores, weights, SAMPLE, fine[at]).into();
    let share = heaviest / fine_sums[at].max(f64::MIN_POSITIVE);
    let doubt = 1.05 + 2.0 * share.sqrt();
    let mut curve = [(E::Scalar::LOWEST, 0.0); PIVOTS + 4];
    // Beyond the finer pivots the next coarse ones are used.
    let coarse_at = |i: usize| (coarse[i], sums[i]);
    curve[1] = if first >= 2 { coarse_at(first - 2) } else { curve[0] };
    curve[2] = if first >= 1 { coarse_at(first - 1) } else { curve[0] };
    for i in 0..PIVOTS {
        curve[3 + i] = (fine[i], fine_sums[i]);
    }
    let end = (E::Scalar::INFINITY, f64::INFINITY);
    curve[PIVOTS + 3] = if first < PIVOTS { coarse_at(first) } else { end };
    let (low, high) = (limit / doubt, limit * doubt);
    let below_low = curve.iter().map(|&(_, sum)| usize::from(sum <= low)).sum::<usize>();
    let below_high = curve.iter().map(|&(_, sum)| usize::from(sum <= high)).sum::<usize>();
    let low = between(&curve, below_low, low, curve[below_low.max(1) - 1].0);
    let high = between(&curve, below_high, high, E::Scalar::INFINITY);
    (low, high)
}

/// Returns the largest weight of a score below a pivot; +0 if there is none.
#[inline(always)]
unsafe fn heaviest_below<L: Level, E: Element>(
    scores: *const E,
    weights: *const E::Scalar,
    len: usize,
    pivot: E::Scalar,
) -> E::Scalar {
    let pivot = LanesOf::<L, E>::splat(pivot);
    let mut heaviest = LanesOf::<L, E>::splat(E::Scalar::default());
    for at in (0..len).step_by(LANES) {
        let under = E::load::<L>(scores.add(at)).lt(pivot);
        heaviest = LanesOf::<L, E>::load(weights.add(at)).keep(under).max(heaviest);
    }
    heaviest.largest()
}

/// Returns the rough weight strictly below each pivot.
#[inline(always)]
pub(super) unsafe fn below<L: Level, E: Element, const N: usize>(
    scores: *const E,
    weights: *const E::Scalar,
    len: usize,
    pivots: &[E::Scalar; N],
) -> [f64; N] {
    let mut sums = [LanesOf::<L, E>::splat(E::Scalar::default()); N];
    let mut lanes = sums;
    for i in 0..N {
        lanes[i] = LanesOf::<L, E>::splat(pivots[i]);
    }
    let mut at = 0;
    while at < len {
        let scores = E::load::<L>(scores.add(at));
        let weights = LanesOf::<L, E>::load(weights.add(at));
        for i in 0..N {
            sums[i] = sums[i].add_where(scores.lt(lanes[i]), weights);
        }
        at += LANES;
    }
    let mut below = [0.0; N];
    for i in 0..N {
        below[i] = sums[i].sum().into();
    }
    below
}

/// Returns the number of pivots with at most `limit` below them, and the scores from the last of those to the next.
#[inline(always)]
pub(super) fn crossing<S: Scalar, const N: usize>(
    pivots: &[S; N],
    below: &[f64; N],
    limit: f64,
) -> (usize, (S, S)) {
    let first = below.iter().map(|&sum| usize::from(sum <= limit)).sum::<usize>();
    (first, around(pivots, first, (S::LOWEST, S::INFINITY)))
}

/// Returns pivots spaced evenly strictly inside a range, ascending.
#[inline(always)]
pub(super) fn evenly<S: Scalar>(from: f64, to: f64) -> [S; PIVOTS] {
    let step = (to - from) / (PIVOTS + 1) as f64;
    std::array::from_fn(|i| S::nearest(from + step * (i + 1) as f64))
}

/// Returns the score at which a curve reaches a value between the points `at - 1` and `at`, linearly; `other` if there
/// is none.
#[inline(always)]
fn between<S: Scalar>(curve: &[(S, f64)], at: usize, value: f64, other: S) -> S {
    if at == 0 || at == curve.len() {
        return other;
    }
    let (left, right) = (curve[at - 1], curve[at]);
    if left.0 <= S::LOWEST || right.0 >= S::INFINITY {
        return other;
    }
    let share = (value - left.1) / (right.1 - left.1);
    S::nearest(left.0.into() * (1.0 - share) + right.0.into() * share)
}

/// Returns the logarithm of a positive number to within .006.
#[inline(always)]
fn rough_ln(value: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = value.to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let fraction = f64::from_bits(bits & MANTISSA | 1f64.to_bits()) - 1.0;
    // log2(1 + f) is 0 and 1 at the ends, and in between about a parabola.
    (f64::from(exponent) + fraction * (1.3465 - 0.3465 * fraction)) * std::f64::consts::LN_2
}

/// Returns the standard normal quantile to within .003, of a probability below one half given by its logarithm; 0 for
/// larger ones (Abramowitz and Stegun 26.2.22).
#[inline(always)]
fn quantile(ln_share: f64) -> f64 {
    let t = (-2.0 * ln_share).max(2.0 * std::f64::consts::LN_2).sqrt();
    let above = t - (2.307_53 + t * 0.270_61) / (1.0 + t * (0.992_29 + t * 0.044_81));
    -above
}
