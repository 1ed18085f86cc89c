//! What the search asks of rows, wherever they come from.

use crate::certificate::Certificate;
use crate::error::Error;
use crate::select::RowWeights;

/// Rows that are to share one set. Its members are columns: keys, or blocks of keys.
pub(super) trait Source {
    const LIMITS: Limits;

    fn rows(&self) -> usize;

    /// Keys of a column, at the most.
    fn block_size(&self) -> usize {
        1
    }

    /// The budget of a row.
    fn eps(&self, row: usize) -> f64;

    /// Whether to judge a row again takes little time, so that all may be judged in every round.
    fn looks_again_fast(&self) -> bool {
        false
    }

    /// Writes the weight of every column in some rows, each `stride` places long: `HIDDEN` for what is masked, unless the
    /// row is whole, and 0 beyond the last.
    ///
    /// # Errors
    /// Whatever is wrong with a row, or [`Error::Interrupted`].
    fn weigh(
        &self,
        listed: &[usize],
        stride: usize,
        to: &mut [f32],
    ) -> Result<Vec<RowWeights>, Error>;

    /// What some rows, in ascending order, lose to a set of columns.
    ///
    /// # Errors
    /// As [`Source::weigh`].
    fn judge(&self, kept: &[bool], listed: &[usize]) -> Result<Certificate, Error>;
}

/// How rows of a source are dealt with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Up to so many are in the program from the beginning.
    pub(super) few: usize,
    /// Of more, so many.
    pub(super) first: usize,
    /// Whether rows of the program that their stored weights prove to be within their budgets are judged by nothing else. Those
    /// weights are then made of sums and exponentials in f64.
    pub(super) stored: bool,
}

/// The columns that rows see.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// Those that at least one row sees.
    pub(super) visible: Vec<bool>,
    /// Those that a row sees that may lose nothing.
    pub(super) lossless: Vec<bool>,
}
