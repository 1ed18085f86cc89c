//! Passes over several short rows at a time.
//!
//! One short row after another would wait for latencies: every step needs the result of the one before. So each step is
//! taken for all rows of a small batch before the next, and the waits overlap. The steps up to the candidate for the
//! boundary only show the way; [`settle`] and [`flank`] sum what a decision ends with, in the order of the row.
//!
//! The `unsafe` functions here ask of their caller a CPU with the level's features, and of raw pointers what each says.

use super::lanes::{Element, LANES, Lanes, Level, Scalar};
use super::passes::{
    DEPTH, NEAR, PIVOTS, Positions, RANKED, Scaled, Shifted, Soon, Sum, Weigh, around,
    extent_within, look, ranks_between, sample, survey, values_around,
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
/// Rows longer than this are judged by a sample, of so many keys, where they are not normal.
const SAMPLED: usize = 1024;
const SAMPLE: usize = 256;

type Of<L, E> = <<E as Element>::Scalar as Scalar>::Lanes<L>;

/// The law of a row whose largest key is known.
pub(crate) trait LawOf<S: Scalar>: Copy {
    type Law: Weigh<S>;
    fn of(self, largest: S) -> Self::Law;
}

/// [`Shifted`] by the largest key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unscaled;

/// [`Scaled`], from the largest key on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaledBy(pub(crate) f64);

impl<S: Scalar> LawOf<S> for Unscaled {
    type Law = Shifted<S>;
    #[inline(always)]
    fn of(self, largest: S) -> Shifted<S> {
        Shifted(largest)
    }
}

impl<S: Scalar> LawOf<S> for ScaledBy {
    type Law = Scaled;
    #[inline(always)]
    fn of(self, largest: S) -> Scaled {
        Scaled { shift: largest.into(), scale: self.0 }
    }
}

/// What is asked of a row, and where a normal row would have its boundary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Aim {
    /// About the share of its mass that may be dropped.
    pub(crate) share: f64,
    /// Its logarithm.
    pub(crate) ln_share: f64,
    /// Keys further below the largest than this weigh too little, all together, to matter.
    pub(crate) reach: f64,
    /// Multiplies keys to natural-log units.
    pub(crate) scale: f64,
}

/// A candidate for the worst key kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Edge<S> {
    pub(crate) key: S,
    /// Its weight.
    pub(crate) weight: S,
    /// How many keys equal it.
    pub(crate) ties: usize,
}

/// What [`approach`] found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Approach<S> {
    /// `None` if the row must be searched in general.
    pub(crate) edge: Option<Edge<S>>,
    largest: S,
    plain: bool,
    /// Sums of distances from the largest key, and of their squares, over whole groups.
    moments: (f64, f64),
    total: f64,
    below: f64,
    inside: usize,
}

/// Scratch for a batch: for each row `stride` keys and weights, and as many for its bracket.
#[derive(Debug)]
pub(crate) struct Room<'a, E: Element> {
    pub(crate) stride: usize,
    pub(crate) keys: &'a mut [E],
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

impl<E: Element> Room<'_, E> {
    /// The keys and weights of a row in whole groups; the keys are where they were if they fill such.
    pub(crate) fn row<'b>(&'b self, at: usize, row: &'b [E]) -> (&'b [E], &'b [E::Scalar]) {
        let range = at * self.stride..at * self.stride + row.len().next_multiple_of(LANES);
        (whole_groups(row, &self.keys[range.start..]), &self.weights[range])
    }
}

