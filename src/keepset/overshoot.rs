//! A set from the mixture of a bound: as many keys are dropped as the bound allows, those that the mixture says.
//!
//! Some rows are then over their budgets, by little if the bound is close. What helps them most is taken back, and then dropped what
//! still fits.

use std::collections::BinaryHeap;

use super::problem::{Best, Problem};
use super::repair::Offer;
use crate::error::Error;
use crate::kernels::SUMMED;
use crate::runtime::ambient::asked_each;

/// Budgets of rows, and keys that these need.
#[derive(Clone, Copy)]
pub(super) struct Limits<'s, 'a> {
    pub(super) problem: &'s Problem<'a>,
    /// Rows that set a limit.
    pub(super) rows: &'s [usize],
    /// Inverses of their budgets in units of their weights.
    pub(super) inverses: &'s [f64],
    /// Upper bound on a weight stored as 0, in units of the budgets.
    pub(super) flushed: &'s [f64],
    /// Keys that no set drops; empty if there are none.
    pub(super) needed: &'s [bool],
}

/// Makes a set by the weights of keys in a mixture with these multipliers, where `dropped` keys may go by the bound.
pub(super) fn overshoot(
    limits: &Limits<'_, '_>,
    (mixed, a): (&[f32], &[f64]),
    dropped: usize,
    best: &mut Best,
) -> Result<(), Error> {
    let Limits { problem, rows, inverses, flushed, needed } = *limits;
    let frame = problem.frame;
    let open = |(mixed, key): &(f32, u32)| {
        *mixed < f32::INFINITY && needed.get(*key as usize) != Some(&true)
    };
    let mut order: Vec<(f32, u32)> = mixed.iter().copied().zip(0..).filter(open).collect();
    order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    let mut gone = vec![false; problem.stride];
    let count = dropped.min(order.len());
    for &(_, key) in &order[..count] {
        gone[key as usize] = true;
    }
    let mut marks: Vec<f32> = gone.iter().map(|gone| f32::from(u8::from(!gone))).collect();
    let losses = problem.sweep(None, 0.5, &mut marks, &[])?;
    let mut left: Vec<f64> = (rows.iter().zip(inverses).zip(flushed))
        .map(|((&row, inverse), flushed)| {
            1.0 - losses[row] * inverse * (1.0 + 2.0 * SUMMED) - count as f64 * flushed
        })
        .collect();
    let charge = |j: usize, key: u32| {
        let weight = f64::from(problem.row(rows[j])[key as usize]);
        weight * inverses[j] + flushed[j]
    };
    let mut lacking: Vec<usize> = (0..left.len()).filter(|&j| left[j] < 0.0).collect();
    let worth = |key: u32, lacking: &[usize], left: &[f64]| -> f64 {
        lacking.iter().map(|&j| charge(j, key).min(-left[j])).sum()
    };
    // Row after row, since keys of a row lie side by side.
    let mut values = vec![0.0; count];
    for &j in &lacking {
        for (value, &(_, key)) in values.iter_mut().zip(&order) {
            *value += charge(j, key).min(-left[j]);
        }
    }
    let offers =
        values.iter().zip(&order).map(|(&value, &(_, key))| Offer { value, column: key as usize });
    let mut offers: BinaryHeap<Offer> = offers.collect();
    let mut size = frame.forced_count + frame.competing - count;
    while !lacking.is_empty() {
        let Some(offer) = offers.pop() else { return Ok(()) };
        let value = worth(offer.column as u32, &lacking, &left);
        if offers.peek().is_some_and(|next| next.value > value) {
            offers.push(Offer { value, ..offer });
            continue;
        }
        gone[offer.column] = false;
        size += 1;
        for (j, left) in left.iter_mut().enumerate() {
            *left += charge(j, offer.column as u32);
        }
        lacking.retain(|&j| left[j] < 0.0);
        if size >= best.size {
            return Ok(());
        }
    }
    let mut tight: Vec<usize> = (0..left.len()).collect();
    tight.sort_by(|&j, &k| left[j].total_cmp(&left[k]).then(j.cmp(&k)));
    // A key that fits weighs no more in the mixture than the remainder.
    let most: f64 = a.iter().zip(&left).map(|(a, left)| a * left).sum();
    for &(mixed, key) in asked_each(&order) {
        if f64::from(mixed) > 1.01 * most {
            break;
        }
        if !gone[key as usize] && tight.iter().all(|&j| charge(j, key) <= left[j]) {
            gone[key as usize] = true;
            size -= 1;
            for (j, left) in left.iter_mut().enumerate() {
                *left -= charge(j, key);
            }
        }
    }
    if size < best.size {
        best.size = size;
        best.kept = (0..frame.columns())
            .map(|i| frame.visible[i] && (frame.forced[i] || !gone[i]))
            .collect();
    }
    Ok(())
}
