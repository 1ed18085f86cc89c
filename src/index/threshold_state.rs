//! State of the search for a row's threshold, and its scratch.

use super::found::Found;
use crate::kernels::Above;
use crate::runtime::held::held;
use crate::runtime::reused::Reused;
use crate::select::Workspace;

/// Scratch for rows, one after another.
#[derive(Debug, Default)]
pub(crate) struct QueryScratch {
    /// Scores by codes, whole groups.
    pub(crate) scores: Vec<f32>,
    /// Exact scores less the codes' offset: of what was kept, or of everything that is visible; whole groups.
    pub(crate) exact: Vec<f64>,
    /// The scores that may be kept, of a row that was searched in a panel.
    pub(crate) above: Above,
    pub(super) weights: Vec<f32>,
    pub(crate) listed: Vec<u32>,
    pub(super) uncoded: Vec<u32>,
    pub(super) uncoded_scores: Vec<f64>,
    pub(crate) workspace: Workspace,
    /// By how much the bound exceeded what it bounds, last time.
    pub(super) excess: Option<f64>,
}

held!(QueryScratch {
    scores, exact, above, weights, listed, uncoded, uncoded_scores, workspace; excess
});

impl QueryScratch {
    /// Forgets what the last row taught, so that answers do not depend on it.
    pub(crate) fn forget(&mut self) {
        self.excess = None;
        self.above.forget();
    }
}

/// Result of an edge.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(super) edge: f32,
    /// Upper and lower bound of what the coded keys below it weigh, relative to the largest score by codes.
    pub(super) upper: f64,
    pub(super) lower: f64,
    pub(super) below: usize,
}

/// State of the search for a row's edge.
#[derive(Debug)]
pub(crate) struct ThresholdState {
    pub(super) largest: f32,
    /// `true` if the scores that may be kept are listed in the scratch: others are not known one by one.
    pub(super) listed: bool,
    pub(super) coded: usize,
    pub(super) seen: usize,
    /// The largest score that is known before any coded key is scored.
    pub(super) top: f64,
    pub(super) uncoded_mass: f64,
    /// Mass kept elsewhere, least and most, relative to the largest score by codes.
    pub(super) beside: (f64, f64),
    pub(super) budget: f64,
    pub(super) excess: f64,
    /// Number of guesses that were too careful; not counted further once one was not careful enough.
    pub(super) careful: usize,
    /// No larger share can be dropped; and the next smaller one that makes a difference.
    pub(super) limit: f64,
    pub(super) next: f64,
    pub(super) rounds: usize,
}

/// Next step for a row.
#[derive(Debug)]
pub(crate) enum Step {
    Done(Found),
    /// Score these keys exactly, and judge.
    Score(Chosen),
    /// Score everything that is visible. If the row is flat, little can be dropped.
    Dense {
        flat: bool,
    },
}

/// Keys that are to be scored.
#[derive(Debug)]
pub(crate) struct Chosen {
    /// Positions, ascending.
    pub(crate) kept: Reused<u32>,
    pub(super) cut: Cut,
}

/// Two ascending lists as one.
pub(crate) fn merged(one: &[u32], other: &[u32]) -> Reused<u32> {
    let mut all: Reused<u32> = one.iter().chain(other).copied().collect();
    if !other.is_empty() {
        all.sort_unstable();
    }
    all
}
