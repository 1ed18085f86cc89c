//! Boundaries of several short rows at a time.
//!
//! Short rows in sequence would wait for latencies: every step needs the result of the one before. So each step is
//! taken for all rows of a small batch before the next, and the waits overlap. The steps up to the candidate for the
//! boundary are rough; the sums behind a decision are taken in the order of the row.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for as many scores and weights
//! behind pointers as it is told, in whole groups, with room for two groups more where it writes.

use super::candidates::{
    Candidate, Edge, GUESSABLE_SPAN, PIVOTS, RANKED, TailTarget, ranks_between, values_around,
};
use super::guess::{below, crossing, evenly, normal, sampled};
use super::partition::Prefetch;
use super::scan::{PaddedSurvey, Scan};
use crate::kernels::isa::{Element, LANES, Lanes, LanesOf, Level, Scalar};
use crate::kernels::simd::{Pass, Simd};
use crate::kernels::weights::{WeightFn, WeightFnOf};

/// Most rows per batch.
pub(crate) const BATCH: usize = 8;
/// Rounds of narrowing before a row is left to the general search.
const ROUNDS: usize = 6;
/// Groups collected without branches: with so few, skipping some costs more.
const DIRECT: usize = 16;
/// Groups marked at a time.
const MARKS: usize = 64;
/// Row length above which a row that is not normal is judged by a sample.
const SAMPLED: usize = 1024;

/// Scratch for a batch: for each row `stride` scores and weights, and as many for its bracket.
#[derive(Debug)]
pub(crate) struct BatchScratch<'a, E: Element> {
    pub(crate) stride: usize,
    pub(crate) scores: &'a mut [E],
    pub(crate) weights: &'a mut [E::Scalar],
    pub(crate) inside: &'a mut [E::Scalar],
    pub(crate) inside_weights: &'a mut [E::Scalar],
}

/// Returns a row in whole groups: in place if it fills them, else its padded copy.
#[inline(always)]
fn whole_groups<'a, E: Element>(row: &'a [E], copy: &'a [E]) -> &'a [E] {
    if row.len().is_multiple_of(LANES) { row } else { &copy[..row.len().next_multiple_of(LANES)] }
}

impl<E: Element> BatchScratch<'_, E> {
    /// Returns the scores and weights of a row in whole groups; the scores are in place if they fill such groups.
    pub(crate) fn row<'b>(&'b self, at: usize, row: &'b [E]) -> (&'b [E], &'b [E::Scalar]) {
        let range = at * self.stride..at * self.stride + row.len().next_multiple_of(LANES);
        (whole_groups(row, &self.scores[range.start..]), &self.weights[range])
    }
}

struct FindCandidates<'a, 'b, E: Element, M> {
    rows: &'a [&'a [E]],
    target: &'a TailTarget,
    weight_fn: M,
    room: &'a mut BatchScratch<'b, E>,
}

