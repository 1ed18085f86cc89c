//! Rows of queries: the keys that each sees, and its head.

use std::ops::Range;

use super::options::AttentionOptions;
use crate::error::{Error, Place};
use crate::index::{RowVisibility, Visible};
use crate::rows::{PerRow, Vectors};

/// Rows of a call.
pub(super) struct QueryRows<'a> {
    /// Axes of the queries but the last.
    pub(super) shape: &'a [usize],
    pub(super) keys: usize,
    rows: usize,
    /// Number of consecutive rows with the same head of keys.
    of_head: usize,
    pub(super) options: AttentionOptions<'a>,
    visible: Visible<'a>,
    /// Keys of each head, if these differ.
    counts: Option<Vec<usize>>,
    /// Sink of each query head.
    pub(super) sinks: Option<PerRow<'a, f64>>,
}

impl<'a> QueryRows<'a> {
    /// Checks the axes of queries against the batch axes of keys or values, of which each head has so many, and the masks.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`], [`Error::RowLength`].
    pub(super) fn new(
        queries: &'a Vectors<'_>,
        (need, keys, counts): (&[usize], usize, Option<Vec<usize>>),
        options: &AttentionOptions<'a>,
    ) -> Result<Self, Error> {
        let Some(matrices) = queries.heads_for_each(need) else {
            return Err(queries.misfit(format!(
                "the axes before the last two must be those of the keys, {need:?}, of which the last may be a multiple"
            )));
        };
        let shape = &queries.shape()[..queries.shape().len() - 1];
        let (rows, of_head) = (queries.heads() * queries.len(), matrices * queries.len());
        let options = options.clone();
        let AttentionOptions { causal, lengths, mask, .. } = options;
        let visible = Visible::new(shape, keys, causal, lengths, mask)?;
        check_changes(&options, (shape, keys))?;
        let sinks = options.sinks.map(|sinks| judged(sinks, shape)).transpose()?;
        Ok(QueryRows { shape, keys, rows, of_head, options, visible, counts, sinks })
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the head of keys of a row, which is monotone.
    pub(super) fn head_of(&self, row: usize) -> usize {
        row / self.of_head
    }

    /// Returns the rows of a head of keys.
    pub(super) fn rows_of(&self, head: usize) -> Range<usize> {
        let row = |head: usize| self.rows.min(head * self.of_head);
        row(head)..row(head + 1)
    }

    /// Returns the place of a row.
    pub(super) fn place(&self, row: usize) -> Place {
        Place::unravel(self.shape, row)
    }

    /// Takes one number for all rows, or one per row.
    pub(super) fn per_row<'b, T: Copy>(
        &self,
        argument: &'static str,
        numbers: &'b [T],
    ) -> Result<PerRow<'b, T>, Error> {
        PerRow::new(argument, numbers, self.rows(), "pass one, or one per row")
    }

    /// Returns the visible keys of a row.
    pub(super) fn row_visibility(&self, row: usize) -> RowVisibility<'a> {
        let counts = self.counts.as_ref();
        self.visible.row_of(row, counts.map_or(self.keys, |counts| counts[self.head_of(row)]))
    }
}

/// Checks the sinks of the query heads.
fn judged<'a>(sinks: &'a [f64], rows: &[usize]) -> Result<PerRow<'a, f64>, Error> {
    let heads = &rows[..rows.len() - 1];
    let problem = "a sink is a score, or negative infinity for none";
    let argument = "sinks";
    PerRow::new(argument, sinks, heads.iter().product(), "pass one, or one per query head")?.all(
        heads,
        |sink| sink < f64::INFINITY,
        |place, value| Error::Number { argument, place, value, problem },
    )
}

/// Checks a soft cap, and the shape of a bias on rows of this shape.
fn check_changes(
    options: &AttentionOptions<'_>,
    (rows, keys): (&[usize], usize),
) -> Result<(), Error> {
    if let Some(value) = options.soft_cap.filter(|cap| !(1e-30..=1e30).contains(cap)) {
        let problem = "pass a number from 1e-30 to 1e30, or none";
        return Err(Error::Number { argument: "soft_cap", place: Place(vec![]), value, problem });
    }
    match options.bias {
        Some(bias) if bias.shape() != [rows, &[keys]].concat() => Err(bias.misfit(format!(
            "a bias has an entry for each row and key: {rows:?} and {keys}; give axes that repeat a stride of 0"
        ))),
        _ => Ok(()),
    }
}
