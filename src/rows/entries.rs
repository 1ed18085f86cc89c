//! Single entries of a row, for callers that read only a few.

use super::{Kind, Scores, Stored, StoredMask};
use crate::error::Error;

impl Scores<'_> {
    /// Returns the score at a position, `scale` times the stored number, rounded once; -inf where it is hidden or
    /// masked.
    ///
    /// # Errors
    /// [`Error::ScoreNan`], [`Error::ScoreInfinite`].
    pub(crate) fn entry(&self, row: usize, j: usize) -> Result<f64, Error> {
        debug_assert!(
            self.kind != Kind::Probs && !matches!(self.mask, Some(StoredMask::Additive(_)))
        );
        if j >= self.span(row).prefix || self.masked(row, j) {
            return Ok(f64::NEG_INFINITY);
        }
        let (at, start) = self.stored_at(row);
        let stored = self.data.get(at, start + j);
        let place = || self.place(row, Some(j));
        if stored.is_nan() {
            return Err(Error::ScoreNan { place: place() });
        }
        if stored == f64::INFINITY {
            return Err(Error::ScoreInfinite { place: place() });
        }
        if stored == f64::NEG_INFINITY {
            return Ok(stored);
        }
        // An overflow downward must not look like a mask, and one upward breaks any bound.
        Ok((self.scale * stored).max(f64::MIN))
    }

    /// Sets the byte of every position that is beyond the row's visible prefix or hidden by its mask.
    pub(crate) fn mark_hidden(&self, row: usize, bytes: &mut [u8]) {
        let span = self.span(row);
        bytes[span.prefix..].fill(1);
        if self.mask.is_some() {
            for (j, byte) in bytes[..span.prefix].iter_mut().enumerate() {
                *byte |= u8::from(self.masked(row, j));
            }
        }
    }

    /// Writes a stretch of the stored numbers, widened exactly.
    pub(crate) fn stretch64(&self, row: usize, start: usize, to: &mut [f64]) {
        let (at, from) = self.stored_at(row);
        let stretch = from + start..from + start + to.len();
        match &self.data {
            Stored::F32(rows) => widen(&rows.row(at)[stretch], to),
            Stored::F64(rows) => to.copy_from_slice(&rows.row(at)[stretch]),
            Stored::F16(rows) => widen(&rows.row(at)[stretch], to),
            Stored::Bf16(rows) => widen(&rows.row(at)[stretch], to),
        }
    }
}

fn widen<T: Copy + Into<f64>>(from: &[T], to: &mut [f64]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = from.into();
    }
}
