//! The smallest certified set of one row, found without sorting it.
//!
//! The boundary between kept and dropped keys is enclosed in a bracket `[lo, hi)` of key values: dropping everything below
//! `lo` is within the budget, dropping everything below `hi` is not. A sample proposes the first bracket, one pass
//! over the row sums both sides of it and collects what lies inside, eight pivots a round shrink it, and the last few
//! keys are sorted. Every sum that a decision ends with is a direct sum of weights, never a difference.
//!
//! The passes see a row in chunks with fixed edges whose sums meet in f64 in order, so it makes no difference to the
//! bits whether one thread walks the chunks or many share them.

use rayon::prelude::*;

use crate::kernels::{
    Bracket, Element, LANES, PIVOTS, PivotSums, Scalar, Scaled, Shifted, Sides, Simd, Stored, Weigh,
};
use crate::mass::{self, CHUNK, Compensated, Slack, Split};
use crate::order;

/// Rows up to this length are their own first bracket.
const SHORT: usize = 2048;
/// Keys that propose the first bracket of a longer row.
const SAMPLE: usize = 1024;
/// Brackets up to this length are sorted.
const RESOLVE: usize = 48;

/// What a set must satisfy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) eps: f64,
    pub(crate) slack: Slack,
    /// At least this many keys, forced ones included.
    pub(crate) min_keep: usize,
    /// With this many keys a set is accepted whatever it loses.
    pub(crate) max_keep: usize,
    pub(crate) aim: Aim,
    /// Whether equal keys have exactly equal real weights, so that a row of equal keys is decided by integers.
    pub(crate) exact_ties: bool,
}

/// Which end of the interval for the tail mass decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Aim {
    /// The upper end: the set found is certified.
    Certify,
    /// The lower end: no smaller set than the one found can hold.
    Refute,
}

impl Rule {
    pub(crate) fn accepts(&self, split: &Split) -> bool {
        if split.kept < self.min_keep {
            return false;
        }
        split.kept >= self.max_keep
            || match self.aim {
                Aim::Certify => split.upper(self.slack.select, self.slack.flush) <= self.eps,
                Aim::Refute => !self.refutes(split),
            }
    }

    /// Whether the set provably loses more than the budget.
    pub(crate) fn refutes(&self, split: &Split) -> bool {
        split.lower(self.slack.certify, self.slack.flush) > self.eps
    }
}

/// A law of weights that can also say where in the row a depth below the largest weight lies.
pub(crate) trait Law<S: Scalar>: Weigh<S> {
    /// The key whose weight is `e^-depth` times the largest.
    fn key_at(&self, largest: S, depth: f64) -> S;
}

impl<S: Scalar> Law<S> for Shifted<S> {
    fn key_at(&self, _largest: S, depth: f64) -> S {
        S::nearest(self.0.into() - depth)
    }
}

impl<S: Scalar> Law<S> for Scaled {
    fn key_at(&self, _largest: S, depth: f64) -> S {
        S::nearest(self.shift - depth / self.scale)
    }
}

impl<S: Scalar> Law<S> for Stored {
    fn key_at(&self, largest: S, depth: f64) -> S {
        S::nearest(largest.into() * (-depth).exp())
    }
}

/// The keys that compete for a place, padded with masked entries, and what is kept beside them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field<'a, E: Element> {
    pub(crate) simd: Simd,
    pub(crate) keys: &'a [E],
    /// Unmasked keys among them.
    pub(crate) live: usize,
    pub(crate) largest: E::Scalar,
    /// Weight and number of the keys that are kept in any case.
    pub(crate) forced: (f64, usize),
    /// Whether chunks are shared out over the pool that this runs on.
    pub(crate) shared: bool,
}

/// A set found, described by its worst member.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found<S> {
    pub(crate) split: Split,
    /// The worst key kept, with its position; `None` if only forced keys are kept.
    pub(crate) boundary: Option<(S, u32)>,
    /// Whether every smaller set is proven to lose more than the budget, or is excluded by `min_keep`.
    pub(crate) minimal: bool,
    /// Whether the decision was made in exact arithmetic, so that the budget itself bounds the tail mass.
    pub(crate) exact: bool,
}

/// What is known outside the bracket.
#[derive(Debug, Clone, Copy)]
struct Outside<S> {
    below: f64,
    dropped: usize,
    above: f64,
    kept: usize,
    /// Keys from here on lie above the bracket.
    edge: S,
}

