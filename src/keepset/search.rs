//! Search for a set, and for multipliers that prove it small.
//!
//! From coarse to fine: a sample of the keys gives the first multipliers. Then each level mixes all keys once, which
//! gives a lower bound and separates the keys far from the boundary. The multipliers are improved on the near keys
//! alone, with the others fixed. At the finer levels the keys near the boundary are walked, worst first, for a set.

use super::bound::{Crossing, crossing};
use super::dual::{Part, StepRule};
use super::overshoot::{Limits, overshoot, tightest};
use super::problem::{Best, Problem, Term};
use super::walk::walk;
use crate::error::Error;
use crate::kernels::padded_stride;
use crate::runtime::ambient::asked_each;
use crate::runtime::interrupt;
use crate::runtime::memory::check_memory;

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
/// Least number of keys near the boundary.
const LEAST_NEAR: usize = 256;
/// Largest number of keys near the boundary for a walk at levels other than the last.
const WORTH_A_WALK: usize = 3072;
/// Keys on a ramp, per row with influence, that are worth another level.
const FULL: usize = 1;
/// Number of levels too coarse for that rule.
const COARSE: usize = 2;
/// Inverse share of keys that change sides of the boundary above which a level is repeated.
const CROSSING: usize = 512;
/// Mixtures of all keys in one search.
const MOST_VIEWS: usize = 12;
const SPREAD: usize = 8;
/// Inverse share of a set by which a walk's may be larger before keys beyond its part are dropped.
const FEW: usize = 50;
/// Inverse relative distance from the lower bound within which a level is not walked twice.
const CLOSE: usize = 200;
/// Keys of that distance that do not count.
const LITTLE: usize = 10;
/// Steps of a descent, and the excess over a budget at which it ends.
const STEPS: (usize, f64) = (6, 3e-3);
/// Factors of a mixture are at most this, so that nothing overflows.
const LARGEST_FACTOR: f64 = 1e30;

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
}

/// All keys at some multipliers.
struct View {
    mixed: Vec<f32>,
    /// Keys below this are dropped, unless they are known to matter.
    low: f32,
    /// Keys known to matter; empty if there are none.
    known: Vec<bool>,
    /// Remainder of each budget after that, in its own units.
    left: Vec<f64>,
    /// Number of keys that the bound of this mixture allows to drop.
    dropped: usize,
}

impl View {
    fn is_below(&self, i: usize) -> bool {
        self.mixed[i] < self.low && !self.known.get(i).is_some_and(|known| *known)
    }
}

impl<'p, 'a> SetSearch<'p, 'a> {
    pub(super) fn new(problem: &'p Problem<'a>, eps: &'p [f64]) -> Self {
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
        SetSearch { problem, eps, rows, inverses, flushed }
    }

    fn limits(&self) -> Limits<'_, 'a> {
        let SetSearch { problem, rows, inverses, flushed, .. } = self;
        Limits { problem, rows, inverses, flushed }
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
        let mut view = self.view(&mut a, LEVELS[level].0, best)?;
        // Keys that no set drops; in a mixture they may be light.
        let needed =
            if walks { self.problem.heavier_than(&self.rows, &self.inverses)? } else { Vec::new() };
        let mut tried = None;
        let mut sampled = level == AFTER_SAMPLE;
        if sampled && view.low < 1.0 - LEVELS[level].0 {
            sampled = false;
            a = self.spread(a)?;
            view = self.view(&mut a, LEVELS[level].0, best)?;
        }
        for _ in 0..MOST_VIEWS {
            interrupt::check()?;
            if walks && !close(best) {
                overshoot(self.limits(), &needed, (&view.mixed, &a), view.dropped, best)?;
            }
            if best.size <= best.lower_bound {
                break;
            }
            let (near, half) = LEVELS[level];
            let part = self.near(&view, near)?;
            let before = a.clone();
            a = part.descend(self.problem.simd, a, half, STEPS)?;
            interrupt::check()?;
            // A ramp with hardly more keys than limiting rows gives no more information on them.
            let active = a.iter().filter(|a| **a > 0.0).count();
            let last = level + 1 == LEVELS.len()
                || level >= COARSE
                    && part.on_ramp(self.problem.simd, &a, LEVELS[level + 1].1) < FULL * active;
            // A second walk at a level was never seen to find more than a part of that.
            let again = tried == Some(level) && close(best);
            if walks && (last || part.keys.len() <= WORTH_A_WALK) && !again {
                self.walk(&view, &part, &a, best)?;
                tried = Some(level);
                interrupt::check()?;
            }
            let next = self.view(&mut a, LEVELS[(level + 1).min(LEVELS.len() - 1)].0, best)?;
            let settled =
                crossed(&view, &next, &part.keys) <= self.problem.frame.competing / CROSSING;
            view = next;
            if !settled && sampled {
                sampled = false;
                a = self.spread(before)?;
                view = self.view(&mut a, LEVELS[level].0, best)?;
            } else if !settled {
                // The part was too small: continue with these keys and those that are near now.
                self.settle(&mut view, &part.keys)?;
            } else if last {
                break;
            } else {
                level += 1;
            }
        }
        if walks && tried.is_none() && best.size > best.lower_bound {
            self.walk(&view, &self.near(&view, LEVELS[LEVELS.len() - 1].0)?, &a, best)?;
        }
        Ok(a)
    }

