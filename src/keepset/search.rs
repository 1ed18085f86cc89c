//! Search for a set, and for multipliers that prove it small.
//!
//! From coarse to fine: a sample of the keys gives the first multipliers. Then each level mixes all keys once, which
//! gives a lower bound, a set (`overshoot`), and the keys near the boundary. The multipliers are improved on these
//! alone, with the others fixed. The search ends when the set is close to the bound. At the finer levels the keys near
//! the boundary are also walked, worst first.
//!
//! Light keys can be sampled, because each loss to them is a sum of many. A key that takes much of some row's budget is
//! in every sample, and in every part where it could be dropped.

use super::bound::{Crossing, crossing};
use super::dual::{Part, StepRule};
use super::limits::{Limits, tightest};
use super::overshoot::overshoot;
use super::problem::{Best, Problem, SMALL, Term};
use super::walk::walk;
use crate::error::Error;
use crate::kernels::{LANES, padded_stride};
use crate::runtime::ambient::asked_each;
use crate::runtime::interrupt;
use crate::runtime::memory::check_memory;
use crate::select::Effort;

/// Weights in the largest sample.
const SAMPLE: usize = 1 << 20;
/// Keys in the smallest and in the largest sample.
const SAMPLE_KEYS: (usize, usize) = (1024, 16384);
/// First multiplicative rounds.
const ROUNDS: usize = 24;
/// Per level: relative distance from the boundary of the near keys' weights, and half width of the ramp.
const LEVELS: [(f32, f32); 5] =
    [(0.9, 0.3), (0.4, 0.15), (0.15, 0.05), (0.05, 0.015), (0.02, 0.005)];
/// Number of levels after a sample.
const AFTER_SAMPLE: usize = 1;
/// Share of a row's budget from which a key is heavy.
const HEAVY: f32 = 0.1;
/// Least number of keys near the boundary.
const LEAST_NEAR: usize = 256;
/// Largest number of keys near the boundary for a walk at levels other than the last.
const WORTH_A_WALK: usize = 3072;
/// Number of keys near the boundary that are soon searched to the end.
const FEW_KEYS: usize = 1024;
/// Keys on a ramp, per row with influence, that are worth another level.
const FULL: usize = 1;
/// Number of levels too coarse for that rule.
const COARSE: usize = 2;
/// Inverse share of keys that change sides of the boundary above which a level is repeated.
const CROSSING: usize = 512;
/// Mixtures of all keys in one search.
const MOST_VIEWS: usize = 12;
/// Most rounds of adaption to some keys.
const ADAPTED: usize = 16;
/// Number of rows with a multiplier up to which they are only improved together.
const FEW_ROWS: usize = 16;
/// Least `low` of a view whose multipliers are not adapted to a sample first.
const LOWEST: f32 = 0.25;
/// Inverse share of a set by which a walk's may be larger before keys beyond its part are dropped.
const FEW: usize = 50;
/// Inverse relative growth of the lower bound in a view below which more views hardly raise it.
const SETTLED: usize = 2000;
/// Inverse share of a set by which it may be larger than a bound that does not grow.
const FAR: usize = 50;
/// Keys that exchanges try at least, by default and with thorough effort.
const EXCHANGES: [usize; 2] = [1 << 17, 1 << 20];
/// Steps of a descent, and the excess over a budget at which it ends.
const STEPS: (usize, f64) = (6, 3e-3);
/// Factors of a mixture are at most this.
const LARGEST_FACTOR: f64 = 1e30;
/// Limits of mixtures that prove anything are below this: what overflows in one weighs more, so that no set may drop it.
const LARGEST_LIMIT: f64 = 1e38;

/// Program for one vector of budgets.
pub(super) struct SetSearch<'p, 'a> {
    problem: &'p Problem<'a>,
    eps: &'p [f64],
    /// Rows that set a limit.
    rows: Vec<usize>,
    /// Inverses of their budgets in units of their weights, without the margin.
    inverses: Vec<f64>,
    /// Upper bound on a weight stored as 0, in units of the budgets.
    flushed: Vec<f64>,
    /// Largest share of a budget that each column takes.
    heaviest: Vec<f32>,
}

