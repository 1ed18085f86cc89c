//! Rows of scores, with every check of a caller's description.

use super::data::{Data, Stored};
use super::mask::{Mask, StoredMask};
use super::per_row::PerRow;
use super::strides::contiguous;
use crate::error::{Error, Place};
use crate::names::names;
use crate::runtime::memory::product;

/// Meaning of the stored numbers.
///
/// ```
/// use certk_rs::{Kind, Options, Scores, select};
/// let scores = Scores::new(&[6.0_f32, 3.0, 1.0, 0.0], &[1, 4])?.kind(Kind::Probs)?;
/// let found = select(&scores, &[0.2], &Options::new())?;
/// assert_eq!(found.row(0), [0, 1]); // nine tenths
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Kind {
    /// Scores in natural-log units; weights are `exp(scale * score + mask)`.
    #[default]
    Logits,
    /// Log-probabilities: treated as logits, that is, renormalised by their own sum.
    LogProbs,
    /// Weights >= 0, renormalised by their own sum; a zero is a masked entry.
    Probs,
}

names! { Kind, "kind", "use \"logits\", \"logprobs\" or \"probs\"", {
    "logits" => Kind::Logits,
    "logprobs" => Kind::LogProbs,
    "probs" => Kind::Probs,
} }

/// Length of a row, and of its prefix beyond which lengths and causality hide everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) n: usize,
    pub(crate) prefix: usize,
}

/// Borrowed rows of scores with the options for reading them.
///
/// Axes: any number of batch axes, then the `n` keys; the last axis is contiguous. Rows are numbered in C order
/// over the batch axes. With [`Scores::ragged`] the buffer is flat and row `i` is `indptr[i]..indptr[i + 1]`.
///
/// ```
/// use certk_rs::Scores;
/// let data = [0.5_f32, -1.0, 2.0, 0.0, 1.0, 3.0];
/// let scores = Scores::new(&data[..], &[2, 3])?.scale(0.125)?;
/// assert_eq!(scores.rows(), 2);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Scores<'a> {
    /// All scores as a single row, if they are ragged.
    pub(crate) data: Stored<'a>,
    pub(super) batch: Vec<usize>,
    pub(super) n: usize,
    indptr: Option<&'a [i64]>,
    pub(crate) kind: Kind,
    pub(crate) scale: f64,
    pub(crate) mask: Option<StoredMask<'a>>,
    lengths: Option<PerRow<'a, i64>>,
    causal_offset: Option<i64>,
    radius: Option<PerRow<'a, f64>>,
}

const LONGEST_ROW: usize = u32::MAX as usize;

impl<'a> Scores<'a> {
    /// Returns the rows of a C-contiguous array of the given shape `(..., n)`.
    ///
    /// ```
    /// use certk_rs::{Error, Scores};
    /// let scores = Scores::new(&[0.0_f32; 12], &[2, 2, 3])?;
    /// assert_eq!((scores.rows(), scores.longest(), scores.batch_shape()), (4, 3, &[2, 2][..]));
    /// assert!(matches!(Scores::new(&[0.0_f32; 12], &[5]), Err(Error::Shape { .. })));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if the shape has no axis or does not fit the buffer, [`Error::RowTooLong`].
    pub fn new(data: impl Into<Data<'a>>, shape: &[usize]) -> Result<Self, Error> {
        let data = data.into();
        let n = *shape.last().ok_or_else(|| no_axis("scores"))?;
        let batch = &shape[..shape.len() - 1];
        if product("scores", shape)? != data.len() {
            return Err(Error::Shape {
                argument: "scores",
                shape: shape.to_vec(),
                problem: format!("the buffer holds {} numbers; make them agree", data.len()),
            });
        }
        Self::strided(data, shape, &contiguous(batch, n))
    }

    /// Returns the rows of an array of shape `(..., n)` whose batch axes have the given strides, in elements. A stride
    /// of 0 broadcasts. The last axis has stride 1 and is not listed.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let rows_of_four = [9.0_f32, 0.0, 0.0, 7.7, 0.0, 9.0, 0.0, 7.7];
    /// let scores = Scores::strided(&rows_of_four, &[2, 3], &[4])?; // three of each
    /// assert_eq!(select(&scores, &[0.1], &Options::new())?.indices, [0, 1]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if strides and shape do not belong together or reach outside the buffer,
    /// [`Error::RowTooLong`].
    pub fn strided(
        data: impl Into<Data<'a>>,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self, Error> {
        Self::over(shape, |batch, n| data.into().rows("scores", batch, n, strides))
    }

