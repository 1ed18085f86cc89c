//! Which keys each row sees, and of which head.

use std::ops::Range;

use super::AttentionOptions;
use crate::error::{Error, Place};
use crate::index::RowVisibility;
use crate::rows::{Vectors, check_strides};

/// The rows of a call.
pub(super) struct Visibility<'a> {
    /// The axes of queries but the last.
    pub(super) shape: Vec<usize>,
    pub(super) keys: usize,
    /// The head of keys of each row; it never falls.
    pub(super) head_of: Vec<usize>,
    pub(super) options: AttentionOptions<'a>,
}

impl<'a> Visibility<'a> {
    /// Judges the axes of queries beside those of keys or values, and what masks them.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`], [`Error::RowLength`].
    pub(super) fn new(
        queries: &Vectors<'_>,
        keys: &Vectors<'_>,
        options: &AttentionOptions<'a>,
    ) -> Result<Self, Error> {
        let need = keys.batch();
        let Some(heads) = queries.heads_among(need) else {
            return Err(queries.misfit(format!(
                "the axes before the last two must be those of the keys, {need:?}, of which the last may be a multiple"
            )));
        };
        let each = |head| std::iter::repeat_n(head, queries.len());
        let head_of = heads.into_iter().flat_map(each).collect();
        let shape = queries.shape()[..queries.shape().len() - 1].to_vec();
        let visibility = Visibility { shape, keys: keys.len(), head_of, options: options.clone() };
        visibility.check()?;
        Ok(visibility)
    }

    pub(super) fn rows(&self) -> usize {
        self.head_of.len()
    }

    /// Heads of queries.
    fn heads(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// The rows of a head of keys, which lie behind those of the heads before it.
    pub(super) fn rows_of(&self, head: usize) -> Range<usize> {
        let start = self.head_of.partition_point(|&of| of < head);
        start..start + self.head_of[start..].partition_point(|&of| of == head)
    }

    /// The place of a row; empty if one number is for all.
    pub(super) fn place(&self, row: usize, numbers: usize) -> Place {
        if numbers == 1 && self.rows() != 1 {
            return Place(vec![]);
        }
        Place::unravel(&self.shape, row)
    }

    /// That there is one number, or one for each row.
    pub(super) fn per_row(&self, argument: &'static str, got: usize) -> Result<(), Error> {
        let expected = self.rows();
        if got == 1 || got == expected {
            return Ok(());
        }
        Err(Error::Length { argument, expected, got, remedy: "pass one, or one per row" })
    }

    fn check(&self) -> Result<(), Error> {
        let n = self.keys;
        if let Some(lengths) = self.options.lengths {
            self.per_row("lengths", lengths.len())?;
            for (row, &value) in lengths.iter().enumerate() {
                if !usize::try_from(value).is_ok_and(|value| value <= n) {
                    return Err(Error::RowLength {
                        place: self.place(row, lengths.len()),
                        value,
                        n,
                    });
                }
            }
        }
        if let Some(sinks) = self.options.sinks {
            let (axes, expected) = (self.shape.len() - 1, self.heads());
            let got = sinks.len();
            if got != 1 && got != expected {
                let remedy = "pass one, or one per query head";
                return Err(Error::Length { argument: "sinks", expected, got, remedy });
            }
            if let Some(head) =
                sinks.iter().position(|&sink| sink.is_nan() || sink == f64::INFINITY)
            {
                let all = got == 1 && expected != 1;
                let place =
                    if all { Place(vec![]) } else { Place::unravel(&self.shape[..axes], head) };
                let problem = "a sink is a score, or negative infinity for none";
                return Err(Error::Number {
                    argument: "sinks",
                    place,
                    value: sinks[head],
                    problem,
                });
            }
        }
        if let Some((mask, strides)) = self.options.mask {
            check_strides("mask", mask.len(), &self.shape, n, strides)?;
        }
        Ok(())
    }

    /// What a row sees.
    pub(super) fn row_visibility(&self, row: usize) -> RowVisibility<'a> {
        let (m, n) = (self.shape[self.shape.len() - 1], self.keys);
        let mut visible = n;
        if let Some(lengths) = self.options.lengths {
            let length = lengths[if lengths.len() == 1 { 0 } else { row }];
            visible = visible.min(length.unsigned_abs() as usize);
        }
        if self.options.causal {
            visible = visible.min((row % m + 1 + n).saturating_sub(m));
        }
        let allowed = self.options.mask.map(|(mask, strides)| {
            let place = Place::unravel(&self.shape, row).0;
            let start: usize = place.iter().zip(strides).map(|(i, stride)| i * stride).sum();
            mask.get(start..start + n).unwrap_or(&[])
        });
        RowVisibility { visible, allowed }
    }
}