/// All keys at some multipliers.
struct View {
    mixed: Vec<f32>,
    /// Keys below this are dropped, unless they are apart.
    low: f32,
    /// Keys that are not counted among those below: heavy ones and those known; empty if there are none.
    apart: Vec<bool>,
    /// Keys known to matter; empty if there are none.
    known: Vec<bool>,
    /// Remainder of each budget after that, in its own units.
    left: Vec<f64>,
    /// Number of keys that the bound of this mixture allows to drop.
    dropped: usize,
}

impl View {
    fn is_below(&self, i: usize) -> bool {
        self.mixed[i] < self.low && self.apart.get(i) != Some(&true)
    }
}

impl<'p, 'a> SetSearch<'p, 'a> {
    pub(super) fn new(problem: &'p Problem<'a>, eps: &'p [f64]) -> Result<Self, Error> {
        /// A weight that was flushed to 0 is below this.
        const FLUSHED: f64 = f32::MIN_POSITIVE as f64 * 2.0;
        let rows: Vec<usize> = (0..problem.rows())
            .filter(|&j| problem.totals[j] > 0.0 && eps[j] > 0.0 && eps[j] < 1.0)
            .collect();
        let budgets: Vec<f64> = (rows.iter())
            .map(|&j| eps[j] * problem.totals[j] / (1.0 + problem.margin[j]))
            .collect();
        let inverses: Vec<f64> = budgets.iter().map(|b| b.recip().min(1e300)).collect();
        let flushed = inverses.iter().map(|inverse| inverse * FLUSHED).collect();
        let heaviest = problem.heaviest(&rows, &inverses)?;
        Ok(SetSearch { problem, eps, rows, inverses, flushed, heaviest })
    }

    fn limits(&self) -> Limits<'_, 'a> {
        let SetSearch { problem, rows, inverses, flushed, heaviest, .. } = self;
        Limits { problem, rows, inverses, flushed, heaviest }
    }

    /// Returns the rows and factors of a mixture.
    fn terms(&self, multipliers: &[f64]) -> Vec<Term> {
        let factors = (self.rows.iter().zip(multipliers).zip(&self.inverses))
            .filter(|((_, a), _)| **a > 0.0)
            .map(|((&row, a), inverse)| (row, (a * inverse).min(LARGEST_FACTOR)));
        self.problem.terms(factors)
    }

    /// Improves both bounds (without walks only the lower one), starting from the multipliers in `start`, and returns
    /// the last multipliers.
    pub(super) fn improve(
        &self,
        walks: bool,
        start: Option<&[f64]>,
        best: &mut Best,
    ) -> Result<Vec<f64>, Error> {
        let mut all = vec![0.0; self.problem.rows()];
        if self.rows.is_empty() || self.problem.frame.competing == 0 {
            return Ok(all);
        }
        let start: Option<Vec<f64>> =
            start.map(|start| self.rows.iter().map(|&row| start[row]).collect());
        let found = match start.filter(|start| start.iter().any(|a| *a > 0.0)) {
            Some(start) => self.descend(walks, (start, AFTER_SAMPLE), best)?,
            None => self.descend(walks, self.begin(best)?, best)?,
        };
        for (&row, a) in self.rows.iter().zip(found) {
            all[row] = a;
        }
        Ok(all)
    }

