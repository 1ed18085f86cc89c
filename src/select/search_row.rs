//! Search for the smallest certified set of one row, without a sort.
//!
//! The boundary between kept and dropped keys is enclosed in a bracket `[lo, hi)` of scores: dropping everything below
//! `lo` is within the budget, dropping everything below `hi` is not.
//!
//! 1. A sample, measured against a rough mass of the row, proposes the first bracket. A short row is weighed whole.
//! 2. One pass over the row sums both sides of the bracket and collects the keys inside.
//! 3. Eight pivots a round shrink the bracket.
//! 4. The last few scores are compared pair by pair.
//!
//! Intermediate sums may be rough. The sums behind a final decision are direct sums of weights, never differences.
//!
//! The passes read a row in chunks with fixed edges, and add their sums in f64 in order. So the number of threads does
//! not change the bits.

use super::candidates::{Boundary, Candidates};
use super::constraints::Constraints;
use super::curve::{crossing, interpolate, values_between};
use super::partition::{Known, Partition};
use super::scratch::{SearchScratch, padded};
use super::weight_fn::InvertibleWeightFn;
use crate::error::Error;
use crate::kernels::{
    Element, GUESSABLE_SPAN, LANES, PIVOTS, PartitionSums, PivotSums, RANKED, Scalar, around,
    ranks_between, sample, values_around,
};
use crate::numerics::certified_sums::{self, CHUNK, SplitSums};
use crate::numerics::order::Ordered;

/// Length up to which rows are weighed whole, once.
const SHORT: usize = 1024;
/// Least and most sampled keys that propose the first bracket of a longer row.
const SAMPLE: (usize, usize) = (256, 4096);
/// Rounds that narrow a bracket: an f64 has 64 bits, of which every third round at worst settles three.
const ROUNDS: usize = 96;
/// Number of times that the search may turn to the other side of a bracket.
const TURNS: usize = 3;
/// Relative deviation below which a sample's estimate of the mass is used directly.
const TRUSTED: f64 = 0.09;
/// Approximate relative error of a row's rough mass.
const ROUGH: f64 = 0.05;

/// Search of one row: its keys, their weights, and the rule for a set.
pub(super) struct Search<'a, E: Element, W> {
    pub(super) keys: &'a Candidates<'a, E>,
    pub(super) weight_fn: W,
    pub(super) rule: &'a Constraints,
}

