//! Visible keys of the rows of a call: lengths, a causal limit, a mask.

use super::query::RowVisibility;
use crate::error::Error;
use crate::rows::{PerRow, check_strides, offset};

/// Visibility of `keys` keys for rows of shape `shape`.
#[derive(Debug, Clone)]
pub(crate) struct Visible<'a> {
    shape: &'a [usize],
    keys: usize,
    causal: bool,
    lengths: Option<PerRow<'a, i64>>,
    mask: Option<(&'a [u8], &'a [usize])>,
}

impl<'a> Visible<'a> {
    /// Judges lengths, one for all rows or one per row, and a mask, a byte per row and key.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::RowLength`].
    pub(crate) fn new(
        shape: &'a [usize],
        keys: usize,
        causal: bool,
        lengths: Option<&'a [i64]>,
        mask: Option<(&'a [u8], &'a [usize])>,
    ) -> Result<Self, Error> {
        let rows = shape.iter().product();
        let lengths = lengths
            .map(|lengths| {
                PerRow::new("lengths", lengths, rows, "pass one, or one per row")?.all(
                    shape,
                    |value| usize::try_from(value).is_ok_and(|value| value <= keys),
                    |place, value| Error::RowLength { place, value, n: keys },
                )
            })
            .transpose()?;
        if let Some((mask, strides)) = mask {
            check_strides("mask", mask.len(), shape, keys, strides)?;
        }
        Ok(Visible { shape, keys, causal, lengths, mask })
    }

    /// Returns the keys that a row sees.
    pub(crate) fn row(&self, row: usize) -> RowVisibility<'a> {
        self.row_of(row, self.keys)
    }

    /// Returns the keys that a row sees of `there`, of which the others are absent.
    pub(crate) fn row_of(&self, row: usize, there: usize) -> RowVisibility<'a> {
        let (m, n) = (self.shape[self.shape.len() - 1], self.keys);
        let mut prefix = there;
        if let Some(lengths) = self.lengths {
            prefix = prefix.min(lengths.of(row).unsigned_abs() as usize);
        }
        if self.causal {
            prefix = prefix.min((row % m + 1 + there).saturating_sub(m));
        }
        let allowed = self.mask.map(|(mask, strides)| {
            let start = offset(self.shape, strides, row);
            mask.get(start..start + n).unwrap_or(&[])
        });
        RowVisibility { prefix, allowed }
    }
}
