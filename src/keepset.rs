//! One set of keys for many rows, with a lower bound on the size of any such set.
//!
//! The smallest set S whose tail mass is within the budget in every row solves a covering integer program. Two facts
//! enclose its size. For any mixture weights y >= 0, every feasible S satisfies
//! `sum_{i not in S} sum_j y_j P_j(i) <= sum_j y_j eps_j`, so no feasible set has fewer keys than the best keys of the mixed row need
//! for that budget: a **lower bound**. And walking the keys from the worst of the mixed row to the best, dropping each
//! one that every row can still afford, leaves a feasible set: an **upper bound**. Multiplicative updates move the weights
//! towards the rows that lose too much at the mixture's own optimum, and the best of both bounds over the rounds is kept.
//!
//! The promise covers the listed rows only. It says nothing about queries that were not among them.

use rayon::prelude::*;

use crate::certificate::Status;
use crate::error::{Error, Place};
use crate::order;
use crate::scores::{Keep, Scores};
use crate::select::{self, HIDDEN, Hook, Options, RowWeights, allowed_keys, certify_with};
use crate::threads;

/// Rounds of the search with each way of stepping; it ends early when the bounds meet.
const ROUNDS: usize = 28;
/// Rounds per probe when `max_keep` asks for the smallest attainable loss.
const PROBE_ROUNDS: usize = 8;
/// Halvings of the range of that loss.
const PROBES: usize = 24;
/// The budget that a row without one is given when `max_keep` makes it lose something.
const LEAST_BUDGET: f64 = 1e-12;
/// Losses further over budget than this are all the same to the search.
const LARGEST_RATIO: f64 = 1e9;
/// Relative error of a stored weight: two roundings to f32.
const STORED: f64 = 1.0 / 4_194_304.0;
/// Scores up to which one thread is faster than several.
const SERIAL: usize = 1 << 14;
/// Scores weighed between two calls of the hook.
const PORTION: usize = 1 << 24;
/// What the lower bound leaves to an auditor's own rounding, relative to the budget.
const AUDIT_MARGIN: f64 = 1e-6;

/// One kept set for many rows.
#[derive(Debug, Clone, PartialEq)]
pub struct KeepSet {
    /// Positions kept, ascending.
    pub indices: Vec<u32>,
    /// Certified if every row is within its budget, over budget if `max_keep` forbade that, empty if no row has a
    /// visible key.
    pub status: Status,
    /// The real tail mass of each row is at most this.
    pub tail_mass_upper: Vec<f64>,
    /// The real tail mass of each row is at least this.
    pub tail_mass_lower: Vec<f64>,
    /// No set with the same forced keys can be smaller and lose, in each row, at most the budget, or what this set loses
    /// (`tail_mass_upper`) where that is more.
    pub lower_bound: usize,
    /// The mixture of (normalised) rows that proves the lower bound.
    pub weights: Vec<f64>,
}

/// Finds one set of keys whose dropped mass is proven to be at most `eps` in every row, close to the smallest such set.
///
/// Of the options, `max_keep` (with which the largest ratio of loss to budget is made small), `keep_first` and `keep_last`
/// (counted over the positions visible to any row) and `threads` apply. Needs four bytes per score, twice for a moment.
///
/// # Errors
/// Whatever is wrong with the scores, the budgets or the options, by variant.
pub fn keep_set(scores: &Scores<'_>, eps: &[f64], options: &Options) -> Result<KeepSet, Error> {
    keep_set_with(scores, eps, options, &mut || Ok(()))
}

pub(crate) fn keep_set_with(
    scores: &Scores<'_>,
    eps: &[f64],
    options: &Options,
    hook: Hook<'_>,
) -> Result<KeepSet, Error> {
    scores.check_eps(eps)?;
    options.check()?;
    judge_options(scores, options)?;
    let size = scores.rows().saturating_mul(scores.longest());
    let threads = threads::count(options.threads, size > SERIAL)?;
    let _environment = threads::default_floats();
    Problem::new(scores, eps, options, threads, hook)?.solve(hook)
}