/// Copies and weighs the rows, and finds where each budget ends, about.
///
/// # Safety
/// The CPU must have the level's features.
#[inline(always)]
pub(super) unsafe fn approach<L: Level, E: Element, M: LawOf<E::Scalar>>(
    rows: &[&[E]],
    aim: &Aim,
    law: M,
    room: &mut Room<'_, E>,
) -> [Approach<E::Scalar>; BATCH]
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let stride = room.stride;
    assert!(rows.len() <= BATCH && stride.is_multiple_of(LANES));
    assert!(rows.iter().all(|row| row.len() + RANKED <= stride));
    let all = stride * rows.len();
    assert!(room.keys.len() >= all && room.weights.len() >= all);
    assert!(room.inside.len() >= all && room.inside_weights.len() >= all);
    let mut found = [Approach {
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
    // SAFETY: the caller vouches for the level; every row has `stride` entries in each buffer, at least two groups more
    // than its keys.
    unsafe {
        for (r, row) in rows.iter().enumerate() {
            let seen = if row.len().is_multiple_of(LANES) {
                look::<L, E, false>(row, E::Scalar::default(), 1.0).0
            } else {
                let padded = row.len().next_multiple_of(LANES);
                survey::<L, E>(Some(row), row.len(), &mut room.keys[r * stride..][..padded])
            };
            let finite =
                seen.largest > E::Scalar::NEG_INFINITY && seen.largest < E::Scalar::INFINITY;
            (found[r].largest, found[r].plain) = (seen.largest, finite && !seen.nan);
        }
        let mut start = 0;
        for (r, row) in rows.iter().enumerate() {
            let padded = row.len().next_multiple_of(LANES);
            let keys = whole_groups(row, &room.keys[r * stride..]);
            let out = &mut room.weights[r * stride..][..padded];
            let whole = row.len() / LANES;
            // Positions of the rows before come first.
            let write = room.write.wrapping_add(start);
            start += row.len();
            let soon = Soon::new(row.as_ptr().wrapping_byte_add(after), write);
            weigh::<L, E, _>(keys, whole, law.of(found[r].largest), soon, out, &mut found[r]);
        }
        let mut ranges = [(E::Scalar::LOWEST, E::Scalar::INFINITY); BATCH];
        for (range, (row, here)) in ranges.iter_mut().zip(rows.iter().zip(&found)) {
            *range = normal(here, row.len() / LANES * LANES, aim);
        }
        for (r, row) in rows.iter().enumerate() {
            let padded = row.len().next_multiple_of(LANES);
            let here = &mut found[r];
            if !here.plain {
                continue;
            }
            let keys = whole_groups(row, &room.keys[r * stride..]);
            let weights = &room.weights[r * stride..][..padded];
            let to = room.inside[r * stride..].as_mut_ptr();
            let to_weights = room.inside_weights[r * stride..].as_mut_ptr();
            let range = ranges[r];
            enclose::<L, E>((keys, weights, row.len()), range, aim, to, to_weights, here);
        }
        for (r, row) in rows.iter().enumerate() {
            let here = &mut found[r];
            let limit = aim.share * here.total;
            let keys = room.inside[r * stride..][..row.len() + RANKED].as_mut_ptr();
            let weights = room.inside_weights[r * stride..][..row.len() + RANKED].as_mut_ptr();
            let (mut round, mut stubborn) = (0, false);
            while here.inside > RANKED && round < ROUNDS && here.edge.is_none() {
                let before = here.inside;
                narrow::<L, E::Scalar>(keys, weights, here, limit, (aim.scale, stubborn));
                stubborn = !stubborn && here.inside > before / 4;
                round += 1;
            }
            if here.inside == 0 || here.inside > RANKED || here.edge.is_some() {
                continue;
            }
            let room = E::Scalar::nearest(limit - here.below);
            here.edge = candidate::<L, E::Scalar>(keys, weights, here.inside, room);
        }
    }
    found
}

/// Writes the weights; their sum and the moments of the first `whole` groups, roughly.
#[inline(always)]
unsafe fn weigh<L: Level, E: Element, W: Weigh<E::Scalar>>(
    keys: &[E],
    whole: usize,
    law: W,
    soon: Soon,
    to: &mut [E::Scalar],
    found: &mut Approach<E::Scalar>,
) {
    // SAFETY: the caller vouches for the level; both are whole groups of the same number.
    unsafe {
        let shift = Of::<L, E>::splat(found.largest);
        let zero = Of::<L, E>::splat(E::Scalar::default());
        let (mut sum, mut first, mut second) = (zero, zero, zero);
        let groups = keys.chunks_exact(LANES).zip(to.chunks_exact_mut(LANES));
        for (g, (group, out)) in groups.enumerate() {
            soon.fetch::<L, E>(g * LANES);
            let keys = E::load::<L>(group.as_ptr());
            let weights = law.weigh(keys);
            weights.store(out.as_mut_ptr());
            sum = sum.add(weights);
            if g < whole {
                let distance = keys.sub(shift);
                first = first.add(distance);
                second = distance.mul_add(distance, second);
            }
        }
        found.total = sum.sum().into();
        found.moments = (first.sum().into(), second.sum().into());
        // A masked entry makes them infinite, and rows of one value need no search.
        found.plain &= found.moments.0 > f64::NEG_INFINITY && found.moments.1 > 0.0;
    }
}

/// A range around the boundary that a normal row of these moments and this total would have.
#[inline(always)]
fn normal<S: Scalar>(found: &Approach<S>, n: usize, aim: &Aim) -> (S, S) {
    let count = n as f64;
    let mean = found.moments.0 / count;
    let variance = (found.moments.1 / count - mean * mean).max(0.0);
    let deviation = variance.sqrt();
    // Of a normal population the keys below mean + variance + q * deviation, in natural-log units, weigh the normal
    // probability of q, as a share of what the population weighs; the row weighs more or less than that.
    let (mean, variance) = (aim.scale * mean, aim.scale * aim.scale * variance);
    let excess = rough_ln(found.total / count) - (mean + 0.5 * variance);
    let middle = mean + variance + aim.scale * deviation * quantile(aim.ln_share + excess);
    let width = WIDTH * aim.scale * deviation / count.sqrt();
    let largest: f64 = found.largest.into();
    (
        S::nearest(largest + (middle - width) / aim.scale),
        S::nearest(largest + (middle + width) / aim.scale),
    )
}

/// A range around the boundary that a sample of the row has.
#[inline(always)]
unsafe fn sampled<L: Level, E: Element>(
    keys: &[E],
    weights: &[E::Scalar],
    found: &Approach<E::Scalar>,
    aim: &Aim,
) -> (E::Scalar, E::Scalar)
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let mut raw = [E::MASKED; SAMPLE];
    let mut sample_weights = [E::Scalar::default(); SAMPLE];
    let stride = keys.len() / SAMPLE;
    sample(keys, stride, &mut raw);
    sample(weights, stride, &mut sample_weights);
    let (keys, weights) = (raw.as_ptr(), sample_weights.as_ptr());
    let limit = aim.share * found.total * (SAMPLE as f64 / (stride * SAMPLE) as f64);
    // SAFETY: the caller vouches for the level; the sample is whole groups.
    unsafe {
        let largest: f64 = found.largest.into();
        let coarse: [E::Scalar; PIVOTS] = evenly(largest - aim.reach, largest);
        let sums = below::<L, E, PIVOTS>(keys, weights, SAMPLE, &coarse);
        let (first, (lo, hi)) = crossing(&coarse, &sums, limit);
        let (least, most) = extent_within::<L, E>(&raw, lo, hi);
        let fine: [E::Scalar; PIVOTS] = if least < most {
            evenly(least.into(), most.into())
        } else {
            let from: f64 = if first == 0 { largest - aim.reach } else { lo.into() };
            evenly(from, if first == PIVOTS { largest } else { hi.into() })
        };
        let fine_sums = below::<L, E, PIVOTS>(keys, weights, SAMPLE, &fine);
        let (second, _) = crossing(&fine, &fine_sums, limit);
        // The relative deviation of a sum of weights none of which is above the heaviest of them.
        let at = second.min(PIVOTS - 1);
        let heaviest: f64 = heaviest_below::<L, E>(keys, weights, SAMPLE, fine[at]).into();
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

/// The largest weight of a key below a pivot; +0 if there is none.
#[inline(always)]
unsafe fn heaviest_below<L: Level, E: Element>(
    keys: *const E,
    weights: *const E::Scalar,
    len: usize,
    pivot: E::Scalar,
) -> E::Scalar {
    // SAFETY: the caller vouches for the level and for `len` keys and weights, whole groups.
    unsafe {
        let pivot = Of::<L, E>::splat(pivot);
        let mut heaviest = Of::<L, E>::splat(E::Scalar::default());
        for at in (0..len).step_by(LANES) {
            let under = E::load::<L>(keys.add(at)).lt(pivot);
            heaviest = Of::<L, E>::load(weights.add(at)).keep(under).max(heaviest);
        }
        heaviest.largest()
    }
}

/// Collects the keys of a range that holds the boundary: the given one, or one on its other side.
#[inline(always)]
unsafe fn enclose<L: Level, E: Element>(
    (keys, weights, len): (&[E], &[E::Scalar], usize),
    mut range: (E::Scalar, E::Scalar),
    aim: &Aim,
    to: *mut E::Scalar,
    to_weights: *mut E::Scalar,
    found: &mut Approach<E::Scalar>,
) where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let limit = aim.share * found.total;
    let from = (keys.as_ptr(), weights.as_ptr(), keys.len());
    let mut left = 2;
    // SAFETY: the caller vouches for the level, the pointers and the room.
    unsafe {
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
                    sampled::<L, E>(&keys[..len], &weights[..len], found, aim)
                } else {
                    let largest: f64 = found.largest.into();
                    let pivots: [E::Scalar; PIVOTS] = evenly(largest - aim.reach, largest);
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
    keys: *const E,
    weights: *const E::Scalar,
    len: usize,
    pivots: &[E::Scalar; N],
) -> [f64; N] {
    // SAFETY: the caller vouches for the level and for `len` keys and weights, whole groups.
    unsafe {
        let mut sums = [Of::<L, E>::splat(E::Scalar::default()); N];
        let mut lanes = sums;
        for i in 0..N {
            lanes[i] = Of::<L, E>::splat(pivots[i]);
        }
        let mut at = 0;
        while at < len {
            let keys = E::load::<L>(keys.add(at));
            let weights = Of::<L, E>::load(weights.add(at));
            for i in 0..N {
                sums[i] = sums[i].add_where(keys.lt(lanes[i]), weights);
            }
            at += LANES;
        }
        let mut below = [0.0; N];
        for i in 0..N {
            below[i] = sums[i].sum().into();
        }
        below
    }
}

/// How many pivots have at most `limit` below them, and the keys from the last of those up to the next.
#[inline(always)]
fn crossing<S: Scalar, const N: usize>(
    pivots: &[S; N],
    below: &[f64; N],
    limit: f64,
) -> (usize, (S, S)) {
    let first = below.iter().map(|&sum| usize::from(sum <= limit)).sum::<usize>();
    (first, around(pivots, first, (S::LOWEST, S::INFINITY)))
}

/// Collects the keys of a range and their weights; how many there are, and the weight below and inside, roughly.
#[inline(always)]
unsafe fn collect<L: Level, E: Element>(
    (keys, weights, len): (*const E, *const E::Scalar, usize),
    range: (E::Scalar, E::Scalar),
    to: *mut E::Scalar,
    to_weights: *mut E::Scalar,
) -> (usize, f64, f64) {
    // SAFETY: the caller vouches for the level, for `len` keys and weights (whole groups), and for room for as many and a
    // group more; nothing is written ahead of what has been read.
    unsafe {
        let (lo, hi) = (Of::<L, E>::splat(range.0), Of::<L, E>::splat(range.1));
        let mut below = Of::<L, E>::splat(E::Scalar::default());
        let (mut mass, mut inside) = (below, 0);
        if len <= LANES * DIRECT {
            for at in (0..len).step_by(LANES) {
                let keys = E::load::<L>(keys.add(at));
                let weights = Of::<L, E>::load(weights.add(at));
                below = below.add_where(keys.lt(lo), weights);
                let within = keys.within(lo, hi);
                mass = mass.add_where(Of::<L, E>::mask(within), weights);
                keys.compress_store(within, to.add(inside));
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
                let keys = E::load::<L>(keys.add(at));
                below = below.add_where(keys.lt(lo), Of::<L, E>::load(weights.add(at)));
                let within = keys.within(lo, hi);
                marks[g] = within;
                marked |= u64::from(within != 0) << g;
            }
            while marked != 0 {
                let g = marked.trailing_zeros() as usize;
                marked &= marked - 1;
                let at = start + g * LANES;
                let (keys, weights) =
                    (E::load::<L>(keys.add(at)), Of::<L, E>::load(weights.add(at)));
                keys.compress_store(marks[g], to.add(inside));
                weights.compress_store(marks[g], to_weights.add(inside));
                mass = mass.add_where(Of::<L, E>::mask(marks[g]), weights);
                inside += marks[g].count_ones() as usize;
            }
        }
        (inside, below.sum().into(), mass.sum().into())
    }
}

/// Shrinks a bracket in place, or finds that it holds one key only.
#[inline(always)]
unsafe fn narrow<L: Level, S: Scalar + Element<Scalar = S>>(
    keys: *mut S,
    weights: *mut S,
    found: &mut Approach<S>,
    limit: f64,
    (scale, stubborn): (f64, bool),
) {
    // SAFETY: the caller vouches for the level and for room for the bracket and two groups more.
    unsafe {
        let bottom = S::Lanes::<L>::splat(S::NEG_INFINITY);
        bottom.store(keys.add(found.inside));
        S::Lanes::<L>::splat(S::default()).store(weights.add(found.inside));
        let len = found.inside.next_multiple_of(LANES);
        let top = S::Lanes::<L>::splat(S::INFINITY);
        let (mut smallest, mut largest) = (top, bottom);
        let mut mass = S::Lanes::<L>::splat(S::default());
        for at in (0..len).step_by(LANES) {
            let keys = S::Lanes::<L>::load(keys.add(at));
            largest = keys.max(largest);
            smallest = keys.select(keys.gt(bottom), top).min(smallest);
            mass = mass.add(S::Lanes::<L>::load(weights.add(at)));
        }
        let (smallest, largest) = (smallest.smallest(), largest.largest());
        if smallest == largest {
            found.edge = Some(Edge { key: largest, weight: *weights, ties: found.inside });
            return;
        }
        let mass: f64 = mass.sum().into();
        let share = (limit - found.below) / mass;
        let (least, most): (f64, f64) = (smallest.into(), largest.into());
        let pivots = if stubborn {
            // Values crowd somewhere; the floats themselves do not.
            ranks_between(smallest, largest)
        } else if (most - least) * scale > NEAR {
            evenly(least, most)
        } else {
            values_around(smallest, largest, share)
        };
        let sums = below::<L, S, PIVOTS>(keys, weights, len, &pivots);
        let (first, range) = crossing(&pivots, &sums, limit - found.below);
        if first > 0 {
            found.below += sums[first - 1];
        }
        found.inside = collect::<L, S>((keys, weights, len), range, keys, weights).0;
    }
}

/// The largest of a few keys whose strictly smaller ones weigh at most `room`, roughly, comparing all pairs; `None` if
/// there is none.
#[inline(always)]
unsafe fn candidate<L: Level, S: Scalar>(
    keys: *mut S,
    weights: *mut S,
    len: usize,
    room: S,
) -> Option<Edge<S>> {
    // SAFETY: the caller vouches for the level, for `len` keys and weights and for room for two groups more.
    unsafe {
        let bottom = S::Lanes::<L>::splat(S::NEG_INFINITY);
        bottom.store(keys.add(len));
        bottom.store(keys.add(len + LANES));
        let room = S::Lanes::<L>::splat(room);
        let zero = S::Lanes::<L>::splat(S::default());
        let one = S::Lanes::<L>::load(keys);
        let mut below = zero;
        let mut best = bottom;
        if len <= LANES {
            for j in 0..len {
                let (key, weight) = (*keys.add(j), *weights.add(j));
                below = below
                    .add_where(one.gt(S::Lanes::<L>::splat(key)), S::Lanes::<L>::splat(weight));
            }
        } else {
            let other = S::Lanes::<L>::load(keys.add(LANES));
            let mut more = zero;
            for j in 0..len {
                let key = S::Lanes::<L>::splat(*keys.add(j));
                let weight = S::Lanes::<L>::splat(*weights.add(j));
                below = below.add_where(one.gt(key), weight);
                more = more.add_where(other.gt(key), weight);
            }
            best = other.select(room.ge(more), bottom);
        }
        let best = one.select(room.ge(below), bottom).max(best).largest();
        let edge = S::Lanes::<L>::splat(best);
        let mut equal = u32::from(S::Lanes::<L>::number(one.eq(edge)));
        if len > LANES {
            let more = S::Lanes::<L>::number(S::Lanes::<L>::load(keys.add(LANES)).eq(edge));
            equal |= u32::from(more) << LANES;
        }
        (best > S::NEG_INFINITY).then(|| Edge {
            key: best,
            weight: *weights.add(equal.trailing_zeros() as usize),
            ties: equal.count_ones() as usize,
        })
    }
}

/// What [`settle`] summed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Settled {
    /// Weight of the keys below the edge.
    pub(crate) below: f64,
    /// Weight of the keys at the edge and above.
    pub(crate) above: f64,
    /// How many are at the edge or above, which is how many positions were listed.
    pub(crate) kept: usize,
}

/// Sums a row on both sides of an edge and lists, in order, the positions of the keys at the edge and above.
///
/// # Safety
/// The caller vouches for the level, for room for all positions and sixteen more, and that a list has as many positions
/// as there are keys.
#[inline(always)]
pub(super) unsafe fn settle<L: Level, E: Element>(
    keys: &[E],
    weights: &[E::Scalar],
    edge: E::Scalar,
    positions: Positions<'_>,
    to: *mut u32,
) -> Settled {
    assert_eq!(keys.len(), weights.len());
    // SAFETY: both are whole groups of the same number; the caller vouches for the rest.
    unsafe {
        let edge = Of::<L, E>::splat(edge);
        let (mut below, mut above, mut kept) = (Sum::new(), Sum::new(), 0usize);
        let blocks = keys.chunks(LANES * DEPTH).zip(weights.chunks(LANES * DEPTH));
        for (b, (keys, weights)) in blocks.enumerate() {
            let groups = keys.chunks_exact(LANES).zip(weights.chunks_exact(LANES));
            for (g, (keys, weights)) in groups.enumerate() {
                let keys = E::load::<L>(keys.as_ptr());
                let weights = Of::<L, E>::load(weights.as_ptr());
                let over = keys.ge(edge);
                below.add_where(keys.lt(edge), weights);
                above.add_where(over, weights);
                let over = Of::<L, E>::bits(over);
                positions.compress::<L>((b * DEPTH + g) * LANES, over, to.add(kept));
                kept += over.count_ones() as usize;
            }
            below.flush();
            above.flush();
        }
        Settled { below: below.total(), above: above.total(), kept }
    }
}

/// What [`flank`] summed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Flanks {
    /// Weight of the keys below a key.
    pub(crate) below: f64,
    /// How many there are, masked ones and padding included.
    pub(crate) count_below: usize,
    /// Weight of the keys above it.
    pub(crate) above: f64,
    /// How many there are.
    pub(crate) count_above: usize,
}