impl<S: Scalar> Outside<S> {
    /// The worst member of a set that keeps nothing of the bracket, if it keeps any competing key.
    fn boundary(&self) -> Option<(S, u32)> {
        (self.edge < S::INFINITY).then_some((self.edge, u32::MAX))
    }

    fn with(&self, tail: f64, dropped: usize, head: f64, kept: usize) -> Split {
        Split {
            tail: self.below + tail,
            dropped: self.dropped + dropped,
            head: self.above + head,
            kept: self.kept + kept,
        }
    }
}

/// Scratch of the search, reused from row to row.
#[derive(Debug, Default)]
pub(crate) struct Scratch<S> {
    bracket: Bracket<S>,
    entries: Vec<(S, u32)>,
    sorted: Vec<S>,
    weights: Vec<S>,
    heads: Vec<f64>,
}

impl<E: Element> Field<'_, E> {
    fn fold<R: Send>(
        &self,
        pass: impl Fn(&[E], u32) -> R + Sync + Send,
        mut combine: impl FnMut(R),
    ) {
        if self.shared {
            let parts: Vec<R> = self
                .keys
                .par_chunks(CHUNK)
                .enumerate()
                .map(|(c, chunk)| pass(chunk, (c * CHUNK) as u32))
                .collect();
            parts.into_iter().for_each(combine);
        } else {
            for (c, chunk) in self.keys.chunks(CHUNK).enumerate() {
                combine(pass(chunk, (c * CHUNK) as u32));
            }
        }
    }

    pub(crate) fn mass<W: Weigh<E::Scalar>>(&self, law: W) -> f64 {
        let mut total = 0.0;
        self.fold(|keys, _| self.simd.mass(keys, law), |part| total += part);
        total
    }

    fn pivot_sums<W: Weigh<E::Scalar>>(&self, law: W, pivots: &[E::Scalar; PIVOTS]) -> PivotSums {
        let mut total = PivotSums::default();
        self.fold(
            |keys, _| self.simd.pivot_sums(keys, law, pivots),
            |part| {
                for i in 0..PIVOTS {
                    total.below[i] += part.below[i];
                    total.at_least[i] += part.at_least[i];
                }
            },
        );
        total
    }

    fn split<W: Weigh<E::Scalar>>(
        &self,
        law: W,
        range: (E::Scalar, E::Scalar),
        to: &mut Bracket<E::Scalar>,
    ) -> Sides {
        to.clear();
        let mut total = Sides::default();
        let mut add = |part: Sides| {
            total.below += part.below;
            total.above += part.above;
            total.count_above += part.count_above;
            total.inside += part.inside;
        };
        if self.shared {
            let pass = |keys: &[E], first: u32| {
                let mut part = Bracket::default();
                part.reserve(keys.len());
                (self.simd.split(keys, first, law, range, &mut part), part)
            };
            self.fold(pass, |(sides, part): (Sides, Bracket<E::Scalar>)| {
                to.append(&part);
                add(sides);
            });
        } else {
            for (c, chunk) in self.keys.chunks(CHUNK).enumerate() {
                to.reserve(chunk.len());
                add(self.simd.split(chunk, (c * CHUNK) as u32, law, range, to));
            }
        }
        total
    }

    /// Finds the smallest set that the rule accepts.
    pub(crate) fn search<W: Law<E::Scalar>>(
        &self,
        law: W,
        rule: &Rule,
        scratch: &mut Scratch<E::Scalar>,
    ) -> Found<E::Scalar>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let everything = (E::Scalar::LOWEST, E::Scalar::INFINITY);
        let nothing_lost = self.live == 0 || (rule.eps == 0.0 && rule.max_keep >= self.all());
        if nothing_lost || rule.min_keep >= self.all() {
            let head = self.forced.0 + self.mass(law);
            let boundary = (self.live > 0).then_some((E::Scalar::LOWEST, u32::MAX));
            let split = Split { tail: 0.0, dropped: 0, head, kept: self.all() };
            return Found { split, boundary, minimal: true, exact: false };
        }
        let mut outside = self.enclose(law, rule, scratch);
        let mut by_rank = false;
        loop {
            let len = scratch.bracket.len();
            if len <= RESOLVE {
                break;
            }
            let (mut least, mut most) = (scratch.bracket.keys()[0], scratch.bracket.keys()[0]);
            for &key in scratch.bracket.keys() {
                least = if key < least { key } else { least };
                most = if key > most { key } else { most };
            }
            if least == most {
                match self.resolve_ties(law, rule, &outside, scratch) {
                    Some(found) => return found,
                    None => break,
                }
            }
            let pivots =
                if by_rank { ranks_between(least, most) } else { values_between(least, most) };
            let total = self.simd.mass(scratch.bracket.padded(), law);
            let sums = self.simd.pivot_sums(scratch.bracket.padded(), law, &pivots);
            let range = crossing(&pivots, everything, |i| {
                let head = (total - sums.below[i]).max(0.0);
                let kept = sums.at_least[i];
                rule.accepts(&outside.with(sums.below[i], len - kept, head, kept))
            });
            let sides = self.simd.narrow(&mut scratch.bracket, law, range);
            outside.below += sides.below;
            outside.dropped += len - sides.inside - sides.count_above;
            outside.above += sides.above;
            outside.kept += sides.count_above;
            if range.1 < E::Scalar::INFINITY {
                outside.edge = range.1;
            }
            // Values that are spread unevenly are not narrowed by evenly spaced pivots; ranks always are.
            by_rank = sides.inside > len / 4;
        }
        if let Some(found) = self.resolve(law, rule, &outside, scratch) {
            return found;
        }
        // Rounding put the boundary below the bracket after all: decide among all keys in one order.
        self.split(law, everything, &mut scratch.bracket);
        let outside = Outside {
            below: 0.0,
            dropped: 0,
            above: self.forced.0,
            kept: self.forced.1,
            edge: E::Scalar::INFINITY,
        };
        let all = Split { tail: 0.0, dropped: 0, head: self.forced.0, kept: self.all() };
        self.resolve(law, rule, &outside, scratch).unwrap_or(Found {
            split: all,
            boundary: Some((E::Scalar::LOWEST, u32::MAX)),
            minimal: false,
            exact: false,
        })
    }

    fn all(&self) -> usize {
        self.live + self.forced.1
    }

    /// Fills the bracket and sums what lies outside it.
    fn enclose<W: Law<E::Scalar>>(
        &self,
        law: W,
        rule: &Rule,
        scratch: &mut Scratch<E::Scalar>,
    ) -> Outside<E::Scalar>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let mut range = (E::Scalar::LOWEST, E::Scalar::INFINITY);
        let short = self.keys.len() <= SHORT;
        let mass = if short { 0.0 } else { self.mass(law) };
        if !short {
            range = self.guess(law, rule, mass, scratch);
        }
        let split_at = |below: f64, above: usize| Split {
            tail: below,
            dropped: self.live - above,
            head: self.forced.0 + (mass - below).max(0.0),
            kept: self.forced.1 + above,
        };
        for attempt in 0.. {
            let sides = self.split(law, range, &mut scratch.bracket);
            let outside = Outside {
                below: sides.below,
                dropped: self.live - sides.inside - sides.count_above,
                above: self.forced.0 + sides.above,
                kept: self.forced.1 + sides.count_above,
                edge: range.1,
            };
            if short || attempt == 2 {
                return outside;
            }
            let inside = self.simd.mass(scratch.bracket.padded(), law);
            let low = rule.accepts(&outside.with(0.0, 0, inside, sides.inside));
            let high = range.1 < E::Scalar::INFINITY
                && rule.accepts(&outside.with(inside, sides.inside, 0.0, 0));
            if low && !high {
                return outside;
            }
            // The sample missed: look at the whole side where the boundary must be.
            let (lowest, highest) =
                if low { (range.1, self.largest) } else { (self.deepest(law, rule), range.0) };
            range = if low { (range.1, E::Scalar::INFINITY) } else { (E::Scalar::LOWEST, range.0) };
            if attempt == 0 && lowest < highest {
                let pivots = values_between(lowest, highest);
                let sums = self.pivot_sums(law, &pivots);
                range = crossing(&pivots, range, |i| {
                    rule.accepts(&split_at(sums.below[i], sums.at_least[i]))
                });
            }
        }
        unreachable!("the third attempt returns")
    }

    /// A key that is certainly below the boundary where masses decide: keeping everything above it is enough.
    fn deepest<W: Law<E::Scalar>>(&self, law: W, rule: &Rule) -> E::Scalar {
        let n = self.all() as f64;
        let depth = (n / rule.eps.max(1e-300)).ln().clamp(1.0, 800.0) + 0.5;
        let key = law.key_at(self.largest, depth);
        if key > E::Scalar::LOWEST { key } else { E::Scalar::LOWEST }
    }

    /// A bracket proposed by a strided sample, whose tail sums are measured against the whole row's mass.
    fn guess<W: Law<E::Scalar>>(
        &self,
        law: W,
        rule: &Rule,
        mass: f64,
        scratch: &mut Scratch<E::Scalar>,
    ) -> (E::Scalar, E::Scalar)
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let everything = (E::Scalar::LOWEST, E::Scalar::INFINITY);
        let stride = self.keys.len() / SAMPLE;
        let sample = &mut scratch.sorted;
        sample.clear();
        sample.extend(
            self.keys.iter().skip(stride / 2).step_by(stride).take(SAMPLE).map(|key| key.widen()),
        );
        let factor = self.keys.len() as f64 / SAMPLE as f64;
        // What the rule would say if the sample's tail, made larger or smaller by its own uncertainty, were the row's.
        let accepts = |sums: &PivotSums, i: usize, sign: f64| {
            let seen = (SAMPLE - sums.at_least[i]) as f64;
            let doubt = 1.0 + 4.0 / (seen + 1.0).sqrt();
            let tail = sums.below[i] * factor * doubt.powf(sign);
            let kept = sums.at_least[i] as f64 * factor
                - sign * 4.0 * (sums.at_least[i] as f64 + 1.0).sqrt() * factor;
            #[allow(clippy::cast_sign_loss)] // clamped at 0
            let kept = (kept.max(0.0) as usize).min(self.live);
            rule.accepts(&Split {
                tail: tail.min(mass),
                dropped: self.live - kept,
                head: self.forced.0 + (mass - tail).max(0.0),
                kept: self.forced.1 + kept,
            })
        };
        let lowest = self.deepest(law, rule);
        if lowest.partial_cmp(&self.largest) != Some(std::cmp::Ordering::Less) {
            return everything;
        }
        let pivots = values_between(lowest, self.largest);
        let sums = self.simd.pivot_sums(sample, law, &pivots);
        let (lo, hi) = crossing(&pivots, (lowest, self.largest), |i| accepts(&sums, i, 0.0));
        let pivots = values_between(lo, hi);
        let sums = self.simd.pivot_sums(sample, law, &pivots);
        let low = crossing(&pivots, (lo, hi), |i| accepts(&sums, i, 1.0)).0;
        let high = crossing(&pivots, (lo, hi), |i| accepts(&sums, i, -1.0)).1;
        if low < high {
            (low, if high >= self.largest { E::Scalar::INFINITY } else { high })
        } else {
            everything
        }
    }

    /// All keys of the bracket are equal: only their number matters, the later positions are dropped. `None` if even all
    /// of them are too few.
    fn resolve_ties<W: Law<E::Scalar>>(
        &self,
        law: W,
        rule: &Rule,
        outside: &Outside<E::Scalar>,
        scratch: &mut Scratch<E::Scalar>,
    ) -> Option<Found<E::Scalar>>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let count = scratch.bracket.len();
        let key = scratch.bracket.keys()[0];
        let weight = self.weight(law, key);
        let at = |kept: usize| {
            let tail = weight * (count - kept) as f64;
            outside.with(tail, count - kept, weight * kept as f64, kept)
        };
        // The real row consists of equal weights: integers decide.
        let exact = outside.dropped == 0 && outside.kept == 0 && rule.exact_ties;
        let kept = if exact {
            let droppable = mass::equal_weights_droppable(count as u64, rule.eps) as usize;
            (count - droppable).max(rule.min_keep).max(1).min(rule.max_keep.max(1))
        } else {
            if !rule.accepts(&at(count)) {
                return None;
            }
            let (mut too_few, mut enough) = (0, count);
            if rule.accepts(&at(0)) {
                enough = 0;
            }
            while too_few + 1 < enough {
                let middle = usize::midpoint(too_few, enough);
                if rule.accepts(&at(middle)) {
                    enough = middle;
                } else {
                    too_few = middle;
                }
            }
            enough
        };
        let split = at(kept);
        let boundary = if kept > 0 {
            Some((key, scratch.bracket.positions()[kept - 1]))
        } else {
            outside.boundary()
        };
        let holds = mass::equal_weights_hold(kept as u64, count as u64, rule.eps);
        let minimal = if exact {
            holds
                && (kept <= rule.min_keep
                    || kept == 1
                    || !mass::equal_weights_hold(kept as u64 - 1, count as u64, rule.eps))
        } else {
            kept > 0 && (split.kept <= rule.min_keep || rule.refutes(&at(kept - 1)))
        };
        Some(Found { split, boundary, minimal, exact: exact && holds })
    }

    /// Sorts the bracket and drops the worst keys as long as the rule accepts what is left.
    fn resolve<W: Law<E::Scalar>>(
        &self,
        law: W,
        rule: &Rule,
        outside: &Outside<E::Scalar>,
        scratch: &mut Scratch<E::Scalar>,
    ) -> Option<Found<E::Scalar>>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let Scratch { bracket, entries, sorted, weights, heads } = scratch;
        let len = bracket.len();
        if len > 0
            && rule.exact_ties
            && outside.dropped == 0
            && outside.kept == 0
            && bracket.keys().iter().all(|key| *key == bracket.keys()[0])
        {
            return self.resolve_ties(law, rule, outside, scratch);
        }
        entries.clear();
        entries.extend(bracket.keys().iter().copied().zip(bracket.positions().iter().copied()));
        entries.sort_unstable_by(order::worst_first);
        sorted.clear();
        sorted.extend(entries.iter().map(|entry| entry.0));
        let padded = len.next_multiple_of(LANES);
        sorted.resize(padded, E::Scalar::NEG_INFINITY);
        weights.clear();
        weights.resize(padded, E::Scalar::default());
        self.simd.weights(sorted, law, weights);
        // heads[j]: the weight of the bracket's keys from j on, summed from the best downward.
        heads.clear();
        heads.resize(len + 1, 0.0);
        let mut head = Compensated::default();
        for j in (0..len).rev() {
            head.add(weights[j].into());
            heads[j] = head.value();
        }
        let mut tail = Compensated::default();
        let mut best: Option<(usize, Split)> = None;
        for j in 0..=len {
            let next = outside.with(tail.value(), j, heads[j], len - j);
            if !rule.accepts(&next) {
                // Accepting is monotone, so the next set down decides minimality, and the search is over.
                let (at, split) = best?;
                let boundary = entries.get(at).copied().or(outside.boundary());
                let minimal = split.kept <= rule.min_keep || rule.refutes(&next);
                return Some(Found { split, boundary, minimal, exact: false });
            }
            best = Some((j, next));
            if j < len {
                tail.add(weights[j].into());
            }
        }
        // Everything in the bracket went: nothing is kept but what lies above it.
        let split = best?.1;
        let minimal = split.kept <= self.forced.1;
        Some(Found { split, boundary: outside.boundary(), minimal, exact: false })
    }

    fn weight<W: Weigh<E::Scalar>>(&self, law: W, key: E::Scalar) -> f64
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let mut weights = [E::Scalar::default(); LANES];
        self.simd.weights(&[key; LANES], law, &mut weights);
        weights[0].into()
    }
}