    /// Returns rows of a shape; `rows` makes them from the batch axes and the row length.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is no axis, [`Error::RowTooLong`], and the errors of `rows`.
    pub(super) fn over(
        shape: &[usize],
        rows: impl FnOnce(&[usize], usize) -> Result<Stored<'a>, Error>,
    ) -> Result<Self, Error> {
        let (&n, batch) = shape.split_last().ok_or_else(|| no_axis("scores"))?;
        let data = rows(batch, n)?;
        if n > LONGEST_ROW {
            return Err(Error::RowTooLong { n });
        }
        Ok(Scores {
            data,
            batch: batch.to_vec(),
            n,
            indptr: None,
            kind: Kind::Logits,
            scale: 1.0,
            mask: None,
            lengths: None,
            causal_offset: None,
            radius: None,
        })
    }

    /// Returns the ragged rows of a flat buffer: row `i` is `data[indptr[i]..indptr[i + 1]]`.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::ragged(&[1.0_f32, 1.0, 9.0, 0.0, 0.0], &[0, 2, 5])?;
    /// assert!(scores.is_ragged() && scores.rows() == 2 && scores.longest() == 3);
    /// assert_eq!(select(&scores, &[0.1], &Options::new())?.k, [2, 1]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Indptr`] if `indptr` is empty, does not start at 0, decreases, or does not end at the buffer's
    /// length; [`Error::RowTooLong`].
    pub fn ragged(data: impl Into<Data<'a>>, indptr: &'a [i64]) -> Result<Self, Error> {
        let data = data.into();
        let bad = |position: usize, value: i64, problem| Error::Indptr { position, value, problem };
        match indptr.first() {
            None => {
                return Err(bad(0, -1, "missing; indptr needs rows + 1 entries, starting with 0"));
            }
            Some(0) => {}
            Some(&first) => return Err(bad(0, first, "indptr must start at 0")),
        }
        let mut longest = 0;
        for (i, pair) in indptr.windows(2).enumerate() {
            if pair[1] < pair[0] {
                return Err(bad(i + 1, pair[1], "indptr must not decrease"));
            }
            longest = longest.max((pair[1] - pair[0]).unsigned_abs() as usize);
        }
        let last = indptr[indptr.len() - 1];
        if usize::try_from(last) != Ok(data.len()) {
            let problem = "indptr must end at the number of scores";
            return Err(bad(indptr.len() - 1, last, problem));
        }
        if longest > LONGEST_ROW {
            return Err(Error::RowTooLong { n: longest });
        }
        let all = data.len();
        let mut scores =
            Self::over(&[indptr.len() - 1, 0], |_, _| data.rows("scores", &[], all, &[]))?;
        scores.indptr = Some(indptr);
        Ok(scores)
    }

    /// Sets the meaning of the stored numbers.
    ///
    /// ```
    /// use certk_rs::{Error, Kind, Scores};
    /// let scores = Scores::new(&[0.5_f32, 0.5], &[1, 2])?.scale(2.0)?;
    /// assert!(matches!(scores.kind(Kind::Probs), Err(Error::ScaleWithProbs { value: 2.0, .. })));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ScaleWithProbs`], [`Error::MaskWithProbs`], [`Error::RadiusWithProbs`] if such an option is already set.
    pub fn kind(mut self, kind: Kind) -> Result<Self, Error> {
        self.kind = kind;
        if kind == Kind::Probs {
            if self.scale != 1.0 {
                return Err(Error::ScaleWithProbs { value: self.scale });
            }
            if matches!(self.mask, Some(StoredMask::Additive(_))) {
                return Err(Error::MaskWithProbs);
            }
            if self.radius.is_some() {
                return Err(Error::RadiusWithProbs);
            }
        }
        Ok(self)
    }

    /// Multiplies every score by `scale`, a finite f64. A negative scale reverses the order, 0 makes all scores equal.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::new(&[5.0_f32, 0.0, -5.0], &[1, 3])?;
    /// assert_eq!(select(&scores.clone().scale(-2.0)?, &[0.1], &Options::new())?.row(0), [2]);
    /// assert_eq!(select(&scores.scale(0.0)?, &[0.1], &Options::new())?.k, [3]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::ScaleWithProbs`].
    pub fn scale(mut self, scale: f64) -> Result<Self, Error> {
        if !scale.is_finite() {
            return Err(Error::Scale { value: scale });
        }
        if self.kind == Kind::Probs && scale != 1.0 {
            return Err(Error::ScaleWithProbs { value: scale });
        }
        self.scale = scale;
        Ok(self)
    }

