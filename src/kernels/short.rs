//! Passes over several short rows at a time.
//!
//! One short row after another would wait for latencies: every step needs the result of the one before. So each step is
//! taken for all rows of a small batch before the next, and the waits overlap. The steps up to the candidate for the
//! boundary only show the way; [`sum_and_emit`] and [`sum_around_ties`] sum what a decision ends with, in the order of the row.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, for slices of whole groups where it does not say
//! otherwise, and for the room behind a raw pointer that it says.

use super::lanes::{Element, LANES, Lanes, Level, Scalar};
use super::passes::{
    DEPTH, Exp, GUESSABLE_SPAN, PIVOTS, Positions, Prefetch, RANKED, ScaledExp, Sum, WeightFn,
    around, extent_within, ranks_between, sample, scan, survey, values_around,
};

/// Rows per batch at most.
pub(crate) const BATCH: usize = 8;
/// Rounds of narrowing before a row is left to the general search.
const ROUNDS: usize = 6;
/// Groups that are collected at once: so few are not worth the branches that would skip some.
const DIRECT: usize = 16;
/// Groups whose marks are kept at a time.
const MARKS: usize = 64;
/// Half the width of the first guess for a short row, in standard errors of its mean.
const WIDTH: f64 = 2.1;
/// Rows longer than this are judged by a sample, of so many scores, where they are not normal.
const SAMPLED: usize = 1024;
const SAMPLE: usize = 256;

type Of<L, E> = <<E as Element>::Scalar as Scalar>::Lanes<L>;

/// The law of a row whose largest score is known.
pub(crate) trait WeightFnOf<S: Scalar>: Copy {
    type Weights: WeightFn<S>;
    fn of(self, largest: S) -> Self::Weights;
}

/// [`Exp`] by the largest score.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unscaled;

/// [`ScaledExp`], from the largest score on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaledBy(pub(crate) f64);

impl<S: Scalar> WeightFnOf<S> for Unscaled {
    type Weights = Exp<S>;
    #[inline(always)]
    fn of(self, largest: S) -> Exp<S> {
        Exp(largest)
    }
}

impl<S: Scalar> WeightFnOf<S> for ScaledBy {
    type Weights = ScaledExp;
    #[inline(always)]
    fn of(self, largest: S) -> ScaledExp {
        ScaledExp { shift: largest.into(), scale: self.0 }
    }
}

/// What is asked of a row, and where a normal row would have its boundary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TailTarget {
    /// About the share of its mass that may be dropped.
    pub(crate) share: f64,
    /// Its logarithm.
    pub(crate) ln_share: f64,
    /// Scores further below the largest than this weigh too little, all together, to matter.
    pub(crate) reach: f64,
    /// Multiplies scores to natural-log units.
    pub(crate) scale: f64,
}

/// A candidate for the worst score kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Edge<S> {
    pub(crate) score: S,
    /// Its weight.
    pub(crate) weight: S,
    /// How many scores equal it.
    pub(crate) ties: usize,
}

/// What [`find_candidate`] found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate<S> {
    /// `None` if the row must be searched in general.
    pub(crate) edge: Option<Edge<S>>,
    largest: S,
    plain: bool,
    /// Sums of distances from the largest score, and of their squares, over whole groups.
    moments: (f64, f64),
    total: f64,
    below: f64,
    inside: usize,
}

/// Scratch for a batch: for each row `stride` scores and weights, and as many for its bracket.
#[derive(Debug)]
pub(crate) struct BatchScratch<'a, E: Element> {
    pub(crate) stride: usize,
    pub(crate) scores: &'a mut [E],
    pub(crate) weights: &'a mut [E::Scalar],
    pub(crate) inside: &'a mut [E::Scalar],
    pub(crate) inside_weights: &'a mut [E::Scalar],
    /// Where positions will be written.
    pub(crate) write: *const u32,
}