impl<E: Element, M: WeightFnOf<E::Scalar>> Pass<[Candidate<E::Scalar>; BATCH]>
    for FindCandidates<'_, '_, E, M>
{
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> [Candidate<E::Scalar>; BATCH] {
        let FindCandidates { rows, target, weight_fn, room } = self;
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
        // The next batch, if rows are adjacent in memory.
        let after = rows.iter().map(|row| size_of_val(*row)).sum::<usize>();
        // Every row has `stride` entries in each buffer, at least two groups more than its scores.
        for (r, row) in rows.iter().enumerate() {
            let seen = if row.len().is_multiple_of(LANES) {
                Scan::<E, false>::plain(row).run::<L>().0
            } else {
                let padded = row.len().next_multiple_of(LANES);
                let to = &mut room.scores[r * stride..][..padded];
                PaddedSurvey { from: Some(row), len: row.len(), to }.run::<L>()
            };
            let finite =
                seen.largest > E::Scalar::NEG_INFINITY && seen.largest < E::Scalar::INFINITY;
            (found[r].largest, found[r].plain) = (seen.largest, finite && !seen.nan);
        }
        let next = |row: &[E]| Prefetch::new(row.as_ptr().wrapping_byte_add(after));
        for (r, row) in rows.iter().enumerate() {
            let padded = row.len().next_multiple_of(LANES);
            let scores = whole_groups(row, &room.scores[r * stride..]);
            let out = &mut room.weights[r * stride..][..padded];
            let whole = row.len() / LANES;
            let weight_fn = weight_fn.of(found[r].largest);
            weigh::<L, E, _>(scores, whole, weight_fn, next(row), out, &mut found[r]);
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
            let from = (scores, weights, row.len());
            enclose::<L, E>(from, range, target, next(row), to, to_weights, here);
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
}

impl Simd {
    /// Copies, weighs and searches a few short rows, up to a candidate for the worst score kept.
    pub(crate) fn find_candidate<E: Element, M: WeightFnOf<E::Scalar>>(
        self,
        rows: &[&[E]],
        target: &TailTarget,
        weight_fn: M,
        room: &mut BatchScratch<'_, E>,
    ) -> [Candidate<E::Scalar>; BATCH] {
        self.run(FindCandidates { rows, target, weight_fn, room })
    }
}

/// Writes the weights, and returns rough values of their sum and of the moments of the first `whole` groups.
#[inline(always)]
unsafe fn weigh<L: Level, E: Element, W: WeightFn<E::Scalar>>(
    scores: &[E],
    whole: usize,
    weight_fn: W,
    prefetch: Prefetch,
    to: &mut [E::Scalar],
    found: &mut Candidate<E::Scalar>,
) {
    let shift = LanesOf::<L, E>::splat(found.largest);
    let zero = LanesOf::<L, E>::splat(E::Scalar::default());
    let (mut sum, mut first, mut second) = (zero, zero, zero);
    let groups = scores.chunks_exact(LANES).zip(to.chunks_exact_mut(LANES));
    for (g, (group, out)) in groups.enumerate() {
        // The first half; the second while scores are collected.
        prefetch.fetch::<L, E>(g * LANES / 2);
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

/// Collects the scores of a range that holds the boundary: the given range, or one on its other side.
#[inline(always)]
unsafe fn enclose<L: Level, E: Element>(
    (scores, weights, len): (&[E], &[E::Scalar], usize),
    mut range: (E::Scalar, E::Scalar),
    target: &TailTarget,
    prefetch: Prefetch,
    to: *mut E::Scalar,
    to_weights: *mut E::Scalar,
    found: &mut Candidate<E::Scalar>,
) {
    let limit = target.share * found.total;
    let from = (scores.as_ptr(), weights.as_ptr(), scores.len());
    let mut left = 2;
    loop {
        let within;
        (found.inside, found.below, within) =
            collect::<L, E>(from, range, prefetch.from::<E>(scores.len() / 2), to, to_weights);
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
            // Not a normal row. The range of a sample, or of a short row itself, is cut to the side of the boundary.
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

/// Collects the scores of a range and their weights. Returns their number, and rough weights below and inside.
#[inline(always)]
unsafe fn collect<L: Level, E: Element>(
    (scores, weights, len): (*const E, *const E::Scalar, usize),
    range: (E::Scalar, E::Scalar),
    prefetch: Prefetch,
    to: *mut E::Scalar,
    to_weights: *mut E::Scalar,
) -> (usize, f64, f64) {
    // Writes never overtake reads.
    let (lo, hi) = (LanesOf::<L, E>::splat(range.0), LanesOf::<L, E>::splat(range.1));
    let mut below = LanesOf::<L, E>::splat(E::Scalar::default());
    let (mut mass, mut inside) = (below, 0);
    if len <= LANES * DIRECT {
        for at in (0..len).step_by(LANES) {
            prefetch.fetch::<L, E>(at / 2);
            let scores = E::load::<L>(scores.add(at));
            let weights = LanesOf::<L, E>::load(weights.add(at));
            below = below.add_where(scores.lt(lo), weights);
            let within = scores.within(lo, hi);
            mass = mass.add_where(LanesOf::<L, E>::mask(within), weights);
            scores.compress_store(within, to.add(inside));
            weights.compress_store(within, to_weights.add(inside));
            inside += within.count_ones() as usize;
        }
        return (inside, below.sum().into(), mass.sum().into());
    }
    for start in (0..len).step_by(LANES * MARKS) {
        // Marked first, collected group by group that has any: see `Split`.
        let end = (start + LANES * MARKS).min(len);
        let (mut marks, mut marked) = ([0u16; MARKS], 0u64);
        for (g, at) in (start..end).step_by(LANES).enumerate() {
            prefetch.fetch::<L, E>(at / 2);
            let scores = E::load::<L>(scores.add(at));
            below = below.add_where(scores.lt(lo), LanesOf::<L, E>::load(weights.add(at)));
            marks[g] = scores.within(lo, hi);
        }
        for (g, mark) in marks.iter().enumerate() {
            marked |= u64::from(*mark != 0) << g;
        }
        while marked != 0 {
            let g = marked.trailing_zeros() as usize;
            marked &= marked - 1;
            let at = start + g * LANES;
            let (scores, weights) =
                (E::load::<L>(scores.add(at)), LanesOf::<L, E>::load(weights.add(at)));
            scores.compress_store(marks[g], to.add(inside));
            weights.compress_store(marks[g], to_weights.add(inside));
            mass = mass.add_where(LanesOf::<L, E>::mask(marks[g]), weights);
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
        // Values may cluster; the floats themselves do not.
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
    let nothing = Prefetch::new(scores);
    found.inside = collect::<L, S>((scores, weights, len), range, nothing, scores, weights).0;
}

/// Returns the largest of a few scores whose strictly smaller ones weigh at most `room`, roughly, by comparing all
/// pairs. `None` if there is none.
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
