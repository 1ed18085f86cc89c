//! Borrowed vectors: queries and keys.

use super::{Data, Stored, contiguous, for_dtype};
use crate::error::{Error, Place};
use crate::numerics::finite::all_finite;
use crate::runtime::memory::product;

/// Borrowed vectors of shape `(..., n, d)`; the last axis is contiguous, the others may be strided.
///
/// ```
/// use certk_rs::{Error, Vectors};
/// let data = [0.0_f32; 12];
/// assert!(Vectors::new("q", &data, &[3, 4]).is_ok());
/// assert!(Vectors::strided("q", &data, &[3, 2], &[4]).is_ok()); // the first half of each
/// assert!(matches!(Vectors::new("q", &data, &[3, 5]), Err(Error::Shape { argument: "q", .. })));
/// ```
#[derive(Debug, Clone)]
pub struct Vectors<'a> {
    pub(crate) data: Stored<'a>,
    argument: &'static str,
    shape: Vec<usize>,
}

impl<'a> Vectors<'a> {
    /// Returns the vectors of an array of shape `(..., n, d)` whose axes but the last have the given strides, in
    /// elements. Errors name them by `argument`.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer than two axes, vectors have no entries, or the strides reach outside the buffer.
    pub fn strided(
        argument: &'static str,
        data: impl Into<Data<'a>>,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self, Error> {
        let axes = &shape[..shape.len().saturating_sub(1)];
        Self::over(argument, shape, |d| data.into().rows(argument, axes, d, strides))
    }

    /// Returns vectors of a shape; `rows` makes rows of that many numbers.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer than two axes or vectors have no entries, and the errors of `rows`.
    pub(super) fn over(
        argument: &'static str,
        shape: &[usize],
        rows: impl FnOnce(usize) -> Result<Stored<'a>, Error>,
    ) -> Result<Self, Error> {
        let wrong = |problem: &str| {
            Err(Error::Shape { argument, shape: shape.to_vec(), problem: problem.into() })
        };
        let &[.., _, d] = shape else {
            return wrong(
                "an axis of vectors and an axis of their entries are needed: (..., n, d)",
            );
        };
        if d == 0 {
            return wrong("vectors need at least one entry");
        }
        let data = rows(d)?;
        // Work and results are counted in entries.
        product(argument, shape)?;
        Ok(Vectors { data, argument, shape: shape.to_vec() })
    }

    /// Returns the vectors of a C-contiguous array of shape `(..., n, d)`.
    ///
    /// # Errors
    /// As [`Vectors::strided`].
    pub fn new(
        argument: &'static str,
        data: impl Into<Data<'a>>,
        shape: &[usize],
    ) -> Result<Self, Error> {
        let strides = shape.split_last().map(|(&d, axes)| contiguous(axes, d)).unwrap_or_default();
        Self::strided(argument, data, shape, &strides)
    }

    /// Takes vectors `(pages, heads, rows, d)` as pages, of a power of two of rows each, in which the `n` vectors of each
    /// head of one sequence lie in the order of a table of page numbers: `(heads, n, d)`. All heads share the table.
    /// Nothing is copied. For several sequences see [`Ragged::paged`](super::Ragged::paged).
    ///
    /// ```
    /// use certk_rs::Vectors;
    /// let data: Vec<f32> = (0..12u8).map(f32::from).collect();
    /// // Three pages of two rows, of one head; the rows are 8 to 11, then 0 and 1.
    /// let pages = Vectors::new("k", &data, &[3, 1, 2, 2])?;
    /// assert!(pages.clone().paged(&[2, 0], 3).is_ok());
    /// assert!(pages.paged(&[2, 3], 3).is_err());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if these are no such pages, or the table lacks a page or names one that is not there.
    pub fn paged(self, table: &'a [u32], n: usize) -> Result<Self, Error> {
        self.in_pages(table, &[n], false)
    }

    /// Takes vectors as the pages of sequences, with as many numbers of pages in the table for each.
    pub(super) fn in_pages(
        self,
        table: &'a [u32],
        counts: &[usize],
        axis: bool,
    ) -> Result<Self, Error> {
        check_pages(&self, table, counts)?;
        let &[_, heads, _, d] = &self.shape[..] else { unreachable!("they are pages") };
        let longest = counts.iter().copied().max().unwrap_or(0);
        let shape = [counts.len(), heads, longest, d];
        let rows = match self.data.clone() {
            Stored::F32(rows) => rows.paged(table, counts.to_vec(), axis).map(Stored::F32),
            Stored::F64(rows) => rows.paged(table, counts.to_vec(), axis).map(Stored::F64),
            Stored::F16(rows) => rows.paged(table, counts.to_vec(), axis).map(Stored::F16),
            Stored::Bf16(rows) => rows.paged(table, counts.to_vec(), axis).map(Stored::Bf16),
        };
        let misfit = || self.misfit("it cannot be read in pages".into());
        Vectors::over(self.argument, &shape[usize::from(!axis)..], |_| rows.ok_or_else(misfit))
    }

