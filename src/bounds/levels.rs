//! Tail mass of a row given by levels: numbers of entries of at most, or at least, a score.

use super::measure::Measure;
use crate::numerics::certified_sums::{self, Compensated, SplitSums};

/// Number of entries, and the level that bounds them: from above in a tail, from below in a head.
pub(super) type Level = (u64, f64);

/// Returns an upper bound of the tail mass, given bounds of the tail from above and of the kept set from below.
///
/// Levels at -inf are masked entries. An empty tail gives exactly 0, an empty head 1. If all levels are equal, the
/// result is the smallest float that is not below the quotient of integers.
pub(super) fn tail_mass(
    measure: Measure,
    tail: impl Iterator<Item = Level> + Clone,
    head: impl Iterator<Item = Level> + Clone,
) -> f64 {
    let seen = |level: &Level| level.0 > 0 && level.1 > f64::NEG_INFINITY;
    let (tail, head) = (tail.filter(seen), head.filter(seen));
    let mut levels = tail.clone().chain(head.clone()).map(|(_, level)| level);
    // Sums of sizes must not wrap: a tail of 2^64 keys is not empty.
    let dropped = tail.clone().fold(0, |sum: u64, (size, _)| sum.saturating_add(size));
    let kept = head.clone().fold(0, |sum: u64, (size, _)| sum.saturating_add(size));
    if dropped == 0 {
        return 0.0;
    }
    if kept == 0 {
        return 1.0;
    }
    let first = levels.clone().next();
    let best = levels.clone().fold(f64::NEG_INFINITY, f64::max);
    if best == f64::INFINITY {
        return 1.0;
    }
    if measure.error == 0.0
        && let Some(total) = dropped.checked_add(kept)
        && levels.all(|level| Some(level) == first)
    {
        return share_up(dropped, total);
    }
    let (mut above, mut below, mut terms) = (Compensated::default(), Compensated::default(), 0.0);
    for (size, level) in tail {
        above.add(size as f64 * measure.weight_up(best, level));
        terms += 1.0;
    }
    for (size, level) in head {
        below.add(size as f64 * measure.weight_down(best, level));
        terms += 1.0;
    }
    let split = SplitSums {
        tail: above.value(),
        // Only used to test for an empty side.
        dropped: usize::try_from(dropped).unwrap_or(usize::MAX),
        head: below.value(),
        kept: usize::try_from(kept).unwrap_or(usize::MAX),
    };
    // Sizes, products, sums (Neumaier's lose v + (m v)^2, v = 2^-53), the quotient and these products themselves.
    let rounding = 64.0 * f64::EPSILON + 16.0 * (terms * f64::EPSILON) * (terms * f64::EPSILON);
    let slack = (1.0 + rounding) * measure.inflation() - 1.0;
    split.upper(slack + f64::EPSILON, 0.0)
}

/// Returns the smallest float that is not below `dropped / total`, for `dropped < total`.
pub(super) fn share_up(dropped: u64, total: u64) -> f64 {
    let mut share = (dropped as f64 / total as f64).next_down().next_down();
    while share < 1.0 && !certified_sums::equal_weights_hold(total - dropped, total, share) {
        share = share.next_up();
    }
    share
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(tail: &[Level], head: &[Level]) -> f64 {
        tail_mass(Measure::LOGITS, tail.iter().copied(), head.iter().copied())
    }

    #[test]
    fn equal_levels_are_decided_by_integers() {
        assert_eq!(bound(&[(1, 7.5)], &[(3, 7.5)]), 0.25);
        assert_eq!(share_up(1, 3), (1.0f64 / 3.0).next_up());
        assert_eq!(share_up(2, 3), (2.0f64 / 3.0).next_up());
        assert_eq!(share_up(1, 10), 0.1);
        assert_eq!(share_up(u64::MAX - 1, u64::MAX), 1.0);
    }

    #[test]
    fn nothing_dropped_and_nothing_kept() {
        assert_eq!(bound(&[], &[(3, 0.0)]), 0.0);
        assert_eq!(bound(&[(0, 5.0), (4, f64::NEG_INFINITY)], &[(3, 0.0)]), 0.0);
        assert_eq!(bound(&[(1, 0.0)], &[]), 1.0);
        assert_eq!(bound(&[(1, 0.0)], &[(1, f64::NEG_INFINITY)]), 1.0);
        assert_eq!(bound(&[(1, f64::INFINITY)], &[(1, 0.0)]), 1.0);
        assert_eq!(bound(&[], &[]), 0.0);
    }

    #[test]
    fn sizes_do_not_wrap() {
        // 2^64 keys dropped and one kept, and the reverse.
        let many = [(1 << 63, 0.0), (1 << 63, 0.0)];
        assert_eq!(bound(&many, &[(1, 0.0)]), 1.0);
        assert!((bound(&[(1, 0.0)], &many) / 2f64.powi(-64) - 1.0).abs() < 1e-12);
        assert!((bound(&many, &many) - 0.5).abs() < 1e-12);
    }
}