/// The last pivot at which the rule still accepts, and the first at which it no longer does.
fn crossing<S: Copy>(
    pivots: &[S; PIVOTS],
    outer: (S, S),
    accepts: impl Fn(usize) -> bool,
) -> (S, S) {
    let first = (0..PIVOTS).find(|&i| !accepts(i)).unwrap_or(PIVOTS);
    let lo = if first == 0 { outer.0 } else { pivots[first - 1] };
    let hi = if first == PIVOTS { outer.1 } else { pivots[first] };
    (lo, hi)
}

/// Pivots spaced evenly in value strictly inside a range, ascending.
fn values_between<S: Scalar>(least: S, most: S) -> [S; PIVOTS] {
    let (least, most): (f64, f64) = (least.into(), most.into());
    std::array::from_fn(|i| {
        let share = (i + 1) as f64 / (PIVOTS + 1) as f64;
        S::nearest(least * (1.0 - share) + most * share)
    })
}

/// Pivots spaced evenly among the floats of a range, ascending; the last lies above its lower end.
fn ranks_between<S: Scalar>(least: S, most: S) -> [S; PIVOTS] {
    let (least, most) = (i128::from(least.rank()), i128::from(most.rank()));
    std::array::from_fn(|i| {
        let step = ((most - least) * (i as i128 + 1) + PIVOTS as i128) / (PIVOTS as i128 + 1);
        S::from_rank((least + step) as i64)
    })
}
