//! Rows of attention in progress.

use super::job::{AttentionJob, RowBudget};
use crate::error::Error;
use crate::index::{
    Coded, Codes, Prepared, Query, QueryScratch, RowVisibility, Rung, ThresholdSearch,
};
use crate::kernels::{Keys, LANES, Simd};
use crate::runtime::held::held;
use crate::runtime::memory;
use crate::runtime::reused::Reused;
use crate::runtime::scratch::Lent;

/// A row in progress.
pub(super) struct PendingRow {
    pub(super) number: usize,
    pub(super) wide: Reused<f64>,
    pub(super) query: Query,
    pub(super) prepared: Option<Prepared>,
    pub(super) prefix: usize,
    pub(super) eps: f64,
    pub(super) scratch: Lent<RowScratch>,
    /// Kept keys, if not all visible ones.
    pub(super) kept: Option<Reused<u32>>,
    pub(super) upper: f64,
    pub(super) scored: usize,
    pub(super) rung: Rung,
    /// `true` until the row is answered.
    pub(super) open: bool,
    /// `true` if it is not answered because little can be dropped.
    pub(super) flat: bool,
    /// `true` if the keys that it may keep are listed.
    pub(super) listed: bool,
}

/// Scratch of a row.
#[derive(Default)]
pub(super) struct RowScratch {
    pub(super) query: QueryScratch,
    pub(super) weights: Vec<f64>,
}

held!(RowScratch { query, weights });

/// Makes room for a number per key, in whole groups.
pub(super) fn grow<T>(numbers: &mut Vec<T>, keys: usize) -> Result<(), Error> {
    let all = keys.saturating_add(LANES);
    memory::room("k", numbers, all.saturating_sub(numbers.len()))
}

/// Returns scratch for a row.
fn row_scratch() -> Lent<RowScratch> {
    let mut scratch = Lent::<RowScratch>::new();
    scratch.query.forget();
    scratch
}

impl AttentionJob<'_> {
    /// Returns a query in f64.
    ///
    /// # Errors
    /// [`Error::KeyNotFinite`].
    pub(super) fn query(&self, row: usize) -> Result<Reused<f64>, Error> {
        let mut wide = Reused::with_hint(self.queries.dim());
        self.add_query(row, &mut wide)?;
        Ok(wide)
    }

    /// Appends a query in f64.
    ///
    /// # Errors
    /// [`Error::KeyNotFinite`].
    pub(super) fn add_query(&self, row: usize, to: &mut Vec<f64>) -> Result<(), Error> {
        let m = self.queries.len();
        self.queries.add_finite(row / m, row % m, to)
    }

    /// Returns new rows.
    pub(super) fn rows(
        &self,
        head: usize,
        list: &[usize],
        budget: RowBudget<'_>,
    ) -> Result<Reused<PendingRow>, Error> {
        let codes = self.index.map(|index| index.head(head));
        // Without an index the size of keys is found when they are read.
        let largest = codes.map_or(0.0, |codes| f64::from(codes.largest()));
        let row = |&row: &usize| {
            let wide = self.query(row)?;
            let eps = budget.eps.of(row);
            Ok(PendingRow {
                number: row,
                query: Query::new(&wide, self.scale, largest),
                prepared: codes
                    .filter(|_| eps > 0.0)
                    .map(|codes| codes.prepare(self.simd, &wide, self.scale)),
                wide,
                prefix: self.query_rows.row_visibility(row).prefix,
                eps,
                scratch: row_scratch(),
                kept: None,
                upper: 0.0,
                scored: 0,
                rung: Rung::Dense,
                open: true,
                flat: false,
                listed: false,
            })
        };
        list.iter().map(row).collect()
    }
}

impl PendingRow {
    /// Returns the search of a row that has a query for codes, and its scratch.
    pub(super) fn search<'s, E: Coded>(
        &'s mut self,
        row_visibility: RowVisibility<'s>,
        codes: &'s Codes,
        keys: Keys<'s, E>,
        simd: Simd,
    ) -> Option<(ThresholdSearch<'s, E>, &'s mut QueryScratch)> {
        let search = ThresholdSearch {
            simd,
            codes,
            keys: Some(keys),
            query: &self.query,
            prepared: self.prepared.as_ref()?,
            row_visibility,
            eps: self.eps,
            trim: false,
            beside: None,
        };
        Some((search, &mut self.scratch.query))
    }
}