    /// Masks the rows. The mask has the scores' shape; `strides` are those of its batch axes, in elements.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::new(&[1.0_f32, 5.0, 1.0, 5.0], &[2, 2])?;
    /// let masked = scores.mask(&[true, false][..], &[0])?; // one mask for both rows
    /// assert_eq!(select(&masked, &[0.1], &Options::new())?.indices, [0, 0]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::MaskWithProbs`], [`Error::Conflict`] with ragged rows.
    pub fn mask(self, mask: impl Into<Mask<'a>>, strides: &[usize]) -> Result<Self, Error> {
        let mask = mask.into();
        let additive = matches!(mask, Mask::Additive(_));
        self.masked_by(additive, |batch, n| mask.rows(batch, n, strides))
    }

    /// Masks the rows; `rows` makes the mask's rows from the batch axes and the row length.
    ///
    /// # Errors
    /// As [`Scores::mask`].
    pub(super) fn masked_by(
        mut self,
        additive: bool,
        rows: impl FnOnce(&[usize], usize) -> Result<StoredMask<'a>, Error>,
    ) -> Result<Self, Error> {
        self.not_ragged("mask", "store -inf at masked entries of ragged rows")?;
        if self.kind == Kind::Probs && additive {
            return Err(Error::MaskWithProbs);
        }
        self.mask = Some(rows(&self.batch, self.n)?);
        Ok(self)
    }

    /// Hides all but the first `lengths[row]` entries of a row. One length per row, or one for all.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::new(&[0.0_f32; 6], &[2, 3])?.lengths(&[2, 0])?;
    /// assert_eq!(select(&scores, &[0.0], &Options::new())?.k, [2, 0]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::RowLength`], [`Error::Conflict`] with ragged rows.
    pub fn lengths(mut self, lengths: &'a [i64]) -> Result<Self, Error> {
        self.not_ragged("lengths", "the row lengths are already in indptr")?;
        let n = self.n;
        let lengths = self.per_row("lengths", lengths)?.all(
            &self.batch,
            |value| usize::try_from(value).is_ok_and(|value| value <= n),
            |place, value| Error::RowLength { place, value, n },
        )?;
        self.lengths = Some(lengths);
        Ok(self)
    }

    /// Hides the positions `> i + offset` of each row, `i` being its index on the second-last axis.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::new(&[0.0_f32; 6], &[2, 3])?.causal_offset(1)?;
    /// assert_eq!(select(&scores, &[0.0], &Options::new())?.k, [2, 3]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Conflict`] with ragged rows, [`Error::Shape`] if there is no second-last axis.
    pub fn causal_offset(mut self, offset: i64) -> Result<Self, Error> {
        self.not_ragged("causal_offset", "cut the ragged rows to what each may see")?;
        if self.batch.is_empty() {
            return Err(Error::Shape {
                argument: "scores",
                shape: vec![self.n],
                problem: "causal_offset needs a query axis before the last; use lengths".into(),
            });
        }
        self.causal_offset = Some(offset);
        Ok(self)
    }

