//! One set of keys for many rows, with a lower bound on the size of any such set.
//!
//! The smallest set S whose tail mass is within the budget in every row solves a covering integer program. Two facts
//! enclose its size. For any mixture weights y >= 0, every feasible S satisfies
//! `sum_{i not in S} sum_j y_j P_j(i) <= sum_j y_j eps_j`, so no feasible set has fewer keys than the best keys of the mixed row need
//! for that budget: a **lower bound**. And walking the keys from the worst of the mixed row to the best, dropping each
//! one that every row can still afford, leaves a feasible set: an **upper bound**. The weights are multipliers of the
//! relaxed program's dual, which is improved by multiplicative updates first and then by Newton steps on the few keys near
//! the boundary (`dual`), from coarse to fine (`search`); the contested keys are walked in several orders (`walk`).
//!
//! The promise covers the listed rows only. It says nothing about queries that were not among them.

mod bound;
mod dual;
mod problem;
mod search;
mod walk;

use crate::certificate::Status;
use crate::error::Error;
use crate::rows::{Keep, Scores};
use crate::select::{Options, certify_tails};
use crate::threads;
use problem::{Best, Problem};
use search::SetSearch;

/// Halvings of the range of the loss, when `max_keep` asks for the smallest attainable one.
const PROBES: usize = 24;
/// Scores up to which one thread is faster than several.
const SERIAL: usize = 1 << 14;

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
/// (counted over the positions visible to any row) and `threads` apply. Needs four bytes per score, and again for
/// the keys near the boundary: usually a third of that, three times as much where all scores are equal.
///
/// # Errors
/// Whatever is wrong with the scores, the budgets or the options, by variant.
pub fn keep_set(scores: &Scores<'_>, eps: &[f64], options: &Options) -> Result<KeepSet, Error> {
    let _environment = threads::default_floats();
    let eps = scores.budgets(eps)?;
    options.check()?;
    judge_options(scores, options)?;
    let size = scores.rows().saturating_mul(scores.longest());
    let threads = threads::count(options.threads, size > SERIAL)?;
    Problem::new(scores, eps, options, threads)?.solve()
}

fn judge_options(scores: &Scores<'_>, options: &Options) -> Result<(), Error> {
    let conflict = |first, remedy| Err(Error::Conflict { first, second: "keep_set", remedy });
    if scores.is_ragged() {
        return conflict("indptr", "rows of one set share their positions; pad them and mask");
    }
    // One by one, so that an option that is added does not compile before somebody has decided here.
    let &Options {
        min_keep,
        block_size,
        max_keep: _,
        keep_first: _,
        keep_last: _,
        prove_minimal: _, // of a set there is a lower bound instead
        threads: _,
    } = options;
    if block_size != 1 {
        return conflict("block_size", "a set of whole blocks is not supported; leave it at 1");
    }
    if min_keep > 1 {
        return conflict("min_keep", "use keep_first or keep_last, or leave it at 1");
    }
    Ok(())
}

impl Problem<'_> {
    fn solve(mut self) -> Result<KeepSet, Error> {
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
        let eps = self.aims.clone();
        for attempt in 0.. {
            let mut best = self.all_visible();
            best.lower_bound = self.forced_count;
            if self.forced_count < best.size {
                best.multipliers = Some(SetSearch::new(&self, &eps).improve(true, &mut best)?);
            }
            let over = best.size > self.max_keep;
            if over {
                self.shrink(&eps, &mut best)?;
            }
            let set = self.certified(&best)?;
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
    fn shrink(&self, eps: &[f64], best: &mut Best) -> Result<(), Error> {
        let least = eps.iter().copied().filter(|e| *e > 0.0).fold(1.0, f64::min);
        let (mut low, mut high) = (0.0, -least.ln());
        let mut fitting: Option<Best> = None;
        for _ in 0..PROBES {
            let middle = 0.5 * (low + high);
            let scaled: Vec<f64> = eps.iter().map(|e| e * middle.exp()).collect();
            let mut probe = self.all_visible();
            SetSearch::new(self, &scaled).improve(true, &mut probe)?;
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
        let search = SetSearch::new(self, eps);
        let multipliers = best.multipliers.clone().unwrap_or_else(|| search.equal());
        for i in search.ranked(&multipliers) {
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
    fn certified(&self, best: &Best) -> Result<KeepSet, Error> {
        let indices: Vec<u32> = (0..self.n).filter(|&i| best.kept[i]).map(|i| i as u32).collect();
        let one: Vec<u8> = best.kept.iter().map(|&k| u8::from(k)).collect();
        let strides = vec![0; self.scores.batch_shape().len()];
        let keep = Keep::Mask { kept: &one, strides: &strides };
        let judged = certify_tails(self.scores, &keep, &self.eps, self.threads)?;
        let holds = judged.holds.as_ref().is_some_and(|holds| holds.iter().all(|h| *h));
        let mut proof = best.clone();
        if !holds {
            // What no smaller set can achieve is the loss of this one.
            let achieved: Vec<f64> = (self.aims.iter().zip(&judged.tail_mass_upper))
                .map(|(aim, upper)| aim.max(*upper).min(1f64.next_down()))
                .collect();
            proof = self.all_visible();
            proof.lower_bound = self.forced_count;
            proof.size = usize::MAX;
            SetSearch::new(self, &achieved).improve(false, &mut proof)?;
            proof.lower_bound = proof.lower_bound.min(best.size);
        }
        Ok(KeepSet {
            indices,
            status: if holds { Status::Certified } else { Status::OverBudget },
            tail_mass_upper: judged.tail_mass_upper,
            tail_mass_lower: judged.tail_mass_lower,
            lower_bound: proof.lower_bound,
            weights: proof.weights,
        })
    }
}
