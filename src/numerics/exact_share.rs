//! Kept sets whose real tail mass equals the budget, which no interval can show.
//!
//! A set that drops the share `eps` of each level of equal scores has a tail mass of exactly `eps`. No other set has:
//! powers of e with different rational exponents are linearly independent over the rationals (Lindemann and
//! Weierstrass), so the difference of the tail and `eps` times the total vanishes only level by level.

use crate::error::Error;
use crate::numerics::certified_sums::is_share;
use crate::numerics::sorting;
use crate::runtime::memory::room;
use crate::runtime::reused::Reused;

/// Returns `true` if a set leaves a tail mass of exactly `eps`. `entries` are the visible scores, `true` if kept; the
/// pair counts the dropped and the visible ones.
///
/// # Errors
/// [`Error::NoMemory`].
pub(crate) fn leaves_exactly(
    eps: f64,
    (dropped, visible): (usize, usize),
    entries: impl Iterator<Item = (f64, bool)>,
) -> Result<bool, Error> {
    // Budgets such as 0.05 are no share of any number of keys: most rows end here.
    if !is_share(dropped as u64, visible as u64, eps) {
        return Ok(false);
    }
    let mut entries_by_score: Reused<(f64, bool)> = Reused::with_hint(visible);
    room("scores", &mut entries_by_score, visible)?;
    entries_by_score.extend(entries);
    sorting::sort(&mut entries_by_score, |a, b| a.0.total_cmp(&b.0));
    Ok(entries_by_score.chunk_by(|a, b| a.0 == b.0).all(|level| {
        let dropped = level.iter().filter(|entry| !entry.1).count();
        is_share(dropped as u64, level.len() as u64, eps)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_levels() {
        let row = |entries: &[(f64, bool)], eps: f64| {
            let dropped = entries.iter().filter(|entry| !entry.1).count();
            leaves_exactly(eps, (dropped, entries.len()), entries.iter().copied()).unwrap()
        };
        let two = [(0.0, true), (-1.0, true), (-0.0, false), (-1.0, false)];
        assert!(row(&two, 0.5));
        assert!(!row(&two, 0.5f64.next_up()) && !row(&two, 0.25));
        // As many are dropped, but not of each level.
        assert!(!row(&[(0.0, true), (0.0, true), (-1.0, false), (-1.0, false)], 0.5));
        let quarter = [(2.0, false), (2.0, true), (2.0, true), (2.0, true)];
        assert!(row(&quarter, 0.25) && !row(&quarter, 0.1));
    }
}
