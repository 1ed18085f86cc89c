//! Rows of numbers that lie apart in memory. The gaps may be borrowed for writing elsewhere: no slice ever covers more
//! than one row.
//!
//! SAFETY: a [`Strided`] is made of memory that is borrowed for its lifetime, and every row of its layout lies there. So does every row
//! of a [`Keys`] that is made of one.

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::isa::Element;
use super::matrix::Keys;

/// Layout of rows of one length: axes, and their strides in elements.
#[derive(Debug, Clone)]
struct Layout {
    axes: Vec<usize>,
    strides: Vec<usize>,
    /// Number of rows.
    rows: usize,
    /// Length of a row.
    len: usize,
    /// Distance of rows, if it is the same for all.
    step: Option<usize>,
    /// Of each matrix where it starts and how many rows it has, if these differ; `axes` are those of the longest.
    ragged: Option<Vec<(usize, usize)>>,
}

impl Layout {
    /// Returns `None` if the number of rows overflows.
    fn new(axes: &[usize], strides: &[usize], len: usize) -> Option<Self> {
        let empty = len == 0 || axes.contains(&0);
        let rows = if axes.contains(&0) {
            0
        } else {
            axes.iter().try_fold(1usize, |rows, &axis| rows.checked_mul(axis))?
        };
        // An empty array is never read, and an axis of length one may have any stride.
        let stride = |(&axis, &stride)| if empty || axis == 1 { 0 } else { stride };
        let strides: Vec<usize> = axes.iter().zip(strides).map(stride).collect();
        let mut spread = axes.iter().zip(&strides).rev().filter(|(axis, _)| **axis != 1);
        let step = match spread.next() {
            None => Some(0),
            Some((&axis, &step)) => {
                let end = |axis: usize| step.checked_mul(axis);
                let mut next = end(axis);
                let even = spread.all(|(&axis, &stride)| {
                    let fits = next == Some(stride);
                    next = next.and_then(|next| next.checked_mul(axis));
                    fits
                });
                even.then_some(step)
            }
        };
        Some(Layout { axes: axes.to_vec(), strides, rows, len, step, ragged: None })
    }

    /// Returns the index one past the last element of any row.
    fn reach(&self) -> Option<usize> {
        if self.len == 0 || self.rows == 0 {
            return Some(0);
        }
        let mut end = self.len;
        for (&axis, &stride) in self.axes.iter().zip(&self.strides) {
            end = end.checked_add((axis - 1).checked_mul(stride)?)?;
        }
        Some(end)
    }

    /// Returns the offset of an existing row, in C order of the axes.
    #[inline]
    fn offset(&self, row: usize) -> usize {
        if let (Some(ragged), Some(&most)) = (&self.ragged, self.axes.last()) {
            let ((start, count), at) = (ragged[row / most], row % most);
            assert!(at < count, "a row that is not there");
            return start + at * self.len;
        }
        match self.step {
            Some(step) => row * step,
            None => along(&self.axes, &self.strides, row),
        }
    }
}

/// Returns the offset of an entry, in C order of some axes.
fn along(axes: &[usize], strides: &[usize], entry: usize) -> usize {
    let (mut rest, mut offset) = (entry, 0);
    for (&axis, &stride) in axes.iter().zip(strides).rev() {
        offset += rest % axis * stride;
        rest /= axis;
    }
    offset
}

/// Borrowed rows of one length.
#[derive(Debug, Clone)]
pub struct Strided<'a, T> {
    start: NonNull<T>,
    layout: Layout,
    rows: PhantomData<&'a [T]>,
}

// SAFETY: it is read only, like the references that it stands for.
unsafe impl<T: Sync> Send for Strided<'_, T> {}
// SAFETY: likewise.
unsafe impl<T: Sync> Sync for Strided<'_, T> {}

impl<'a, T> Strided<'a, T> {
    /// Returns rows of `len` elements in a slice, along axes with these strides, in elements. `None` if they reach
    /// outside.
    pub(crate) fn within(
        data: &'a [T],
        axes: &[usize],
        strides: &[usize],
        len: usize,
    ) -> Option<Self> {
        let layout = Layout::new(axes, strides, len).filter(|_| axes.len() == strides.len())?;
        let inside = layout.reach()? <= data.len();
        inside.then_some(Strided { start: NonNull::from(data).cast(), layout, rows: PhantomData })
    }

