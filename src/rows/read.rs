//! Stored entries of a row, and checks of their values.

use super::{Kind, Scores, StoredMask};
use crate::error::Error;
use crate::kernels::Strided;

impl Scores<'_> {
    /// Returns the index of the stored row that holds a row, and the row's offset in it.
    #[inline]
    pub(super) fn stored_at(&self, row: usize) -> (usize, usize) {
        self.ragged_start(row).map_or((row, 0), |start| (0, start))
    }

    /// Returns the stored entries of a row.
    #[inline]
    pub(crate) fn row<'b, E>(&self, stored: &Strided<'b, E>, row: usize) -> &'b [E] {
        if !self.is_ragged() {
            return stored.row(row);
        }
        let (all, start) = self.stored_at(row);
        &stored.row(all)[start..][..self.span(row).n]
    }

    /// Returns the stored entries of a row, up to its prefix.
    #[inline]
    pub(crate) fn visible<'b, E>(&self, stored: &Strided<'b, E>, row: usize) -> &'b [E] {
        &self.row(stored, row)[..self.span(row).prefix]
    }

    /// Returns `true` if the mask hides entry `j` of a row (its own value may hide it as well).
    pub(super) fn masked(&self, row: usize, j: usize) -> bool {
        match &self.mask {
            Some(StoredMask::Allowed(bytes)) => bytes.row(row)[j] == 0,
            Some(StoredMask::Additive(data)) => data.get(row, j) <= data.masked_below(),
            None => false,
        }
    }

    /// Checks every visible entry of a row.
    ///
    /// # Errors
    /// The error of the first bad entry.
    pub(crate) fn judge(&self, row: usize) -> Result<(), Error> {
        let (at, start) = self.stored_at(row);
        for j in 0..self.span(row).prefix {
            if self.masked(row, j) {
                continue;
            }
            let value = self.data.get(at, start + j);
            let place = || self.place(row, Some(j));
            if self.kind == Kind::Probs {
                if !(0.0..f64::INFINITY).contains(&value) {
                    return Err(Error::Probability { place: place(), value });
                }
                continue;
            }
            if let Some(StoredMask::Additive(mask)) = &self.mask {
                let value = mask.get(row, j);
                if value.is_nan() || value == f64::INFINITY {
                    return Err(Error::MaskValue { place: place(), value });
                }
            }
            if value.is_nan() {
                return Err(Error::ScoreNan { place: place() });
            }
            if value == f64::INFINITY {
                return Err(Error::ScoreInfinite { place: place() });
            }
        }
        Ok(())
    }
}
