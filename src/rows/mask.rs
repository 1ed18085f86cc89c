//! Masks over scores: which entries may be kept, or a number to add.

use super::data::Data;

/// A mask over the scores: which entries may be kept, or a bias to add.
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
pub enum Mask<'a> {
    /// A byte per entry: non-zero means that the entry may be kept, zero that it is masked.
    Allowed(&'a [u8]),
    /// A real number to add to `scale * score`; -inf, or anything <= half the most negative finite value of its
    /// dtype, masks the entry.
    Additive(Data<'a>),
}

impl<'a> From<&'a [bool]> for Mask<'a> {
    fn from(allowed: &'a [bool]) -> Self {
        Mask::Allowed(bytemuck::cast_slice(allowed))
    }
}

/// Numbers to add.
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

impl Mask<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Mask::Allowed(bytes) => bytes.len(),
            Mask::Additive(data) => data.len(),
        }
    }
}
