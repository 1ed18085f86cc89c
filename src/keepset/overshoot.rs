//! A set from the mixture of a bound: as many keys are dropped as the bound allows, those that the mixture says.
//!
//! Some rows are then over their budgets, by little if the bound is close. What helps them most is taken back, and then
//! what still fits is dropped.

use super::limits::Limits;
use super::problem::Best;
use super::repair::most_helpful;
use crate::error::Error;
use crate::kernels::SUMMED;

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
    let (back, enough) = most_helpful(limits, &gone, lacking, room)?;
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
