//! An index over the values of many heads.

use super::chunks::TASK;
use super::codes::Codes;
use super::content::Content;
use super::key_index::KeyIndex;
use super::options::IndexOptions;
use super::spread::Tops;
use crate::error::Error;
use crate::rows::Vectors;
#[cfg(feature = "files")]
use std::io::{Read, Write};

/// Values as one byte or half a byte an entry, beside a [`KeyIndex`] of their keys, with what is needed to bound what averages of
/// the codes lose.
///
/// It takes `d + 4` or `d / 2 + 4` bytes a value (d in whole sixteens). What it proves is about the values that it was built of:
/// [`ValueIndex::check`] tells.
///
/// ```
/// use certk_rs::{ValueIndex, Vectors};
/// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
/// let values = Vectors::new("values", &data, &[50, 4])?;
/// let index = ValueIndex::build(&values)?;
/// index.check(&values)?;
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ValueIndex<'a>(KeyIndex<'a>);

impl<'a> ValueIndex<'a> {
    /// Builds an index of values of shape `(..., n, d)`, float32, float16 or bfloat16.
    ///
    /// ```
    /// use certk_rs::{ValueIndex, Vectors};
    /// let values = [0.5_f32; 2 * 50 * 4];
    /// let index = ValueIndex::build(&Vectors::new("values", &values, &[2, 50, 4])?)?;
    /// assert_eq!((index.batch_shape(), index.len(), index.dim()), (&[2][..], 50, 4));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::build`].
    pub fn build(values: &Vectors<'_>) -> Result<Self, Error> {
        Self::with_bits(values, 8)
    }

    /// Builds an index that takes 8 or 4 bits an entry. In four bits outputs lose sixteen times as much, which averages of many
    /// values even out and those of few do not.
    ///
    /// ```
    /// use certk_rs::{ValueIndex, Vectors};
    /// let values: Vec<f32> = (0..50 * 16).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let index = ValueIndex::with_bits(&Vectors::new("values", &values, &[50, 16])?, 4)?;
    /// assert_eq!(index.bits(), 4);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::build`]; [`Error::Option`] for other bits.
    pub fn with_bits(values: &Vectors<'_>, bits: u32) -> Result<Self, Error> {
        let content = match bits {
            4 => Content::HalfValues,
            8 => Content::Values,
            _ => {
                let (value, problem) = (bits.to_string(), "codes of values take 4 or 8");
                return Err(Error::Option { argument: "value_bits", value, problem });
            }
        };
        KeyIndex::build_of(content, values, &IndexOptions::new()).map(ValueIndex)
    }

    /// Returns the bits of an entry's code: 8, or 4.
    pub fn bits(&self) -> u32 {
        if self.0.content == Content::HalfValues { 4 } else { 8 }
    }

    /// Returns of each head what is known of eigenvalues.
    #[doc(hidden)]
    pub fn tops(&self) -> Vec<Tops> {
        self.0.tops()
    }

    /// Appends values of shape `(..., m, d)`, as [`KeyIndex::append`] appends keys. On an error the index is as it was.
    ///
    /// ```
    /// # use certk_rs::{ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let values = Vectors::new("values", &data, &[50, 4])?;
    /// # let mut index = ValueIndex::build(&values)?;
    /// index.append(&Vectors::new("values", &data[..8], &[2, 4])?)?;
    /// assert_eq!(index.len(), 52);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::append`].
    pub fn append(&mut self, values: &Vectors<'_>) -> Result<(), Error> {
        self.0.append(values)
    }

    /// Appends the keys and the values of tokens: to both indexes, or on an error to neither.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// let (mut index, mut values) = (KeyIndex::build(&keys, &IndexOptions::new())?, ValueIndex::build(&keys)?);
    /// let next = Vectors::new("next", &data[..8], &[2, 4])?;
    /// values.append_beside(&next, &mut index, &next)?;
    /// assert_eq!((index.len(), values.len()), (52, 52));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::append`]; [`Error::Shape`] if there are more of one than of the other.
    pub fn append_beside(
        &mut self,
        values: &Vectors<'_>,
        index: &mut KeyIndex<'_>,
        keys: &Vectors<'_>,
    ) -> Result<(), Error> {
        if values.len() != keys.len() || self.len() != index.len() {
            let (more, all) = (keys.len(), index.len());
            return Err(values.misfit(format!(
                "there are {more} keys beside them, and {all} indexed keys beside {} values: pass as many",
                self.len()
            )));
        }
        index.admit(keys, true)?;
        self.0.admit(values, true)?;
        // What was judged and has room can only be stopped, and few are not.
        let before = (keys.len() > TASK).then(|| index.snapshot());
        let ready = (index.ready(keys, None)?, self.0.ready(values, None)?);
        index.take_in(keys, ready.0)?;
        let taken = self.0.take_in(values, ready.1);
        if let (Err(_), Some(before)) = (&taken, before) {
            *index = before;
        }
        taken
    }