impl<E: Element, W: InvertibleWeightFn<E::Scalar>> Search<'_, E, W> {
    /// Finds the smallest set that the rule accepts, given the approximate range of the boundary if that is known.
    ///
    /// # Errors
    /// [`Error::NoMemory`], where the boundary cannot be enclosed more closely than there is memory for.
    pub(super) fn run(
        &self,
        range: Option<(E::Scalar, E::Scalar)>,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Result<Boundary<E::Scalar>, Error> {
        let nothing_lost =
            self.keys.visible == 0 || (self.rule.eps == 0.0 && self.rule.max_keep >= self.all());
        if nothing_lost || self.rule.min_keep >= self.all() {
            let head = self.keys.forced.0 + self.keys.mass(self.weight_fn)?;
            let boundary = (self.keys.visible > 0).then_some((E::Scalar::LOWEST, u32::MAX));
            let split = SplitSums { tail: 0.0, dropped: 0, head, kept: self.all() };
            return Ok(Boundary { split, worst: boundary, minimal: true, exact: false });
        }
        if self.keys.smallest == self.keys.largest && self.keys.forced.1 == 0 {
            // A single value: nothing to search.
            let within = self.weight(self.keys.largest) * self.keys.visible as f64;
            let partition = Partition { within, ..self.nothing_outside() };
            if let Some(found) =
                self.resolve_ties(&partition, (self.keys.largest, self.keys.visible))
            {
                return Ok(found);
            }
        }
        let partition = self.enclose(range, scratch)?;
        if let Some(found) = self.descend(partition, scratch) {
            return Ok(found);
        }
        // Rounding moved the boundary out of the bracket: the whole row is the bracket.
        let everything = (E::Scalar::LOWEST, E::Scalar::INFINITY);
        self.keys.split(self.weight_fn, everything, scratch)?;
        let within = self.keys.simd.weigh(&mut scratch.bracket, self.weight_fn);
        let partition = Partition { within, ..self.nothing_outside() };
        Ok(self.descend(partition, scratch).unwrap_or(Boundary {
            split: SplitSums { tail: 0.0, dropped: 0, head: self.keys.forced.0, kept: self.all() },
            worst: Some((E::Scalar::LOWEST, u32::MAX)),
            minimal: false,
            exact: false,
        }))
    }

    /// Returns `true` if numbers of keys decide as well.
    fn counted(&self) -> bool {
        self.rule.counts(self.all())
    }

    fn all(&self) -> usize {
        self.keys.visible + self.keys.forced.1
    }

    fn nothing_outside(&self) -> Partition<E::Scalar> {
        Partition {
            below: 0.0,
            dropped: 0,
            within: 0.0,
            above: self.keys.forced.0,
            kept: self.keys.forced.1,
            edge: E::Scalar::INFINITY,
        }
    }

    /// Shrinks the bracket until its scores can be compared pair by pair. `None` if the boundary is not inside.
    fn descend(
        &self,
        mut partition: Partition<E::Scalar>,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Option<Boundary<E::Scalar>> {
        // Pivots lie first around the expected end of the budget, then evenly in value, then among the floats, which
        // always ends. The limit guards against a NaN that another thread writes into the row meanwhile.
        let (mut stubborn, mut rounds) = (0, 0);
        while scratch.bracket.len() > RANKED {
            rounds += 1;
            if rounds > ROUNDS {
                return None;
            }
            let len = scratch.bracket.len();
            let (scores, weights) = scratch.bracket.padded(LANES);
            let (least, most) = self.keys.simd.extent(scores);
            if least == most {
                return self.resolve_ties(&partition, (least, len));
            }
            let pivots = match stubborn {
                0 if self
                    .weight_fn
                    .scale()
                    .is_none_or(|scale| (most.into() - least.into()) * scale < GUESSABLE_SPAN) =>
                {
                    let share =
                        (self.rule.target(partition.total()) - partition.below) / partition.within;
                    values_around(least, most, share)
                }
                stubborn if stubborn % 2 == 0 => values_between(least, most),
                _ => ranks_between(least, most),
            };
            let counted = self.counted();
            let sums = self.keys.simd.pivot_sums(scores, weights, &pivots, counted);
            let range = self.crossing(&partition, len, &pivots, &sums);
            let sides = self.keys.simd.narrow(&mut scratch.bracket, range);
            partition.narrow(len, &sides, range.1);
            stubborn = if sides.inside > len / 4 { stubborn + 1 } else { 0 };
        }
        self.resolve(&partition, scratch)
    }

    /// Returns the last pivot that the rule accepts, and the first that it does not.
    fn crossing(
        &self,
        partition: &Partition<E::Scalar>,
        len: usize,
        pivots: &[E::Scalar; PIVOTS],
        sums: &PivotSums,
    ) -> (E::Scalar, E::Scalar) {
        let counted = self.counted();
        let room = self.rule.target(partition.total()) - partition.below;
        let accepts = |i: usize| {
            let (below, at_least) = (sums.below[i], sums.at_least[i]);
            if !counted {
                return below <= room;
            }
            let head = (partition.within - below).max(0.0);
            self.rule.accepts(&partition.with(below, len - at_least, head, at_least))
        };
        // Acceptance is monotone.
        let first = (0..PIVOTS).filter(|&i| accepts(i)).count();
        around(pivots, first, (E::Scalar::LOWEST, E::Scalar::INFINITY))
    }

    /// Fills the bracket and sums both sides of it.
    fn enclose(
        &self,
        range: Option<(E::Scalar, E::Scalar)>,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Result<Partition<E::Scalar>, Error> {
        let mut range = match range {
            Some(range) => range,
            None if self.keys.scores.len() <= SHORT => {
                return Ok(self.enclose_short(scratch));
            }
            None => self.guess(None, scratch)?,
        };
        for turn in 0.. {
            let sides = self.keys.split(self.weight_fn, range, scratch)?;
            let within = self.keys.simd.weigh(&mut scratch.bracket, self.weight_fn);
            let mut partition = self.nothing_outside();
            partition.narrow(self.keys.visible, &PartitionSums { within, ..sides }, range.1);
            let low = range.0 == E::Scalar::LOWEST
                || self.rule.accepts(&partition.with(0.0, 0, within, sides.inside));
            let high = range.1 == E::Scalar::INFINITY
                || !self.rule.accepts(&partition.with(within, sides.inside, 0.0, 0));
            // After a wrong guess the boundary is on the other side. Summed in another order it may be on this side
            // again, so turns are counted, and the search repairs a miss.
            let (side, edge, below) = match (low, high) {
                (true, true) | (false, false) => return Ok(partition),
                _ if self.keys.scores.len() <= SHORT => {
                    return Ok(self.enclose_short(scratch));
                }
                _ if turn == TURNS => return Ok(partition),
                (false, true) => ((E::Scalar::LOWEST, range.0), range.0, partition.below),
                (true, false) => {
                    ((range.1, E::Scalar::INFINITY), range.1, partition.below + within)
                }
            };
            range = side;
            if turn == 0 {
                // The row's mass is known now, and its tail up to one place.
                let known = Known { edge, below, total: partition.total() };
                let (lo, hi) = self.guess(Some(known), scratch)?;
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
    fn enclose_short(&self, scratch: &mut SearchScratch<E::Scalar>) -> Partition<E::Scalar> {
        let n = self.keys.scores.len();
        let SearchScratch { bracket, scores: wide, weights, .. } = scratch;
        let weights = padded(weights, n, E::Scalar::default());
        let scores = if let Some(scores) = E::scalars(self.keys.scores) {
            scores
        } else {
            let wide = padded(wide, n, E::Scalar::default());
            self.keys.simd.widen(self.keys.scores, wide);
            wide
        };
        let within = self.keys.simd.weights(scores, self.weight_fn, weights);
        let mut partition = Partition { within, ..self.nothing_outside() };
        let mut range = (E::Scalar::LOWEST, E::Scalar::INFINITY);
        if n > RANKED {
            let lowest = self.deepest();
            let pivots = values_between(lowest, self.keys.largest);
            let sums = self.keys.simd.pivot_sums(scores, weights, &pivots, self.counted());
            range = self.crossing(&partition, self.keys.visible, &pivots, &sums);
        }
        let sides = self.keys.simd.narrow_into(scores, weights, range, bracket);
        partition.narrow(self.keys.visible, &sides, range.1);
        partition
    }

    /// Returns a key below the boundary if masses decide, else the smallest key.
    fn deepest(&self) -> E::Scalar {
        let score = self.weight_fn.score_at(self.keys.largest, depth(self.all(), self.rule.eps));
        let score = if score > self.keys.smallest { score } else { self.keys.smallest };
        if score > E::Scalar::LOWEST { score } else { E::Scalar::LOWEST }
    }

    /// Returns a bracket proposed by a strided sample, with its tail sums measured against the mass of the whole row.
    fn guess(
        &self,
        known: Option<Known<E::Scalar>>,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Result<(E::Scalar, E::Scalar), Error> {
        let n = self.keys.scores.len();
        let size = (n / 32).clamp(SAMPLE.0, SAMPLE.1) / LANES * LANES;
        let scores = padded(&mut scratch.scores, size, E::Scalar::default());
        let weights = padded(&mut scratch.weights, size, E::Scalar::default());
        if let Some(all) = E::scalars(self.keys.scores) {
            sample(all, all.len() / size, scores);
        } else {
            let mut raw = [E::MASKED; SAMPLE.1];
            sample(self.keys.scores, n / size, &mut raw[..size]);
            self.keys.simd.widen(&raw[..size], scores);
        }
        let seen = self.keys.simd.weights(scores, self.weight_fn, weights);
        let mut factor = n as f64 / size as f64;
        let (mass, trust) = if let Some(Known { edge, below, total }) = known {
            // Scale the sample to the known sums.
            let sampled =
                self.keys.simd.pivot_sums(scores, weights, &[edge; PIVOTS], false).below[0];
            if sampled > 0.0 && below > 0.0 {
                factor = below / sampled;
            }
            (total, ROUGH)
        } else {
            // The sample weighs a flat row well enough.
            let squares = self.keys.simd.squares(weights);
            let deviation = (squares - seen * seen / size as f64).max(0.0).sqrt() / seen;
            // One large key, of weight 1, is easily missed.
            let flat = deviation < TRUSTED && TRUSTED * TRUSTED * seen * factor > 1.0;
            let (mass, trust) = if flat {
                (seen * factor, 2.0 * deviation)
            } else {
                (self.keys.rough_mass(self.weight_fn)?, ROUGH)
            };
            (self.keys.forced.0 + mass, trust)
        };
        let lowest = self.deepest();
        if lowest.partial_cmp(&self.keys.largest) != Some(std::cmp::Ordering::Less) {
            return Ok((E::Scalar::LOWEST, E::Scalar::INFINITY));
        }
        let counted = self.counted();
        let pivots = values_between(lowest, self.keys.largest);
        let sums = self.keys.simd.pivot_sums(scores, weights, &pivots, counted);
        if counted {
            return Ok(self.guess_counted(
                mass,
                (scores, weights),
                factor,
                (lowest, &pivots, &sums),
            ));
        }
        // A curve of the tail mass against the score, finer where it crosses the target.
        let target = self.rule.target(mass);
        let cross = (0..PIVOTS).filter(|&i| sums.below[i] * factor <= target).count();
        let (lo, hi) = around(&pivots, cross, (lowest, self.keys.largest));
        // Pivots are sampled scores, so that a cluster is resolved as well.
        let (least, most) = self.keys.simd.extent_within(scores, (lo, hi));
        let finer = if least < most { values_between(least, most) } else { values_between(lo, hi) };
        let fine = self.keys.simd.pivot_sums(scores, weights, &finer, false);
        let mut curve = [(lowest, 0.0); 2 * PIVOTS + 2];
        for i in 0..PIVOTS {
            let (coarse, fine) = ((pivots[i], sums.below[i]), (finer[i], fine.below[i]));
            curve[if i < cross { i + 1 } else { i + PIVOTS + 1 }] = coarse;
            curve[cross + i + 1] = fine;
        }
        curve[2 * PIVOTS + 1] = (self.keys.largest, seen);
        // Relative deviation of a sum of weights, none of which is above the pivot's.
        let at =
            (1..curve.len()).find(|&i| curve[i].1 * factor > target).unwrap_or(curve.len() - 1);
        let share = self.weight(curve[at].0) / curve[at].1.max(f64::MIN_POSITIVE);
        let doubt = 1.0 + trust + 2.0 * share.sqrt().min(1e3);
        let low = interpolate(&curve, target / doubt / factor);
        let high = interpolate(&curve, target * doubt / factor);
        Ok((low.unwrap_or(E::Scalar::LOWEST), high.unwrap_or(E::Scalar::INFINITY)))
    }

    /// Returns the bracket where numbers of keys decide as well.
    fn guess_counted(
        &self,
        mass: f64,
        (scores, weights): (&[E::Scalar], &[E::Scalar]),
        factor: f64,
        (lowest, pivots, sums): (E::Scalar, &[E::Scalar; PIVOTS], &PivotSums),
    ) -> (E::Scalar, E::Scalar) {
        // The rule's answer if the row's tail were the sample's, scaled up or down by its own uncertainty.
        let accepts = |sums: &PivotSums, i: usize, sign: f64| {
            let (above, seen) = (sums.at_least[i] as f64, (scores.len() - sums.at_least[i]) as f64);
            let doubt = 1.0 + ROUGH + 4.0 / (seen + 1.0).sqrt();
            let tail = sums.below[i] * factor * doubt.powf(sign);
            let kept = above * factor - sign * 4.0 * (above + 1.0).sqrt() * factor;
            #[allow(clippy::cast_sign_loss)] // clamped at 0
            let kept = (kept.max(0.0) as usize).min(self.keys.visible);
            self.rule.accepts(&SplitSums {
                tail: tail.min(mass),
                dropped: self.keys.visible - kept,
                head: self.keys.forced.0 + (mass - tail).max(0.0),
                kept: self.keys.forced.1 + kept,
            })
        };
        let (lo, hi) = crossing(pivots, (lowest, self.keys.largest), |i| accepts(sums, i, 0.0));
        let pivots = values_between(lo, hi);
        let sums = self.keys.simd.pivot_sums(scores, weights, &pivots, true);
        let low = crossing(&pivots, (E::Scalar::LOWEST, hi), |i| accepts(&sums, i, 1.0)).0;
        let high = crossing(&pivots, (lo, E::Scalar::INFINITY), |i| accepts(&sums, i, -1.0)).1;
        if low < high { (low, high) } else { (E::Scalar::LOWEST, E::Scalar::INFINITY) }
    }

    /// Returns the position that ends the first `kept` of the `count` keys equal to `score`.
    fn last_of(&self, score: E::Scalar, kept: usize, count: usize) -> u32 {
        if kept == count {
            return u32::MAX;
        }
        let mut missing = kept;
        for (c, chunk) in self.keys.scores.chunks(CHUNK).enumerate() {
            match self.keys.simd.find_equal(chunk, score, missing) {
                Ok(at) => return (c * CHUNK + at) as u32,
                Err(seen) => missing -= seen,
            }
        }
        u32::MAX
    }

    /// Resolves a bracket whose `count` keys all equal `score`: only their number matters, the later positions are
    /// dropped. `None` if even all of them are too few, or none is needed though there are keys above.
    fn resolve_ties(
        &self,
        partition: &Partition<E::Scalar>,
        (score, count): (E::Scalar, usize),
    ) -> Option<Boundary<E::Scalar>> {
        let weight = self.weight(score);
        let at = |kept: usize| {
            let tail = weight * (count - kept) as f64;
            partition.with(tail, count - kept, weight * kept as f64, kept)
        };
        // The row consists of equal weights: decided in integers.
        let exact = partition.dropped == 0 && partition.kept == 0 && self.rule.exact_ties;
        let kept = if exact {
            let droppable =
                certified_sums::equal_weights_droppable(count as u64, self.rule.eps) as usize;
            (count - droppable).max(self.rule.min_keep).max(1).min(self.rule.max_keep.max(1))
        } else {
            if !self.rule.accepts(&at(count)) {
                return None;
            }
            if !self.rule.accepts(&at(0)) {
                fewest((0, count), |kept| self.rule.accepts(&at(kept)))
            } else if partition.edge < E::Scalar::INFINITY {
                return None;
            } else {
                0
            }
        };
        let split = at(kept);
        let boundary = (kept > 0).then(|| (score, self.last_of(score, kept, count)));
        let holds = certified_sums::equal_weights_hold(kept as u64, count as u64, self.rule.eps);
        let minimal = if exact {
            holds
                && (kept <= self.rule.min_keep
                    || kept == 1
                    || !certified_sums::equal_weights_hold(
                        kept as u64 - 1,
                        count as u64,
                        self.rule.eps,
                    ))
        } else {
            split.kept <= self.rule.min_keep || kept == 0 || self.rule.refutes(&at(kept - 1))
        };
        Some(Boundary { split, worst: boundary, minimal, exact: exact && holds })
    }

    /// Finds the boundary among the few remaining keys. `None` if it is not there.
    fn resolve(
        &self,
        partition: &Partition<E::Scalar>,
        scratch: &mut SearchScratch<E::Scalar>,
    ) -> Option<Boundary<E::Scalar>> {
        let SearchScratch { bracket, equal, .. } = scratch;
        let len = bracket.len();
        let room = self.rule.target(partition.total()) - partition.below;
        let mut score = self.keys.simd.candidate(bracket, E::Scalar::nearest(room));
        if score == E::Scalar::NEG_INFINITY || self.counted() {
            score = self.keys.simd.extent(bracket.padded(LANES).0).0;
        }
        // From there up or down until the exact rule's answer changes: few steps, if any.
        for _ in 0..=2 * len {
            if score == E::Scalar::INFINITY || len == 0 {
                break;
            }
            let next = E::Scalar::from_rank(score.rank() + 1);
            let (scores, weights) = bracket.padded(LANES);
            let sides = self.keys.simd.narrow_into(scores, weights, (score, next), equal);
            let mut here = *partition;
            here.narrow(len, &sides, next);
            let (mass, count) = (sides.within, sides.inside);
            if !self.rule.accepts(&here.with(0.0, 0, mass, count)) {
                // Dropping the keys below this one already loses too much.
                let lower = bracket.scores().iter().copied().filter(|k| *k < score);
                score = lower.reduce(|a, b| if b > a { b } else { a })?;
                continue;
            }
            let without = here.with(mass, count, 0.0, 0);
            if self.rule.accepts(&without) {
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
                return self.resolve_ties(&here, (score, count));
            }
            let split = here.with(0.0, 0, mass, count);
            let minimal = split.kept <= self.rule.min_keep || self.rule.refutes(&without);
            return Some(Boundary { split, worst: Some((score, u32::MAX)), minimal, exact: false });
        }
        // Every key of the bracket can be dropped. That is an answer only if nothing was ruled out above it.
        if partition.edge < E::Scalar::INFINITY {
            return None;
        }
        let split = partition.with(partition.within, len, 0.0, 0);
        let minimal = split.kept <= self.keys.forced.1;
        Some(Boundary { split, worst: partition.boundary(), minimal, exact: false })
    }

    fn weight(&self, score: E::Scalar) -> f64 {
        let mut weights = [E::Scalar::default(); LANES];
        self.keys.simd.weights(&[score; LANES], self.weight_fn, &mut weights);
        weights[0].into()
    }
}

/// Returns the smallest number that is enough, between one that is not and one that is.
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

/// Returns a depth below the largest score, in natural-log units, beyond which `n` keys together weigh less than the
/// budget.
pub(crate) fn depth(n: usize, eps: f64) -> f64 {
    (n as f64 / eps.max(1e-300)).ln().clamp(1.0, 800.0) + 0.5
}