    /// Returns matrices of so many rows of `len` elements each in a slice, of which each starts at its place, in elements; `axes` are
    /// those before the rows. `None` if they reach outside.
    pub(crate) fn ragged(
        data: &'a [T],
        axes: &[usize],
        matrices: Vec<(usize, usize)>,
        len: usize,
    ) -> Option<Self> {
        let most = matrices.iter().map(|(_, count)| *count).max().unwrap_or(0);
        let axes: Vec<usize> = axes.iter().copied().chain([most]).collect();
        let layout = Layout::new(&axes, &vec![0; axes.len()], len)?;
        let inside = |&(start, count): &(usize, usize)| {
            let end = count.checked_mul(len).and_then(|all| all.checked_add(start));
            count == 0 || end.is_some_and(|end| end <= data.len())
        };
        let fits = layout.rows == matrices.len() * most && matrices.iter().all(inside);
        let layout = Layout { ragged: Some(matrices), ..layout };
        fits.then_some(Strided { start: NonNull::from(data).cast(), layout, rows: PhantomData })
    }

    /// Returns how many rows each matrix has, if these differ.
    pub(crate) fn counts(&self) -> Option<Vec<usize>> {
        let ragged = self.layout.ragged.as_ref()?;
        Some(ragged.iter().map(|(_, count)| *count).collect())
    }

    /// Returns the rows of a view, along its last axis. `None` unless that is contiguous and no stride is negative.
    #[cfg(feature = "ndarray")]
    pub(crate) fn of<D: ndarray::Dimension>(view: &ndarray::ArrayView<'a, T, D>) -> Option<Self> {
        let ((&len, axes), (&last, steps)) =
            (view.shape().split_last()?, view.strides().split_last()?);
        if len > 1 && last != 1 && !view.is_empty() {
            return None;
        }
        let stride = |(&axis, &step): (&usize, &isize)| match axis {
            _ if view.is_empty() => Some(0),
            0 | 1 => Some(0),
            _ => usize::try_from(step).ok(),
        };
        let strides: Option<Vec<usize>> = axes.iter().zip(steps).map(stride).collect();
        let layout = Layout::new(axes, &strides?, len)?;
        // Each row is a run of elements of the view, which are borrowed for its lifetime.
        let start = NonNull::new(view.as_ptr().cast_mut())?;
        Some(Strided { start, layout, rows: PhantomData })
    }

    /// Returns a row, in C order of the axes.
    #[inline]
    pub(crate) fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.layout.rows, "a row that is not there");
        // SAFETY: that of the file: the row is there.
        unsafe {
            std::slice::from_raw_parts(
                self.start.as_ptr().add(self.layout.offset(row)),
                self.layout.len,
            )
        }
    }

    /// Returns the same bytes, as another type of their size.
    pub(crate) fn cast<U: bytemuck::AnyBitPattern>(self) -> Strided<'a, U>
    where
        T: bytemuck::NoUninit,
    {
        assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>());
        Strided { start: self.start.cast(), layout: self.layout, rows: PhantomData }
    }

    /// Returns the rows along the last axis at one place of the axes before it.
    pub(crate) fn matrix(&self, place: usize) -> Keys<'a, T>
    where
        T: Element,
    {
        let Layout { axes, strides, rows, len, .. } = &self.layout;
        let Some((&count, before)) = axes.split_last() else { return Keys::new(&[], 0, *len) };
        let stride = strides[before.len()];
        if *rows == 0 || *len == 0 {
            return Keys::new(&[], 0, *len);
        }
        assert!(place < rows / count, "a matrix that is not there");
        let (offset, stride, count) = match &self.layout.ragged {
            Some(ragged) => (ragged[place].0, *len, ragged[place].1),
            None => (along(before, strides, place), stride, count),
        };
        if count == 0 {
            return Keys::new(&[], 0, *len);
        }
        // SAFETY: that of the file: its first row is there, and so are all that follow.
        unsafe { Keys::at(self.start.add(offset), count, stride, *len) }
    }
}