/// Sums a row on both sides of the keys that equal one.
#[inline(always)]
pub(super) unsafe fn flank<L: Level, E: Element>(
    keys: &[E],
    weights: &[E::Scalar],
    key: E::Scalar,
) -> Flanks {
    assert_eq!(keys.len(), weights.len());
    // SAFETY: both are whole groups of the same number; the caller vouches for the level.
    unsafe {
        let key = Of::<L, E>::splat(key);
        let (mut below, mut above) = (Sum::new(), Sum::new());
        let (mut count_below, mut count_above) = (0usize, 0usize);
        let blocks = keys.chunks(LANES * DEPTH).zip(weights.chunks(LANES * DEPTH));
        for (keys, weights) in blocks {
            for (keys, weights) in keys.chunks_exact(LANES).zip(weights.chunks_exact(LANES)) {
                let keys = E::load::<L>(keys.as_ptr());
                let weights = Of::<L, E>::load(weights.as_ptr());
                let (under, over) = (keys.lt(key), keys.gt(key));
                below.add_where(under, weights);
                above.add_where(over, weights);
                count_below += Of::<L, E>::number(under).count_ones() as usize;
                count_above += Of::<L, E>::number(over).count_ones() as usize;
            }
            below.flush();
            above.flush();
        }
        Flanks { below: below.total(), count_below, above: above.total(), count_above }
    }
}
