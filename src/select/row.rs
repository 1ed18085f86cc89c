//! The smallest certified set of one row, found without sorting it.
//!
//! The boundary between kept and dropped keys is enclosed in a bracket `[lo, hi)` of key values: dropping everything below
//! `lo` is within the budget, dropping everything below `hi` is not. A sample, measured against a rough mass of the row,
//! proposes the first bracket (a short row is weighed whole instead), one pass over the row sums both sides of it and
//! collects what lies inside, eight pivots a round shrink it, and the last few keys are compared pair by pair. Sums
//! that only show the way may be rough; every sum that a decision ends with is a direct sum of weights, never a difference.
//!
//! The passes see a row in chunks with fixed edges whose sums meet in f64 in order, so it makes no difference to the
//! bits whether one thread walks the chunks or many share them.

use super::workspace::padded;
use crate::certified_sums::{self, CHUNK, ErrorBound, SplitSums};
use crate::error::Error;
use crate::kernels::{
    Bracket, Element, Exp, GUESSABLE_SPAN, Identity, LANES, PIVOTS, PartitionSums, PivotSums,
    Prefetch, RANKED, Scalar, ScaledExp, Simd, WeightFn, around, ranks_between, sample,
    values_around,
};
use crate::memory::check_memory;
use crate::order::Ordered;
use crate::threads;

/// Rows up to this length are weighed whole, once.
const SHORT: usize = 1024;
/// Keys that propose the first bracket of a longer row, at least and at most.
const SAMPLE: (usize, usize) = (256, 4096);
/// Rounds that narrow a bracket: an f64 has 64 bits, of which every third round at worst settles three.
const ROUNDS: usize = 96;
/// How often the search turns to the other side of a bracket.
const TURNS: usize = 3;
/// Scores that are so large, scaled, are not weighed roughly.
const FAR: f64 = 1e5;
/// Scales that f32 can multiply by what makes an exponent of a float.
const STEEP: f64 = 1e30;
/// A sample's estimate of the mass is used as it is if its own deviation is below this.
const TRUSTED: f64 = 0.09;
/// Below such a budget it matters how many keys were flushed.
pub(crate) const TINY_BUDGET: f64 = 1e-28;
/// By how much the rough mass of a row may be wrong, about.
const ROUGH: f64 = 0.05;

/// What a set must satisfy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Constraints {
    pub(crate) eps: f64,
    pub(crate) slack: ErrorBound,
    /// At least this many keys, forced ones included.
    pub(crate) min_keep: usize,
    /// With this many keys a set is accepted whatever it loses.
    pub(crate) max_keep: usize,
    pub(crate) decide_on: DecideOn,
    /// Whether equal keys have exactly equal real weights, so that a row of equal keys is decided by integers.
    pub(crate) exact_ties: bool,
}

/// Which end of the interval for the tail mass decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecideOn {
    /// The upper end: the set found is certified.
    Upper,
    /// The lower end: no smaller set than the one found can hold.
    Lower,
}

impl Constraints {
    pub(crate) fn accepts(&self, split: &SplitSums) -> bool {
        split.kept >= self.min_keep && (split.kept >= self.max_keep || self.affords(split))
    }

    /// Whether the mass alone allows the set.
    fn affords(&self, split: &SplitSums) -> bool {
        match self.decide_on {
            DecideOn::Upper => split.upper(self.slack.select, self.slack.flush) <= self.eps,
            DecideOn::Lower => !self.refutes(split),
        }
    }

    /// Whether the set provably loses more than the budget.
    pub(crate) fn refutes(&self, split: &SplitSums) -> bool {
        split.lower(self.slack.certify, self.slack.flush) > self.eps
    }

    /// About the largest tail that it affords of a row of a total mass.
    pub(crate) fn target(&self, total: f64) -> f64 {
        let slack = match self.decide_on {
            DecideOn::Upper => 1.0 + self.slack.select,
            DecideOn::Lower => 1.0 / (1.0 + self.slack.certify),
        };
        total * self.eps / (self.eps + slack * (1.0 - self.eps))
    }

    /// Whether decisions depend on numbers of keys, and not on masses alone.
    fn counts(&self, scores: usize) -> bool {
        self.min_keep > 1 || self.max_keep < scores || self.eps < TINY_BUDGET
    }
}

