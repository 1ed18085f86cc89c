//! Shortest prefix of a row's ranking whose output error is proven to be small enough.
//!
//! The error is not monotone in the number of keys: a further key may move the output away. So all prefixes are
//! examined, from the longest to the shortest, with running sums over the tail. The error is `|N_T - (T/H) N_S| / (T +
//! H)`, N the weighted sums of the points, and `N_S` the difference of the whole sum and `N_T` (its rounding counts
//! only T/H times). The error of the running sums is bounded as well, so a prefix is skipped only if its error provably
//! exceeds the budget. The first of the others is certified like any given set.

use super::cloud::{Cloud, WeightedSum, square};
use super::rounding::{SUM, UP, V};
use super::row::{Parted, Weighed};
use crate::error::Error;
use crate::numerics::certified_sums::Compensated;
use crate::numerics::order;
use crate::numerics::sorting;
use crate::runtime::ambient::{self, asked};
use crate::runtime::memory::filled;

/// Prefixes that may be certified in vain, where rounding leaves the running sums undecided: at least so many, and as many
/// more as cost no more multiplications than this. After that only those are tried that the running sums themselves prove.
const TRIALS: usize = 8;
const TRIAL_WORK: usize = 1 << 22;

/// Selected prefix of a row.
#[derive(Debug, Clone, Default)]
pub(super) struct Found {
    /// Positions, ascending.
    pub(super) kept: Vec<u32>,
    pub(super) error: f64,
    pub(super) tail_mass: (f64, f64),
    /// `true` if every shorter prefix provably exceeds the budget.
    pub(super) minimal: bool,
}

/// Finds the shortest prefix of at least one key whose certified error is at most `out_tol`.
///
/// # Errors
/// The error of a call that was ended. It is checked between the steps too: a step that first touches its pages takes
/// long.
pub(super) fn shortest(cloud: &Cloud, weighed: &Weighed, out_tol: f64) -> Result<Found, Error> {
    let mut ranked: Vec<(f64, u32)> = asked(weighed.keys.iter().enumerate())
        .filter(|(_, key)| **key > f64::NEG_INFINITY)
        .map(|(j, &key)| (key, j as u32))
        .collect();
    sorting::sort(&mut ranked, |a, b| order::worst_first(b, a));
    let mut rank = filled("scores", cloud.n, u32::MAX)?;
    for (place, entry) in asked(ranked.iter().enumerate()) {
        rank[entry.1 as usize] = place as u32;
    }
    let errors = scan(cloud, weighed, &ranked)?;
    let mut found = Found { minimal: true, ..Found::default() };
    let most = TRIALS.max(TRIAL_WORK / (cloud.n * cloud.d).max(1));
    let (mut length, mut trials) = (ranked.len(), 0);
    // The whole row loses nothing.
    for (k, error) in asked(errors.iter().enumerate().map(|(i, error)| (i + 1, error))) {
        if error.low > out_tol {
            continue;
        }
        if trials < most || error.high <= out_tol {
            trials += 1;
            if let Some(parted) = Parted::new(cloud, weighed, |j| (rank[j] as usize) < k) {
                let exact = parted.exact();
                if exact <= out_tol {
                    (found.error, found.tail_mass, length) = (exact, parted.tail_mass, k);
                    break;
                }
            }
        }
        found.minimal = false;
    }
    found.kept = asked(&ranked[..length]).map(|entry| entry.1).collect();
    sorting::sort(&mut found.kept, Ord::cmp);
    Ok(found)
}

/// Lower and upper end of an error, in the units of the values.
struct Between {
    low: f64,
    high: f64,
}

/// Returns the errors of the prefixes of 1 to n - 1 keys.
fn scan(cloud: &Cloud, weighed: &Weighed, ranked: &[(f64, u32)]) -> Result<Vec<Between>, Error> {
    let n = ranked.len();
    if n < 2 {
        return Ok(Vec::new());
    }
    let largest = ranked[0].0;
    let weights: Vec<f64> = asked(ranked).map(|e| weighed.weigh(e.0, largest)).collect();
    ambient::check()?;
    let (mut whole, mut sizes) = (WeightedSum::new(cloud.d), Compensated::default());
    let (mut head, mut heads) = (Compensated::default(), Vec::with_capacity(n));
    for (entry, &weight) in asked(ranked.iter().zip(&weights)) {
        let j = entry.1 as usize;
        whole.add(weight, cloud.point(j));
        sizes.add(weight * cloud.lengths[j]);
        head.add(weight);
        heads.push(head.value());
    }
    ambient::check()?;
    let (whole, all) = (whole.finish(), sizes.value() * UP);
    let eta = weighed.eta;
    let (mut vector, mut gap) = (vec![0.0; cloud.d], vec![0.0; cloud.d]);
    let (mut tail, mut sizes) = (Compensated::default(), Compensated::default());
    let mut errors = Vec::with_capacity(n - 1);
    for k in asked((1..n).rev()) {
        let (j, weight) = (ranked[k].1 as usize, weights[k]);
        for (sum, u) in vector.iter_mut().zip(cloud.point(j)) {
            *sum += weight * u;
        }
        tail.add(weight);
        sizes.add(weight * cloud.lengths[j]);
        let (tail, head, size) = (tail.value(), heads[k - 1], sizes.value() * UP);
        let odds = tail / head;
        for ((gap, t), all) in gap.iter_mut().zip(&vector).zip(&whole) {
            *gap = t - odds * (all - t);
        }
        let dropped = (n - k) as f64;
        // Of a tail's sum: its weights and points, a product, and as many sums. Of the kept set's: the same of both sums it is
        // the difference of, and T/H, which is off by each weight twice. Flushed weights come on top.
        let each = eta + 4.0 * V * (1.0 + eta);
        let of_tail = (each + (dropped + 8.0) * V) * size;
        let of_head = (each + SUM + (dropped + 16.0) * V) * (all + size)
            + (eta * (2.0 + eta) + 32.0 * V * (1.0 + eta)) * 2.0 * all * (1.0 + eta);
        let flushed = dropped * 2f64.powi(-1018) * (1.0 + eta) * cloud.largest;
        // The square of a tiny gap may underflow, which must not make it larger.
        let radius = (of_tail + odds * of_head + flushed) * UP + cloud.floor;
        let length = square(&gap).sqrt();
        let total = head + tail;
        let low = (length * (2.0 - cloud.grow) - radius) / total * (1.0 - eta - 64.0 * V);
        let high = (length * cloud.grow + radius) / total * (1.0 + eta) * UP;
        errors.push(Between { low: cloud.publish_low(low), high: cloud.publish(1.0, high) });
    }
    errors.reverse();
    Ok(errors)
}