/// Returns a view of sixteen-bit integers as the numbers with those bits.
///
/// # Panics
/// If the numbers have another size.
#[cfg(feature = "ndarray")]
#[allow(clippy::needless_pass_by_value)] // a view is a reference
pub fn with_bits<T: bytemuck::AnyBitPattern>(
    view: ndarray::ArrayViewD<'_, u16>,
) -> ndarray::ArrayViewD<'_, T> {
    assert!(size_of::<T>() == size_of::<u16>() && align_of::<T>() == align_of::<u16>());
    // SAFETY: the same memory, borrowed for the same lifetime, as numbers that may have any bits.
    unsafe { view.raw_view().cast().deref_into_view() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_where_strides_say() {
        let data: Vec<u32> = (0..24).collect();
        let starts = |axes: &[usize], strides: &[usize], len| -> Option<Vec<u32>> {
            let rows = Strided::within(&data, axes, strides, len)?;
            Some((0..rows.layout.rows).map(|row| rows.row(row)[0]).collect())
        };
        assert_eq!(starts(&[2, 3], &[12, 4], 2).unwrap(), [0, 4, 8, 12, 16, 20]);
        assert_eq!(starts(&[2, 3], &[4, 8], 4).unwrap(), [0, 8, 16, 4, 12, 20]);
        assert_eq!(starts(&[3, 2], &[0, 5], 1).unwrap(), [0, 5, 0, 5, 0, 5]);
        assert_eq!(starts(&[1, 2, 1], &[99, 5, 77], 19).unwrap(), [0, 5]);
        assert_eq!(starts(&[], &[], 24).unwrap(), [0]);
        assert!(starts(&[1, 2], &[0, 5], 20).is_none());
        assert!(starts(&[usize::MAX, 2], &[0, 0], 1).is_none());
        assert!(starts(&[2, 2], &[usize::MAX, 0], 1).is_none());
        assert!(starts(&[2], &[], 1).is_none());
        let empty = Strided::within(&data, &[3, 0], &[50, 50], 4).unwrap();
        assert_eq!(empty.layout.rows, 0);
        let empty = Strided::within(&data, &[3, 2], &[50, 50], 0).unwrap();
        assert_eq!((empty.layout.rows, empty.row(5)), (6, &[][..]));
    }

    #[test]
    fn matrices_have_different_numbers_of_rows() {
        let data: Vec<f32> = (0..48u16).map(f32::from).collect();
        let rows = Strided::ragged(&data, &[3], vec![(4, 2), (40, 0), (28, 4)], 5).unwrap();
        assert_eq!(rows.counts().unwrap(), [2, 0, 4]);
        assert_eq!((rows.row(1), rows.row(11)), (&data[9..14], &data[43..48]));
        assert_eq!(rows.matrix(2).row(3), &data[43..48]);
        for absent in [2, 4, 12] {
            assert!(std::panic::catch_unwind(|| rows.row(absent)).is_err(), "{absent}");
        }
        for (matrix, row) in [(0, 2), (1, 0), (2, 4)] {
            assert!(std::panic::catch_unwind(|| rows.matrix(matrix).row(row)).is_err());
        }
        for wrong in [vec![(44, 1), (0, 0), (0, 0)], vec![(usize::MAX, 1); 3], vec![(0, 1)]] {
            assert!(Strided::ragged(&data, &[3], wrong, 5).is_none());
        }
        assert!(Strided::ragged(&data, &[2], vec![(0, usize::MAX); 2], 5).is_none());
        assert!(Strided::ragged(&data, &[2], vec![(99, 0); 2], 5).is_some());
    }

    #[test]
    fn matrices_are_rows_of_the_last_axis() {
        let data: Vec<f32> = (0..48u16).map(f32::from).collect();
        let rows = Strided::within(&data, &[2, 3], &[24, 8], 5).unwrap();
        let second = rows.matrix(1);
        assert_eq!((second.row(0)[0], second.row(2)), (24.0, &data[40..45]));
        assert_eq!(second.behind(2).row(0), &data[40..45]);
        for at in [3, usize::MAX] {
            assert!(std::panic::catch_unwind(|| second.row(at)).is_err());
        }
        assert!(std::panic::catch_unwind(|| second.behind(3).row(0)).is_err());
        assert!(std::panic::catch_unwind(|| rows.matrix(2)).is_err());
    }
}
