//! Interface of rows to the search.

use crate::certificate::Certificate;
use crate::error::Error;
use crate::select::RowWeights;

/// Rows that are to share one set. Its members are columns: keys, or blocks of keys.
pub(super) trait Source {
    const LIMITS: Limits;

    fn rows(&self) -> usize;

    /// Returns the most keys of a column.
    fn block_size(&self) -> usize {
        1
    }

    /// Returns the budget of a row.
    fn eps(&self, row: usize) -> f64;

    /// Returns `true` if judging a row again is cheap, so that all may be judged in every round.
    fn looks_again_fast(&self) -> bool {
        false
    }

    /// Writes the weight of every column in some rows, each `stride` long: `HIDDEN` for a masked column, unless the row
    /// is whole, and 0 beyond the last.
    ///
    /// # Errors
    /// The error of an invalid row, or [`Error::Interrupted`].
    fn weigh(
        &self,
        listed: &[usize],
        stride: usize,
        to: &mut [f32],
    ) -> Result<Vec<RowWeights>, Error>;

    /// Certifies the loss of some rows, in ascending order, to a set of columns.
    ///
    /// # Errors
    /// As [`Source::weigh`].
    fn judge(&self, kept: &[bool], listed: &[usize]) -> Result<Certificate, Error>;
}

/// Limits on the rows of a source in the program.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Number of rows up to which all are in the program from the beginning.
    pub(super) few: usize,
    /// Number of rows at the beginning if there are more.
    pub(super) first: usize,
    /// `true` if stored weights alone judge rows of the program that they prove to be within their budgets. Those
    /// weights are then made of f64 sums and exponentials.
    pub(super) stored: bool,
}

/// Columns that rows see.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// Columns that at least one row sees.
    pub(super) visible: Vec<bool>,
    /// Columns seen by a row that may lose nothing.
    pub(super) lossless: Vec<bool>,
}