    /// Returns the name that errors use.
    pub(crate) fn argument(&self) -> &'static str {
        self.argument
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the number of entries of a vector.
    pub(crate) fn dim(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// Returns the number of vectors of each matrix, if these differ.
    pub(crate) fn counts(&self) -> Option<Vec<usize>> {
        for_dtype!(self.data, rows => rows.counts())
    }

    /// Returns the number of vectors of a matrix: of the longest, if they differ.
    pub(crate) fn len(&self) -> usize {
        self.shape[self.shape.len() - 2]
    }

    /// Returns the batch axes: all but those of a matrix.
    pub(crate) fn batch(&self) -> &[usize] {
        &self.shape[..self.shape.len() - 2]
    }

    /// Returns the number of matrices.
    pub(crate) fn heads(&self) -> usize {
        self.batch().iter().product()
    }

    /// Writes a vector in f64, exactly.
    pub(crate) fn widen(&self, head: usize, row: usize, to: &mut Vec<f64>) {
        to.clear();
        self.data.widen(head * self.len() + row, 0..self.dim(), to);
    }

    /// Writes a vector in f64, exactly, and checks that it is finite.
    ///
    /// # Errors
    /// [`Error::KeyNotFinite`] at the first entry that is not finite.
    pub(crate) fn finite(&self, head: usize, row: usize, to: &mut Vec<f64>) -> Result<(), Error> {
        to.clear();
        self.add_finite(head, row, to)
    }

    /// Appends a vector in f64, exactly, and checks that it is finite.
    ///
    /// # Errors
    /// [`Error::KeyNotFinite`] at the first entry that is not finite.
    pub(crate) fn add_finite(
        &self,
        head: usize,
        row: usize,
        to: &mut Vec<f64>,
    ) -> Result<(), Error> {
        let from = to.len();
        self.data.widen(head * self.len() + row, 0..self.dim(), to);
        if all_finite(&to[from..]) {
            return Ok(());
        }
        let entry = to[from..].iter().position(|entry| !entry.is_finite()).unwrap_or(0);
        let (argument, place) = (self.argument, self.place(head, row, entry));
        Err(Error::KeyNotFinite { argument, place })
    }

    /// Returns the place of an entry.
    pub(crate) fn place(&self, head: usize, row: usize, entry: usize) -> Place {
        let mut place = Place::unravel(self.batch(), head).0;
        place.extend([row, entry]);
        Place(place)
    }

    /// Returns the number of consecutive matrices, in C order, per matrix of `need` (grouped heads). `None` unless all
    /// axes agree; the last may be a multiple.
    pub(crate) fn heads_for_each(&self, need: &[usize]) -> Option<usize> {
        let have = self.batch();
        let last = need.len().wrapping_sub(1);
        let fits = have.len() == need.len()
            && have.iter().zip(need).enumerate().all(|(axis, (&have, &need))| {
                have == need || axis == last && need > 0 && have.is_multiple_of(need)
            });
        let grouped = || have.last().zip(need.last()).map_or(1, |(have, need)| have / need.max(&1));
        fits.then(|| grouped().max(1))
    }

    /// Returns the error for a shape that does not fit.
    pub(crate) fn misfit(&self, problem: String) -> Error {
        Error::Shape { argument: self.argument, shape: self.shape.clone(), problem }
    }
}

/// Checks that vectors are pages, and that a table lists those of sequences of so many rows.
fn check_pages(pages: &Vectors<'_>, table: &[u32], counts: &[usize]) -> Result<(), Error> {
    let &[count, _, rows, _] = &pages.shape[..] else {
        return Err(pages.misfit("pages need four axes (pages, heads, rows of a page, d)".into()));
    };
    if !rows.is_power_of_two() {
        return Err(
            pages.misfit(format!("a page has {rows} rows: give pages of a power of two of rows"))
        );
    }
    let width = table.len().checked_div(counts.len()).unwrap_or(0);
    if width * counts.len() != table.len() {
        return Err(pages.misfit(format!(
            "its table has {} pages for {} sequences: give as many for each",
            table.len(),
            counts.len()
        )));
    }
    for (sequence, &n) in counts.iter().enumerate() {
        let needed = n.div_ceil(rows);
        if needed > width {
            return Err(pages.misfit(format!(
                "sequence {sequence} has {n} rows in pages of {rows}, but its table only {width} pages"
            )));
        }
        let listed = &table[sequence * width..][..needed];
        if let Some(at) = listed.iter().position(|&page| page as usize >= count) {
            return Err(pages.misfit(format!(
                "page {at} of sequence {sequence} is number {}, and there are {count} pages",
                listed[at].cast_signed()
            )));
        }
    }
    Ok(())
}