/// A law of weights that can also say where in the row a depth below the largest weight lies.
pub(crate) trait InvertibleWeightFn<S: Scalar>: WeightFn<S> {
    /// The key whose weight is `e^-depth` times the largest.
    fn score_at(&self, largest: S, depth: f64) -> S;
    /// The factor of an exponential law, for scores near enough to 0 that its mass can be told roughly.
    fn scale(&self) -> Option<f64>;
}

/// Whether keys around this one, which is finite, can be weighed roughly.
pub(crate) fn is_near(score: f64, scale: f64) -> bool {
    (score * scale).abs() < FAR && scale < STEEP
}

impl<S: Scalar> InvertibleWeightFn<S> for Exp<S> {
    fn score_at(&self, _largest: S, depth: f64) -> S {
        S::nearest(self.0.into() - depth)
    }
    fn scale(&self) -> Option<f64> {
        is_near(self.0.into(), 1.0).then_some(1.0)
    }
}

impl<S: Scalar> InvertibleWeightFn<S> for ScaledExp {
    fn score_at(&self, _largest: S, depth: f64) -> S {
        S::nearest(self.shift - depth / self.scale)
    }
    fn scale(&self) -> Option<f64> {
        is_near(self.shift, self.scale).then_some(self.scale)
    }
}

impl<S: Scalar> InvertibleWeightFn<S> for Identity {
    fn score_at(&self, largest: S, depth: f64) -> S {
        S::nearest(largest.into() * (-depth).exp())
    }
    fn scale(&self) -> Option<f64> {
        None
    }
}

/// The keys that compete for a place, padded with masked entries, and what is kept beside them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidates<'a, E: Element> {
    pub(crate) simd: Simd,
    pub(crate) scores: &'a [E],
    /// Unmasked keys among them.
    pub(crate) visible: usize,
    pub(crate) largest: E::Scalar,
    /// About what the keys weigh, the largest weighing 1, if that is known.
    pub(crate) rough: Option<f64>,
    /// No key is smaller.
    pub(crate) smallest: E::Scalar,
    /// What is worth fetching while this row is worked on.
    pub(crate) prefetch: Option<Prefetch>,
    /// Weight and number of the keys that are kept in any case.
    pub(crate) forced: (f64, usize),
    /// How many threads chunks are shared out over.
    pub(crate) threads: usize,
}

/// A set found, described by its worst member.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Boundary<S> {
    pub(crate) split: SplitSums,
    /// The worst key kept, with its position; `None` if only forced keys are kept.
    pub(crate) boundary: Option<(S, u32)>,
    /// Whether every smaller set is proven to lose more than the budget, or is excluded by `min_keep`.
    pub(crate) minimal: bool,
    /// Whether the decision was made in exact arithmetic, so that the budget itself bounds the tail mass.
    pub(crate) exact: bool,
}

/// What is known outside the bracket, and of it as a whole.
#[derive(Debug, Clone, Copy)]
struct Partition<S> {
    below: f64,
    dropped: usize,
    /// What the bracket weighs.
    within: f64,
    above: f64,
    kept: usize,
    /// Keys from here on lie above the bracket.
    edge: S,
}

impl<S: Scalar> Partition<S> {
    /// The worst member of a set that keeps nothing of the bracket, if it keeps any competing key.
    fn boundary(&self) -> Option<(S, u32)> {
        (self.edge < S::INFINITY).then_some((self.edge, u32::MAX))
    }

    /// Takes note of how a bracket of `len` keys was narrowed.
    fn narrow(&mut self, len: usize, sides: &PartitionSums, end: S) {
        self.below += sides.below;
        // Fewer than none only if another thread writes to the row meanwhile, which `Decide` finds out.
        self.dropped += len.saturating_sub(sides.inside + sides.count_above);
        self.within = sides.within;
        self.above += sides.above;
        self.kept += sides.count_above;
        if end < S::INFINITY {
            self.edge = end;
        }
    }

    fn total(&self) -> f64 {
        self.below + self.within + self.above
    }

