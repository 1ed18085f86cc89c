//! Borrowed buffers of numbers in the four types they may be stored in.

use std::ops::Range;

use half::{bf16, f16};

use super::strides::{check_strides, misfit};
use crate::error::Error;
use crate::kernels::Strided;

/// A borrowed buffer of stored numbers. `f16` and `bf16` widen exactly.
///
/// ```
/// use certk_rs::{Data, half::f16};
/// let stored = [f16::from_f32(0.5), f16::from_f32(-2.0)];
/// let data = Data::from(&stored);
/// assert_eq!((data.len(), data.get(1), data.get(2)), (2, Some(-2.0), None));
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Data<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Double precision.
    F64(&'a [f64]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// Brain floating point.
    Bf16(&'a [bf16]),
}

/// Borrowed rows of stored numbers.
#[derive(Debug, Clone)]
pub enum Stored<'a> {
    F32(Strided<'a, f32>),
    F64(Strided<'a, f64>),
    F16(Strided<'a, f16>),
    Bf16(Strided<'a, bf16>),
}

/// Runs generic code for the stored type of the rows.
macro_rules! for_dtype {
    ($rows:expr, $of:ident => $work:expr) => {
        match &$rows {
            $crate::rows::Stored::F32($of) => $work,
            $crate::rows::Stored::F64($of) => $work,
            $crate::rows::Stored::F16($of) => $work,
            $crate::rows::Stored::Bf16($of) => $work,
        }
    };
}
pub(crate) use for_dtype;

/// Sealed traits behind [`Number`].
mod listed {
    pub trait Rows: Sized {
        fn stored(rows: crate::kernels::Strided<'_, Self>) -> super::Stored<'_>;
        fn slice(data: super::Data<'_>) -> Option<&[Self]>;
    }
}
pub(super) use listed::Rows;

/// Type in which numbers may be stored: f32, f64, f16 or bf16.
pub trait Number: Rows {}

macro_rules! data_from {
    ($($type:ty => $variant:ident),*) => {$(
        impl Rows for $type {
            fn stored(rows: Strided<'_, Self>) -> Stored<'_> {
                Stored::$variant(rows)
            }

            fn slice(data: Data<'_>) -> Option<&[Self]> {
                if let Data::$variant(data) = data { Some(data) } else { None }
            }
        }
        impl Number for $type {}
        impl<'a> From<&'a [$type]> for Data<'a> {
            fn from(data: &'a [$type]) -> Self {
                Data::$variant(data)
            }
        }
        impl<'a> From<&'a Vec<$type>> for Data<'a> {
            fn from(data: &'a Vec<$type>) -> Self {
                Data::$variant(data)
            }
        }
        impl<'a, const N: usize> From<&'a [$type; N]> for Data<'a> {
            fn from(data: &'a [$type; N]) -> Self {
                Data::$variant(data)
            }
        }
    )*};
}
data_from!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16);

impl Data<'_> {
    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        match self {
            Data::F32(d) => d.len(),
            Data::F64(d) => d.len(),
            Data::F16(d) => d.len(),
            Data::Bf16(d) => d.len(),
        }
    }

    /// Returns `true` if the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number at `i`, exactly, or `None` past the end.
    pub fn get(&self, i: usize) -> Option<f64> {
        match self {
            Data::F32(d) => d.get(i).map(|&v| f64::from(v)),
            Data::F64(d) => d.get(i).copied(),
            Data::F16(d) => d.get(i).map(|&v| f64::from(v)),
            Data::Bf16(d) => d.get(i).map(|&v| f64::from(v)),
        }
    }
}

impl<'a> Data<'a> {
    /// Returns rows of `n` numbers along batch axes with these strides, in elements.
    ///
    /// # Errors
    /// [`Error::Shape`] if the rows reach outside the buffer.
    pub(super) fn rows(
        self,
        argument: &'static str,
        batch: &[usize],
        n: usize,
        strides: &[usize],
    ) -> Result<Stored<'a>, Error> {
        check_strides(argument, self.len(), batch, n, strides)?;
        let rows = match self {
            Data::F32(d) => Strided::within(d, batch, strides, n).map(Stored::F32),
            Data::F64(d) => Strided::within(d, batch, strides, n).map(Stored::F64),
            Data::F16(d) => Strided::within(d, batch, strides, n).map(Stored::F16),
            Data::Bf16(d) => Strided::within(d, batch, strides, n).map(Stored::Bf16),
        };
        rows.ok_or_else(|| misfit(argument, self.len(), batch, n, strides))
    }
}

impl Stored<'_> {
    /// Returns an entry of a row, exactly.
    #[inline]
    pub(crate) fn get(&self, row: usize, j: usize) -> f64 {
        match self {
            Stored::F32(rows) => f64::from(rows.row(row)[j]),
            Stored::F64(rows) => rows.row(row)[j],
            Stored::F16(rows) => f64::from(rows.row(row)[j]),
            Stored::Bf16(rows) => f64::from(rows.row(row)[j]),
        }
    }

    /// Appends a stretch of a row, exactly.
    pub(crate) fn widen(&self, row: usize, stretch: Range<usize>, to: &mut Vec<f64>) {
        match self {
            Stored::F32(rows) => to.extend(rows.row(row)[stretch].iter().map(|&v| f64::from(v))),
            Stored::F64(rows) => to.extend_from_slice(&rows.row(row)[stretch]),
            Stored::F16(rows) => to.extend(rows.row(row)[stretch].iter().map(|&v| f64::from(v))),
            Stored::Bf16(rows) => to.extend(rows.row(row)[stretch].iter().map(|&v| f64::from(v))),
        }
    }

    /// Returns the bound at or below which an additive mask entry masks: half the most negative finite value of the
    /// dtype.
    pub(crate) fn masked_below(&self) -> f64 {
        match self {
            Stored::F32(_) => f64::from(f32::MIN) / 2.0,
            Stored::F64(_) => f64::MIN / 2.0,
            Stored::F16(_) => f64::from(f16::MIN) / 2.0,
            Stored::Bf16(_) => f64::from(bf16::MIN) / 2.0,
        }
    }
}
