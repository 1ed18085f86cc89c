//! Repair of a set that some rows cannot afford: the columns that help them most are added, one by one.

use std::collections::BinaryHeap;

use super::problem::Problem;
use crate::error::Error;

/// A column and its value to the rows over budget.
#[derive(PartialEq)]
struct Offer {
    value: f64,
    column: usize,
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
pub(super) fn repair(problem: &Problem<'_>, kept: &mut [bool]) -> Result<usize, Error> {
    let inverses: Vec<f64> = (0..problem.rows())
        .map(|j| (problem.aims[j] * problem.totals[j] / (1.0 + problem.margin[j])).recip())
        .collect();
    let lacking: Vec<(usize, f64)> = (problem.ratios(kept)?.iter().enumerate())
        .map(|(j, ratio)| {
            (j, ratio * (1.0 + 2.0 * crate::kernels::SUMMED) * (1.0 + problem.margin[j]) - 1.0)
        })
        .filter(|(j, excess)| *excess > 0.0 && inverses[*j].is_finite())
        .collect();
    let columns: Vec<usize> =
        (0..kept.len()).filter(|&column| problem.frame.competes(column) && !kept[column]).collect();
    let reduction = |j: usize, column: usize| f64::from(problem.row(j)[column]) * inverses[j];
    let (added, _) = most_helpful(&columns, lacking, reduction, usize::MAX);
    for &column in &added {
        kept[column] = true;
    }
    Ok(added.len())
}

/// Returns columns, fewer than `most`, that together take the excess over their budgets from rows; and whether they do.
///
/// A column's value is its reduction of the rows' excess, in units of their budgets. Values only shrink, so the best
/// column is found by computing again the value of the seemingly best one.
pub(super) fn most_helpful(
    columns: &[usize],
    mut lacking: Vec<(usize, f64)>,
    reduction: impl Fn(usize, usize) -> f64,
    most: usize,
) -> (Vec<usize>, bool) {
    // Row after row, since the columns of a row lie side by side.
    let mut values = vec![0.0; columns.len()];
    for &(j, excess) in &lacking {
        for (value, &column) in values.iter_mut().zip(columns) {
            *value += reduction(j, column).min(excess);
        }
    }
    let offers = values.iter().zip(columns).map(|(&value, &column)| Offer { value, column });
    let (mut offers, mut added): (BinaryHeap<Offer>, _) = (offers.collect(), Vec::new());
    while !lacking.is_empty() && added.len() < most {
        let Some(offer) = offers.pop() else { break };
        let each = lacking.iter();
        let value = each.map(|&(j, excess)| reduction(j, offer.column).min(excess)).sum();
        if offers.peek().is_some_and(|next| next.value > value) {
            offers.push(Offer { value, ..offer });
            continue;
        }
        added.push(offer.column);
        for (j, excess) in &mut lacking {
            *excess -= reduction(*j, offer.column);
        }
        lacking.retain(|(_, excess)| *excess > 0.0);
    }
    (added, lacking.is_empty())
}
