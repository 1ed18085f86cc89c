//! Borrowed vectors of which each head has another number.

use super::{Data, Stored, Vectors};
use crate::error::Error;
use crate::kernels::Strided;

/// Keys or values `(..., n, d)` of which each head has a number n of its own, in one buffer without padding.
///
/// ```
/// use certk_rs::Ragged;
/// let data = [0.0_f32; 12];
/// // Three rows of the first head, room for one more, and two of the second.
/// assert!(Ragged::new("k", &data, &[2], 2, &[0, 4], &[3, 2]).is_ok());
/// assert!(Ragged::new("k", &data, &[2], 2, &[0, 5], &[3, 2]).is_err());
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Ragged<'a>(Vectors<'a>);

impl<'a> Ragged<'a> {
    /// Takes the rows of `dim` entries of heads along some axes: where each head starts in the buffer, in rows, and how many rows
    /// it has. Heads may share rows, and there may be others between them.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are not as many heads, or rows reach outside of the buffer.
    pub fn new(
        argument: &'static str,
        data: impl Into<Data<'a>>,
        batch: &[usize],
        dim: usize,
        starts: &[usize],
        counts: &[usize],
    ) -> Result<Self, Error> {
        let data = data.into();
        let most = counts.iter().copied().max().unwrap_or(0);
        let shape = [batch, &[most, dim]].concat();
        let misfit = || Error::Shape {
            argument,
            shape: shape.clone(),
            problem: format!(
                "starts {starts:?} and counts {counts:?} of its heads, in rows, do not fit a buffer of {}",
                data.len()
            ),
        };
        let heads = batch.iter().try_fold(1usize, |all, axis| all.checked_mul(*axis));
        if heads != Some(starts.len()) || starts.len() != counts.len() {
            return Err(misfit());
        }
        let matrices: Option<Vec<(usize, usize)>> = starts
            .iter()
            .zip(counts)
            .map(|(start, count)| Some((start.checked_mul(dim)?, *count)))
            .collect();
        let matrices = matrices.ok_or_else(misfit)?;
        let rows = |dim| {
            let stored = match data {
                Data::F32(data) => Strided::ragged(data, batch, matrices, dim).map(Stored::F32),
                Data::F64(data) => Strided::ragged(data, batch, matrices, dim).map(Stored::F64),
                Data::F16(data) => Strided::ragged(data, batch, matrices, dim).map(Stored::F16),
                Data::Bf16(data) => Strided::ragged(data, batch, matrices, dim).map(Stored::Bf16),
            };
            stored.ok_or_else(misfit)
        };
        Vectors::over(argument, &shape, rows).map(Ragged)
    }

    /// Takes vectors `(pages, heads, rows, d)` as the pages of several sequences, of a power of two of rows each: a table of
    /// as many page numbers for each sequence, and how many rows it has. The result has the axes `(sequences, heads,
    /// longest, d)`. Nothing is copied, and numbers behind the last page of a sequence are not read.
    ///
    /// ```
    /// use certk_rs::{Ragged, Vectors};
    /// let data = [0.0_f32; 12];
    /// let pages = Vectors::new("k", &data, &[3, 1, 2, 2])?;
    /// assert!(Ragged::paged(pages, &[2, 0, 1, u32::MAX], &[3, 2]).is_ok());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Vectors::paged`].
    pub fn paged(pages: Vectors<'a>, table: &'a [u32], counts: &[usize]) -> Result<Self, Error> {
        pages.in_pages(table, counts, true).map(Ragged)
    }

    /// Returns the same as vectors of equal numbers, which only attention reads: those that a head lacks are not there.
    pub(crate) fn vectors(&self) -> &Vectors<'a> {
        &self.0
    }
}
