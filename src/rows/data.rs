//! Borrowed buffers of numbers in the four types they may be stored in.

use half::{bf16, f16};

/// A borrowed buffer of stored numbers. `f16` and `bf16` widen exactly.
///
/// ```
/// use certk_rs::{Data, half::f16};
/// let stored = [f16::from_f32(0.5), f16::from_f32(-2.0)];
/// let data = Data::from(&stored);
/// let mut wide = Vec::new();
/// data.widen(1, 1, &mut wide);
/// assert_eq!((data.len(), wide), (2, vec![-2.0]));
/// ```
#[derive(Debug, Clone, Copy)]
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

/// Runs generic code for what a buffer stores.
macro_rules! for_dtype {
    ($data:expr, $slice:ident => $work:expr) => {
        match $data {
            $crate::rows::Data::F32($slice) => $work,
            $crate::rows::Data::F64($slice) => $work,
            $crate::rows::Data::F16($slice) => $work,
            $crate::rows::Data::Bf16($slice) => $work,
        }
    };
}
pub(crate) use for_dtype;

macro_rules! data_from {
    ($($type:ty => $variant:ident),*) => {$(
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
    /// How many numbers the buffer holds.
    pub fn len(&self) -> usize {
        match self {
            Data::F32(d) => d.len(),
            Data::F64(d) => d.len(),
            Data::F16(d) => d.len(),
            Data::Bf16(d) => d.len(),
        }
    }

    /// Whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number at `i`, exactly.
    #[inline]
    pub(crate) fn get(&self, i: usize) -> f64 {
        match self {
            Data::F32(d) => f64::from(d[i]),
            Data::F64(d) => d[i],
            Data::F16(d) => f64::from(d[i]),
            Data::Bf16(d) => f64::from(d[i]),
        }
    }

    /// Appends a stretch of numbers, exactly.
    pub fn widen(&self, start: usize, len: usize, to: &mut Vec<f64>) {
        let stretch = start..start + len;
        match self {
            Data::F32(d) => to.extend(d[stretch].iter().map(|&v| f64::from(v))),
            Data::F64(d) => to.extend_from_slice(&d[stretch]),
            Data::F16(d) => to.extend(d[stretch].iter().map(|&v| f64::from(v))),
            Data::Bf16(d) => to.extend(d[stretch].iter().map(|&v| f64::from(v))),
        }
    }

    /// Additive mask entries at or below this mean "masked" (half the most negative finite value of the dtype).
    pub(crate) fn masked_below(&self) -> f64 {
        match self {
            Data::F32(_) => f64::from(f32::MIN) / 2.0,
            Data::F64(_) => f64::MIN / 2.0,
            Data::F16(_) => f64::from(f16::MIN) / 2.0,
            Data::Bf16(_) => f64::from(bf16::MIN) / 2.0,
        }
    }
}
