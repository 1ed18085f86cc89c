//! A set from the mixture of a bound: as many keys are dropped as the bound allows, those that the mixture says.
//!
//! Some rows are then over their budgets, by little if the bound is close. What helps them most is taken back, and then
//! what still fits is dropped.

use super::problem::{Best, Problem};
use super::repair::most_helpful;
use crate::error::Error;
use crate::kernels::SUMMED;
use crate::runtime::ambient::asked_each;

/// Budgets of the rows that set a limit.
#[derive(Clone, Copy)]
pub(super) struct Limits<'s, 'a> {
    pub(super) problem: &'s Problem<'a>,
    pub(super) rows: &'s [usize],
    /// Inverses of their budgets in units of their weights.
    pub(super) inverses: &'s [f64],
    /// Upper bound on a weight stored as 0, in units of the budgets.
    pub(super) flushed: &'s [f64],
    /// Largest share of a budget that each column takes.
    pub(super) heaviest: &'s [f32],
}

impl Limits<'_, '_> {
    /// Returns the loss of a row to a key, in units of its budget.
    pub(super) fn charge(&self, j: usize, key: usize) -> f64 {
        f64::from(self.problem.row(self.rows[j])[key]) * self.inverses[j] + self.flushed[j]
    }

    /// Returns `true` if every row can afford to lose a key. `order` are all rows, best those first that can afford
    /// least.
    pub(super) fn affords(&self, order: &[usize], left: &[f64], key: usize) -> bool {
        order.iter().all(|&j| self.charge(j, key) <= left[j])
    }

    /// Charges keys in their order, those that every row can afford then, and returns these.
    pub(super) fn drop_affordable(
        &self,
        keys: impl Iterator<Item = u32>,
        left: &mut [f64],
    ) -> Vec<u32> {
        let order = tightest(left);
        let mut dropped = Vec::new();
        for key in asked_each(keys) {
            if self.affords(&order, left, key as usize) {
                for (j, left) in left.iter_mut().enumerate() {
                    *left -= self.charge(j, key as usize);
                }
                dropped.push(key);
            }
        }
        dropped
    }
}

/// Returns the rows by what is left of their budgets, the least first.
pub(super) fn tightest(left: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..left.len()).collect();
    order.sort_by(|&j, &k| left[j].total_cmp(&left[k]).then(j.cmp(&k)));
    order
}

/// Makes a set by the weights of keys in a mixture with these multipliers, where `dropped` keys may go by the bound.
/// Keys that take more than a budget stay, although they may be light in the mixture.
pub(super) fn overshoot(
    limits: Limits<'_, '_>,
    (mixed, a): (&[f32], &[f64]),
    dropped: usize,
    best: &mut Best,
) -> Result<(), Error> {
    let Limits { problem, rows, inverses, flushed, heaviest } = limits;
    let frame = problem.frame;
    let open = |(mixed, key): &(f32, u32)| *mixed < f32::INFINITY && heaviest[*key as usize] <= 1.0;
    let mut order: Vec<(f32, u32)> = mixed.iter().copied().zip(0..).filter(open).collect();
    let worst_first = |a: &(f32, u32), b: &(f32, u32)| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1));
    let mut gone = vec![false; problem.stride];
    let count = dropped.min(order.len());
    if count < order.len() {
        order.select_nth_unstable_by(count, worst_first);
    }
    for &(_, key) in &order[..count] {
        gone[key as usize] = true;
    }
    // As they lie in memory.
    let keys: Vec<usize> = (0..gone.len()).filter(|&key| gone[key]).collect();
    let mut marks: Vec<f32> = gone.iter().map(|gone| f32::from(u8::from(!gone))).collect();
    let losses = problem.sweep(None, 0.5, &mut marks, &[])?;
    let mut left: Vec<f64> = (rows.iter().zip(inverses).zip(flushed))
        .map(|((&row, inverse), flushed)| {
            1.0 - losses[row] * inverse * (1.0 + 2.0 * SUMMED) - count as f64 * flushed
        })
        .collect();
    let size = frame.forced_count + frame.competing - count;
    let over = left.iter().enumerate().filter(|(_, left)| **left < 0.0);
    let lacking = over.map(|(j, left)| (j, -left)).collect();
    let room = best.size.saturating_sub(size);
    let (back, enough) = most_helpful(&keys, lacking, |j, key| limits.charge(j, key), room);
    if !enough || back.len() >= room {
        return Ok(());
    }
    for &key in &back {
        gone[key] = false;
        left.iter_mut().enumerate().for_each(|(j, left)| *left += limits.charge(j, key));
    }
    // A key that fits weighs no more in the mixture than the remainder.
    let most: f64 = a.iter().zip(&left).map(|(a, left)| a * left).sum();
    order.retain(|&(mixed, key)| f64::from(mixed) <= 1.01 * most && !gone[key as usize]);
    order.sort_unstable_by(worst_first);
    let more = limits.drop_affordable(order.into_iter().map(|(_, key)| key), &mut left);
    let size = size + back.len() - more.len();
    if size < best.size {
        for key in more {
            gone[key as usize] = true;
        }
        best.size = size;
        best.kept = (0..frame.columns())
            .map(|i| frame.visible[i] && (frame.forced[i] || !gone[i]))
            .collect();
    }
    Ok(())
}