    fn descend(
        &self,
        walks: bool,
        (mut a, mut level): (Vec<f64>, usize),
        best: &mut Best,
    ) -> Result<Vec<f64>, Error> {
        let near = |level: usize| LEVELS[level.min(LEVELS.len() - 1)].0;
        let mut view = self.view(&mut a, (near(level), 1.0), best)?;
        let (mut bound, size) = (0, best.size);
        let coarse = level == AFTER_SAMPLE && self.is_sampled();
        if coarse && view.low < LOWEST {
            a = self.tuned(&self.weighed_sample()?, a, level)?;
            view = self.view(&mut a, (near(level), 1.0), best)?;
        }
        for _ in 0..MOST_VIEWS {
            interrupt::check()?;
            if walks {
                overshoot(self.limits(), (&view.mixed, &a), view.dropped, best)?;
            }
            let near_keys = self.near(&view, near(level));
            if best.size <= best.lower_bound
                || walks && self.ends(best, (level, bound), near_keys.len())
            {
                break;
            }
            bound = best.lower_bound;
            let part = self.part(near_keys, view.left.clone(), 1.0)?;
            a = self.tuned(&part, a, level)?;
            interrupt::check()?;
            // A ramp with hardly more keys than limiting rows gives no more information on them.
            let active = a.iter().filter(|a| **a > 0.0).count();
            let last = level + 1 == LEVELS.len()
                || level >= COARSE
                    && part.on_ramp(self.problem.simd, &a, LEVELS[level + 1].1) < FULL * active;
            let worth = last && self.problem.effort == Effort::Thorough;
            if walks && (worth || part.keys.len() <= WORTH_A_WALK) {
                self.walk(&view, &part, &a, best)?;
                interrupt::check()?;
            }
            // Where the last view had to go, this one may begin.
            let most = (1.5 * view.low).max(LOWEST);
            let next = self.view(&mut a, (near(level + 1), most), best)?;
            let settled =
                crossed(&view, &next, &part.keys) <= self.problem.frame.competing / CROSSING;
            view = next;
            if !settled {
                // The part was too small: continue with these keys and those that are near now.
                self.settle(&mut view, &part.keys)?;
            } else if last {
                break;
            } else {
                level += 1;
            }
        }
        // Without any set yet, the worst keys are walked at least.
        if walks && best.size == size && size > best.lower_bound {
            let keys = self.near(&view, near(LEVELS.len()));
            let part = self.part(keys, view.left.clone(), 1.0)?;
            self.walk(&view, &part, &a, best)?;
        }
        Ok(a)
    }

    /// Returns `true` if a search ends at a view of a level, before `near` keys are looked at more closely, where the
    /// last view had another lower bound.
    fn ends(&self, best: &Best, (level, before): (usize, usize), near: usize) -> bool {
        let settled = best.lower_bound - before <= best.lower_bound / SETTLED
            && best.lower_bound >= SMALL
            && best.size - best.lower_bound <= best.size / FAR;
        let known =
            self.problem.is_enough(best.size, best.lower_bound) || level > AFTER_SAMPLE && settled;
        match self.problem.effort {
            Effort::Fast => known,
            // Few keys are soon searched to the end.
            Effort::Default => known && near > FEW_KEYS,
            Effort::Thorough => false,
        }
    }

    /// Returns the first multipliers, and the first level.
    fn begin(&self, best: &mut Best) -> Result<(Vec<f64>, usize), Error> {
        let simd = self.problem.simd;
        if !self.is_sampled() {
            let all = self.sample(1)?;
            let mut least = (f64::INFINITY, vec![1.0; self.rows.len()]);
            self.view(&mut least.1, (LEVELS[0].0, 1.0), best)?;
            for rule in [StepRule::Power, StepRule::Exponential] {
                let (value, mut a) = all.spread(simd, ROUNDS, rule);
                self.view(&mut a, (LEVELS[0].0, 1.0), best)?;
                if value < least.0 {
                    least = (value, a);
                }
            }
            return Ok((least.1, 0));
        }
        let stride = 4 * self.problem.frame.competing / self.sampled();
        let sample = self.sample(stride)?;
        let (_, mut a) = sample.spread(simd, ROUNDS, StepRule::Power);
        for half in [0.5, 0.15] {
            a = sample.descend(simd, a, half, (STEPS.0, 1e-2))?;
        }
        interrupt::check()?;
        let a = self.tuned(&self.weighed_sample()?, a, AFTER_SAMPLE)?;
        interrupt::check()?;
        Ok((a, AFTER_SAMPLE))
    }

    /// Improves multipliers on some keys: if they are many or far off, by rounds of each alone, at first many by these
    /// only; by steps of all together.
    fn tuned(&self, part: &Part, mut a: Vec<f64>, level: usize) -> Result<Vec<f64>, Error> {
        let simd = self.problem.simd;
        let many = |a: &[f64]| a.iter().filter(|a| **a > 0.0).count() > FEW_ROWS;
        if self.is_sampled() && (many(&a) || part.is_far(simd, &a)?) {
            a = part.adapt(simd, a, ADAPTED)?;
            if level == AFTER_SAMPLE && many(&a) {
                return Ok(a);
            }
        }
        part.descend(simd, a, LEVELS[level].1, STEPS)
    }

