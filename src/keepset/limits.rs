//! Budgets of the rows that set a limit, and what a key takes from them.

use super::problem::Problem;
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

    /// Returns the factor and the addend that make charges of a row's weights, in f32.
    pub(super) fn scale(&self, j: usize) -> (f32, f32) {
        (self.inverses[j].min(1e30) as f32, self.flushed[j].min(1e30) as f32)
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
