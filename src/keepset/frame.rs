//! Columns of a program: visible and forced ones, and the most that may be kept.

use super::source::Seen;
use crate::error::{Error, Place};

/// The budget that a row without one is given when `max_keep` makes it lose something.
const LEAST_BUDGET: f64 = 1e-12;

/// Columns of a program.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// Columns that at least one row sees.
    pub(super) visible: Vec<bool>,
    pub(super) forced: Vec<bool>,
    pub(super) forced_count: usize,
    /// Columns that are visible and not forced.
    pub(super) competing: usize,
    pub(super) max_keep: usize,
    /// `true` if rows that may lose nothing lose something, because `max_keep` forbids what they need.
    lossy: bool,
}

impl Frame {
    /// Takes the visible columns, and `asked`, the forced ones.
    ///
    /// # Errors
    /// [`Error::ForcedOverMax`] if they are more than `max_keep`.
    pub(super) fn new(seen: Seen, asked: Vec<bool>, max_keep: usize) -> Result<Self, Error> {
        let count = |flags: &[bool]| flags.iter().filter(|flag| **flag).count();
        let forced = count(&asked);
        if forced > max_keep {
            return Err(Error::ForcedOverMax { place: Place(vec![]), forced, max_keep });
        }
        let demanded: Vec<bool> = asked.iter().zip(&seen.lossless).map(|(a, b)| a | b).collect();
        let lossy = count(&demanded) > max_keep;
        let forced = if lossy { asked } else { demanded };
        let forced_count = count(&forced);
        let competing = seen.visible.iter().zip(&forced).filter(|(v, f)| **v && !**f).count();
        Ok(Frame { visible: seen.visible, forced, forced_count, competing, max_keep, lossy })
    }

    pub(super) fn columns(&self) -> usize {
        self.visible.len()
    }

    pub(super) fn competes(&self, i: usize) -> bool {
        self.visible[i] && !self.forced[i]
    }

    /// Returns the budget that the search uses in place of a row's own.
    pub(super) fn aim(&self, eps: f64) -> f64 {
        if self.lossy && eps == 0.0 { LEAST_BUDGET } else { eps }
    }
}

/// Marks the first and the last visible columns.
pub(super) fn ends(visible: &[bool], first: usize, last: usize) -> Vec<bool> {
    let positions: Vec<usize> = (0..visible.len()).filter(|&i| visible[i]).collect();
    let (first, last) = (first.min(positions.len()), last.min(positions.len()));
    let mut forced = vec![false; visible.len()];
    for &i in positions[..first].iter().chain(&positions[positions.len() - last..]) {
        forced[i] = true;
    }
    forced
}