/// A row in whole groups: where it is if it fills them, else its padded copy.
#[inline(always)]
fn whole_groups<'a, E: Element>(row: &'a [E], copy: &'a [E]) -> &'a [E] {
    if row.len().is_multiple_of(LANES) { row } else { &copy[..row.len().next_multiple_of(LANES)] }
}

impl<E: Element> BatchScratch<'_, E> {
    /// The scores and weights of a row in whole groups; the scores are where they were if they fill such.
    pub(crate) fn row<'b>(&'b self, at: usize, row: &'b [E]) -> (&'b [E], &'b [E::Scalar]) {
        let range = at * self.stride..at * self.stride + row.len().next_multiple_of(LANES);
        (whole_groups(row, &self.scores[range.start..]), &self.weights[range])
    }
}

/// Copies and weighs the rows, and finds where each budget ends, about.
///
/// # Safety
/// The CPU must have the level's features.
#[inline(always)]
pub(super) unsafe fn find_candidate<L: Level, E: Element, M: WeightFnOf<E::Scalar>>(
    rows: &[&[E]],
    target: &TailTarget,
    weight_fn: M,
    room: &mut BatchScratch<'_, E>,
) -> [Candidate<E::Scalar>; BATCH]
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let stride = room.stride;
    assert!(rows.len() <= BATCH && stride.is_multiple_of(LANES));
    assert!(rows.iter().all(|row| row.len() + RANKED <= stride));
    let all = stride * rows.len();
    assert!(room.scores.len() >= all && room.weights.len() >= all);
    assert!(room.inside.len() >= all && room.inside_weights.len() >= all);
    let mut found = [Candidate {
        edge: None,
        largest: E::Scalar::NEG_INFINITY,
        plain: false,
        moments: (0.0, 0.0),
        total: 0.0,
        below: 0.0,
        inside: 0,
    }; BATCH];
    // The batch after this one, if rows follow each other in memory.
    let after = rows.iter().map(|row| size_of_val(*row)).sum::<usize>();
    // Every row has `stride` entries in each buffer, at least two groups more than its scores.
    for (r, row) in rows.iter().enumerate() {
        let seen = if row.len().is_multiple_of(LANES) {
            scan::<L, E, false>(row, E::Scalar::default(), 1.0).0
        } else {
            let padded = row.len().next_multiple_of(LANES);
            survey::<L, E>(Some(row), row.len(), &mut room.scores[r * stride..][..padded])
        };
        let finite = seen.largest > E::Scalar::NEG_INFINITY && seen.largest < E::Scalar::INFINITY;
        (found[r].largest, found[r].plain) = (seen.largest, finite && !seen.nan);
    }
    let mut start = 0;
    for (r, row) in rows.iter().enumerate() {
        let padded = row.len().next_multiple_of(LANES);
        let scores = whole_groups(row, &room.scores[r * stride..]);
        let out = &mut room.weights[r * stride..][..padded];
        let whole = row.len() / LANES;
        // Positions of the rows before come first.
        let write = room.write.wrapping_add(start);
        start += row.len();
        let prefetch = Prefetch::new(row.as_ptr().wrapping_byte_add(after), write);
        weigh::<L, E, _>(
            scores,
            whole,
            weight_fn.of(found[r].largest),
            prefetch,
            out,
            &mut found[r],
        );
    }
    let mut ranges = [(E::Scalar::LOWEST, E::Scalar::INFINITY); BATCH];
    for (range, (row, here)) in ranges.iter_mut().zip(rows.iter().zip(&found)) {
        *range = normal(here, row.len() / LANES * LANES, target);
    }
    for (r, row) in rows.iter().enumerate() {
        let padded = row.len().next_multiple_of(LANES);
        let here = &mut found[r];
        if !here.plain {
            continue;
        }
        let scores = whole_groups(row, &room.scores[r * stride..]);
        let weights = &room.weights[r * stride..][..padded];
        let to = room.inside[r * stride..].as_mut_ptr();
        let to_weights = room.inside_weights[r * stride..].as_mut_ptr();
        let range = ranges[r];
        enclose::<L, E>((scores, weights, row.len()), range, target, to, to_weights, here);
    }
    for (r, row) in rows.iter().enumerate() {
        let here = &mut found[r];
        let limit = target.share * here.total;
        let scores = room.inside[r * stride..][..row.len() + RANKED].as_mut_ptr();
        let weights = room.inside_weights[r * stride..][..row.len() + RANKED].as_mut_ptr();
        let (mut round, mut stubborn) = (0, false);
        while here.inside > RANKED && round < ROUNDS && here.edge.is_none() {
            let before = here.inside;
            narrow::<L, E::Scalar>(scores, weights, here, limit, (target.scale, stubborn));
            stubborn = !stubborn && here.inside > before / 4;
            round += 1;
        }
        if here.inside == 0 || here.inside > RANKED || here.edge.is_some() {
            continue;
        }
        let room = E::Scalar::nearest(limit - here.below);
        here.edge = candidate::<L, E::Scalar>(scores, weights, here.inside, room);
    }
    found
}

