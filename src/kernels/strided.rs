//! Rows of numbers that lie apart in memory. The gaps may be borrowed for writing elsewhere: no slice ever covers more
//! than one row.
//!
//! SAFETY: a [`Strided`] is made of memory that is borrowed for its lifetime, and every row of its layout lies there. So does every row
//! of a [`Keys`] that is made of one.

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::isa::Element;
use super::matrix::{Keys, Pages};

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

/// Matrices of several sequences and heads, in pages that all heads of a sequence share.
#[derive(Debug, Clone)]
struct Paged<'a> {
    /// Pages of each sequence, `width` for each.
    table: &'a [u32],
    width: usize,
    /// Number of rows of each sequence.
    counts: Vec<usize>,
    /// Distances in elements: of pages, of heads, of rows.
    strides: [usize; 3],
    log_rows: u32,
}

impl<'a> Paged<'a> {
    /// Returns where a head of a sequence starts, in elements, the number of its rows, and its pages.
    fn matrix(&self, place: usize, heads: usize) -> (usize, usize, Pages<'a>) {
        let (sequence, head) = (place / heads, place % heads);
        let table = &self.table[sequence * self.width..][..self.width];
        let pages = Pages { table, stride: self.strides[0], log_rows: self.log_rows, before: 0 };
        (head * self.strides[1], self.counts[sequence], pages)
    }
}

