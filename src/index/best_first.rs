//! Search in decreasing bound: scores what may matter most, until one of three rules allows to stop.
//!
//! Codes give upper bounds of the scores of all keys. Let E be what has been scored exactly and U the largest of
//! all other scores: of E outside S as well as of the bounds of what is open. The first two rules are those
//! of arXiv 2512.07647.
//!
//! - mass ("MC-Search"): S, within E, may stay if what E outside S and the open keys can weigh at most is within the budget.
//! - gap ("Delta_k-Search"): S, the k best of E, may stay if `s_(k) - U >= ln[(n - k)(1 - eps) / (k eps)]`, n counting all keys
//!   that the row sees.
//! - top k: S, the k best of E, is the true top k if no open bound reaches `s_(k)`. Nothing is said of masses.
//!
//! Scores of members of S enter with their lower ends, those of all others with their upper ends. What has all been scored
//! is the exact answer, so every search ends; and wherever it is stopped, the interval that it reports holds.

use std::cmp::Ordering;

use super::codes::Codes;
use super::exact::ExactProduct;
use super::found::{Found, Rung};
use super::gram::Sums;
use super::known::{Known, Pending, ranked};
use super::options::Rule;
use super::prepared::Prepared;
use super::query::{Query, RowVisibility};
use super::queue::{Queue, Unit};
use crate::error::Error;
use crate::kernels::{Element, Exp, Keys, LANES, Picked, Simd};
use crate::numerics::certified_sums::{self, SplitSums};
use crate::numerics::sorting;
use crate::runtime::ambient::{self, asked, asked_each};
use crate::runtime::reused::Reused;

/// Mass of the open keys, relative to a top.
#[derive(Clone, Copy)]
struct Open {
    upper: f64,
    lower: f64,
    /// The largest of their bounds.
    bound: f64,
}

/// One row of a search.
pub(crate) struct BestFirst<'a, E> {
    pub(crate) simd: Simd,
    pub(crate) codes: &'a Codes<'a>,
    pub(crate) keys: Keys<'a, E>,
    pub(crate) query: &'a Query,
    pub(crate) prepared: &'a Prepared,
    pub(crate) row_visibility: RowVisibility<'a>,
    /// Number of those keys.
    pub(crate) seen: usize,
    pub(crate) rule: Rule,
    pub(crate) eps: f64,
    /// The most keys to be scored.
    pub(crate) most: usize,
}

/// Relative error of a few f64 operations and exponentials, generously.
const SUM_ROUNDING: f64 = 1e-11;
/// More than a weight that is flushed to 0.
const NOTHING: f64 = 1e-290;
/// Keys that are scored at a time, at least, and as a share of those that have been.
const BATCH: (usize, usize) = (16, 32);
/// Keys that are scored between two questions whether to go on.
const SCORED: usize = 256;

