//! Results of a selection: kept sets and their certificates.

use std::ops::Range;

use super::constraints::Constraints;
use crate::certificate::Status;
use crate::error::Error;
use crate::kernels::{Piece, append_all};
use crate::numerics::certified_sums::SplitSums;
use crate::rows::Keep;
use crate::runtime::memory::room;
use crate::runtime::recycled::{self, recycled};
use crate::runtime::threads;

/// Kept sets in compressed rows, with a certificate for each.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Selection {
    /// Number of keys kept, per row.
    pub k: Vec<i64>,
    /// Offsets into `indices`: row `i` keeps `indices[indptr[i]..indptr[i + 1]]`.
    pub indptr: Vec<i64>,
    /// Kept positions, ascending within a row.
    pub indices: Vec<u32>,
    /// Upper bound on the real tail mass, per row.
    pub tail_mass_upper: Vec<f64>,
    /// Lower bound on the real tail mass, per row.
    pub tail_mass_lower: Vec<f64>,
    /// `true` where no smaller set under the same constraints is within the budget, proven; with a block size, no set
    /// of fewer blocks.
    pub minimal: Vec<bool>,
    /// Status of each row.
    pub status: Vec<Status>,
}

recycled!(Selection { k, indptr, indices, tail_mass_upper, tail_mass_lower, minimal, status });

impl<'a> From<&'a Selection> for Keep<'a> {
    /// Borrows the selection as a kept set for [`certify`](crate::certify).
    ///
    /// ```
    /// use certk_rs::{CertifyOptions, Keep, Options, Scores, certify, select};
    ///
    /// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
    /// let scores = Scores::new(&row, &[1, 6])?;
    /// let found = select(&scores, &[0.1], &Options::new())?;
    /// let judged = certify(&scores, &Keep::from(&found), &CertifyOptions::new().eps(&[0.1]).independent(true))?;
    /// assert_eq!(judged.holds, Some(vec![true]));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    fn from(selection: &'a Selection) -> Self {
        Keep::Positions { indptr: &selection.indptr, positions: &selection.indices }
    }
}

impl Selection {
    /// Returns the buffers to this thread, or to this [`Context`](crate::Context), for later calls of the same kind.
    /// Those calls then allocate none.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::new(&[1.0_f32; 64], &[1, 64])?;
    /// let first = select(&scores, &[0.1], &Options::new())?;
    /// let k = first.k[0];
    /// first.recycle();
    /// assert_eq!(select(&scores, &[0.1], &Options::new())?.k, [k]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn recycle(self) {
        recycled::recycle(self);
    }

    /// Bytes per row, without the positions.
    pub(crate) const ROW: usize = 4 * size_of::<i64>() + 2;

    /// Returns the kept positions of a row, ascending.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::new(&[9.0_f32, 0.0, 0.0, 9.0], &[2, 2])?;
    /// let found = select(&scores, &[0.1], &Options::new())?;
    /// assert_eq!((found.row(0), found.row(1)), (&[0][..], &[1][..]));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn row(&self, row: usize) -> &[u32] {
        let at = |i: usize| self.indptr[i].unsigned_abs() as usize;
        &self.indices[at(row)..at(row + 1)]
    }

    /// Returns the row of the first answer, if the next answer is of the first of `rows`.
    pub(super) fn begun(&self, rows: &Range<usize>) -> usize {
        rows.start - self.k.len()
    }

    /// Makes room for the decisions of `rows` rows.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn room(&mut self, rows: usize) -> Result<(), Error> {
        room("scores", &mut self.k, rows)?;
        room("scores", &mut self.indptr, rows.saturating_add(1))?;
        room("scores", &mut self.tail_mass_upper, rows)?;
        room("scores", &mut self.tail_mass_lower, rows)?;
        room("scores", &mut self.minimal, rows)?;
        room("scores", &mut self.status, rows)
    }

    pub(crate) fn push(&mut self, decision: &Decision) {
        self.k.push(decision.kept as i64);
        self.tail_mass_upper.push(decision.upper);
        self.tail_mass_lower.push(decision.lower);
        self.minimal.push(decision.minimal);
        self.status.push(decision.status);
        self.indptr.push(self.indices.len() as i64);
    }

    /// Appends the answers for later rows.
    pub(super) fn append(&mut self, parts: &[Selection], threads: usize) -> Result<(), Error> {
        self.room(parts.iter().map(|part| part.k.len()).sum())?;
        let listed = parts.iter().map(|part| part.indices.len()).sum();
        room("scores", &mut self.indices, listed)?;
        let indices: Vec<&[u32]> = parts.iter().map(|part| &part.indices[..]).collect();
        let mut base = self.indices.len() as i64;
        append_all(&mut self.indices, &indices, |pieces| {
            threads::map_all(threads, pieces, 1, Piece::copy)
        });
        for part in parts {
            self.indptr.extend(part.indptr.iter().map(|end| base + end));
            base += part.indices.len() as i64;
            self.k.extend_from_slice(&part.k);
            self.tail_mass_upper.extend_from_slice(&part.tail_mass_upper);
            self.tail_mass_lower.extend_from_slice(&part.tail_mass_lower);
            self.minimal.extend_from_slice(&part.minimal);
            self.status.extend_from_slice(&part.status);
        }
        Ok(())
    }
}

/// Decision on one row's set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Decision {
    pub(crate) kept: usize,
    pub(crate) upper: f64,
    pub(crate) lower: f64,
    pub(crate) minimal: bool,
    pub(crate) status: Status,
}

impl Decision {
    pub(super) const EMPTY: Decision =
        Decision { kept: 0, upper: 0.0, lower: 0.0, minimal: true, status: Status::Empty };

    pub(super) fn new(
        split: &SplitSums,
        minimal: bool,
        exact: bool,
        constraints: &Constraints,
    ) -> Self {
        let slack = &constraints.slack;
        let mut upper = split.upper(slack.select, slack.flush);
        if exact {
            upper = upper.min(constraints.eps);
        }
        let lower = split.lower(slack.certify, slack.flush).min(upper);
        let holds = upper <= constraints.eps;
        let status = if holds { Status::Certified } else { Status::OverBudget };
        Decision { kept: split.kept, upper, lower, minimal: minimal && holds, status }
    }

    /// Returns `true` if more precise arithmetic could change the answer.
    pub(crate) fn open(&self, eps: f64) -> bool {
        match self.status {
            Status::Certified => !self.minimal,
            Status::OverBudget => self.lower <= eps,
            Status::Empty => false,
        }
    }
}