/// Borrowed rows of one length.
#[derive(Debug, Clone)]
pub struct Strided<'a, T> {
    start: NonNull<T>,
    layout: Layout,
    /// `None` unless rows lie in pages; the layout's strides then are not used.
    paged: Option<Paged<'a>>,
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
        let start = NonNull::from(data).cast();
        inside.then_some(Strided { start, layout, paged: None, rows: PhantomData })
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
        let start = NonNull::from(data).cast();
        fits.then_some(Strided { start, layout, paged: None, rows: PhantomData })
    }

    /// Takes these matrices (pages, heads, rows of a page) as the pages of sequences: `width` numbers of pages for each,
    /// and how many rows it has. There is an axis of sequences if it is asked for, else one sequence. `None` if these are
    /// no such matrices, or a row's page is not there.
    pub(crate) fn paged(self, table: &'a [u32], counts: Vec<usize>, axis: bool) -> Option<Self> {
        let &[pages, heads, rows] = &self.layout.axes[..] else { return None };
        let &[of_page, of_head, of_row] = &self.layout.strides[..] else { return None };
        let width = if counts.is_empty() { 0 } else { table.len() / counts.len() };
        let there = |(sequence, count): (usize, &usize)| {
            let needed = count.div_ceil(rows);
            let table = &table[sequence * width..];
            needed <= width && table[..needed].iter().all(|&page| (page as usize) < pages)
        };
        let fits = rows.is_power_of_two()
            && self.paged.is_none()
            && self.layout.ragged.is_none()
            && table.len() == width * counts.len()
            && (axis || counts.len() == 1)
            && counts.iter().enumerate().all(there);
        let most = counts.iter().copied().max().unwrap_or(0);
        let axes = [counts.len(), heads, most];
        let layout = Layout::new(
            &axes[usize::from(!axis)..],
            &[0; 3][usize::from(!axis)..],
            self.layout.len,
        )?;
        let strides = [of_page, of_head, of_row];
        let paged = Paged { table, width, counts, strides, log_rows: rows.trailing_zeros() };
        fits.then_some(Strided { layout, paged: Some(paged), ..self })
    }

    /// Returns how many rows each matrix has, if these differ.
    pub(crate) fn counts(&self) -> Option<Vec<usize>> {
        if let Some(paged) = &self.paged {
            let &[.., heads, most] = &self.layout.axes[..] else { return None };
            let each = paged.counts.iter().flat_map(|count| std::iter::repeat_n(*count, heads));
            let differ = paged.counts.iter().any(|count| *count != most);
            return differ.then(|| each.collect());
        }
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
        Some(Strided { start, layout, paged: None, rows: PhantomData })
    }

    /// Returns a row, in C order of the axes.
    #[inline]
    pub(crate) fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.layout.rows, "a row that is not there");
        let offset = match &self.paged {
            None => self.layout.offset(row),
            Some(paged) => self.paged_offset(paged, row),
        };
        // SAFETY: that of the file: the row is there.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(offset), self.layout.len) }
    }

    fn paged_offset(&self, paged: &Paged<'_>, row: usize) -> usize {
        let &[.., heads, most] = &self.layout.axes[..] else { unreachable!("two axes or three") };
        let (start, count, pages) = paged.matrix(row / most, heads);
        assert!(row % most < count, "a row that is not there");
        start + pages.offset(row % most, paged.strides[2])
    }

    /// Returns the same bytes, as another type of their size.
    pub(crate) fn cast<U: bytemuck::AnyBitPattern>(self) -> Strided<'a, U>
    where
        T: bytemuck::NoUninit,
    {
        assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>());
        let Strided { start, layout, paged, .. } = self;
        Strided { start: start.cast(), layout, paged, rows: PhantomData }
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
        let (offset, stride, count, pages) = match (&self.paged, &self.layout.ragged) {
            (Some(paged), _) => {
                let (start, count, pages) = paged.matrix(place, before[before.len() - 1]);
                (start, paged.strides[2], count, Some(pages))
            }
            (None, Some(ragged)) => (ragged[place].0, *len, ragged[place].1, None),
            (None, None) => (along(before, strides, place), stride, count, None),
        };
        if count == 0 {
            return Keys::new(&[], 0, *len);
        }
        // SAFETY: that of the file: its first row is there, and so are all that follow.
        unsafe { Keys::at(self.start.add(offset), count, stride, *len, pages) }
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

    /// Rows of pages are those of the table, for each way to read them.
    #[test]
    fn pages_are_those_of_the_table() {
        let data: Vec<f32> = (0..96u16).map(f32::from).collect();
        // Three pages of two heads of four rows, with a gap behind each row.
        let pages = |axes: &[usize]| Strided::within(&data, axes, &[32, 16, 4], 3).unwrap();
        let table = [2, 0, 1, u32::MAX];
        let rows = pages(&[3, 2, 4]).paged(&table, vec![7, 3], true).unwrap();
        assert_eq!(rows.counts().unwrap(), [7, 7, 3, 3]);
        let first = |sequence: usize, head: usize, at: usize| {
            let page = [[2, 0], [1, 9]][sequence][at / 4];
            (page * 32 + head * 16 + at % 4 * 4) as f32
        };
        for (sequence, count) in [(0, 7), (1, 3)] {
            for head in 0..2 {
                let matrix = rows.matrix(sequence * 2 + head);
                for at in 0..count {
                    let want = first(sequence, head, at);
                    assert_eq!(rows.row((sequence * 2 + head) * 7 + at)[0], want);
                    assert_eq!(matrix.row(at)[0], want);
                    assert_eq!(matrix.behind(at).row(0)[2], want + 2.0);
                }
                assert!(std::panic::catch_unwind(|| matrix.row(count)).is_err());
                assert!(std::panic::catch_unwind(|| matrix.behind(1).row(count - 1)).is_err());
            }
        }
        let one = pages(&[3, 2, 4]).paged(&table[..2], vec![8], false).unwrap();
        assert_eq!((one.counts(), one.layout.axes.len()), (None, 2));
        // A page that is not there, too few pages, no power of two, no such matrices.
        for (axes, table, counts) in [
            (&[3, 2, 4][..], &[3, 0][..], vec![5]),
            (&[3, 2, 4], &[1], vec![5]),
            (&[3, 2, 3], &[1], vec![1]),
            (&[3, 2, 4], &[1, 2, 0], vec![1, 1]),
        ] {
            assert!(pages(axes).paged(table, counts, true).is_none(), "{axes:?} {table:?}");
        }
        assert!(pages(&[3, 2, 4]).paged(&table, vec![7, 3], false).is_none());
        let of_pages = pages(&[3, 2, 4]).paged(&[0], vec![4], true).unwrap();
        assert!(of_pages.paged(&[0], vec![1], true).is_none());
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
