//! Masks over scores: entries that may be kept, or biases to add.

use super::data::{Data, Stored};
use super::strides::{check_strides, misfit};
use crate::error::Error;
use crate::kernels::Strided;

/// Mask over the scores: entries that may be kept, or biases to add.
///
/// ```
/// use certk_rs::{Mask, Options, Scores, select};
/// let row = [1.0_f32, 5.0, 1.0];
/// let allowed = Scores::new(&row, &[1, 3])?.mask(&[true, false, true][..], &[3])?;
/// assert_eq!(select(&allowed, &[0.0], &Options::new())?.row(0), [0, 2]);
/// let added = Scores::new(&row, &[1, 3])?.mask(Mask::Additive((&[9.0_f32, 0.0, 0.0]).into()), &[3])?;
/// assert_eq!(select(&added, &[0.1], &Options::new())?.row(0), [0]);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Mask<'a> {
    /// A byte per entry: non-zero means that the entry may be kept, zero that it is masked.
    Allowed(&'a [u8]),
    /// Real number to add to `scale * score`. -inf, or anything <= half the most negative finite value of its dtype,
    /// masks the entry.
    Additive(Data<'a>),
}

impl<'a> From<&'a [bool]> for Mask<'a> {
    fn from(allowed: &'a [bool]) -> Self {
        Mask::Allowed(bytemuck::cast_slice(allowed))
    }
}

/// Converts slices of biases.
macro_rules! mask_from {
    ($($type:ty),*) => {$(
        impl<'a> From<&'a [$type]> for Mask<'a> {
            fn from(biases: &'a [$type]) -> Self {
                Mask::Additive(biases.into())
            }
        }
    )*};
}
mask_from!(f32, f64, half::f16, half::bf16);

/// Rows of a mask.
#[derive(Debug, Clone)]
pub enum StoredMask<'a> {
    Allowed(Strided<'a, u8>),
    Additive(Stored<'a>),
}

impl<'a> Mask<'a> {
    /// Returns the rows of the mask, laid out as by [`Data::rows`].
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub(super) fn rows(
        self,
        batch: &[usize],
        n: usize,
        strides: &[usize],
    ) -> Result<StoredMask<'a>, Error> {
        match self {
            Mask::Additive(data) => Ok(StoredMask::Additive(data.rows("mask", batch, n, strides)?)),
            Mask::Allowed(bytes) => {
                check_strides("mask", bytes.len(), batch, n, strides)?;
                let rows = Strided::within(bytes, batch, strides, n);
                let misfit = || misfit("mask", bytes.len(), batch, n, strides);
                Ok(StoredMask::Allowed(rows.ok_or_else(misfit)?))
            }
        }
    }
}

/// Sealed trait behind [`MaskEntry`].
mod listed {
    pub trait MaskRows: Sized {
        fn stored(rows: crate::kernels::Strided<'_, Self>) -> super::StoredMask<'_>;
    }
}
pub(super) use listed::MaskRows;

/// Type of a mask's entries: `bool`, bytes of which zero masks an entry, or biases to add.
pub trait MaskEntry: MaskRows {}

macro_rules! mask_entries {
    ($($type:ty, $rows:ident => $stored:expr);*) => {$(
        impl MaskRows for $type {
            fn stored($rows: Strided<'_, Self>) -> StoredMask<'_> {
                $stored
            }
        }
        impl MaskEntry for $type {}
    )*};
}
mask_entries!(
    bool, rows => StoredMask::Allowed(rows.cast());
    u8, rows => StoredMask::Allowed(rows);
    f32, rows => StoredMask::Additive(Stored::F32(rows));
    f64, rows => StoredMask::Additive(Stored::F64(rows));
    half::f16, rows => StoredMask::Additive(Stored::F16(rows));
    half::bf16, rows => StoredMask::Additive(Stored::Bf16(rows))
);