    fn with(&self, tail: f64, dropped: usize, head: f64, kept: usize) -> SplitSums {
        SplitSums {
            tail: self.below + tail,
            dropped: self.dropped + dropped,
            head: self.above + head,
            kept: self.kept + kept,
        }
    }
}

/// The exact mass of a row, and of its keys below an edge.
#[derive(Debug, Clone, Copy)]
struct Known<S> {
    edge: S,
    below: f64,
    total: f64,
}

/// Scratch of the search, reused from row to row.
#[derive(Debug, Default)]
pub(crate) struct SearchScratch<S> {
    bracket: Bracket<S>,
    /// The keys that equal a candidate for the boundary.
    equal: Bracket<S>,
    /// Brackets of the parts of a row that is shared out.
    parts: Vec<Bracket<S>>,
    /// Keys and weights of a short row or a sample.
    scores: Vec<S>,
    weights: Vec<S>,
}

/// Asks for what a bracket of that many keys may grow to, twice as much each time: keys and weights, and for a moment the old
/// ones.
fn ask<S>(scores: usize, asked: &mut usize) -> Result<(), Error> {
    if scores <= *asked {
        return Ok(());
    }
    *asked = scores.saturating_mul(2);
    check_memory("scores", *asked, 3 * size_of::<S>())
}