    /// Marks the heavy columns; there are none if it is empty.
    fn apart(&self) -> Vec<bool> {
        let heavy = |share: &f32| *share >= HEAVY;
        let any = self.heaviest.iter().any(heavy);
        if any { self.heaviest.iter().map(heavy).collect() } else { Vec::new() }
    }

    /// Returns the most light keys of a sample.
    fn sampled(&self) -> usize {
        (SAMPLE / self.rows.len()).clamp(SAMPLE_KEYS.0, SAMPLE_KEYS.1)
    }

    /// Returns `true` if the first multipliers are those of a sample.
    fn is_sampled(&self) -> bool {
        self.problem.frame.competing >= 2 * self.sampled()
    }

    /// Gathers all heavy keys, after a sample of the light ones, each of which stands for several.
    fn weighed_sample(&self) -> Result<Part, Error> {
        let competing =
            (0..self.problem.frame.columns()).filter(|&i| self.problem.frame.competes(i));
        let (heavy, light): (Vec<u32>, Vec<u32>) =
            competing.map(|i| i as u32).partition(|&i| self.heaviest[i as usize] >= HEAVY);
        let stride = light.len().div_ceil(self.sampled()).max(1);
        let mut keys: Vec<u32> = light.iter().copied().step_by(stride).collect();
        let count = keys.len() / LANES * LANES;
        keys.truncate(count);
        keys.extend(heavy);
        let each = light.len() as f32 / count.max(1) as f32;
        Ok(self.part(keys, vec![1.0; self.rows.len()], 1.0)?.standing(count, each))
    }

    /// Gathers every `stride`-th competing key, but for the heavy ones; with a stride of 1, all.
    fn sample(&self, stride: usize) -> Result<Part, Error> {
        let sampled = |i: &usize| {
            self.problem.frame.competes(*i) && (stride == 1 || self.heaviest[*i] < HEAVY)
        };
        let competing = (0..self.problem.frame.columns()).filter(sampled);
        let keys: Vec<u32> = competing.step_by(stride).map(|i| i as u32).collect();
        let share = keys.len() as f64 / self.problem.frame.competing as f64;
        self.part(keys, vec![share; self.rows.len()], share)
    }

    fn part(&self, keys: Vec<u32>, free: Vec<f64>, share: f64) -> Result<Part, Error> {
        // Weights, and a few numbers per row and per key.
        check_memory(
            "scores",
            self.rows.len().saturating_mul(padded_stride(keys.len())),
            size_of::<f32>(),
        )?;
        check_memory("scores", self.rows.len().saturating_add(keys.len()), 64)?;
        let rows: Vec<(&[f32], f64)> = (self.rows.iter().zip(&self.inverses))
            .map(|(&row, &inverse)| (self.problem.row(row), inverse))
            .collect();
        Part::new(&rows, keys, (free, share), self.problem.threads)
    }

    /// Mixes all keys, updates the lower bound, and scales the multipliers so that the boundary is at 1. Also sums the
    /// rows' losses to the keys clearly below it, at most below `most`.
    fn view(
        &self,
        a: &mut [f64],
        (near, most): (f32, f32),
        best: &mut Best,
    ) -> Result<View, Error> {
        /// Largest deviation of a scale that counts as 1, relative to the near range.
        const SCALED: f32 = 0.2;
        let (problem, frame) = (self.problem, self.problem.frame);
        let terms = self.terms(a);
        let low = (1.0 - near).min(most);
        let mut mixed = vec![0.0; problem.stride];
        let apart = self.apart();
        let mut losses = problem.sweep(Some(&terms), low, &mut mixed, &apart)?;
        let limit = problem.limit(&terms, self.eps);
        let Crossing { dropped, threshold } = crossing(&mixed, limit);
        let bound = frame.forced_count + frame.competing - dropped;
        if bound > best.lower_bound && limit < LARGEST_LIMIT {
            best.lower_bound = bound;
            best.mixture = Problem::mixture(&terms);
        }
        if (threshold - 1.0).abs() > SCALED * near && threshold > 0.0 {
            let scale = threshold.recip();
            for a in a.iter_mut() {
                *a *= f64::from(scale);
            }
            for mixed in &mut mixed {
                *mixed *= scale;
            }
            losses = problem.sweep(None, low, &mut mixed, &apart)?;
        }
        let mut view = View { mixed, left: Vec::new(), low, apart, known: Vec::new(), dropped };
        self.lower(&mut view, losses)?;
        Ok(view)
    }