fn judge_options(scores: &Scores<'_>, options: &Options) -> Result<(), Error> {
    let conflict = |first, remedy| Err(Error::Conflict { first, second: "keep_set", remedy });
    if scores.is_ragged() {
        return conflict("indptr", "rows of one set share their positions; pad them and mask");
    }
    if options.block_size != 1 {
        return conflict("block_size", "a set of whole blocks is not supported; leave it at 1");
    }
    if options.min_keep > 1 {
        return conflict("min_keep", "use keep_first or keep_last, or leave it at 1");
    }
    Ok(())
}

/// The covering program, with weights laid out key by key.
struct Problem<'a> {
    scores: &'a Scores<'a>,
    threads: usize,
    rows: usize,
    n: usize,
    /// Weights relative to each row's largest, (n, rows); 0 for a masked key.
    weights: Vec<f32>,
    /// Computed sum of each row, 0 for a row without visible keys.
    totals: Vec<f64>,
    eps: Vec<f64>,
    /// The budgets that the search works with.
    aims: Vec<f64>,
    /// By how much each budget is divided, beyond 1, so that the certificate of the final set goes through.
    margin: Vec<f64>,
    /// The largest slack of a ratio of computed sums, over the rows.
    slack: f64,
    /// Keys that at least one row sees.
    visible: Vec<bool>,
    forced: Vec<bool>,
    max_keep: usize,
}

/// A set, and what proves that none can be much smaller.
#[derive(Clone)]
struct Best {
    kept: Vec<bool>,
    size: usize,
    lower_bound: usize,
    /// Multipliers of the rows' normalised constraints `tau_j / eps_j <= 1` at the best lower bound.
    multipliers: Vec<f64>,
}

impl<'a> Problem<'a> {
    fn new(
        scores: &'a Scores<'a>,
        eps: &[f64],
        options: &Options,
        threads: usize,
        hook: Hook<'_>,
    ) -> Result<Self, Error> {
        let (rows, n) = (scores.rows(), scores.longest());
        let eps: Vec<f64> = if eps.len() == 1 { vec![eps[0]; rows] } else { eps.to_vec() };
        let mut by_row = zeros(rows, n)?;
        let mut all: Vec<RowWeights> = Vec::with_capacity(rows);
        let portion = (PORTION / n.max(1)).max(1);
        for start in (0..rows).step_by(portion) {
            let end = (start + portion).min(rows);
            let slots = &mut by_row[start * n..end * n];
            let work = |(i, slot): (_, &mut [f32])| select::weigh_row(scores, start + i, slot);
            let parts: Vec<Result<RowWeights, Error>> = threads::run(threads, || {
                if n == 0 {
                    (0..end - start).map(|i| work((i, &mut []))).collect()
                } else if threads == 1 {
                    slots.chunks_mut(n).enumerate().map(work).collect()
                } else {
                    slots.par_chunks_mut(n).enumerate().map(work).collect()
                }
            })?;
            for part in parts {
                all.push(part?);
            }
            hook()?;
        }
        let mut visible = vec![false; n];
        // What rows that may lose nothing see.
        let mut lossless = vec![false; n];
        for (row, weights) in by_row.chunks_exact(n.max(1)).enumerate() {
            for (i, &weight) in weights.iter().enumerate() {
                visible[i] |= weight != HIDDEN;
                lossless[i] |= weight != HIDDEN && eps[row] == 0.0;
            }
        }
        let positions: Vec<usize> = (0..n).filter(|&i| visible[i]).collect();
        let first = options.keep_first.min(positions.len());
        let last = options.keep_last.min(positions.len());
        let mut forced = vec![false; n];
        for &i in positions[..first].iter().chain(&positions[positions.len() - last..]) {
            forced[i] = true;
        }
        let count = |flags: &[bool]| flags.iter().filter(|flag| **flag).count();
        let max_keep = allowed_keys(options.max_keep, positions.len(), 0, scores, 0)?;
        if count(&forced) > max_keep {
            let place = Place(vec![]);
            return Err(Error::ForcedOverMax { place, forced: count(&forced), max_keep });
        }
        let demanded: Vec<bool> = forced.iter().zip(&lossless).map(|(a, b)| a | b).collect();
        // Where `max_keep` forbids what those rows ask for, they take part with a budget that is next to nothing.
        let aims = if count(&demanded) <= max_keep {
            forced = demanded;
            eps.clone()
        } else {
            eps.iter().map(|e| if *e == 0.0 { LEAST_BUDGET } else { *e }).collect()
        };
        let slack = all.iter().map(|row| row.slack.certify).fold(0.0, f64::max);
        let margin = (all.iter())
            .map(|row| (1.0 + row.slack.select) * (1.0 + STORED) - 1.0 + n as f64 * f64::EPSILON)
            .collect();
        let totals = all.iter().map(|row| row.total).collect();
        let weights = transpose(&by_row, rows, n, threads)?;
        Ok(Problem {
            scores,
            threads,
            rows,
            n,
            weights,
            totals,
            eps,
            aims,
            margin,
            slack,
            visible,
            forced,
            max_keep,
        })
    }