impl<E: Element> Candidates<'_, E> {
    fn fold<R: Send>(&self, pass: impl Fn(&[E]) -> R + Sync + Send, mut combine: impl FnMut(R)) {
        if self.threads == 1 {
            self.scores.chunks(CHUNK).for_each(|chunk| combine(pass(chunk)));
        } else {
            let parts = threads::map(self.threads, self.scores.chunks(CHUNK), 1, pass);
            parts.into_iter().for_each(combine);
        }
    }

    /// What the keys weigh, to within a few per cent.
    fn rough_mass<W: InvertibleWeightFn<E::Scalar>>(&self, weight_fn: W) -> f64 {
        if let Some(mass) = self.rough {
            return mass;
        }
        let Some(scale) = weight_fn.scale() else { return self.mass(weight_fn) };
        let mut total = 0.0;
        let pass = |scores: &[E]| self.simd.rough(scores, self.largest, scale);
        self.fold(pass, |part| total += part);
        total
    }

    pub(crate) fn mass<W: WeightFn<E::Scalar>>(&self, weight_fn: W) -> f64 {
        let mut total = 0.0;
        self.fold(|scores| self.simd.mass(scores, weight_fn), |part| total += part);
        total
    }

    /// Sums both sides of a range of the row and collects the keys inside; they are not weighed yet.
    fn split<W: WeightFn<E::Scalar>>(
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
                ask::<E::Scalar>(part.len() + chunk.len(), &mut asked)?;
                part.reserve(chunk.len());
                Ok(self.simd.split(chunk, weight_fn, range, None, part))
            };
            scores.chunks(CHUNK).map(pass).collect()
        });
        let found = found.into_iter().collect::<Result<Vec<Vec<PartitionSums>>, Error>>()?;
        let all: usize = parts[..found.len()].iter().map(Bracket::len).sum();
        ask::<E::Scalar>(all, &mut 0)?;
        for (sides, part) in found.iter().zip(parts.iter()) {
            bracket.append(part);
            sides.iter().for_each(&mut add);
        }
        Ok(total)
    }

    /// Finds the smallest set that the rule accepts.
    ///
    /// # Errors
    /// [`Error::NoMemory`], where the boundary cannot be enclosed more closely than there is memory for.
    pub(crate) fn search<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        constraints: &Constraints,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Result<Boundary<E::Scalar>, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let nothing_lost =
            self.visible == 0 || (constraints.eps == 0.0 && constraints.max_keep >= self.all());
        if nothing_lost || constraints.min_keep >= self.all() {
            let head = self.forced.0 + self.mass(weight_fn);
            let boundary = (self.visible > 0).then_some((E::Scalar::LOWEST, u32::MAX));
            let split = SplitSums { tail: 0.0, dropped: 0, head, kept: self.all() };
            return Ok(Boundary { split, boundary, minimal: true, exact: false });
        }
        if self.smallest == self.largest && self.forced.1 == 0 {
            // One value: nothing to search for.
            let within = self.weight(weight_fn, self.largest) * self.visible as f64;
            let partition = Partition { within, ..self.nothing_outside() };
            if let Some(found) =
                self.resolve_ties(weight_fn, constraints, &partition, (self.largest, self.visible))
            {
                return Ok(found);
            }
        }
        let partition = self.enclose(weight_fn, constraints, scratch)?;
        if let Some(found) = self.descend(weight_fn, constraints, partition, scratch) {
            return Ok(found);
        }
        // Rounding put the boundary out of the bracket after all: the whole row is the bracket.
        let everything = (E::Scalar::LOWEST, E::Scalar::INFINITY);
        self.split(weight_fn, everything, scratch)?;
        let within = self.simd.weigh(&mut scratch.bracket, weight_fn);
        let partition = Partition { within, ..self.nothing_outside() };
        Ok(self.descend(weight_fn, constraints, partition, scratch).unwrap_or(Boundary {
            split: SplitSums { tail: 0.0, dropped: 0, head: self.forced.0, kept: self.all() },
            boundary: Some((E::Scalar::LOWEST, u32::MAX)),
            minimal: false,
            exact: false,
        }))
    }

    fn all(&self) -> usize {
        self.visible + self.forced.1
    }

    fn nothing_outside(&self) -> Partition<E::Scalar> {
        Partition {
            below: 0.0,
            dropped: 0,
            within: 0.0,
            above: self.forced.0,
            kept: self.forced.1,
            edge: E::Scalar::INFINITY,
        }
    }

    /// Shrinks the bracket until its keys can be compared pair by pair. `None` if the boundary is not inside.
    fn descend<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        constraints: &Constraints,
        mut partition: Partition<E::Scalar>,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Option<Boundary<E::Scalar>>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        // First around the place where the budget should end, then evenly in value, then among the floats, which
        // always ends: but for a NaN that another thread wrote into the row meanwhile, hence the limit.
        let (mut stubborn, mut rounds) = (0, 0);
        while scratch.bracket.len() > RANKED {
            rounds += 1;
            if rounds > ROUNDS {
                return None;
            }
            let len = scratch.bracket.len();
            let (scores, weights) = scratch.bracket.padded(LANES);
            let (least, most) = self.simd.extent(scores);
            if least == most {
                return self.resolve_ties(weight_fn, constraints, &partition, (least, len));
            }
            let pivots = match stubborn {
                0 if weight_fn
                    .scale()
                    .is_none_or(|scale| (most.into() - least.into()) * scale < GUESSABLE_SPAN) =>
                {
                    let share = (constraints.target(partition.total()) - partition.below)
                        / partition.within;
                    values_around(least, most, share)
                }
                stubborn if stubborn % 2 == 0 => values_between(least, most),
                _ => ranks_between(least, most),
            };
            let counted = constraints.counts(self.all());
            let sums = self.simd.pivot_sums(scores, weights, &pivots, counted);
            let range = self.crossing(constraints, &partition, len, &pivots, &sums);
            let sides = self.simd.narrow(&mut scratch.bracket, range);
            partition.narrow(len, &sides, range.1);
            stubborn = if sides.inside > len / 4 { stubborn + 1 } else { 0 };
        }
        self.resolve(weight_fn, constraints, &partition, scratch)
    }

    /// The last pivot at which the rule still accepts, and the first at which it no longer does.
    fn crossing(
        &self,
        constraints: &Constraints,
        partition: &Partition<E::Scalar>,
        len: usize,
        pivots: &[E::Scalar; PIVOTS],
        sums: &PivotSums,
    ) -> (E::Scalar, E::Scalar) {
        let counted = constraints.counts(self.all());
        let room = constraints.target(partition.total()) - partition.below;
        let accepts = |i: usize| {
            let (below, at_least) = (sums.below[i], sums.at_least[i]);
            if !counted {
                return below <= room;
            }
            let head = (partition.within - below).max(0.0);
            constraints.accepts(&partition.with(below, len - at_least, head, at_least))
        };
        // Accepting is monotone.
        let first = (0..PIVOTS).filter(|&i| accepts(i)).count();
        around(pivots, first, (E::Scalar::LOWEST, E::Scalar::INFINITY))
    }

    /// Fills the bracket and sums what lies outside it.
    fn enclose<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        constraints: &Constraints,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Result<Partition<E::Scalar>, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        if self.scores.len() <= SHORT {
            return Ok(self.enclose_short(weight_fn, constraints, scratch));
        }
        let mut range = self.guess(weight_fn, constraints, None, scratch);
        for turn in 0.. {
            let sides = self.split(weight_fn, range, scratch)?;
            let within = self.simd.weigh(&mut scratch.bracket, weight_fn);
            let mut partition = self.nothing_outside();
            partition.narrow(self.visible, &PartitionSums { within, ..sides }, range.1);
            let low = range.0 == E::Scalar::LOWEST
                || constraints.accepts(&partition.with(0.0, 0, within, sides.inside));
            let high = range.1 == E::Scalar::INFINITY
                || !constraints.accepts(&partition.with(within, sides.inside, 0.0, 0));
            // Where the guess missed, the boundary is somewhere on the other side. Summed in another order it may be on
            // this side after all, again and again, so turns are counted; the search finds out what they missed.
            let (side, edge, below) = match (low, high) {
                (true, true) | (false, false) => return Ok(partition),
                _ if turn == TURNS => return Ok(partition),
                (false, true) => ((E::Scalar::LOWEST, range.0), range.0, partition.below),
                (true, false) => {
                    ((range.1, E::Scalar::INFINITY), range.1, partition.below + within)
                }
            };
            range = side;
            if turn == 0 {
                // Now it is known what the row weighs, and its tail up to one place.
                let known = Known { edge, below, total: partition.total() };
                let (lo, hi) = self.guess(weight_fn, constraints, Some(known), scratch);
                let lo = if lo > side.0 { lo } else { side.0 };
                let hi = if hi < side.1 { hi } else { side.1 };
                if lo < hi {
                    range = (lo, hi);
                }
            }
        }
        unreachable!("the last turn returns")
    }

    /// Weighs a short row whole and cuts the first bracket out of it.
    fn enclose_short<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        constraints: &Constraints,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Partition<E::Scalar>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let n = self.scores.len();
        let SearchScratch { bracket, scores: wide, weights, .. } = scratch;
        let weights = padded(weights, n, E::Scalar::default());
        let scores = if let Some(scores) = E::scalars(self.scores) {
            scores
        } else {
            let wide = padded(wide, n, E::Scalar::default());
            self.simd.widen(self.scores, wide);
            wide
        };
        let within = self.simd.weights(scores, weight_fn, weights);
        let mut partition = Partition { within, ..self.nothing_outside() };
        let mut range = (E::Scalar::LOWEST, E::Scalar::INFINITY);
        if n > RANKED {
            let lowest = self.deepest(weight_fn, constraints);
            let pivots = values_between(lowest, self.largest);
            let sums =
                self.simd.pivot_sums(scores, weights, &pivots, constraints.counts(self.all()));
            range = self.crossing(constraints, &partition, self.visible, &pivots, &sums);
        }
        let sides = self.simd.narrow_into(scores, weights, range, bracket);
        partition.narrow(self.visible, &sides, range.1);
        partition
    }

    /// A key that is below the boundary where masses decide, or the smallest.
    fn deepest<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        constraints: &Constraints,
    ) -> E::Scalar {
        let score = weight_fn.score_at(self.largest, depth(self.all(), constraints.eps));
        let score = if score > self.smallest { score } else { self.smallest };
        if score > E::Scalar::LOWEST { score } else { E::Scalar::LOWEST }
    }

    /// A bracket proposed by a strided sample, whose tail sums are measured against the whole row's mass.
    fn guess<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        constraints: &Constraints,
        known: Option<Known<E::Scalar>>,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> (E::Scalar, E::Scalar)
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let n = self.scores.len();
        let size = (n / 32).clamp(SAMPLE.0, SAMPLE.1) / LANES * LANES;
        let scores = padded(&mut scratch.scores, size, E::Scalar::default());
        let weights = padded(&mut scratch.weights, size, E::Scalar::default());
        if let Some(all) = E::scalars(self.scores) {
            sample(all, all.len() / size, scores);
        } else {
            let mut raw = [E::MASKED; SAMPLE.1];
            sample(self.scores, n / size, &mut raw[..size]);
            self.simd.widen(&raw[..size], scores);
        }
        let seen = self.simd.weights(scores, weight_fn, weights);
        let mut factor = n as f64 / size as f64;
        let (mass, trust) = if let Some(Known { edge, below, total }) = known {
            // The sample is stretched to what is known.
            let sampled = self.simd.pivot_sums(scores, weights, &[edge; PIVOTS], false).below[0];
            if sampled > 0.0 && below > 0.0 {
                factor = below / sampled;
            }
            (total, ROUGH)
        } else {
            // A flat row is weighed well enough by the sample.
            let squares = self.simd.squares(weights);
            let deviation = (squares - seen * seen / size as f64).max(0.0).sqrt() / seen;
            // One large key, which weighs 1, is easily missed.
            let flat = deviation < TRUSTED && TRUSTED * TRUSTED * seen * factor > 1.0;
            let (mass, trust) = if flat {
                (seen * factor, 2.0 * deviation)
            } else {
                (self.rough_mass(weight_fn), ROUGH)
            };
            (self.forced.0 + mass, trust)
        };
        let lowest = self.deepest(weight_fn, constraints);
        if lowest.partial_cmp(&self.largest) != Some(std::cmp::Ordering::Less) {
            return (E::Scalar::LOWEST, E::Scalar::INFINITY);
        }
        let counted = constraints.counts(self.all());
        let pivots = values_between(lowest, self.largest);
        let sums = self.simd.pivot_sums(scores, weights, &pivots, counted);
        if counted {
            return self.guess_counted(
                constraints,
                mass,
                (scores, weights),
                factor,
                (lowest, &pivots, &sums),
            );
        }
        // A curve of the tail mass against the key, finer where it crosses the target.
        let target = constraints.target(mass);
        let cross = (0..PIVOTS).filter(|&i| sums.below[i] * factor <= target).count();
        let (lo, hi) = around(&pivots, cross, (lowest, self.largest));
        // Among the sampled keys there, so that a cluster is resolved, too.
        let (least, most) = self.simd.extent_within(scores, (lo, hi));
        let finer = if least < most { values_between(least, most) } else { values_between(lo, hi) };
        let fine = self.simd.pivot_sums(scores, weights, &finer, false);
        let mut curve = [(lowest, 0.0); 2 * PIVOTS + 2];
        for i in 0..PIVOTS {
            let (coarse, fine) = ((pivots[i], sums.below[i]), (finer[i], fine.below[i]));
            curve[if i < cross { i + 1 } else { i + PIVOTS + 1 }] = coarse;
            curve[cross + i + 1] = fine;
        }
        curve[2 * PIVOTS + 1] = (self.largest, seen);
        // The relative deviation of a sum of weights none of which is above the pivot's.
        let at =
            (1..curve.len()).find(|&i| curve[i].1 * factor > target).unwrap_or(curve.len() - 1);
        let share = self.weight(weight_fn, curve[at].0) / curve[at].1.max(f64::MIN_POSITIVE);
        let doubt = 1.0 + trust + 2.0 * share.sqrt().min(1e3);
        let low = interpolate(&curve, target / doubt / factor);
        let high = interpolate(&curve, target * doubt / factor);
        (low.unwrap_or(E::Scalar::LOWEST), high.unwrap_or(E::Scalar::INFINITY))
    }

    /// The same where numbers of keys decide, too.
    fn guess_counted(
        &self,
        constraints: &Constraints,
        mass: f64,
        (scores, weights): (&[E::Scalar], &[E::Scalar]),
        factor: f64,
        (lowest, pivots, sums): (E::Scalar, &[E::Scalar; PIVOTS], &PivotSums),
    ) -> (E::Scalar, E::Scalar) {
        // What the rule would say if the sample's tail, made larger or smaller by its own uncertainty, were the row's.
        let accepts = |sums: &PivotSums, i: usize, sign: f64| {
            let (above, seen) = (sums.at_least[i] as f64, (scores.len() - sums.at_least[i]) as f64);
            let doubt = 1.0 + ROUGH + 4.0 / (seen + 1.0).sqrt();
            let tail = sums.below[i] * factor * doubt.powf(sign);
            let kept = above * factor - sign * 4.0 * (above + 1.0).sqrt() * factor;
            #[allow(clippy::cast_sign_loss)] // clamped at 0
            let kept = (kept.max(0.0) as usize).min(self.visible);
            constraints.accepts(&SplitSums {
                tail: tail.min(mass),
                dropped: self.visible - kept,
                head: self.forced.0 + (mass - tail).max(0.0),
                kept: self.forced.1 + kept,
            })
        };
        let (lo, hi) = crossing(pivots, (lowest, self.largest), |i| accepts(sums, i, 0.0));
        let pivots = values_between(lo, hi);
        let sums = self.simd.pivot_sums(scores, weights, &pivots, true);
        let low = crossing(&pivots, (E::Scalar::LOWEST, hi), |i| accepts(&sums, i, 1.0)).0;
        let high = crossing(&pivots, (lo, E::Scalar::INFINITY), |i| accepts(&sums, i, -1.0)).1;
        if low < high { (low, high) } else { (E::Scalar::LOWEST, E::Scalar::INFINITY) }
    }

    /// The position that ends the first `kept` of the keys that equal `score`, all of which are `count`.
    fn last_of(&self, score: E::Scalar, kept: usize, count: usize) -> u32 {
        if kept == count {
            return u32::MAX;
        }
        let mut missing = kept;
        for (c, chunk) in self.scores.chunks(CHUNK).enumerate() {
            match self.simd.find_equal(chunk, score, missing) {
                Ok(at) => return (c * CHUNK + at) as u32,
                Err(seen) => missing -= seen,
            }
        }
        u32::MAX
    }

    /// All `count` keys of the bracket equal `score`: only their number matters, the later positions are dropped. `None` if
    /// even all of them are too few, or none is needed though there are keys above.
    fn resolve_ties<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        constraints: &Constraints,
        partition: &Partition<E::Scalar>,
        (score, count): (E::Scalar, usize),
    ) -> Option<Boundary<E::Scalar>>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let weight = self.weight(weight_fn, score);
        let at = |kept: usize| {
            let tail = weight * (count - kept) as f64;
            partition.with(tail, count - kept, weight * kept as f64, kept)
        };
        // The real row consists of equal weights: integers decide.
        let exact = partition.dropped == 0 && partition.kept == 0 && constraints.exact_ties;
        let kept = if exact {
            let droppable =
                certified_sums::equal_weights_droppable(count as u64, constraints.eps) as usize;
            (count - droppable).max(constraints.min_keep).max(1).min(constraints.max_keep.max(1))
        } else {
            if !constraints.accepts(&at(count)) {
                return None;
            }
            if !constraints.accepts(&at(0)) {
                fewest((0, count), |kept| constraints.accepts(&at(kept)))
            } else if partition.edge < E::Scalar::INFINITY {
                return None;
            } else {
                0
            }
        };
        let split = at(kept);
        let boundary = (kept > 0).then(|| (score, self.last_of(score, kept, count)));
        let holds = certified_sums::equal_weights_hold(kept as u64, count as u64, constraints.eps);
        let minimal = if exact {
            holds
                && (kept <= constraints.min_keep
                    || kept == 1
                    || !certified_sums::equal_weights_hold(
                        kept as u64 - 1,
                        count as u64,
                        constraints.eps,
                    ))
        } else {
            split.kept <= constraints.min_keep || kept == 0 || constraints.refutes(&at(kept - 1))
        };
        Some(Boundary { split, boundary, minimal, exact: exact && holds })
    }

    /// Finds the boundary among the few keys that are left. `None` if it is not there.
    fn resolve<W: InvertibleWeightFn<E::Scalar>>(
        &self,
        weight_fn: W,
        constraints: &Constraints,
        partition: &Partition<E::Scalar>,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Option<Boundary<E::Scalar>>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let SearchScratch { bracket, equal, .. } = scratch;
        let len = bracket.len();
        let room = constraints.target(partition.total()) - partition.below;
        let mut score = self.simd.candidate(bracket, E::Scalar::nearest(room));
        if score == E::Scalar::NEG_INFINITY || constraints.counts(self.all()) {
            score = self.simd.extent(bracket.padded(LANES).0).0;
        }
        // From there up or down to where the exact rule changes its mind; few steps, if any.
        for _ in 0..=2 * len {
            if score == E::Scalar::INFINITY || len == 0 {
                break;
            }
            let next = E::Scalar::from_rank(score.rank() + 1);
            let (scores, weights) = bracket.padded(LANES);
            let sides = self.simd.narrow_into(scores, weights, (score, next), equal);
            let mut here = *partition;
            here.narrow(len, &sides, next);
            let (mass, count) = (sides.within, sides.inside);
            if !constraints.accepts(&here.with(0.0, 0, mass, count)) {
                // Even the keys below this one are too much to drop.
                let lower = bracket.scores().iter().copied().filter(|k| *k < score);
                score = lower.reduce(|a, b| if b > a { b } else { a })?;
                continue;
            }
            let without = here.with(mass, count, 0.0, 0);
            if constraints.accepts(&without) {
                let higher = bracket.scores().iter().copied().filter(|k| *k > score);
                match higher.reduce(|a, b| if b < a { b } else { a }) {
                    Some(higher) => score = higher,
                    None => break,
                }
                continue;
            }
            if count > 1 {
                let edge = if sides.count_above > 0 { next } else { partition.edge };
                let here = Partition { edge, ..here };
                return self.resolve_ties(weight_fn, constraints, &here, (score, count));
            }
            let split = here.with(0.0, 0, mass, count);
            let minimal = split.kept <= constraints.min_keep || constraints.refutes(&without);
            return Some(Boundary {
                split,
                boundary: Some((score, u32::MAX)),
                minimal,
                exact: false,
            });
        }
        // Everything in the bracket can go. That is an answer only if nothing was ruled out above it.
        if partition.edge < E::Scalar::INFINITY {
            return None;
        }
        let split = partition.with(partition.within, len, 0.0, 0);
        let minimal = split.kept <= self.forced.1;
        Some(Boundary { split, boundary: partition.boundary(), minimal, exact: false })
    }

    fn weight<W: WeightFn<E::Scalar>>(&self, weight_fn: W, score: E::Scalar) -> f64
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let mut weights = [E::Scalar::default(); LANES];
        self.simd.weights(&[score; LANES], weight_fn, &mut weights);
        weights[0].into()
    }
}

