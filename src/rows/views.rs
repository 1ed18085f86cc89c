//! Views of ndarray as rows, vectors, values and masks, read where they lie.

// A view is a reference, and handed over as one.
#![allow(clippy::needless_pass_by_value)]

use ndarray::{ArrayView, Dimension};

use super::{Data, Mask, Scores, Values, Vectors, contiguous};
use crate::error::Error;
use crate::kernels::extent;

/// The memory that a view spans, and the strides of its axes but the last.
fn stretch<'a, T, D: Dimension>(
    argument: &'static str,
    view: &ArrayView<'a, T, D>,
) -> Result<(&'a [T], Vec<usize>), Error> {
    let view = view.clone().into_dyn();
    if let (Some(data), Some((&n, batch))) = (view.to_slice(), view.shape().split_last()) {
        // Axes of length one, and all axes of an empty array, may carry any stride; the shape says what it should be.
        return Ok((data, contiguous(batch, n)));
    }
    extent(&view).ok_or_else(|| Error::Shape {
        argument,
        shape: view.shape().to_vec(),
        problem: format!(
            "its strides are {:?}: the last axis must be contiguous and no stride negative; copy it with as_standard_layout()",
            view.strides()
        ),
    })
}

impl<'a> Scores<'a> {
    /// Rows of a view of shape `(..., n)`, read where they lie: batch axes may be strided or broadcast, the last axis is
    /// contiguous. The numbers are f32, f64, f16 or bf16.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// use ndarray::array;
    ///
    /// let scores = array![[4.0_f32, 0.0, 3.0], [1.0, 1.0, 9.0]];
    /// let found = select(&Scores::of(scores.view())?, &[0.1], &Options::new())?;
    /// assert_eq!(found.row(1), [2]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::RowTooLong`].
    pub fn of<T, D: Dimension>(view: ArrayView<'a, T, D>) -> Result<Self, Error>
    where
        Data<'a>: From<&'a [T]>,
    {
        let (data, strides) = stretch("scores", &view)?;
        Self::strided(data, view.shape(), &strides)
    }

    /// Rows under a mask of the same shape, or one that was broadcast to it: truth values, of which false masks an entry, or
    /// numbers to add.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// use ndarray::array;
    ///
    /// let scores = array![[4.0_f32, 0.0, 3.0], [1.0, 1.0, 9.0]];
    /// let seen = array![true, true, false];
    /// let seen = seen.broadcast((2, 3)).unwrap();
    /// let rows = Scores::of(scores.view())?.mask_of(seen)?;
    /// assert_eq!(select(&rows, &[0.1], &Options::new())?.row(1), [0, 1]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Scores::mask`].
    pub fn mask_of<T, D: Dimension>(self, view: ArrayView<'a, T, D>) -> Result<Self, Error>
    where
        Mask<'a>: From<&'a [T]>,
    {
        let (mask, strides) = stretch("mask", &view)?;
        self.mask(Mask::from(mask), &strides)
    }
}

impl<'a> Vectors<'a> {
    /// Vectors in a view of shape `(..., n, d)`, read where they lie. Errors speak of them by the name of `argument`.
    ///
    /// ```
    /// use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// use ndarray::Array3;
    ///
    /// let keys = Array3::<f32>::from_shape_fn((2, 100, 8), |(h, i, j)| ((h + i * j) % 7) as f32);
    /// let index = KeyIndex::build(&Vectors::of("keys", keys.view())?, &IndexOptions::new())?;
    /// assert_eq!(index.len(), 100);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn of<T, D: Dimension>(
        argument: &'static str,
        view: ArrayView<'a, T, D>,
    ) -> Result<Self, Error>
    where
        Data<'a>: From<&'a [T]>,
    {
        let (data, strides) = stretch(argument, &view)?;
        Self::strided(argument, data, view.shape(), &strides)
    }
}

impl<'a> Values<'a> {
    /// Values in a view of shape `(..., n, d_v)`, read where they lie.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn of<T, D: Dimension>(view: ArrayView<'a, T, D>) -> Result<Self, Error>
    where
        Data<'a>: From<&'a [T]>,
    {
        let (data, strides) = stretch("values", &view)?;
        Self::strided(data, view.shape(), &strides)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Array3, s};

    use super::*;
    use crate::{Options, select};

    #[test]
    fn views_are_read_where_they_lie() {
        let numbers =
            Array3::from_shape_fn((3, 4, 8), |(a, b, c)| ((a * 7 + b * 5 + c * 3) % 11) as f32);
        let found = |view: ArrayView<'_, f32, ndarray::Ix3>| {
            select(&Scores::of(view).unwrap(), &[0.1], &Options::new()).unwrap()
        };
        let copied = |view: ArrayView<'_, f32, ndarray::Ix3>| {
            found(view.to_owned().as_standard_layout().view())
        };
        for view in [
            numbers.view(),
            numbers.slice(s![..;2, 1..3, 2..7]),
            numbers.slice(s![1..2, .., ..]),
            numbers.slice(s![.., 0..0, ..]),
            numbers.view().permuted_axes([1, 0, 2]),
        ] {
            assert_eq!(found(view), copied(view));
        }
        for view in [numbers.slice(s![.., .., ..;2]), numbers.slice(s![..;-1, .., ..])] {
            let error = Scores::of(view).unwrap_err().to_string();
            assert!(error.contains("as_standard_layout"), "{error}");
        }
        let halves = Array2::from_shape_fn((2, 5), |(i, j)| half::bf16::from_f32((i * j) as f32));
        assert!(Scores::of(halves.view()).is_ok() && Vectors::of("q", halves.view()).is_ok());
        assert!(Values::of(halves.view()).is_ok());
    }
}
