//! Single entries of a row, for what reads only a few of them.

use super::{Data, Kind, Mask, Scores};
use crate::error::Error;

impl Scores<'_> {
    /// The score at a position, `scale` times what is stored, rounded once; -inf where it is hidden or masked.
    ///
    /// # Errors
    /// [`Error::ScoreNan`], [`Error::ScoreInfinite`].
    pub(crate) fn entry(&self, row: usize, j: usize) -> Result<f64, Error> {
        debug_assert!(self.kind != Kind::Probs && !matches!(self.mask, Some(Mask::Additive(_))));
        let span = self.span(row);
        if j >= span.prefix || self.masked(&span, j) {
            return Ok(f64::NEG_INFINITY);
        }
        let stored = self.data.get(span.start + j);
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
                *byte |= u8::from(self.masked(&span, j));
            }
        }
    }

    /// Writes a stretch of what is stored, widened exactly.
    pub(crate) fn stretch64(&self, row: usize, start: usize, to: &mut [f64]) {
        let start = self.span(row).start + start;
        let stretch = start..start + to.len();
        match self.data {
            Data::F32(d) => widen(&d[stretch], to),
            Data::F64(d) => to.copy_from_slice(&d[stretch]),
            Data::F16(d) => widen(&d[stretch], to),
            Data::Bf16(d) => widen(&d[stretch], to),
        }
    }
}

fn widen<T: Copy + Into<f64>>(from: &[T], to: &mut [f64]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = from.into();
    }
}