/// The smallest number that is enough, between one that is not and one that is.
pub(crate) fn fewest(
    (mut too_few, mut enough): (usize, usize),
    is: impl Fn(usize) -> bool,
) -> usize {
    while too_few + 1 < enough {
        let middle = usize::midpoint(too_few, enough);
        if is(middle) {
            enough = middle;
        } else {
            too_few = middle;
        }
    }
    enough
}

/// So far below the largest key, in natural-log units, all of `n` keys together weigh less than the budget.
pub(crate) fn depth(n: usize, eps: f64) -> f64 {
    (n as f64 / eps.max(1e-300)).ln().clamp(1.0, 800.0) + 0.5
}

/// Where a curve of ascending keys and values reaches a value, linearly between its points; `None` beyond its ends.
fn interpolate<S: Scalar>(curve: &[(S, f64)], value: f64) -> Option<S> {
    let at = curve.iter().position(|point| point.1 > value)?;
    let (right, left) = (curve[at], curve[at.checked_sub(1)?]);
    let share = ((value - left.1) / (right.1 - left.1)).clamp(0.0, 1.0);
    Some(S::nearest(left.0.into() * (1.0 - share) + right.0.into() * share))
}

/// The last pivot at which the rule still accepts, and the first at which it no longer does.
fn crossing<S: Copy>(
    pivots: &[S; PIVOTS],
    outer: (S, S),
    accepts: impl Fn(usize) -> bool,
) -> (S, S) {
    let first = (0..PIVOTS).find(|&i| !accepts(i)).unwrap_or(PIVOTS);
    around(pivots, first, outer)
}

/// Pivots spaced evenly in value strictly inside a range, ascending.
fn values_between<S: Scalar>(least: S, most: S) -> [S; PIVOTS] {
    let (least, most): (f64, f64) = (least.into(), most.into());
    std::array::from_fn(|i| {
        let share = (i + 1) as f64 / (PIVOTS + 1) as f64;
        S::nearest(least * (1.0 - share) + most * share)
    })
}