    /// The weights of a key in all rows.
    fn key(&self, i: usize) -> &[f32] {
        &self.weights[i * self.rows..(i + 1) * self.rows]
    }

    fn all_visible(&self) -> Best {
        let size = self.visible.iter().filter(|v| **v).count();
        let multipliers = vec![0.0; self.rows];
        Best { kept: self.visible.clone(), size, lower_bound: 0, multipliers }
    }

    /// What each row may lose, in units of its weights, with the margin set aside. Rows that see nothing, that may lose
    /// everything, or whose keys are all forced, set no limit.
    fn budgets(&self, eps: &[f64]) -> Vec<f64> {
        let each = eps.iter().zip(&self.totals).zip(&self.margin);
        each.map(|((&eps, &total), &margin)| {
            if total > 0.0 && eps > 0.0 && eps < 1.0 {
                eps * total / (1.0 + margin)
            } else {
                f64::INFINITY
            }
        })
        .collect()
    }

    /// Improves both bounds for the budgets `eps`, starting from `start`'s multipliers.
    fn improve(
        &self,
        eps: &[f64],
        mut multipliers: Vec<f64>,
        (rule, rounds): (Step, usize),
        best: &mut Best,
        hook: Hook<'_>,
    ) -> Result<(), Error> {
        let budgets = self.budgets(eps);
        // Rows that can lose something and see something; the others are met by the forced keys.
        let active: Vec<bool> =
            (0..self.rows).map(|j| self.totals[j] > 0.0 && eps[j] > 0.0 && eps[j] < 1.0).collect();
        for (multiplier, active) in multipliers.iter_mut().zip(&active) {
            *multiplier = if *active { multiplier.max(1e-300) } else { 0.0 };
        }
        for round in 0..rounds {
            let sum: f64 = multipliers.iter().sum();
            if sum <= 0.0 {
                break;
            }
            for multiplier in &mut multipliers {
                *multiplier /= sum;
            }
            let order = self.ranked(eps, &multipliers)?;
            let (bound, ratios) = self.refute(eps, &multipliers, &order);
            if bound > best.lower_bound {
                best.lower_bound = bound;
                best.multipliers.clone_from(&multipliers);
            }
            let (kept, size) = self.drop_affordable(&budgets, &order);
            if size < best.size {
                best.size = size;
                best.kept = kept;
            }
            hook()?;
            if best.size <= best.lower_bound {
                break;
            }
            rule.apply(&mut multipliers, &ratios, round);
        }
        Ok(())
    }

