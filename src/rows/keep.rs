//! Kept sets given by a caller, and their layout over a row.

use std::ops::Range;

use super::{Scores, check_strides};
use crate::error::Error;
use crate::runtime::ambient::{self, asked, pieces_mut};

/// Kept keys of each row.
///
/// Positions that a row's mask, length or causal limit hides may be listed. They weigh nothing and are not counted.
///
/// ```
/// use certk_rs::{CertifyOptions, Keep, Scores, certify};
/// let scores = Scores::new(&[1.0_f32, 0.0, 1.0], &[1, 3])?;
/// let listed = Keep::Indices { indptr: &[0, 2], indices: &[2, 0] };
/// let masked = Keep::Mask { kept: &[1, 0, 1], strides: &[3] };
/// let judged = certify(&scores, &listed, &CertifyOptions::new())?;
/// assert_eq!(judged.k, [2]);
/// assert_eq!(judged, certify(&scores, &masked, &CertifyOptions::new())?);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Keep<'a> {
    /// A byte per score, non-zero for a kept key, in the shape of the scores. Ragged rows take a flat buffer like that
    /// of the scores, and no strides.
    Mask {
        /// The bytes.
        kept: &'a [u8],
        /// Strides of the batch axes, in elements.
        strides: &'a [usize],
    },
    /// Row `i` keeps the positions `indices[indptr[i]..indptr[i + 1]]`, in any order, each at most once.
    Indices {
        /// Start of each row's positions, then the total: rows + 1 entries.
        indptr: &'a [i64],
        /// Positions within their rows.
        indices: &'a [i64],
    },
    /// The same with positions of type `u32`, as in a [`Selection`](crate::Selection). `Keep::from(&selection)` copies
    /// nothing.
    Positions {
        /// Start of each row's positions, then the total: rows + 1 entries.
        indptr: &'a [i64],
        /// Positions within their rows.
        positions: &'a [u32],
    },
}

impl Keep<'_> {
    /// Checks shapes and offsets, without reading a row's content.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`], [`Error::Indptr`].
    pub(crate) fn check(&self, scores: &Scores<'_>) -> Result<(), Error> {
        match *self {
            Keep::Mask { kept, .. } if scores.is_ragged() => {
                let expected = scores.ragged_start(scores.rows()).unwrap_or(0);
                if kept.len() == expected {
                    return Ok(());
                }
                let remedy = "a flat mask beside the flat scores";
                Err(Error::Length { argument: "keep", got: kept.len(), expected, remedy })
            }
            Keep::Mask { kept, strides } => {
                check_strides("keep", kept.len(), &scores.batch, scores.n, strides)
            }
            Keep::Indices { indptr, .. } | Keep::Positions { indptr, .. } => {
                let listed = match *self {
                    Keep::Positions { positions, .. } => positions.len(),
                    Keep::Indices { indices, .. } => indices.len(),
                    Keep::Mask { .. } => 0,
                };
                if indptr.len() != scores.rows() + 1 {
                    let remedy = "one list of positions per row";
                    let (got, expected) = (indptr.len().saturating_sub(1), scores.rows());
                    return Err(Error::Length { argument: "keep", got, expected, remedy });
                }
                let bad = |position: usize, problem| {
                    Err(Error::Indptr { position, value: indptr[position], problem })
                };
                if indptr[0] != 0 {
                    return bad(0, "the kept set's indptr must start at 0");
                }
                if let Some(i) = indptr.windows(2).position(|pair| pair[1] < pair[0]) {
                    return bad(i + 1, "the kept set's indptr must not decrease");
                }
                let last = indptr.len() - 1;
                if usize::try_from(indptr[last]) != Ok(listed) {
                    return bad(last, "the kept set's indptr must end at the number of indices");
                }
                Ok(())
            }
        }
    }

    /// Returns a row's bytes in place, for a kept set given as a mask; `None` for an empty row.
    pub(crate) fn lent(&self, scores: &Scores<'_>, row: usize) -> Option<&[u8]> {
        let Keep::Mask { kept, strides } = *self else { return None };
        let span = scores.span(row);
        if span.n == 0 {
            return None;
        }
        if let Some(start) = scores.ragged_start(row) {
            return Some(&kept[start..start + span.n]);
        }
        let place = scores.place(row, None).0;
        let start: usize = place.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        Some(&kept[start..start + span.n])
    }

    /// Writes one byte per position of a row: 1 where it is kept. The buffer is as long as the row.
    ///
    /// # Errors
    /// [`Error::KeepRange`], [`Error::KeepTwice`].
    pub(crate) fn lay(
        &self,
        scores: &Scores<'_>,
        row: usize,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let span = scores.span(row);
        if span.n == 0 && matches!(self, Keep::Mask { .. }) {
            return Ok(());
        }
        match *self {
            Keep::Mask { .. } => bytes.copy_from_slice(self.lent(scores, row).unwrap_or(&[])),
            Keep::Indices { indptr, indices } => {
                let listed = &indices[row_of(indptr, row)];
                mark(scores, row, listed.iter().copied(), bytes)?;
            }
            Keep::Positions { indptr, positions } => {
                let listed = &positions[row_of(indptr, row)];
                mark(scores, row, listed.iter().copied().map(i64::from), bytes)?;
            }
        }
        ambient::check()
    }
}

/// Returns the range of a row's listed positions.
fn row_of(indptr: &[i64], row: usize) -> Range<usize> {
    let at = |i: usize| indptr[i].unsigned_abs() as usize;
    at(row)..at(row + 1)
}

/// Writes 1 at each listed position of a row, 0 elsewhere.
fn mark(
    scores: &Scores<'_>,
    row: usize,
    listed: impl Iterator<Item = i64>,
    bytes: &mut [u8],
) -> Result<(), Error> {
    let n = bytes.len();
    for piece in pieces_mut(bytes) {
        piece.fill(0);
    }
    ambient::check()?;
    for value in asked(listed) {
        let place = || scores.place(row, None);
        match usize::try_from(value).ok().and_then(|j| bytes.get_mut(j)) {
            None => return Err(Error::KeepRange { place: place(), value, n }),
            Some(1) => return Err(Error::KeepTwice { place: place(), value }),
            Some(byte) => *byte = 1,
        }
    }
    Ok(())
}