/// Writes the weights; their sum and the moments of the first `whole` groups, roughly.
#[inline(always)]
unsafe fn weigh<L: Level, E: Element, W: WeightFn<E::Scalar>>(
    scores: &[E],
    whole: usize,
    weight_fn: W,
    prefetch: Prefetch,
    to: &mut [E::Scalar],
    found: &mut Candidate<E::Scalar>,
) {
    let shift = Of::<L, E>::splat(found.largest);
    let zero = Of::<L, E>::splat(E::Scalar::default());
    let (mut sum, mut first, mut second) = (zero, zero, zero);
    let groups = scores.chunks_exact(LANES).zip(to.chunks_exact_mut(LANES));
    for (g, (group, out)) in groups.enumerate() {
        prefetch.fetch::<L, E>(g * LANES);
        let scores = E::load::<L>(group.as_ptr());
        let weights = weight_fn.weigh(scores);
        weights.store(out.as_mut_ptr());
        sum = sum.add(weights);
        if g < whole {
            let distance = scores.sub(shift);
            first = first.add(distance);
            second = distance.mul_add(distance, second);
        }
    }
    found.total = sum.sum().into();
    found.moments = (first.sum().into(), second.sum().into());
    // A masked entry makes them infinite, and rows of one value need no search.
    found.plain &= found.moments.0 > f64::NEG_INFINITY && found.moments.1 > 0.0;
}