    /// The competing keys with their weights in the mixture, worst first.
    fn ranked(&self, eps: &[f64], multipliers: &[f64]) -> Result<Vec<(f64, u32)>, Error> {
        let mixture: Vec<f64> = (mixture(multipliers, eps).0.iter())
            .zip(&self.totals)
            .map(|(&y, total)| if y > 0.0 { y / total } else { 0.0 })
            .collect();
        let weigh = |i: usize| {
            let terms = self.key(i).iter().zip(&mixture);
            terms.map(|(&weight, y)| f64::from(weight) * y).sum::<f64>()
        };
        let competes = |i: &usize| self.visible[*i] && !self.forced[*i];
        threads::run(self.threads, || {
            let mut order: Vec<(f64, u32)> = if self.threads == 1 {
                (0..self.n).filter(competes).map(|i| (weigh(i), i as u32)).collect()
            } else {
                (0..self.n).into_par_iter().filter(competes).map(|i| (weigh(i), i as u32)).collect()
            };
            if self.threads == 1 {
                order.sort_unstable_by(order::worst_first);
            } else {
                order.par_sort_unstable_by(order::worst_first);
            }
            order
        })
    }

    /// How many keys every feasible set has at least, and what each row loses, relative to its budget, when the
    /// mixture drops as much as it can.
    fn refute(&self, eps: &[f64], multipliers: &[f64], order: &[(f64, u32)]) -> (usize, Vec<f64>) {
        let budget = mixture(multipliers, eps).1;
        // What each real row loses is within the slack of what the computed one loses; beside that there are the
        // weights' rounding to f32, the sums over keys and rows, and what an auditor's own arithmetic may add.
        let rounding = (self.rows + self.n + 8) as f64 * f64::EPSILON;
        let limit = budget * (1.0 + self.slack) * (1.0 + STORED + 2.0 * rounding + AUDIT_MARGIN);
        let mut lost = 0.0;
        let mut losses = vec![0.0; self.rows];
        let mut dropped = 0;
        for &(weight, i) in order {
            if lost + weight > limit {
                break;
            }
            lost += weight;
            dropped += 1;
            for (loss, &weight) in losses.iter_mut().zip(self.key(i as usize)) {
                *loss += f64::from(weight);
            }
        }
        let forced = self.forced.iter().filter(|f| **f).count();
        let ratio = |j: usize| (losses[j] / self.totals[j] / eps[j]).min(LARGEST_RATIO);
        let ratios =
            (0..self.rows).map(|j| if multipliers[j] > 0.0 { ratio(j) } else { 0.0 }).collect();
        (forced + order.len() - dropped, ratios)
    }

    /// Drops keys, worst first, as long as every row can afford each.
    fn drop_affordable(&self, budgets: &[f64], order: &[(f64, u32)]) -> (Vec<bool>, usize) {
        let mut kept = self.visible.clone();
        let mut size = kept.iter().filter(|v| **v).count();
        let mut left = budgets.to_vec();
        for &(_, i) in order {
            let weights = self.key(i as usize);
            if weights.iter().zip(&left).all(|(&weight, left)| charge(weight) <= *left) {
                for (left, &weight) in left.iter_mut().zip(weights) {
                    *left -= charge(weight);
                }
                kept[i as usize] = false;
                size -= 1;
            }
        }
        (kept, size)
    }

    fn start(&self) -> Vec<f64> {
        vec![1.0; self.rows]
    }

    fn solve(mut self, hook: Hook<'_>) -> Result<KeepSet, Error> {
        if self.visible.iter().all(|visible| !visible) {
            let none = vec![0.0; self.rows];
            return Ok(KeepSet {
                indices: Vec::new(),
                status: Status::Empty,
                tail_mass_upper: none.clone(),
                tail_mass_lower: none.clone(),
                lower_bound: 0,
                weights: none,
            });
        }
        let forced = self.forced.iter().filter(|f| **f).count();
        let eps = self.aims.clone();
        for attempt in 0.. {
            let mut best = self.all_visible();
            best.lower_bound = forced;
            if forced < best.size {
                for rule in [Step::Power, Step::Exponential] {
                    if best.size > best.lower_bound {
                        self.improve(&eps, self.start(), (rule, ROUNDS), &mut best, hook)?;
                    }
                }
            }
            let over = best.size > self.max_keep;
            if over {
                self.shrink(&eps, &mut best, hook)?;
            }
            let set = self.certified(&best, hook)?;
            if set.status == Status::Certified || over {
                return Ok(set);
            }
            // Rounding ate the margin of some row: set more aside, in the end everything, so that all keys are kept.
            for margin in &mut self.margin {
                *margin = if attempt < 2 { 64.0 * *margin + 1e-9 } else { f64::INFINITY };
            }
        }
        unreachable!("a set of all keys loses nothing")
    }