    /// Keeps the first `len` values of every head; `values` are all those that are indexed now. Bounds are as sound as before and at first a
    /// little looser, as [`KeyIndex::truncate`] has it. On an error the index is as it was.
    ///
    /// ```
    /// # use certk_rs::{ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let values = Vectors::new("values", &data, &[50, 4])?;
    /// # let mut index = ValueIndex::build(&values)?;
    /// index.truncate(45, &values)?;
    /// assert_eq!(index.len(), 45);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::truncate`].
    pub fn truncate(&mut self, len: usize, values: &Vectors<'_>) -> Result<(), Error> {
        self.0.truncate(len, values)
    }

    /// Keeps the first `len` values of every head without being given any, as [`KeyIndex::crop`].
    ///
    /// # Errors
    /// As [`KeyIndex::crop`].
    pub fn crop(&mut self, len: usize) -> Result<(), Error> {
        self.0.crop(len)
    }

    /// Returns an index of some entries of the first axis, as [`KeyIndex::take`].
    ///
    /// # Errors
    /// As [`KeyIndex::take`].
    pub fn take(&self, entries: &[usize]) -> Result<Self, Error> {
        self.0.take(entries).map(ValueIndex)
    }

    /// Takes out values by position, as [`KeyIndex::evict`] does keys; `values` are all those that are indexed now.
    ///
    /// ```
    /// # use certk_rs::{ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let values = Vectors::new("values", &data, &[50, 4])?;
    /// # let mut index = ValueIndex::build(&values)?;
    /// index.evict(&[&[3, 49, 7]], &values)?;
    /// assert_eq!(index.len(), 47);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::evict`].
    pub fn evict(&mut self, positions: &[&[u32]], values: &Vectors<'_>) -> Result<(), Error> {
        self.0.evict(positions, values)
    }

    /// Returns the index as it is now, which shares memory with this one, as [`KeyIndex::snapshot`] does.
    ///
    /// ```
    /// # use certk_rs::{ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let values = Vectors::new("values", &data, &[50, 4])?;
    /// # let mut index = ValueIndex::build(&values)?;
    /// let snapshot = index.snapshot();
    /// index.truncate(45, &values)?;
    /// assert_eq!(snapshot.len(), 50);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> Self {
        self.clone()
    }

    /// Compares values, all of them, with those that the index was built of, by a fingerprint of 128 bits.
    ///
    /// ```
    /// # use certk_rs::{ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let values = Vectors::new("values", &data, &[50, 4])?;
    /// # let index = ValueIndex::build(&values)?;
    /// index.check(&values)?;
    /// let others = [0.0_f32; 50 * 4];
    /// assert!(index.check(&Vectors::new("values", &others, &[50, 4])?).is_err());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::check`].
    pub fn check(&self, values: &Vectors<'_>) -> Result<(), Error> {
        self.0.check(values)
    }

    /// Returns the storage type of the values: float32, float16 or bfloat16.
    pub fn dtype(&self) -> &'static str {
        self.0.dtype()
    }

    /// Returns the number of values of a head.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if there are no values.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of entries of a value.
    pub fn dim(&self) -> usize {
        self.0.dim()
    }

    /// Returns the axes before those of a matrix of values.
    pub fn batch_shape(&self) -> &[usize] {
        self.0.batch_shape()
    }

    /// Returns the bytes of memory that it takes, about.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Returns the codes of a head.
    pub(crate) fn head(&self, head: usize) -> &Codes<'a> {
        self.0.head(head)
    }

    /// Judges the shape and the type of values that are lent.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::OtherKeys`].
    pub(crate) fn fits(&self, values: &Vectors<'_>) -> Result<(), Error> {
        self.0.fits(values)
    }
}

