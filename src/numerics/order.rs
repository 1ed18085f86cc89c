//! The order of scores: the only definition of "better".
//!
//! Scores compare as real numbers, so -0 equals +0 although their bits differ. Of two equal scores the one with the
//! lower position is better. NaN never reaches an order: it is rejected when scores are checked.

use std::cmp::Ordering;

/// Compares two entries `(score, position)`: `Less` means that `a` is *worse* than `b`.
///
/// Sorting with it puts the entry that is dropped first at the front.
#[inline]
pub(crate) fn worst_first<S: PartialOrd>(a: &(S, u32), b: &(S, u32)) -> Ordering {
    match a.0.partial_cmp(&b.0) {
        Some(Ordering::Less) => Ordering::Less,
        Some(Ordering::Greater) => Ordering::Greater,
        // Equal scores: the later position is worse. (A NaN would end up here too, but is rejected before.)
        _ => b.1.cmp(&a.1),
    }
}

/// Returns `true` if an entry belongs to the set whose worst member is `boundary`.
#[inline]
pub(crate) fn kept<S: PartialOrd>(entry: &(S, u32), boundary: &(S, u32)) -> bool {
    entry.0 > boundary.0 || (entry.0 == boundary.0 && entry.1 <= boundary.1)
}

/// Floating-point type whose finite values can be enumerated in order.
pub(crate) trait Ordered: Copy + PartialOrd {
    /// Returns the rank of a value among the floats: monotone in the real value, equal for -0 and +0.
    fn rank(self) -> i64;
    /// Returns the value of a rank; the inverse of [`Ordered::rank`] for finite values.
    fn from_rank(rank: i64) -> Self;
}

impl Ordered for f32 {
    #[inline]
    fn rank(self) -> i64 {
        let magnitude = i64::from(self.abs().to_bits());
        if self < 0.0 { -magnitude } else { magnitude }
    }
    #[inline]
    fn from_rank(rank: i64) -> Self {
        let magnitude = f32::from_bits(rank.unsigned_abs() as u32);
        if rank < 0 { -magnitude } else { magnitude }
    }
}

impl Ordered for f64 {
    #[inline]
    fn rank(self) -> i64 {
        let magnitude = self.abs().to_bits().cast_signed();
        if self < 0.0 { -magnitude } else { magnitude }
    }
    #[inline]
    fn from_rank(rank: i64) -> Self {
        let magnitude = f64::from_bits(rank.unsigned_abs());
        if rank < 0 { -magnitude } else { magnitude }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_zeros_tie_and_the_lower_position_is_better() {
        assert_eq!(worst_first(&(-0.0f32, 1), &(0.0, 0)), Ordering::Less);
        assert_eq!(worst_first(&(0.0f32, 0), &(-0.0, 1)), Ordering::Greater);
        assert_eq!(worst_first(&(1.0f64, 9), &(0.5, 0)), Ordering::Greater);
        assert_eq!((-0.0f64).rank(), 0.0f64.rank());
    }

    #[test]
    fn kept_is_inclusive_at_the_boundary() {
        assert!(kept(&(1.0f32, 4), &(1.0, 4)));
        assert!(!kept(&(1.0f32, 5), &(1.0, 4)));
        assert!(kept(&(-0.0f32, 3), &(0.0, 4)));
        assert!(kept(&(2.0f32, 9), &(1.0, 4)));
    }

    #[test]
    fn ranks_are_monotone_and_invertible() {
        let values = [f32::MIN, -1.5, -f32::MIN_POSITIVE, -1e-45, 0.0, 1e-45, 1.0, f32::MAX];
        for pair in values.windows(2) {
            assert!(pair[0].rank() < pair[1].rank());
            assert_eq!(f32::from_rank(pair[0].rank()), pair[0]);
        }
        for value in [f64::MIN, -3.25, 0.0, 5e-324, f64::MAX] {
            assert_eq!(f64::from_rank(value.rank()), value);
        }
    }
}