impl<E: Element<Scalar = f32>> BestFirst<'_, E> {
    /// Searches; also says whether the rule has been met, which for the top k no tail mass shows. `scores` are those by codes,
    /// in whole groups; they are written over.
    ///
    /// # Errors
    /// What stops the call.
    pub(crate) fn run(&self, scores: &mut [f32]) -> Result<(Found, bool), Error> {
        let visible = self.seen;
        let all = match self.rule {
            Rule::TopK(k) => k >= visible,
            Rule::Mass | Rule::Gap => self.eps == 0.0,
        };
        if all || visible == 0 {
            let minimal = visible <= 1 || self.eps == 0.0;
            let kept = self.sees(0..self.codes.len()).collect();
            let found = Found { kept, visible, minimal, rung: Rung::Codes, ..Found::default() };
            return Ok((found, true));
        }
        let mut known = Known::default();
        let (units, certain) = self.units(scores);
        let affordable = certain.len().min(self.most);
        self.score(&certain[..affordable], scores, &mut known);
        if affordable < certain.len() {
            // Nothing bounds the others.
            let open = Open { upper: f64::INFINITY, lower: 0.0, bound: f64::INFINITY };
            let top = known.largest();
            let k = if let Rule::TopK(k) = self.rule { k.min(affordable) } else { affordable };
            return Ok((self.found(&ranked(&known), k, &known, top, &open)?, false));
        }
        match self.rule {
            Rule::Mass => Ok((self.by_mass(units, scores, known)?, true)),
            Rule::Gap => Ok((self.by_gap(units, scores, known)?, true)),
            Rule::TopK(k) => self.top(k, units, scores, known),
        }
    }

    /// Those of some keys that the row sees.
    fn sees(&self, keys: std::ops::Range<usize>) -> impl Iterator<Item = u32> {
        keys.filter(|&key| self.row_visibility.sees(key)).map(|key| key as u32)
    }

    /// Returns a bound on the error of an exact score, with a sum or difference.
    fn doubt(&self) -> f64 {
        1.25 * self.query.error
    }

    /// All that the row sees and that can be bounded, and the keys that cannot. Scores of what it does not see become -inf.
    fn units(&self, scores: &mut [f32]) -> (Reused<Unit>, Reused<u32>) {
        let n = self.codes.len();
        let (mut units, mut certain) = (Reused::new(), Reused::new());
        units.reserve(n);
        let radii = self.codes.radii();
        for ((key, score), radius) in asked(scores[..n].iter_mut().enumerate().zip(radii)) {
            if !self.row_visibility.sees(key) {
                *score = f32::NEG_INFINITY;
                continue;
            }
            let score = *score;
            // Without a code, or beyond what f32 holds: never a mask.
            if !score.is_finite() {
                certain.push(key as u32);
                continue;
            }
            let guess = f64::from(score);
            // The exact score is less an offset of its own rounding.
            let reach = self.prepared.code_error.reach_of(radius) + self.doubt();
            let (lower, upper) = (guess - reach, guess + reach);
            let (lower, upper) = if reach.is_nan() {
                (f64::NEG_INFINITY, f64::INFINITY)
            } else {
                (lower.next_down(), upper.next_up())
            };
            units.push(Unit { upper, lower, guess, key: key as u32 });
        }
        (units, certain)
    }

    /// Scores keys exactly; their codes are not looked at any more.
    fn score(&self, keys: &[u32], scores: &mut [f32], known: &mut Known) {
        let from = known.scores.len();
        known.keys.extend_from_slice(keys);
        known.scores.resize(from + keys.len(), 0.0);
        let to = &mut known.scores[from..];
        for (keys, to) in asked_each(keys.chunks(SCORED).zip(to.chunks_mut(SCORED))) {
            self.query.score(self.simd, self.keys, Picked::Listed(keys), self.prepared.offset, to);
        }
        for &key in keys {
            scores[key as usize] = f32::NEG_INFINITY;
        }
    }

    /// Scores the next units whose bounds are not below a floor; whether there was any that may still be scored.
    fn advance(
        &self,
        queue: &mut Queue,
        floor: f64,
        scores: &mut [f32],
        known: &mut Known,
    ) -> bool {
        if ambient::check().is_err() {
            return false;
        }
        let room = self.most.saturating_sub(known.keys.len());
        let batch = BATCH.0.max(known.keys.len() / BATCH.1);
        let mut keys: Reused<u32> = Reused::with_hint(batch);
        while let Some(unit) = queue.peek() {
            if unit.upper < floor || keys.len() >= room.min(batch) {
                break;
            }
            keys.push(unit.key);
            queue.at += 1;
        }
        self.score(&keys, scores, known);
        !keys.is_empty()
    }

    /// Returns the mass of the open keys, relative to a top.
    fn open(&self, units: &[Unit], scores: &[f32], top: f64) -> Result<Open, Error> {
        ambient::check()?;
        if units.is_empty() {
            return Ok(Open { upper: 0.0, lower: 0.0, bound: f64::NEG_INFINITY });
        }
        let largest = self.simd.scan(scores, None).0.largest;
        let sums = self.simd.below(scores, largest, f32::INFINITY);
        let sums = Sums::computed(sums.weights, sums.squares, 1.0 + SUM_ROUNDING, sums.count);
        let down = grown(f64::from(largest) - top);
        let code_error = &self.prepared.code_error;
        // Not 0, which would outweigh any mass.
        let mut upper = code_error.mass_upper(&sums) * down.max(NOTHING) * (1.0 + SUM_ROUNDING);
        let mut lower = code_error.mass_lower(&sums) * down * (1.0 - SUM_ROUNDING);
        // One by one: hardly ever better than all codes together, and slower.
        if self.rule == Rule::Mass || !upper.is_finite() {
            upper =
                upper.min(self.each(units, |unit| unit.upper, top) * (1.0 + self.sum_rounding()));
            lower =
                lower.max(self.each(units, |unit| unit.lower, top) * (1.0 - self.sum_rounding()));
        }
        let bound = units.iter().fold(f64::NEG_INFINITY, |bound, unit| bound.max(unit.upper));
        let lower = if lower < f64::INFINITY { lower.max(0.0) } else { 0.0 };
        Ok(Open { upper: if upper.is_nan() { f64::INFINITY } else { upper }, lower, bound })
    }

    /// Returns the mass of units by one end of their bounds, relative to a top, with an allowance for flushed weights.
    fn each(&self, units: &[Unit], end: fn(&Unit) -> f64, top: f64) -> f64 {
        let ends: Reused<f64> = units.iter().map(end).collect();
        let shift = ends.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if shift == f64::INFINITY {
            return shift;
        }
        if shift == f64::NEG_INFINITY {
            return 0.0;
        }
        let flushed = ends.len() as f64 * NOTHING;
        (self.weigh(ends, shift) + flushed) * grown(shift - top)
    }

    /// The sum of weights relative to a shift that no score exceeds.
    fn weigh(&self, mut scores: Reused<f64>, shift: f64) -> f64 {
        let padded = scores.len().next_multiple_of(LANES);
        scores.resize(padded, f64::NEG_INFINITY);
        if scores.is_empty() { 0.0 } else { self.simd.mass(&scores, Exp(shift)) }
    }

    /// The answer that keeps the first `k` of the known keys in this order.
    fn found(
        &self,
        order: &[usize],
        k: usize,
        known: &Known,
        top: f64,
        open: &Open,
    ) -> Result<Found, Error> {
        let n = self.seen;
        let sum = |order: &[usize]| -> Result<f64, Error> {
            ambient::check()?;
            Ok(self.weigh(order.iter().map(|&i| known.scores[i]).collect(), top))
        };
        let (kept, closed) = order.split_at(k);
        let (head, tail) = (sum(kept)?, sum(closed)?);
        let error = self.error();
        let split = SplitSums { tail: tail + open.upper, dropped: n - k, head, kept: k };
        let upper = split.upper(error, NOTHING);
        let low = SplitSums { tail: tail + open.lower, ..split };
        let lower = low.lower(error, NOTHING).min(upper);
        let worst = kept.iter().map(|&i| known.scores[i]).fold(f64::INFINITY, f64::min);
        // A set of one key fewer loses at least the least kept weight more, if nothing open can be better than it.
        let minimal = k == 1
            || k > 1 && worst - self.doubt() >= open.bound && {
                let weight = certified_sums::exp(worst - top);
                let fewer = SplitSums {
                    tail: low.tail + weight,
                    dropped: n - k + 1,
                    head: head - weight,
                    kept: k - 1,
                };
                // The head is a difference.
                fewer.lower(3.0 * error, NOTHING) > self.eps
            };
        let mut keys: Reused<u32> = kept.iter().map(|&i| known.keys[i]).collect();
        sorting::sort(&mut keys, Ord::cmp);
        let scored = known.keys.len();
        let rung = match scored {
            0 => Rung::Codes,
            _ if scored == n => Rung::Dense,
            _ => Rung::Rescored,
        };
        Ok(Found { kept: keys, visible: n, scored, upper, lower, minimal, rung })
    }

    /// The answer that keeps all known keys.
    fn all_known(&self, queue: &Queue, scores: &[f32], known: &Known) -> Result<Found, Error> {
        let top = known.largest();
        let open = self.open(queue.open(), scores, top)?;
        self.found(&ranked(known), known.keys.len(), known, top, &open)
    }

    /// By what ratios of sums of computed weights may be off.
    fn error(&self) -> f64 {
        (2.0 * self.query.error).exp_m1() * (1.0 + SUM_ROUNDING) + self.sum_rounding()
    }

    /// The same of sums over all that the row sees: each block of 256 is one rounding more, and the constant holds for the first of them.
    fn sum_rounding(&self) -> f64 {
        let deeper = (self.seen / 256).saturating_sub(1 << 15);
        SUM_ROUNDING + deeper as f64 * f64::EPSILON
    }

    fn by_mass(
        &self,
        units: Reused<Unit>,
        scores: &mut [f32],
        mut known: Known,
    ) -> Result<Found, Error> {
        let odds = self.eps / (1.0 - self.eps);
        let mut queue = Queue::new(units, 0);
        let mut sums: Reused<Suffix> = Reused::new();
        let shift = Self::suffixes(&mut queue, scores, &mut sums);
        let (mut top, mut head, mut summed) = (f64::NEG_INFINITY, 0.0, 0);
        loop {
            for &score in &known.scores[summed..] {
                if score > top {
                    head = head * (top - score).exp() + 1.0;
                    top = score;
                } else {
                    head += (score - top).exp();
                }
            }
            summed = known.scores.len();
            // What only shows the way need not be proven; what is reported is.
            let open = self.suffix(&sums[queue.at]) * (shift - top).exp();
            let over = queue.open().is_empty();
            if open <= odds * head * (1.0 - SUM_ROUNDING) || over {
                let open = self.open(queue.open(), scores, top)?;
                let found = self.fewest(&known, top, &open)?;
                if found.upper <= self.eps || over {
                    return Ok(found);
                }
            }
            if !self.advance(&mut queue, f64::NEG_INFINITY, scores, &mut known) {
                return self.all_known(&queue, scores, &known);
            }
        }
    }

    /// Sums over what is open when so many units have been scored, relative to a shift, which is returned.
    fn suffixes(queue: &mut Queue, scores: &[f32], sums: &mut Reused<Suffix>) -> f64 {
        queue.sorted = queue.units.len();
        sorting::sort(&mut queue.units, |a, b| {
            b.upper.total_cmp(&a.upper).then_with(|| a.key.cmp(&b.key))
        });
        let finite =
            |upper: f64, top: f64| if upper < f64::INFINITY { top.max(upper) } else { top };
        let shift = queue.units.iter().fold(f64::NEG_INFINITY, |top, u| finite(u.upper, top));
        let shift = if shift > f64::NEG_INFINITY { shift } else { 0.0 };
        sums.resize(queue.units.len() + 1, Suffix::default());
        for (at, unit) in asked(queue.units.iter().enumerate().rev()) {
            let mut sum = sums[at + 1];
            sum.each += (unit.upper - shift).exp();
            let weight = (f64::from(scores[unit.key as usize]) - shift).exp();
            sum.codes.upper += weight;
            sum.codes.squares += weight * weight;
            sum.codes.largest = sum.codes.largest.max(weight);
            sums[at] = sum;
        }
        shift
    }

    /// Returns the approximate upper bound of the open mass.
    fn suffix(&self, sum: &Suffix) -> f64 {
        sum.each.min(self.prepared.code_error.mass_upper(&sum.codes))
    }

    /// The fewest known keys that are within the budget; all of them if none are.
    fn fewest(&self, known: &Known, top: f64, open: &Open) -> Result<Found, Error> {
        let order = ranked(known);
        let odds = self.eps / (1.0 - self.eps) / (1.0 + self.error());
        let weights: Reused<f64> = order.iter().map(|&i| (known.scores[i] - top).exp()).collect();
        let mut head = weights.iter().sum::<f64>();
        let (mut k, mut tail) = (order.len(), open.upper);
        while k > 1 && tail + weights[k - 1] <= odds * (head - weights[k - 1]) {
            k -= 1;
            tail += weights[k];
            head -= weights[k];
        }
        // Sums above ran one way only; what is reported decides.
        loop {
            let found = self.found(&order, k, known, top, open)?;
            if found.upper <= self.eps || k == order.len() {
                return Ok(found);
            }
            k += 1;
        }
    }

    fn by_gap(
        &self,
        units: Reused<Unit>,
        scores: &mut [f32],
        mut known: Known,
    ) -> Result<Found, Error> {
        let n = self.seen;
        let mut queue = Queue::new(units, 0);
        let mut pending = Pending::new();
        let mut order: Reused<usize> = Reused::new();
        let mut worst = f64::INFINITY;
        let error = self.doubt();
        loop {
            pending.take(&known);
            let open = queue.upper();
            while let Some(best) = pending.best() {
                if known.scores[best] - error < open || ambient::check().is_err() {
                    break;
                }
                pending.drop_best();
                order.push(best);
                worst = worst.min(known.scores[best]);
                // The largest score of all others: of those that were scored, too.
                let next = pending.best().map_or(f64::NEG_INFINITY, |i| known.scores[i] + error);
                let gap = (worst - error - next.max(open)).next_down();
                let bound = self.gap_bound(gap, order.len());
                if bound <= self.eps {
                    let k = order.len();
                    order.extend(pending.places());
                    let top = known.largest();
                    let open = self.open(queue.open(), scores, top)?;
                    let mut found = self.found(&order, k, &known, top, &open)?;
                    found.upper = found.upper.min(bound);
                    found.lower = found.lower.min(found.upper);
                    return Ok(found);
                }
            }
            if order.len() == n || !self.advance(&mut queue, f64::NEG_INFINITY, scores, &mut known)
            {
                return self.all_known(&queue, scores, &known);
            }
        }
    }

    /// An upper bound of the tail mass, given a lower bound of the gap behind the k best of all keys.
    fn gap_bound(&self, gap: f64, k: usize) -> f64 {
        let n = self.seen;
        let dropped = n - k;
        // Most ranks are far from it.
        if dropped as f64 * (-gap).exp() > 1.001 * self.eps / (1.0 - self.eps) * k as f64 {
            return 1.0;
        }
        let tail = dropped as f64 * grown(-gap);
        let bound =
            SplitSums { tail, dropped, head: k as f64, kept: k }.upper(SUM_ROUNDING, NOTHING);
        // Equal or better scores: decided in integers.
        let equal = gap >= 0.0 && certified_sums::equal_weights_hold(k as u64, n as u64, self.eps);
        if equal { bound.min(self.eps) } else { bound }
    }

    fn top(
        &self,
        k: usize,
        mut units: Reused<Unit>,
        scores: &mut [f32],
        mut known: Known,
    ) -> Result<(Found, bool), Error> {
        let error = self.doubt();
        // What is probably best gives a floor at once.
        let first = k.min(units.len()).min(self.most.saturating_sub(known.keys.len()));
        if first > 0 && first < units.len() {
            sorting::place(&mut units, first - 1, |a, b| {
                b.guess.total_cmp(&a.guess).then_with(|| a.key.cmp(&b.key))
            });
        }
        let keys: Reused<u32> = units[..first].iter().map(|unit| unit.key).collect();
        self.score(&keys, scores, &mut known);
        let mut queue = Queue::new(units, first);
        let floor = |known: &Known| -> f64 {
            if known.scores.len() < k {
                return f64::NEG_INFINITY;
            }
            let mut scores = known.scores.clone();
            sorting::place(&mut scores, k - 1, |a, b| b.total_cmp(a));
            scores[k - 1] - error
        };
        let mut least = floor(&known);
        while queue.upper() >= least {
            if !self.advance(&mut queue, least, scores, &mut known) {
                break;
            }
            least = floor(&known);
        }
        let proven = known.keys.len() >= k && queue.upper() < least;
        let order = self.told_apart(ranked(&known), k, &known);
        let top = known.largest();
        let open = self.open(queue.open(), scores, top)?;
        Ok((self.found(&order, k.min(order.len()), &known, top, &open)?, proven))
    }

    /// Puts known keys around rank k in their true order where rounding hides it; equal scores by position.
    fn told_apart(&self, mut order: Reused<usize>, k: usize, known: &Known) -> Reused<usize> {
        if k == 0 || k >= order.len() {
            return order;
        }
        let (kth, doubt) = (known.scores[order[k - 1]], 2.0 * self.doubt());
        let from = order.partition_point(|&i| known.scores[i] > kth + doubt);
        let to = order.partition_point(|&i| known.scores[i] >= kth - doubt);
        if to <= k || to - from < 2 {
            return order;
        }
        let entries = &self.query.entries;
        let mut exact: Reused<(ExactProduct, usize)> = asked_each(&order[from..to])
            .map(|&i| {
                let key = self.keys.row(known.keys[i] as usize).iter();
                (ExactProduct::of(entries, key.map(|entry| entry.widen())), i)
            })
            .collect();
        exact.sort_unstable_by(|(a, i), (b, j)| {
            let order = match self.query.scale.partial_cmp(&0.0) {
                Some(Ordering::Greater) => b.cmp(a),
                Some(Ordering::Less) => a.cmp(b),
                _ => Ordering::Equal,
            };
            order.then_with(|| known.keys[*i].cmp(&known.keys[*j]))
        });
        for (to, (_, i)) in order[from..to].iter_mut().zip(&exact) {
            *to = *i;
        }
        order
    }
}

/// Sums over open units.
#[derive(Debug, Clone, Copy, Default)]
struct Suffix {
    each: f64,
    codes: Sums,
}

/// e^x for x of either sign.
fn grown(x: f64) -> f64 {
    if x > 0.0 { certified_sums::exp(-x).recip() } else { certified_sums::exp(x) }
}