    /// States that every real score lies within `radius[row]` (natural-log units, after scale and mask) of the stored
    /// one. Certificates then hold for the real scores. One radius per row, or one for all.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::new(&[3.0_f32, 0.0], &[1, 2])?;
    /// let exact = select(&scores, &[0.1], &Options::new())?;
    /// let rough = select(&scores.radius(&[1.0])?, &[0.1], &Options::new())?;
    /// assert_eq!((exact.k[0], rough.k[0]), (1, 2)); // e^-3 may be e^-1
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Radius`], [`Error::RadiusWithProbs`].
    pub fn radius(mut self, radius: &'a [f64]) -> Result<Self, Error> {
        if self.kind == Kind::Probs {
            return Err(Error::RadiusWithProbs);
        }
        let radius = self.per_row("radius", radius)?.all(
            &self.batch,
            |value| (0.0..=300.0).contains(&value),
            |place, value| Error::Radius { place, value },
        )?;
        self.radius = Some(radius);
        Ok(self)
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        match self.indptr {
            Some(indptr) => indptr.len() - 1,
            None => self.batch.iter().product(),
        }
    }

    /// Returns the length of the longest row.
    pub fn longest(&self) -> usize {
        match self.indptr {
            Some(indptr) => {
                indptr.windows(2).map(|p| (p[1] - p[0]).unsigned_abs() as usize).max().unwrap_or(0)
            }
            None => self.n,
        }
    }

    /// Returns the shape of the batch axes; `[rows]` for ragged rows.
    pub fn batch_shape(&self) -> &[usize] {
        &self.batch
    }

    /// Returns `true` if the rows come with `indptr`.
    pub fn is_ragged(&self) -> bool {
        self.indptr.is_some()
    }

    /// Refuses an argument that ragged rows do not take.
    ///
    /// # Errors
    /// [`Error::Conflict`].
    pub(crate) fn not_ragged(
        &self,
        first: &'static str,
        remedy: &'static str,
    ) -> Result<(), Error> {
        if self.is_ragged() {
            return Err(Error::Conflict { first, second: "indptr", remedy });
        }
        Ok(())
    }

    /// Returns `true` if every stored number is a visible score without change.
    #[cfg(feature = "montecarlo")]
    pub(crate) fn is_plain(&self) -> bool {
        let bare = self.mask.is_none() && self.lengths.is_none() && self.causal_offset.is_none();
        bare && self.scale == 1.0 && self.kind != Kind::Probs && self.radius.is_none()
    }

    /// Takes budgets of tail mass: one per row, or one for all, each in [0, 1).
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Eps`].
    pub(crate) fn budgets<'b>(&self, eps: &'b [f64]) -> Result<PerRow<'b, f64>, Error> {
        self.per_row("eps", eps)?.budgets(&self.batch)
    }

    /// Takes budgets of the output error: one per row, or one for all, finite and not negative.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Tolerance`].
    pub(crate) fn tolerances<'b>(&self, out_tol: &'b [f64]) -> Result<PerRow<'b, f64>, Error> {
        self.per_row("out_tol", out_tol)?.tolerances(&self.batch)
    }

    /// Takes an argument with one number per row, or one for all.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub(crate) fn per_row<'b, T: Copy>(
        &self,
        argument: &'static str,
        numbers: &'b [T],
    ) -> Result<PerRow<'b, T>, Error> {
        let remedy = "one number, or one per row in the batch shape of scores";
        PerRow::new(argument, numbers, self.rows(), remedy)
    }

    /// Returns the radius of a row's scores, in natural-log units.
    pub(crate) fn row_radius(&self, row: usize) -> f64 {
        self.radius.map_or(0.0, |radius| radius.of(row))
    }

    /// Returns the multi-index of a row, or of an entry of it.
    pub(crate) fn place(&self, row: usize, position: Option<usize>) -> Place {
        let mut place = Place::unravel(&self.batch, row);
        place.0.extend(position);
        place
    }

    /// Returns the length of a row and of its prefix.
    pub(crate) fn span(&self, row: usize) -> Span {
        if let Some(indptr) = self.indptr {
            let n = (indptr[row + 1] - indptr[row]).unsigned_abs() as usize;
            return Span { n, prefix: n };
        }
        let mut prefix = self.n;
        if let Some(lengths) = self.lengths {
            prefix = prefix.min(lengths.of(row).unsigned_abs() as usize);
        }
        if let Some(offset) = self.causal_offset {
            let query = row % self.batch[self.batch.len() - 1];
            let seen = (query as i64).saturating_add(offset).saturating_add(1).max(0);
            // A count beyond `usize` is beyond the row.
            prefix = prefix.min(usize::try_from(seen).unwrap_or(usize::MAX));
        }
        Span { n: self.n, prefix }
    }

    /// Returns the start of a ragged row in the flat buffer.
    pub(super) fn ragged_start(&self, row: usize) -> Option<usize> {
        self.indptr.map(|indptr| indptr[row].unsigned_abs() as usize)
    }
}

fn no_axis(argument: &'static str) -> Error {
    let problem = "at least one axis (the keys) is needed".into();
    Error::Shape { argument, shape: vec![], problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_byte_shows_an_entry_it_is_judged() {
        let data = [1.0, 2.0, f64::NAN];
        for byte in 0..=255u8 {
            let allowed = [1, 0, byte];
            let scores = Scores::new(&data[..], &[3]).unwrap();
            let scores = scores.mask(Mask::Allowed(&allowed), &[]).unwrap();
            let want =
                if byte == 0 { Ok(()) } else { Err(Error::ScoreNan { place: Place(vec![2]) }) };
            assert_eq!(scores.judge(0), want, "{byte}");
            assert_eq!(scores.wide_scores(0, &mut Vec::new()).map(|_| ()), want, "{byte}");
        }
    }
}
