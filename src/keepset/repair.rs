//! Repair of a set that some rows cannot afford: the columns that help them most are added, one by one.

use std::collections::BinaryHeap;

use super::problem::Problem;
use crate::error::Error;

/// A column and its value to the rows over budget.
#[derive(PartialEq)]
pub(super) struct Offer {
    pub(super) value: f64,
    pub(super) column: usize,
}

impl Eq for Offer {}

impl Ord for Offer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.value.total_cmp(&other.value).then(other.column.cmp(&self.column))
    }
}

impl PartialOrd for Offer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Adds columns to a set until every row of the program is within its budget, and returns their number.
///
/// A column's value is its reduction of the rows' excess, in units of their budgets. Values only shrink, so the best
/// column is found by computing again the value of the seemingly best one.
pub(super) fn repair(problem: &Problem<'_>, kept: &mut [bool]) -> Result<usize, Error> {
    let inverses: Vec<f64> = (0..problem.rows())
        .map(|j| (problem.aims[j] * problem.totals[j] / (1.0 + problem.margin[j])).recip())
        .collect();
    let mut lacking: Vec<(usize, f64)> = (problem.ratios(kept)?.iter().enumerate())
        .map(|(j, ratio)| {
            (j, ratio * (1.0 + 2.0 * crate::kernels::SUMMED) * (1.0 + problem.margin[j]) - 1.0)
        })
        .filter(|(j, excess)| *excess > 0.0 && inverses[*j].is_finite())
        .collect();
    let worth = |column: usize, lacking: &[(usize, f64)]| -> f64 {
        let each = lacking.iter();
        each.map(|&(j, excess)| (f64::from(problem.row(j)[column]) * inverses[j]).min(excess)).sum()
    };
    let mut offers: BinaryHeap<Offer> = (0..kept.len())
        .filter(|&column| problem.frame.competes(column) && !kept[column])
        .map(|column| Offer { value: worth(column, &lacking), column })
        .collect();
    let mut added = 0;
    while !lacking.is_empty() {
        let Some(offer) = offers.pop() else { break };
        let value = worth(offer.column, &lacking);
        if offers.peek().is_some_and(|next| next.value > value) {
            offers.push(Offer { value, ..offer });
            continue;
        }
        kept[offer.column] = true;
        added += 1;
        for (j, excess) in &mut lacking {
            *excess -= f64::from(problem.row(*j)[offer.column]) * inverses[*j];
        }
        lacking.retain(|(_, excess)| *excess > 0.0);
    }
    Ok(added)
}
