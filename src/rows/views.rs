//! Views of `ndarray` as rows, vectors, values and masks, without a copy.

// By value, because a view is a reference.
#![allow(clippy::needless_pass_by_value)]

use std::cell::OnceCell;

use ndarray::{ArrayView, ArrayViewD, Axis, Dimension};

use super::mask::MaskEntry;
use super::{Number, Scores, StoredMask, Values, Vectors, contiguous};
use crate::error::Error;
use crate::kernels::Strided;
use crate::runtime::memory::list;

/// Returns the rows of a view along its last axis.
fn rows<'a, T, D: Dimension>(
    argument: &'static str,
    view: &ArrayView<'a, T, D>,
) -> Result<Strided<'a, T>, Error> {
    Strided::of(view).ok_or_else(|| Error::Shape {
        argument,
        shape: view.shape().to_vec(),
        problem: format!(
            "its strides are {:?}: the last axis must be contiguous and no stride negative; copy it with as_standard_layout()",
            view.strides()
        ),
    })
}

/// Returns the bytes of a view, without the gaps between rows, and the strides of its axes but the last. Rows are
/// copied unless they are adjacent or repeated.
///
/// # Errors
/// [`Error::NoMemory`].
pub fn whole_bytes<'a>(
    argument: &'static str,
    view: ArrayViewD<'a, u8>,
    copied: &'a OnceCell<Vec<u8>>,
) -> Result<(&'a [u8], Vec<usize>), Error> {
    let mut each = view;
    let last = each.ndim().saturating_sub(1);
    let repeated: Vec<bool> = each.strides()[..last].iter().map(|&stride| stride == 0).collect();
    for (axis, _) in repeated.iter().enumerate().filter(|(_, repeated)| **repeated) {
        let few = each.len_of(Axis(axis)).min(1);
        each.slice_axis_inplace(Axis(axis), (..few).into());
    }
    let axes = &each.shape()[..last];
    let row = each.shape().last().copied().unwrap_or(1);
    let mut strides = contiguous(axes, row);
    let repeats = strides.iter_mut().zip(&repeated).filter(|(_, repeated)| **repeated);
    repeats.for_each(|(stride, _)| *stride = 0);
    if let Some(bytes) = each.to_slice() {
        return Ok((bytes, strides));
    }
    if copied.get().is_none() {
        let mut bytes = list(argument, each.len())?;
        bytes.extend(each.iter());
        let _ = copied.set(bytes);
    }
    Ok((copied.get().map_or(&[][..], Vec::as_slice), strides))
}

impl<'a> Scores<'a> {
    /// Returns the rows of a view of shape `(..., n)`, without a copy. Batch axes may be strided or broadcast, the last
    /// axis is contiguous. The numbers are f32, f64, f16 or bf16.
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
        T: Number,
    {
        Self::over(view.shape(), |_, _| Ok(T::stored(rows("scores", &view)?)))
    }

    /// Masks the rows by a view of the same shape, or broadcast to it: `bool`, of which `false` masks an entry, or
    /// biases to add.
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
        T: MaskEntry,
    {
        let mask = T::stored(rows("mask", &view)?);
        let additive = matches!(mask, StoredMask::Additive(_));
        self.masked_by(additive, |batch, n| {
            if view.shape().split_last() == Some((&n, batch)) {
                return Ok(mask);
            }
            Err(Error::Shape {
                argument: "mask",
                shape: view.shape().to_vec(),
                problem: format!(
                    "it has one entry for each of the scores, {batch:?} rows of {n}: broadcast it"
                ),
            })
        })
    }
}

impl<'a> Vectors<'a> {
    /// Returns the vectors of a view of shape `(..., n, d)`, without a copy. Errors name them by `argument`.
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
        T: Number,
    {
        Self::over(argument, view.shape(), |_| Ok(T::stored(rows(argument, &view)?)))
    }
}

impl<'a> Values<'a> {
    /// Returns the values of a view of shape `(..., n, d_v)`, without a copy.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn of<T, D: Dimension>(view: ArrayView<'a, T, D>) -> Result<Self, Error>
    where
        T: Number,
    {
        Self::over(view.shape(), |_| Ok(T::stored(rows("values", &view)?)))
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Array3, s};

    use super::*;
    use crate::rows::Keep;
    use crate::{
        AttentionOptions, Budget, Options, OutputOptions, attention, output_error, select,
    };

    /// Another borrower may write to the gaps between the rows of a view. Only Miri sees a reference to a gap: `make
    /// test-miri`.
    #[test]
    fn the_other_half_of_an_array_may_be_written_to() {
        let mut numbers = Array2::from_shape_fn((3, 64), |(i, j)| ((i * 7 + j * 3) % 11) as f32);
        let mut allowed = Array2::from_shape_fn((3, 64), |(i, j)| (i + j) % 5 != 0);
        let copied = numbers.slice(s![.., ..32]).to_owned();
        let shown = allowed.slice(s![.., ..32]).to_owned();
        let answers = |rows: &Scores<'_>, keys: &Vectors<'_>, values: &Values<'_>| {
            let options = Options::new().threads(1);
            let attended = AttentionOptions::new().threads(1);
            let budget = Budget::TailMass(&[0.1]);
            (
                select(rows, &[0.1], &options).unwrap(),
                output_error(
                    rows,
                    values,
                    &Keep::Indices { indptr: &[0, 1, 2, 4], indices: &[1, 2, 3, 5] },
                    &OutputOptions::new(),
                )
                .unwrap(),
                attention(keys, keys, keys, budget, None, &attended).unwrap(),
            )
        };
        let rows = Scores::of(copied.view()).unwrap().mask_of(shown.view()).unwrap();
        let copies = copied.t().as_standard_layout().into_owned();
        let keys = Vectors::of("k", copied.view()).unwrap();
        let want = answers(&rows, &keys, &Values::of(copies.view()).unwrap());

        let mut turned =
            Array2::from_shape_fn((32, 6), |(j, i)| if i < 3 { copies[[j, i]] } else { f32::NAN });
        let (left, mut right) = numbers.view_mut().split_at(Axis(1), 32);
        let (seen, mut unseen) = allowed.view_mut().split_at(Axis(1), 32);
        let (values, mut beside) = turned.view_mut().split_at(Axis(1), 3);
        let rows = Scores::of(left.view()).unwrap().mask_of(seen.view()).unwrap();
        let keys = Vectors::of("k", left.view()).unwrap();
        let values = Values::of(values.view()).unwrap();
        right.fill(7.0);
        unseen.fill(true);
        beside.fill(9.0);
        assert_eq!(answers(&rows, &keys, &values), want);
        right.fill(8.0);
    }

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