/// A range around the boundary that a normal row of these moments and this total would have.
#[inline(always)]
fn normal<S: Scalar>(found: &Candidate<S>, n: usize, target: &TailTarget) -> (S, S) {
    let count = n as f64;
    let mean = found.moments.0 / count;
    let variance = (found.moments.1 / count - mean * mean).max(0.0);
    let deviation = variance.sqrt();
    // Of a normal population the scores below mean + variance + q * deviation, in natural-log units, weigh the normal
    // probability of q, as a share of what the population weighs; the row weighs more or less than that.
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

/// A range around the boundary that a sample of the row has.
#[inline(always)]
unsafe fn sampled<L: Level, E: Element>(
    scores: &[E],
    weights: &[E::Scalar],
    found: &Candidate<E::Scalar>,
    target: &TailTarget,
) -> (E::Scalar, E::Scalar)
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
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
    let (least, most) = extent_within::<L, E>(&raw, lo, hi);
    let fine: [E::Scalar; PIVOTS] = if least < most {
        evenly(least.into(), most.into())
    } else {
        let from: f64 = if first == 0 { largest - target.reach } else { lo.into() };
        evenly(from, if first == PIVOTS { largest } else { hi.into() })
    };
    let fine_sums = below::<L, E, PIVOTS>(scores, weights, SAMPLE, &fine);
    let (second, _) = crossing(&fine, &fine_sums, limit);
    // The relative deviation of a sum of weights none of which is above the heaviest of them.
    let at = second.min(PIVOTS - 1);
    let heaviest: f64 = heaviest_below::<L, E>(scores, weights, SAMPLE, fine[at]).into();
    let share = heaviest / fine_sums[at].max(f64::MIN_POSITIVE);
    let doubt = 1.05 + 2.0 * share.sqrt();
    let mut curve = [(E::Scalar::LOWEST, 0.0); PIVOTS + 4];
    // Beyond the finer pivots the next coarse ones must do.
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

/// Where a curve reaches a value between the point before `at` and that at it, linearly; `other` where that cannot be said.
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

/// Pivots spaced evenly strictly inside a range, ascending.
#[inline(always)]
fn evenly<S: Scalar>(from: f64, to: f64) -> [S; PIVOTS] {
    let step = (to - from) / (PIVOTS + 1) as f64;
    std::array::from_fn(|i| S::nearest(from + step * (i + 1) as f64))
}

/// The largest weight of a score below a pivot; +0 if there is none.
#[inline(always)]
unsafe fn heaviest_below<L: Level, E: Element>(
    scores: *const E,
    weights: *const E::Scalar,
    len: usize,
    pivot: E::Scalar,
) -> E::Scalar {
    let pivot = Of::<L, E>::splat(pivot);
    let mut heaviest = Of::<L, E>::splat(E::Scalar::default());
    for at in (0..len).step_by(LANES) {
        let under = E::load::<L>(scores.add(at)).lt(pivot);
        heaviest = Of::<L, E>::load(weights.add(at)).keep(under).max(heaviest);
    }
    heaviest.largest()
}

/// Collects the scores of a range that holds the boundary: the given one, or one on its other side.
#[inline(always)]
unsafe fn enclose<L: Level, E: Element>(
    (scores, weights, len): (&[E], &[E::Scalar], usize),
    mut range: (E::Scalar, E::Scalar),
    target: &TailTarget,
    to: *mut E::Scalar,
    to_weights: *mut E::Scalar,
    found: &mut Candidate<E::Scalar>,
) where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let limit = target.share * found.total;
    let from = (scores.as_ptr(), weights.as_ptr(), scores.len());
    let mut left = 2;
    loop {
        let within;
        (found.inside, found.below, within) = collect::<L, E>(from, range, to, to_weights);
        let side = if found.below > limit {
            (E::Scalar::LOWEST, range.0)
        } else if found.below + within <= limit {
            (range.1, E::Scalar::INFINITY)
        } else {
            return;
        };
        if left == 0 {
            return;
        }
        left -= 1;
        range = side;
        if left > 0 {
            // Not a normal row. What a sample says, or a short row itself, is cut to the side of the boundary.
            let (lo, hi) = if len > SAMPLED {
                sampled::<L, E>(&scores[..len], &weights[..len], found, target)
            } else {
                let largest: f64 = found.largest.into();
                let pivots: [E::Scalar; PIVOTS] = evenly(largest - target.reach, largest);
                let sums = below::<L, E, PIVOTS>(from.0, from.1, from.2, &pivots);
                crossing(&pivots, &sums, limit).1
            };
            let inner =
                (if lo > side.0 { lo } else { side.0 }, if hi < side.1 { hi } else { side.1 });
            if inner.0 < inner.1 {
                range = inner;
            }
        }
    }
}

/// The logarithm of a positive number to within .006.
#[inline(always)]
fn rough_ln(value: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = value.to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let fraction = f64::from_bits(bits & MANTISSA | 1f64.to_bits()) - 1.0;
    // log2(1 + f) is 0 and 1 at the ends, and in between about a parabola.
    (f64::from(exponent) + fraction * (1.3465 - 0.3465 * fraction)) * std::f64::consts::LN_2
}