    /// Finds a set of `max_keep` keys whose largest ratio of loss to budget is small: bisection on a common factor of
    /// all budgets.
    fn shrink(&self, eps: &[f64], best: &mut Best, hook: Hook<'_>) -> Result<(), Error> {
        let least = eps.iter().copied().filter(|e| *e > 0.0).fold(1.0, f64::min);
        let (mut low, mut high) = (0.0, -least.ln());
        let mut multipliers = best.multipliers.clone();
        if multipliers.iter().all(|a| *a == 0.0) {
            multipliers = self.start();
        }
        let mut fitting: Option<Best> = None;
        for _ in 0..PROBES {
            let middle = 0.5 * (low + high);
            let scaled: Vec<f64> = eps.iter().map(|e| e * middle.exp()).collect();
            let mut probe = self.all_visible();
            let plan = (Step::Power, PROBE_ROUNDS);
            self.improve(&scaled, multipliers.clone(), plan, &mut probe, hook)?;
            if probe.multipliers.iter().any(|a| *a > 0.0) {
                multipliers.clone_from(&probe.multipliers);
            }
            if probe.size <= self.max_keep {
                high = middle;
                fitting = Some(probe);
            } else {
                low = middle;
            }
        }
        let mut kept = fitting.map_or_else(|| self.forced.clone(), |probe| probe.kept);
        // Use every key that is allowed, the most valuable first.
        let mut size = kept.iter().filter(|k| **k).count();
        for &(_, i) in self.ranked(eps, &multipliers)?.iter().rev() {
            if size >= self.max_keep {
                break;
            }
            if !std::mem::replace(&mut kept[i as usize], true) {
                size += 1;
            }
        }
        *best = Best { kept, size, ..best.clone() };
        Ok(())
    }

    /// The set with its certificate, and the lower bound for what it achieves.
    fn certified(&self, best: &Best, hook: Hook<'_>) -> Result<KeepSet, Error> {
        let indices: Vec<u32> = (0..self.n).filter(|&i| best.kept[i]).map(|i| i as u32).collect();
        let one: Vec<u8> = best.kept.iter().map(|&k| u8::from(k)).collect();
        let strides = vec![0; self.scores.batch_shape().len()];
        let keep = Keep::Mask { kept: &one, strides: &strides };
        let judged =
            certify_with(self.scores, &keep, Some(&self.eps), false, Some(self.threads), hook)?;
        let holds = judged.holds.as_ref().is_some_and(|holds| holds.iter().all(|h| *h));
        let forced = self.forced.iter().filter(|f| **f).count();
        let mut proof = best.clone();
        let mut budgets = self.aims.clone();
        if !holds {
            // What no smaller set can achieve is the loss of this one.
            for (budget, upper) in budgets.iter_mut().zip(&judged.tail_mass_upper) {
                *budget = budget.max(*upper).min(1f64.next_down());
            }
            proof = Best { lower_bound: forced, size: best.size, ..best.clone() };
            let start = if best.multipliers.iter().any(|a| *a > 0.0) {
                best.multipliers.clone()
            } else {
                self.start()
            };
            let mut scratch = Best { size: usize::MAX, ..proof.clone() };
            self.improve(&budgets, start, (Step::Power, ROUNDS), &mut scratch, hook)?;
            proof.lower_bound = scratch.lower_bound.min(best.size);
            proof.multipliers = scratch.multipliers;
        }
        let (weights, _) = mixture(&proof.multipliers, &budgets);
        Ok(KeepSet {
            indices,
            status: if holds { Status::Certified } else { Status::OverBudget },
            tail_mass_upper: judged.tail_mass_upper,
            tail_mass_lower: judged.tail_mass_lower,
            lower_bound: proof.lower_bound,
            weights,
        })
    }
}

