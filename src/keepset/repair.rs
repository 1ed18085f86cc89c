//! Repair of a set that some rows cannot afford: the columns that help them most are added, one by one.

use std::collections::BinaryHeap;

use super::dual::SHARED;
use super::limits::Limits;
use super::problem::Problem;
use crate::error::Error;
use crate::runtime::threads;

/// Columns whose values are summed together.
const BLOCK: usize = 1024;
/// Columns whose charges are gathered at a time.
const TOGETHER: usize = 1024;

/// A column and its value to the rows over budget.
#[derive(PartialEq)]
struct Offer {
    value: f32,
    column: usize,
    /// Place of its charges.
    place: usize,
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
    let open: Vec<bool> = (0..problem.stride)
        .map(|column| column < kept.len() && problem.frame.competes(column) && !kept[column])
        .collect();
    let rows: Vec<usize> = (0..problem.rows()).collect();
    let flushed = vec![0.0; rows.len()];
    let limits =
        Limits { problem, rows: &rows, inverses: &inverses, flushed: &flushed, heaviest: &[] };
    let (added, _) = most_helpful(limits, &open, lacking, usize::MAX)?;
    for &column in &added {
        kept[column] = true;
    }
    Ok(added.len())
}

/// Returns columns of `open`, fewer than `most`, that together take the excess over their budgets from rows; and whether
/// they do.
///
/// A column's value is its reduction of the rows' excess, in units of their budgets. Values only shrink, so the best
/// column is found by computing again the value of the seemingly best one. That is done for the best columns alone, as
/// long as one of them is better than all others were.
pub(super) fn most_helpful(
    limits: Limits<'_, '_>,
    open: &[bool],
    mut lacking: Vec<(usize, f64)>,
    most: usize,
) -> Result<(Vec<usize>, bool), Error> {
    let mut open = open.to_vec();
    let mut added = Vec::new();
    while !lacking.is_empty() && added.len() < most {
        let (best, others) = best_offers(limits, &open, &lacking)?;
        let charges = Charges::new(limits, &best, &lacking)?;
        let mut excess: Vec<f32> = lacking.iter().map(|(_, excess)| *excess as f32).collect();
        let mut offers: BinaryHeap<Offer> = best.into();
        let before = added.len();
        while let Some(offer) = offers.pop() {
            let value = charges.value(offer.place, &excess);
            if offers.peek().is_some_and(|next| next.value > value) {
                offers.push(Offer { value, ..offer });
                continue;
            }
            if added.len() == most || value <= 0.0 || value < others && added.len() > before {
                break;
            }
            added.push(offer.column);
            open[offer.column] = false;
            for ((j, left), excess) in lacking.iter_mut().zip(&mut excess) {
                *left -= limits.charge(*j, offer.column);
                *excess = left.max(0.0) as f32;
            }
        }
        lacking.retain(|(_, excess)| *excess > 0.0);
        if added.len() == before {
            break;
        }
    }
    Ok((added, lacking.is_empty()))
}

/// Returns the smaller of two numbers that are no NaN, by one instruction for several.
fn smaller(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

/// Returns the best columns with their values, and the largest value of another.
fn best_offers(
    limits: Limits<'_, '_>,
    open: &[bool],
    lacking: &[(usize, f64)],
) -> Result<(Vec<Offer>, f32), Error> {
    let mut values = vec![0.0; open.len()];
    let add = |(b, values): (usize, &mut [f32])| {
        for &(j, excess) in lacking {
            let ((scale, more), excess) = (limits.scale(j), excess as f32);
            let weights = &limits.problem.row(limits.rows[j])[b * BLOCK..][..values.len()];
            for (value, weight) in values.iter_mut().zip(weights) {
                *value += smaller(weight * scale + more, excess);
            }
        }
    };
    let least = SHARED.div_ceil(BLOCK * lacking.len());
    threads::map(limits.problem.threads, values.chunks_mut(BLOCK).enumerate(), least, add)?;
    let columns = values.iter().enumerate().filter(|(column, _)| open[*column]);
    let mut offers: Vec<Offer> =
        columns.map(|(column, &value)| Offer { value, column, place: 0 }).collect();
    let mut others = 0.0;
    if offers.len() > TOGETHER {
        let (_, next, _) = offers.select_nth_unstable_by(TOGETHER, |a, b| b.cmp(a));
        others = next.value;
        offers.truncate(TOGETHER);
    }
    // As they lie in memory.
    offers.sort_unstable_by_key(|offer| offer.column);
    for (place, offer) in offers.iter_mut().enumerate() {
        offer.place = place;
    }
    Ok((offers, others))
}

/// Charges of columns to rows, in units of their budgets, column after column.
struct Charges {
    charges: Vec<f32>,
    rows: usize,
}

impl Charges {
    fn new(
        limits: Limits<'_, '_>,
        offers: &[Offer],
        lacking: &[(usize, f64)],
    ) -> Result<Self, Error> {
        const TILE: usize = 64;
        let rows = lacking.len();
        let mut charges = vec![0.0; rows * offers.len()];
        let gather = |(charges, offers): (&mut [f32], &[Offer])| {
            for (r, &(j, _)) in lacking.iter().enumerate() {
                let (scale, more) = limits.scale(j);
                let weights = limits.problem.row(limits.rows[j]);
                for (offer, charge) in offers.iter().zip(charges[r..].iter_mut().step_by(rows)) {
                    *charge = weights[offer.column] * scale + more;
                }
            }
        };
        let tiles = charges.chunks_mut(rows * TILE).zip(offers.chunks(TILE));
        threads::map(limits.problem.threads, tiles, SHARED.div_ceil(rows * TILE), gather)?;
        Ok(Charges { charges, rows })
    }

    fn value(&self, place: usize, excess: &[f32]) -> f32 {
        let mut sums = [0.0; 8];
        let charges = self.charges[place * self.rows..][..self.rows].chunks(sums.len());
        for (charges, excess) in charges.zip(excess.chunks(sums.len())) {
            for ((sum, charge), excess) in sums.iter_mut().zip(charges).zip(excess) {
                *sum += smaller(*charge, *excess);
            }
        }
        sums.iter().sum()
    }
}