/// The quantile of the standard normal law to within .003, of a probability below one half that is given by its logarithm;
/// 0 for larger ones (Abramowitz and Stegun 26.2.22).
#[inline(always)]
fn quantile(ln_share: f64) -> f64 {
    let t = (-2.0 * ln_share).max(2.0 * std::f64::consts::LN_2).sqrt();
    let above = t - (2.307_53 + t * 0.270_61) / (1.0 + t * (0.992_29 + t * 0.044_81));
    -above
}

/// The weight strictly below each pivot, roughly.
#[inline(always)]
unsafe fn below<L: Level, E: Element, const N: usize>(
    scores: *const E,
    weights: *const E::Scalar,
    len: usize,
    pivots: &[E::Scalar; N],
) -> [f64; N] {
    let mut sums = [Of::<L, E>::splat(E::Scalar::default()); N];
    let mut lanes = sums;
    for i in 0..N {
        lanes[i] = Of::<L, E>::splat(pivots[i]);
    }
    let mut at = 0;
    while at < len {
        let scores = E::load::<L>(scores.add(at));
        let weights = Of::<L, E>::load(weights.add(at));
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

/// How many pivots have at most `limit` below them, and the scores from the last of those up to the next.
#[inline(always)]
fn crossing<S: Scalar, const N: usize>(
    pivots: &[S; N],
    below: &[f64; N],
    limit: f64,
) -> (usize, (S, S)) {
    let first = below.iter().map(|&sum| usize::from(sum <= limit)).sum::<usize>();
    (first, around(pivots, first, (S::LOWEST, S::INFINITY)))
}

/// Collects the scores of a range and their weights; how many there are, and the weight below and inside, roughly.
#[inline(always)]
unsafe fn collect<L: Level, E: Element>(
    (scores, weights, len): (*const E, *const E::Scalar, usize),
    range: (E::Scalar, E::Scalar),
    to: *mut E::Scalar,
    to_weights: *mut E::Scalar,
) -> (usize, f64, f64) {
    // Nothing is written ahead of what has been read.
    let (lo, hi) = (Of::<L, E>::splat(range.0), Of::<L, E>::splat(range.1));
    let mut below = Of::<L, E>::splat(E::Scalar::default());
    let (mut mass, mut inside) = (below, 0);
    if len <= LANES * DIRECT {
        for at in (0..len).step_by(LANES) {
            let scores = E::load::<L>(scores.add(at));
            let weights = Of::<L, E>::load(weights.add(at));
            below = below.add_where(scores.lt(lo), weights);
            let within = scores.within(lo, hi);
            mass = mass.add_where(Of::<L, E>::mask(within), weights);
            scores.compress_store(within, to.add(inside));
            weights.compress_store(within, to_weights.add(inside));
            inside += within.count_ones() as usize;
        }
        return (inside, below.sum().into(), mass.sum().into());
    }
    for start in (0..len).step_by(LANES * MARKS) {
        // Marked first, collected group by group that has any: see `split`.
        let end = (start + LANES * MARKS).min(len);
        let (mut marks, mut marked) = ([0u16; MARKS], 0u64);
        for (g, at) in (start..end).step_by(LANES).enumerate() {
            let scores = E::load::<L>(scores.add(at));
            below = below.add_where(scores.lt(lo), Of::<L, E>::load(weights.add(at)));
            let within = scores.within(lo, hi);
            marks[g] = within;
            marked |= u64::from(within != 0) << g;
        }
        while marked != 0 {
            let g = marked.trailing_zeros() as usize;
            marked &= marked - 1;
            let at = start + g * LANES;
            let (scores, weights) =
                (E::load::<L>(scores.add(at)), Of::<L, E>::load(weights.add(at)));
            scores.compress_store(marks[g], to.add(inside));
            weights.compress_store(marks[g], to_weights.add(inside));
            mass = mass.add_where(Of::<L, E>::mask(marks[g]), weights);
            inside += marks[g].count_ones() as usize;
        }
    }
    (inside, below.sum().into(), mass.sum().into())
}

/// Shrinks a bracket in place, or finds that it holds one score only.
#[inline(always)]
unsafe fn narrow<L: Level, S: Scalar + Element<Scalar = S>>(
    scores: *mut S,
    weights: *mut S,
    found: &mut Candidate<S>,
    limit: f64,
    (scale, stubborn): (f64, bool),
) {
    let bottom = S::Lanes::<L>::splat(S::NEG_INFINITY);
    bottom.store(scores.add(found.inside));
    S::Lanes::<L>::splat(S::default()).store(weights.add(found.inside));
    let len = found.inside.next_multiple_of(LANES);
    let top = S::Lanes::<L>::splat(S::INFINITY);
    let (mut smallest, mut largest) = (top, bottom);
    let mut mass = S::Lanes::<L>::splat(S::default());
    for at in (0..len).step_by(LANES) {
        let scores = S::Lanes::<L>::load(scores.add(at));
        largest = scores.max(largest);
        smallest = scores.select(scores.gt(bottom), top).min(smallest);
        mass = mass.add(S::Lanes::<L>::load(weights.add(at)));
    }
    let (smallest, largest) = (smallest.smallest(), largest.largest());
    if smallest == largest {
        found.edge = Some(Edge { score: largest, weight: *weights, ties: found.inside });
        return;
    }
    let mass: f64 = mass.sum().into();
    let share = (limit - found.below) / mass;
    let (least, most): (f64, f64) = (smallest.into(), largest.into());
    let pivots = if stubborn {
        // Values crowd somewhere; the floats themselves do not.
        ranks_between(smallest, largest)
    } else if (most - least) * scale > GUESSABLE_SPAN {
        evenly(least, most)
    } else {
        values_around(smallest, largest, share)
    };
    let sums = below::<L, S, PIVOTS>(scores, weights, len, &pivots);
    let (first, range) = crossing(&pivots, &sums, limit - found.below);
    if first > 0 {
        found.below += sums[first - 1];
    }
    found.inside = collect::<L, S>((scores, weights, len), range, scores, weights).0;
}

/// The largest of a few scores whose strictly smaller ones weigh at most `room`, roughly, comparing all pairs; `None` if
/// there is none.
#[inline(always)]
unsafe fn candidate<L: Level, S: Scalar>(
    scores: *mut S,
    weights: *mut S,
    len: usize,
    room: S,
) -> Option<Edge<S>> {
    let bottom = S::Lanes::<L>::splat(S::NEG_INFINITY);
    bottom.store(scores.add(len));
    bottom.store(scores.add(len + LANES));
    let room = S::Lanes::<L>::splat(room);
    let zero = S::Lanes::<L>::splat(S::default());
    let one = S::Lanes::<L>::load(scores);
    let mut below = zero;
    let mut best = bottom;
    if len <= LANES {
        for j in 0..len {
            let (score, weight) = (*scores.add(j), *weights.add(j));
            below =
                below.add_where(one.gt(S::Lanes::<L>::splat(score)), S::Lanes::<L>::splat(weight));
        }
    } else {
        let other = S::Lanes::<L>::load(scores.add(LANES));
        let mut more = zero;
        for j in 0..len {
            let score = S::Lanes::<L>::splat(*scores.add(j));
            let weight = S::Lanes::<L>::splat(*weights.add(j));
            below = below.add_where(one.gt(score), weight);
            more = more.add_where(other.gt(score), weight);
        }
        best = other.select(room.ge(more), bottom);
    }
    let best = one.select(room.ge(below), bottom).max(best).largest();
    let edge = S::Lanes::<L>::splat(best);
    let mut equal = u32::from(S::Lanes::<L>::number(one.eq(edge)));
    if len > LANES {
        let more = S::Lanes::<L>::number(S::Lanes::<L>::load(scores.add(LANES)).eq(edge));
        equal |= u32::from(more) << LANES;
    }
    (best > S::NEG_INFINITY).then(|| Edge {
        score: best,
        weight: *weights.add(equal.trailing_zeros() as usize),
        ties: equal.count_ones() as usize,
    })
}

/// What [`sum_and_emit`] summed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct KeptSums {
    /// Weight of the scores below the edge.
    pub(crate) below: f64,
    /// Weight of the scores at the edge and above.
    pub(crate) above: f64,
    /// How many are at the edge or above, which is how many positions were listed.
    pub(crate) kept: usize,
}

/// Sums a row on both sides of an edge and lists, in order, the positions of the scores at the edge and above.
///
/// # Safety
/// The caller vouches for the level, for room for all positions and sixteen more, and that a list has as many positions
/// as there are scores.
#[inline(always)]
pub(super) unsafe fn sum_and_emit<L: Level, E: Element>(
    scores: &[E],
    weights: &[E::Scalar],
    edge: E::Scalar,
    positions: Positions<'_>,
    to: *mut u32,
) -> KeptSums {
    assert_eq!(scores.len(), weights.len());
    let edge = Of::<L, E>::splat(edge);
    let (mut below, mut above, mut kept) = (Sum::new(), Sum::new(), 0usize);
    let blocks = scores.chunks(LANES * DEPTH).zip(weights.chunks(LANES * DEPTH));
    for (b, (scores, weights)) in blocks.enumerate() {
        let groups = scores.chunks_exact(LANES).zip(weights.chunks_exact(LANES));
        for (g, (scores, weights)) in groups.enumerate() {
            let scores = E::load::<L>(scores.as_ptr());
            let weights = Of::<L, E>::load(weights.as_ptr());
            let over = scores.ge(edge);
            below.add_where(scores.lt(edge), weights);
            above.add_where(over, weights);
            let over = Of::<L, E>::bits(over);
            positions.compress::<L>((b * DEPTH + g) * LANES, over, to.add(kept));
            kept += over.count_ones() as usize;
        }
        below.flush();
        above.flush();
    }
    KeptSums { below: below.total(), above: above.total(), kept }
}

/// What [`sum_around_ties`] summed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TieSums {
    /// Weight of the scores below a score.
    pub(crate) below: f64,
    /// How many there are, masked ones and padding included.
    pub(crate) count_below: usize,
    /// Weight of the scores above it.
    pub(crate) above: f64,
    /// How many there are.
    pub(crate) count_above: usize,
}

/// Sums a row on both sides of the scores that equal one.
#[inline(always)]
pub(super) unsafe fn sum_around_ties<L: Level, E: Element>(
    scores: &[E],
    weights: &[E::Scalar],
    score: E::Scalar,
) -> TieSums {
    assert_eq!(scores.len(), weights.len());
    let score = Of::<L, E>::splat(score);
    let (mut below, mut above) = (Sum::new(), Sum::new());
    let (mut count_below, mut count_above) = (0usize, 0usize);
    let blocks = scores.chunks(LANES * DEPTH).zip(weights.chunks(LANES * DEPTH));
    for (scores, weights) in blocks {
        for (scores, weights) in scores.chunks_exact(LANES).zip(weights.chunks_exact(LANES)) {
            let scores = E::load::<L>(scores.as_ptr());
            let weights = Of::<L, E>::load(weights.as_ptr());
            let (under, over) = (scores.lt(score), scores.gt(score));
            below.add_where(under, weights);
            above.add_where(over, weights);
            count_below += Of::<L, E>::number(under).count_ones() as usize;
            count_above += Of::<L, E>::number(over).count_ones() as usize;
        }
        below.flush();
        above.flush();
    }
    TieSums { below: below.total(), count_below, above: above.total(), count_above }
}