/// The mixture weights `y_j = a_j / eps_j` of multipliers, up to a common factor, and the budget `sum_j y_j eps_j`. A budget
/// next to nothing counts as a little more: that keeps the numbers in range and the bound valid.
fn mixture(multipliers: &[f64], eps: &[f64]) -> (Vec<f64>, f64) {
    const LEAST: f64 = 1e-290;
    let floor = |eps: &f64| eps.max(LEAST);
    let active = multipliers.iter().zip(eps).filter(|(a, _)| **a > 0.0);
    let unit = active.map(|(_, eps)| floor(eps)).fold(1.0, f64::min);
    let each = multipliers.iter().zip(eps);
    let weights: Vec<f64> =
        each.map(|(a, eps)| if *a > 0.0 { a * (unit / floor(eps)) } else { 0.0 }).collect();
    let budget = weights.iter().zip(eps).map(|(y, eps)| y * floor(eps)).sum();
    (weights, budget)
}

/// What dropping a key of a computed weight may cost at the most: the real weight of a flushed one is not 0.
fn charge(weight: f32) -> f64 {
    const FLUSHED: f32 = f32::MIN_POSITIVE * 2.0;
    f64::from(weight.max(FLUSHED))
}

/// How multipliers answer to what their rows lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// By a power of loss over budget: closes the gap within a few dozen rounds where many keys share the mass.
    Power,
    /// By an exponential of the difference: steadier where single keys decide.
    Exponential,
}

impl Step {
    /// One multiplicative update: rows that lose more than their budget at the mixture's optimum gain weight.
    fn apply(self, multipliers: &mut [f64], ratios: &[f64], round: usize) {
        /// Rows that lose next to nothing fade no faster than this.
        const LEAST_RATIO: f64 = 0.02;
        let rate = 2.0 / (1.0 + round as f64).sqrt();
        let widest = ratios.iter().map(|r| (r - 1.0).abs()).fold(0.0, f64::max).max(1e-12);
        for (multiplier, ratio) in multipliers.iter_mut().zip(ratios) {
            *multiplier *= match self {
                Step::Power => ratio.max(LEAST_RATIO).powf(rate),
                Step::Exponential => (rate * (ratio - 1.0) / widest).exp(),
            };
        }
    }
}

/// From rows of keys to keys of rows, with masked entries weighing nothing.
fn transpose(by_row: &[f32], rows: usize, n: usize, threads: usize) -> Result<Vec<f32>, Error> {
    const TILE: usize = 64;
    let mut by_key = zeros(rows, n)?;
    if rows * n == 0 {
        return Ok(by_key);
    }
    let work = |(t, tile): (usize, &mut [f32])| {
        for (j, weights) in by_row.chunks_exact(n).enumerate() {
            for (key, &weight) in tile.chunks_exact_mut(rows).zip(&weights[t * TILE..]) {
                key[j] = weight.max(0.0);
            }
        }
    };
    threads::run(threads, || {
        if threads == 1 {
            by_key.chunks_mut(rows * TILE).enumerate().for_each(work);
        } else {
            by_key.par_chunks_mut(rows * TILE).enumerate().for_each(work);
        }
    })?;
    Ok(by_key)
}

/// A zeroed matrix, or an error where there is no room for it.
fn zeros(rows: usize, n: usize) -> Result<Vec<f32>, Error> {
    let too_large = || Error::NoMemory { rows, n };
    let size = rows.checked_mul(n).ok_or_else(too_large)?;
    let mut matrix = Vec::new();
    matrix.try_reserve_exact(size).map_err(|_| too_large())?;
    matrix.resize(size, 0.0);
    Ok(matrix)
}