    /// Returns the first multipliers, and the first level.
    fn begin(&self, best: &mut Best) -> Result<(Vec<f64>, usize), Error> {
        let (simd, competing) = (self.problem.simd, self.problem.frame.competing);
        let (least, most) = SAMPLE_KEYS;
        let sampled = (SAMPLE / self.rows.len()).clamp(least, most);
        if competing < 2 * sampled {
            let all = self.sample(1)?;
            let mut least = (f64::INFINITY, vec![1.0; self.rows.len()]);
            self.view(&mut least.1, LEVELS[0].0, best)?;
            for rule in [StepRule::Power, StepRule::Exponential] {
                let (value, mut a) = all.spread(simd, ROUNDS, rule);
                self.view(&mut a, LEVELS[0].0, best)?;
                if value < least.0 {
                    least = (value, a);
                }
            }
            return Ok((least.1, 0));
        }
        let stride = competing / sampled;
        let (_, a) = self.sample(4 * stride)?.spread(simd, ROUNDS, StepRule::Power);
        interrupt::check()?;
        let sample = self.sample(stride)?;
        let a = sample.descend(simd, a, 0.5, (STEPS.0, 3e-2))?;
        let a = sample.descend(simd, a, 0.15, (STEPS.0, 1e-2))?;
        interrupt::check()?;
        Ok((a, AFTER_SAMPLE))
    }

    /// Runs a few multiplicative rounds on all keys: a sample says little about rows that lose a few heavy keys.
    fn spread(&self, mut a: Vec<f64>) -> Result<Vec<f64>, Error> {
        let mut mixed = vec![0.0; self.problem.stride];
        let seed = 1e-3 * a.iter().sum::<f64>() / a.len() as f64;
        for a in &mut a {
            *a = a.max(seed);
        }
        let mut ratios = vec![1.0; a.len()];
        for round in 0..SPREAD {
            let losses = self.problem.sweep(Some(&self.terms(&a)), 1.0, &mut mixed, &[])?;
            interrupt::check()?;
            let rate = (round as f64 + 1.0).sqrt().recip();
            let alpha = (1.0 - rate) / (1.0 + rate);
            for (j, a) in a.iter_mut().enumerate() {
                ratios[j] = (losses[self.rows[j]] * self.inverses[j]).clamp(0.02, 50.0);
                *a *= (alpha + ratios[j]) / (1.0 + alpha * ratios[j]);
            }
        }
        // Rows that gained nothing from so little set no limit.
        for (a, ratio) in a.iter_mut().zip(ratios) {
            *a = if *a <= seed && ratio < 0.5 { 0.0 } else { *a };
        }
        Ok(a)
    }

    /// Gathers every `stride`-th competing key.
    fn sample(&self, stride: usize) -> Result<Part, Error> {
        let competing =
            (0..self.problem.frame.columns()).filter(|&i| self.problem.frame.competes(i));
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
    /// rows' losses to the keys clearly below it.
    fn view(&self, a: &mut [f64], near: f32, best: &mut Best) -> Result<View, Error> {
        /// Largest deviation of a scale that counts as 1, relative to the near range.
        const SCALED: f32 = 0.2;
        let (problem, frame) = (self.problem, self.problem.frame);
        let terms = self.terms(a);
        let low = 1.0 - near;
        let mut mixed = vec![0.0; problem.stride];
        let mut losses = problem.sweep(Some(&terms), low, &mut mixed, &[])?;
        let limit = problem.limit(&terms, self.eps);
        let Crossing { dropped, threshold } = crossing(&mixed, limit);
        let bound = frame.forced_count + frame.competing - dropped;
        if bound > best.lower_bound {
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
            losses = problem.sweep(None, low, &mut mixed, &[])?;
        }
        let mut view = View { mixed, left: Vec::new(), low, known: Vec::new(), dropped };
        self.lower(&mut view, losses)?;
        Ok(view)
    }

    /// Takes some keys out of those clearly below the boundary.
    fn settle(&self, view: &mut View, known: &[u32]) -> Result<(), Error> {
        view.known = vec![false; self.problem.stride];
        for &key in known {
            view.known[key as usize] = true;
        }
        let losses = self.problem.sweep(None, view.low, &mut view.mixed, &view.known)?;
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
            losses = self.problem.sweep(None, view.low, &mut view.mixed, &view.known)?;
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

    /// Gathers the keys near the boundary, and others known to matter.
    fn near(&self, view: &View, near: f32) -> Result<Part, Error> {
        let mut high = 1.0 + near;
        let within =
            |high: f32| view.mixed.iter().filter(|mixed| (view.low..high).contains(*mixed)).count();
        while within(high) < LEAST_NEAR && high < 1e9 {
            high = 1.0 + 2.0 * (high - 1.0);
        }
        let inside = |i: &usize| {
            (view.low..high).contains(&view.mixed[*i]) || view.known.get(*i).is_some_and(|k| *k)
        };
        let keys: Vec<u32> =
            (0..self.problem.frame.columns()).filter(inside).map(|i| i as u32).collect();
        self.part(keys, view.left.clone(), 1.0)
    }

    /// Searches for a smaller set: drops everything below the part, and the walk's choice from the part.
    fn walk(&self, view: &View, part: &Part, a: &[f64], best: &mut Best) -> Result<(), Error> {
        let (problem, frame) = (self.problem, self.problem.frame);
        let mixed = part.mixed(problem.simd, a);
        let thorough = problem.thorough && !close(best);
        let (dropped, left) = walk(part, (&mixed, a), &self.flushed, thorough)?;
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

/// Returns `true` if a set is so close to the bound that exchanges do not pay. In a small set every key counts.
fn close(best: &Best) -> bool {
    best.size <= best.lower_bound + (best.lower_bound / CLOSE).saturating_sub(LITTLE)
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