    /// Takes some keys out of those clearly below the boundary.
    fn settle(&self, view: &mut View, known: &[u32]) -> Result<(), Error> {
        view.known = vec![false; self.problem.stride];
        view.apart.resize(self.problem.stride, false);
        for &key in known {
            view.known[key as usize] = true;
            view.apart[key as usize] = true;
        }
        let losses = self.problem.sweep(None, view.low, &mut view.mixed, &view.apart)?;
        self.lower(view, losses)
    }

    /// Lowers `low` until every row can afford the keys below it.
    fn lower(&self, view: &mut View, mut losses: Vec<f64>) -> Result<(), Error> {
        loop {
            view.left = self.left_after(&losses, view);
            if view.low == 0.0 || view.left.iter().all(|left| *left > 0.0) {
                return Ok(());
            }
            view.low = if view.low > 1e-3 { 0.75 * view.low } else { 0.0 };
            losses = self.problem.sweep(None, view.low, &mut view.mixed, &view.apart)?;
        }
    }

    /// Returns the remainder of each budget after the keys below `low`, in its own units.
    fn left_after(&self, losses: &[f64], view: &View) -> Vec<f64> {
        let dropped =
            (0..self.problem.frame.columns()).filter(|&i| view.is_below(i)).count() as f64;
        let each = self.rows.iter().zip(&self.inverses).zip(&self.flushed);
        each.map(|((&row, inverse), flushed)| {
            if dropped == 0.0 {
                return 1.0;
            }
            1.0 - losses[row] * inverse * (1.0 + crate::kernels::SUMMED) - dropped * flushed
        })
        .collect()
    }

    /// Returns the keys near the boundary, and others known to matter.
    fn near(&self, view: &View, near: f32) -> Vec<u32> {
        let mut high = 1.0 + near;
        let within =
            |high: f32| view.mixed.iter().filter(|mixed| (view.low..high).contains(*mixed)).count();
        while within(high) < LEAST_NEAR && high < 1e9 {
            high = 1.0 + 2.0 * (high - 1.0);
        }
        let inside = |i: &usize| {
            let near = view.mixed[*i] < high && !view.is_below(*i);
            near || view.known.get(*i) == Some(&true)
        };
        (0..self.problem.frame.columns()).filter(inside).map(|i| i as u32).collect()
    }

    /// Searches for a smaller set: drops everything below the part, and the walk's choice from the part.
    fn walk(&self, view: &View, part: &Part, a: &[f64], best: &mut Best) -> Result<(), Error> {
        let (problem, frame) = (self.problem, self.problem.frame);
        let mixed = part.mixed(problem.simd, a);
        let exchanges = match problem.effort {
            Effort::Thorough if problem.thorough => EXCHANGES[1],
            Effort::Default if problem.thorough => EXCHANGES[0],
            _ => 0,
        };
        let (dropped, left) = walk(part, (&mixed, a), &self.flushed, exchanges)?;
        let gone = (0..frame.columns()).filter(|&i| view.is_below(i)).count() + dropped.len();
        let size = frame.forced_count + frame.competing - gone;
        // Few keys beyond the part still fit.
        if size > best.size + best.size / FEW {
            return Ok(());
        }
        let mut kept: Vec<bool> = (0..frame.columns())
            .map(|i| frame.visible[i] && (frame.forced[i] || !view.is_below(i)))
            .collect();
        for key in dropped {
            kept[part.keys[key as usize] as usize] = false;
        }
        let size = size - self.drop_the_rest(view, part, a, left, &mut kept);
        if size < best.size {
            (best.size, best.kept) = (size, kept);
        }
        Ok(())
    }