/// Files, as those of [`KeyIndex`].
#[cfg(feature = "files")]
impl<'a> ValueIndex<'a> {
    /// Writes the index, without the values, as [`KeyIndex::write_to`] writes one of keys. The file says that it is of values.
    ///
    /// ```
    /// # use certk_rs::{ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let values = Vectors::new("values", &data, &[50, 4])?;
    /// # let index = ValueIndex::build(&values)?;
    /// let mut file = Vec::new();
    /// index.write_to(&mut file).unwrap();
    /// assert!(ValueIndex::from_bytes(&file)? == index);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::write_to`].
    pub fn write_to(&self, writer: impl Write) -> Result<(), Error> {
        self.0.write_to(writer)
    }

    /// Reads an index where its bytes are, as [`KeyIndex::from_bytes`] does.
    ///
    /// ```
    /// # use certk_rs::{ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let values = Vectors::new("values", &data, &[50, 4])?;
    /// # let index = ValueIndex::build(&values)?;
    /// let mut file = Vec::new();
    /// index.write_to(&mut file).unwrap();
    /// assert!(ValueIndex::from_bytes(&file)? == index);
    /// assert!(certk_rs::KeyIndex::from_bytes(&file).is_err());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::from_bytes`]; [`Error::IndexFile`] for an index of keys.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self, Error> {
        KeyIndex::of_bytes(Content::Values, bytes).map(ValueIndex)
    }

    /// Opens such bytes that were checked before, as [`KeyIndex::from_trusted_bytes`] does.
    ///
    /// # Errors
    /// As [`ValueIndex::from_bytes`], but for damage in parts that are not read here.
    pub fn from_trusted_bytes(bytes: &'a [u8]) -> Result<Self, Error> {
        Self::from_trusted_parts(bytes, &[])
    }

    /// The same with what [`ValueIndex::tops`] returned, so that it is not found anew.
    #[doc(hidden)]
    pub fn from_trusted_parts(bytes: &'a [u8], tops: &[Tops]) -> Result<Self, Error> {
        KeyIndex::of_trusted_bytes(Content::Values, bytes, tops).map(ValueIndex)
    }
}

#[cfg(feature = "files")]
impl ValueIndex<'static> {
    /// Reads what [`ValueIndex::write_to`] wrote; what follows it is left unread.
    ///
    /// ```
    /// # use certk_rs::{ValueIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let values = Vectors::new("values", &data, &[50, 4])?;
    /// # let index = ValueIndex::build(&values)?;
    /// let mut file = Vec::new();
    /// index.write_to(&mut file).unwrap();
    /// assert!(ValueIndex::read_from(&file[..])? == index);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::read_from`]; [`Error::IndexFile`] for an index of keys.
    pub fn read_from(mut reader: impl Read) -> Result<Self, Error> {
        KeyIndex::read_of(Content::Values, &mut reader).map(ValueIndex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bounds of values that came one by one are looser than those of values that came at once, and stay so.
    #[cfg(feature = "files")]
    #[test]
    fn what_is_known_of_values_is_not_found_anew() {
        let data: Vec<f32> = (0..900 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
        let vectors = |from: usize, to: usize| {
            Vectors::new("values", &data[from * 4..to * 4], &[to - from, 4]).unwrap()
        };
        let mut values = ValueIndex::build(&vectors(0, 800)).unwrap();
        let mut keys = KeyIndex::build(&vectors(0, 800), &IndexOptions::new()).unwrap();
        for at in 800..840 {
            values.append_beside(&vectors(at, at + 1), &mut keys, &vectors(at, at + 1)).unwrap();
        }
        let mut file = Vec::new();
        values.write_to(&mut file).unwrap();
        let bounds = |index: &ValueIndex<'_>| index.head(0).value_bounds();
        let known = ValueIndex::from_trusted_parts(&file, &values.tops()).unwrap();
        assert_eq!(bounds(&known), bounds(&values));
        let anew = bounds(&ValueIndex::from_trusted_bytes(&file).unwrap());
        assert!(anew.spread < bounds(&values).spread);
    }

    #[test]
    fn values_beside_more_keys_are_not_appended() {
        let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
        let vectors = |n: usize| Vectors::new("values", &data[..n * 4], &[n, 4]).unwrap();
        let mut index = KeyIndex::build(&vectors(50), &IndexOptions::new()).unwrap();
        for (indexed, more) in [(49, 2), (50, 3)] {
            let mut values = ValueIndex::build(&vectors(indexed)).unwrap();
            let refused = values.append_beside(&vectors(2), &mut index, &vectors(more));
            assert!(matches!(refused, Err(Error::Shape { .. })), "{indexed} {more}");
            assert_eq!((values.len(), index.len()), (indexed, 50));
        }
    }
}
