//! Borrowed value vectors, and their match with rows of scores.

use super::{Data, Scores, Stored, contiguous};
use crate::error::{Error, Place};
use crate::runtime::ambient::{self, PIECE};
use crate::runtime::memory::{check_memory, product, room};

/// Borrowed values of shape `(..., n, d_v)`: one vector of `d_v` numbers per key; the last axis is contiguous.
///
/// The leading axes match the batch axes of the scores as in a matrix product. With scores `(..., m, n)` they align,
/// from the right, with the axes before `m`, each of the same length or 1. The last of them may also divide its
/// partner's length, for grouped heads (`heads` over `kv_heads`). Values with as many leading axes as the scores have
/// batch axes give each row its own: all axes agree, and the last may divide.
///
/// ```
/// use certk_rs::{Error, Values};
/// let data = [0.0_f32; 12];
/// assert!(Values::new(&data, &[2, 3, 2]).is_ok());
/// assert!(Values::strided(&data, &[2, 3, 1], &[6, 2]).is_ok()); // the first of two components
/// assert!(matches!(Values::new(&data, &[12]), Err(Error::Shape { argument: "values", .. })));
/// ```
#[derive(Debug, Clone)]
pub struct Values<'a> {
    data: Stored<'a>,
    batch: Vec<usize>,
    n: usize,
    d: usize,
}

impl<'a> Values<'a> {
    /// Returns the values of an array of shape `(..., n, d_v)` whose axes but the last have the given strides, in
    /// elements.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer than two axes or the strides reach outside the buffer.
    pub fn strided(
        data: impl Into<Data<'a>>,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self, Error> {
        let axes = &shape[..shape.len().saturating_sub(1)];
        let rows = |d| data.into().rows("values", axes, d, strides);
        Self::over(shape, rows)
    }

    /// Returns values of a shape; `rows` makes rows of that many numbers.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer than two axes, and the errors of `rows`.
    pub(super) fn over(
        shape: &[usize],
        rows: impl FnOnce(usize) -> Result<Stored<'a>, Error>,
    ) -> Result<Self, Error> {
        let &[ref batch @ .., n, d] = shape else {
            let problem = "an axis of keys and an axis of components are needed: (..., n, d_v)";
            return Err(Error::Shape {
                argument: "values",
                shape: shape.to_vec(),
                problem: problem.into(),
            });
        };
        Ok(Values { data: rows(d)?, batch: batch.to_vec(), n, d })
    }

    /// Returns the values of a C-contiguous array of shape `(..., n, d_v)`.
    ///
    /// # Errors
    /// As [`Values::strided`].
    pub fn new(data: impl Into<Data<'a>>, shape: &[usize]) -> Result<Self, Error> {
        let strides = shape.split_last().map(|(&d, axes)| contiguous(axes, d)).unwrap_or_default();
        Self::strided(data, shape, &strides)
    }

    /// Returns the number of components of a value.
    pub(crate) fn components(&self) -> usize {
        self.d
    }

    /// Returns the number of value matrices.
    pub(crate) fn heads(&self) -> usize {
        self.batch.iter().product()
    }

    /// Returns, per value matrix, the rows of scores that average it.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes do not fit, [`Error::Conflict`] for ragged rows.
    pub(crate) fn rows_by_head(&self, scores: &Scores<'_>) -> Result<Vec<Vec<usize>>, Error> {
        scores.not_ragged("values", "pad the rows to one length and mask")?;
        let batch = scores.batch_shape();
        let misfit = |problem: String| {
            let mut shape = self.batch.clone();
            shape.extend([self.n, self.d]);
            Err(Error::Shape { argument: "values", shape, problem })
        };
        if self.n != scores.longest() {
            return misfit(format!(
                "the axis before the last must have the {} keys of the scores",
                scores.longest()
            ));
        }
        let own = self.batch.len() == batch.len();
        let partners = if own { batch } else { &batch[..batch.len().saturating_sub(1)] };
        let fits = self.batch.len() <= partners.len() && {
            let beside = &partners[partners.len() - self.batch.len()..];
            let last = self.batch.len().wrapping_sub(1);
            self.batch.iter().zip(beside).enumerate().all(|(axis, (&have, &need))| {
                let divides = axis == last && have > 0 && need % have == 0;
                have == need || divides || (have == 1 && !own)
            })
        };
        if !fits {
            let mut shape = batch.to_vec();
            shape.push(self.n);
            return misfit(format!(
                "its leading axes must match those of the scores {shape:?} without the query axis, or all batch axes; \
                 the last may divide its partner (grouped heads)"
            ));
        }
        let skipped = partners.len() - self.batch.len();
        check_memory("values", self.heads(), size_of::<Vec<usize>>())?;
        // A growing list takes up to twice its length.
        check_memory("scores", scores.rows(), 2 * size_of::<usize>())?;
        let mut served = vec![Vec::new(); self.heads()];
        for row in 0..scores.rows() {
            let place = scores.place(row, None).0;
            let mut head = 0;
            for (axis, &have) in self.batch.iter().enumerate() {
                let group = partners[skipped + axis] / have;
                head = head * have + place[skipped + axis] / group;
            }
            served[head].push(row);
        }
        Ok(served)
    }

    /// Writes one value matrix in f64, exactly, keys in order. Keys that no row sees become zeros.
    ///
    /// # Errors
    /// [`Error::Value`] at the first number that is not finite at a seen key.
    pub(crate) fn widen(&self, head: usize, seen: &[bool], to: &mut Vec<f64>) -> Result<(), Error> {
        to.clear();
        room("values", to, product("values", &[self.n, self.d])?)?;
        for (j, &seen) in seen.iter().enumerate() {
            if j.is_multiple_of(PIECE / 64) {
                ambient::check()?;
            }
            let from = to.len();
            if !seen || self.d == 0 {
                to.resize(from + self.d, 0.0);
                continue;
            }
            self.data.widen(head * self.n + j, 0..self.d, to);
            if let Some(i) = to[from..].iter().position(|value| !value.is_finite()) {
                let mut place = Place::unravel(&self.batch, head);
                place.0.extend([j, i]);
                return Err(Error::Value { value: to[from + i], place });
            }
        }
        Ok(())
    }
}