    /// Drops keys beyond the part that every row can still afford, and returns their number.
    fn drop_the_rest(
        &self,
        view: &View,
        part: &Part,
        a: &[f64],
        mut left: Vec<f64>,
        kept: &mut [bool],
    ) -> usize {
        let (limits, order) = (self.limits(), tightest(&left));
        // A key that fits weighs no more in the mixture than the remainder.
        let most: f64 = a.iter().zip(&left).map(|(a, left)| a * left.max(0.0)).sum();
        let mut inside = part.keys.iter().copied().peekable();
        let mut fitting: Vec<(f32, u32)> = Vec::new();
        for (i, &mixed) in asked_each(view.mixed.iter().enumerate()) {
            if inside.next_if_eq(&(i as u32)).is_some() || view.is_below(i) {
                continue;
            }
            // Columns that do not compete, and the padding of a group, have infinite weight.
            let competes = mixed < f32::INFINITY;
            let light = f64::from(mixed) <= 1.01 * most;
            if competes && light && limits.affords(&order, &left, i) {
                fitting.push((mixed, i as u32));
            }
        }
        fitting.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let dropped = limits.drop_affordable(fitting.into_iter().map(|(_, key)| key), &mut left);
        for &key in &dropped {
            kept[key as usize] = false;
        }
        dropped.len()
    }

    /// Returns the competing keys by their weights in a mixture, best first.
    pub(super) fn ranked(&self, multipliers: &[f64]) -> Result<Vec<u32>, Error> {
        let mut mixed = vec![0.0; self.problem.stride];
        let factors: Vec<f64> = self.rows.iter().map(|&row| multipliers[row]).collect();
        self.problem.sweep(Some(&self.terms(&factors)), 0.0, &mut mixed, &[])?;
        let mut order: Vec<u32> = (0..self.problem.frame.columns() as u32)
            .filter(|&i| mixed[i as usize] < f32::INFINITY)
            .collect();
        order.sort_by(|&i, &k| mixed[k as usize].total_cmp(&mixed[i as usize]).then(i.cmp(&k)));
        Ok(order)
    }
}

/// Returns the number of keys outside a part that changed sides.
fn crossed(before: &View, after: &View, part: &[u32]) -> usize {
    let mut part = part.iter().copied().peekable();
    (0..before.mixed.len())
        .filter(|&i| {
            let inside = part.next_if_eq(&(i as u32)).is_some();
            !inside && before.is_below(i) != (after.mixed[i] < 1.0)
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::super::frame::Frame;
    use super::super::source::{Limits, Seen, Source};
    use super::*;
    use crate::certificate::Certificate;
    use crate::numerics::certified_sums::ErrorBound;
    use crate::select::RowWeights;

    /// Rows of two columns, each of 2^24 equal keys.
    struct Blocks;

    impl Source for Blocks {
        const LIMITS: Limits = Limits { few: 32, first: 32, stored: true };

        fn rows(&self) -> usize {
            32
        }

        fn eps(&self, _: usize) -> f64 {
            0.6
        }

        fn weigh(
            &self,
            listed: &[usize],
            stride: usize,
            to: &mut [f32],
        ) -> Result<Vec<RowWeights>, Error> {
            to.chunks_exact_mut(stride).for_each(|row| row[..2].fill(16_777_216.0));
            let slack = ErrorBound::f64(1 << 25, 0.0);
            Ok(vec![RowWeights { total: 33_554_432.0, slack, whole: true }; listed.len()])
        }

        fn judge(&self, _: &[bool], _: &[usize]) -> Result<Certificate, Error> {
            unreachable!("nothing is certified")
        }
    }

    #[test]
    fn a_mixture_that_overflows_proves_nothing() {
        let seen = Seen { visible: vec![true; 2], lossless: vec![false; 2] };
        let frame = Frame::new(seen, vec![false; 2], usize::MAX).unwrap();
        let mut problem = Problem::new(&frame, 1).unwrap();
        problem.admit(&Blocks, &(0..32).collect::<Vec<usize>>()).unwrap();
        let search = SetSearch::new(&problem, &problem.aims).unwrap();
        // Either column may be dropped, whatever the multipliers.
        for each in [1e-30, 1.0, 1e37, 1e60, 1e300] {
            let mut best = problem.all_visible();
            search.view(&mut vec![each; 32], (0.9, 1.0), &mut best).unwrap();
            assert!(best.lower_bound <= 1, "{each}");
        }
    }
}
