//! An index as a file: a safetensors file in the one form that the Python package writes and reads, too, with its own SHA-256.
//!
//! Parts are read where they lie, so that an index can be mapped. Those of eight bytes an entry come first and headers have whole
//! eights, so that where a file begins on a page every part is aligned.

mod header;

use std::borrow::Cow;
use std::io::{self, Read, Write};

use bytemuck::{AnyBitPattern, NoUninit};
use sha2::{Digest, Sha256};

use self::header::{About, Entry, Kind, LONGEST, NO_SHA256};
use super::codes::Codes;
use super::codes::saved::{Matrix, Saved, Trust};
use super::content::Content;
use super::key_index::KeyIndex;
use super::spread::Tops;
use crate::error::Error;
use crate::runtime::ambient;
use crate::runtime::memory::{list, room};

/// Bytes that are read or hashed at a time.
const PORTION: usize = 1 << 20;

impl<'a> KeyIndex<'a> {
    /// Writes the index, without the keys, in the form of `KeyIndex.save` of the Python package (docs/files.md has it): a
    /// safetensors file with the SHA-256 of its own. The same index is written as the same bytes.
    ///
    /// Nothing else is done about the file: write it under another name, and rename it once it is on the disk.
    ///
    /// ```
    /// use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let keys = Vectors::new("keys", &data[..], &[50, 4])?;
    /// let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// let mut file = Vec::new();
    /// index.write_to(&mut file).unwrap();
    /// let read = KeyIndex::from_bytes(&file)?;
    /// read.check(&keys)?;
    /// assert!(read == index && file.len() == index.file_bytes()?);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] for what the writer says, and what stops the call.
    pub fn write_to(&self, mut writer: impl Write) -> Result<(), Error> {
        self.writing(&mut writer).map_err(of_io)
    }

    fn writing(&self, writer: &mut dyn Write) -> io::Result<()> {
        little_endian().map_err(as_io)?;
        let about = self.about();
        let entries = about.entries().map_err(as_io)?;
        let mut hash = Sha256::new_with_prefix(about.text(NO_SHA256).map_err(as_io)?);
        self.each(&entries, &mut |bytes| {
            hash.update(bytes);
            Ok(())
        })?;
        let sha256 = hexadecimal(&hash.finalize());
        writer.write_all(&about.text(&sha256).map_err(as_io)?)?;
        self.each(&entries, &mut |bytes| writer.write_all(bytes))?;
        writer.flush()
    }

    /// Returns the number of bytes that [`KeyIndex::write_to`] writes.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// # let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// let mut file = Vec::new();
    /// index.write_to(&mut file).unwrap();
    /// assert_eq!(index.file_bytes()?, file.len());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::IndexFile`] for more heads than a file holds (about 20 000), [`Error::NoMemory`].
    pub fn file_bytes(&self) -> Result<usize, Error> {
        let about = self.about();
        let data = about.entries()?.last().map_or(0, |entry| entry.bytes.end);
        Ok(about.text(NO_SHA256)?.len() + data)
    }

    fn about(&self) -> About {
        About {
            content: self.content,
            shape: self.batch.iter().copied().chain([self.n, self.dim]).collect(),
            dtype: self.dtype().into(),
            sha256: NO_SHA256.into(),
            bare: self.heads.iter().map(|codes| codes.uncoded().count()).collect(),
        }
    }

    /// All parts in the order of the file, in pieces.
    fn each(
        &self,
        entries: &[Entry],
        take: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut portions = |bytes: &[u8]| {
            bytes.chunks(PORTION).try_for_each(|portion| {
                ambient::check().map_err(as_io)?;
                take(portion)
            })
        };
        entries.iter().try_for_each(|entry| self.heads[entry.head].part(entry.kind, &mut portions))
    }

    /// An index from the bytes of a file, which it reads where they are: they may be mapped. Everything is checked that can be
    /// without the keys, the file's SHA-256 included, so that all of it is read once.
    ///
    /// That is about damage. An index is trusted as the keys are: one that somebody has made up may lie, and certificates with it.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// # let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// let mut file = Vec::new();
    /// index.write_to(&mut file).unwrap();
    /// assert!(KeyIndex::from_bytes(&file)? == index);
    /// *file.last_mut().unwrap() ^= 1;
    /// assert!(KeyIndex::from_bytes(&file).is_err());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::IndexFile`] for bytes that are cut off, damaged or no index of this version, [`Error::Damaged`] for parts that none
    /// has; [`Error::NoMemory`].
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self, Error> {
        Self::of_bytes(Content::Keys, bytes)
    }

    /// The same of keys or of values.
    pub(super) fn of_bytes(content: Content, bytes: &'a [u8]) -> Result<Self, Error> {
        let (about, data) = opened(content, bytes)?;
        let mut hash = Sha256::new_with_prefix(about.text(NO_SHA256)?);
        for portion in data.chunks(PORTION) {
            ambient::check()?;
            hash.update(portion);
        }
        judge(&about, hash)?;
        Self::of_file(&about, data, Trust::Nothing, &[])
    }

    /// The same, of a file that was checked when it was written or read before, in a time that does not grow with the keys: only
    /// what is read for every query is looked at. A file that is damaged in its other parts makes certificates of nothing.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// # let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// let mut file = Vec::new();
    /// index.write_to(&mut file).unwrap();
    /// assert!(KeyIndex::from_trusted_bytes(&file)? == index);
    /// assert!(KeyIndex::from_trusted_bytes(&file[1..]).is_err());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::from_bytes`].
    pub fn from_trusted_bytes(bytes: &'a [u8]) -> Result<Self, Error> {
        Self::of_trusted_bytes(Content::Keys, bytes, &[])
    }

    /// The same of keys or of values, of whose heads eigenvalues may be known.
    pub(super) fn of_trusted_bytes(
        content: Content,
        bytes: &'a [u8],
        tops: &[Tops],
    ) -> Result<Self, Error> {
        let (about, data) = opened(content, bytes)?;
        Self::of_file(&about, data, Trust::Scales, tops)
    }

    fn of_file(about: &About, data: &'a [u8], trust: Trust, tops: &[Tops]) -> Result<Self, Error> {
        let mut heads = blank(about)?;
        heads.iter_mut().zip(tops).for_each(|(head, &tops)| head.tops = Some(tops));
        for entry in about.entries()? {
            let bytes = &data[entry.bytes.clone()];
            let saved: &mut Saved<'a> = &mut heads[entry.head];
            match entry.kind {
                Kind::Fingerprint => saved.fingerprint = fixed(bytes),
                Kind::Gram => saved.gram = cast(bytes)?,
                Kind::Numbers => saved.numbers = fixed(bytes),
                Kind::Spread => saved.spread = cast(bytes)?,
                Kind::SpreadNumbers => saved.spread_numbers = fixed(bytes),
                Kind::Low => saved.low = bytes.into(),
                Kind::LowGram => saved.low_gram = cast(bytes)?,
                Kind::LowNumbers => saved.low_numbers = fixed(bytes),
                Kind::Bare => saved.uncoded = cast(bytes)?,
                Kind::Mean => saved.mean = cast(bytes)?,
                Kind::Radii => saved.radii = cast(bytes)?,
                Kind::Scales => saved.scales = cast(bytes)?,
                Kind::Codes => saved.lines = bytes.into(),
            }
        }
        Self::load_of(about.content, &about.shape, &about.dtype, heads, trust)
    }
}

impl KeyIndex<'static> {
    /// Reads what [`KeyIndex::write_to`] or the Python package wrote, and checks it as [`KeyIndex::from_bytes`] does; what follows
    /// it is left unread. No more memory is asked for than there are bytes, whatever a header claims.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// # let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// let mut file = Vec::new();
    /// index.write_to(&mut file).unwrap();
    /// assert!(KeyIndex::read_from(&file[..]).unwrap() == index);
    /// assert!(KeyIndex::read_from(&file[..99]).is_err());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] for what the reader says; as [`KeyIndex::from_bytes`], and what stops the call.
    pub fn read_from(mut reader: impl Read) -> Result<Self, Error> {
        Self::read_of(Content::Keys, &mut reader)
    }

    /// The same of keys or of values.
    pub(super) fn read_of(content: Content, reader: &mut dyn Read) -> Result<Self, Error> {
        Self::reading(content, reader).map_err(of_io)
    }

    fn reading(content: Content, reader: &mut dyn Read) -> io::Result<Self> {
        little_endian().map_err(as_io)?;
        let mut header = vec![0; 8];
        exactly(reader, &mut header)?;
        let length = header_length(&header).map_err(as_io)?;
        header.resize(8 + length, 0);
        exactly(reader, &mut header[8..])?;
        let about = About::of_text(content, &header).map_err(as_io)?;
        let mut hash = Sha256::new_with_prefix(about.text(NO_SHA256).map_err(as_io)?);
        let mut heads = blank(&about).map_err(as_io)?;
        for Entry { head, kind, count, .. } in about.entries().map_err(as_io)? {
            let saved: &mut Saved<'static> = &mut heads[head];
            match kind {
                Kind::Fingerprint => {
                    saved.fingerprint =
                        fixed(bytemuck::cast_slice(&entries::<u64>(reader, count, &mut hash)?));
                }
                Kind::Gram => saved.gram = entries(reader, count, &mut hash)?.into(),
                Kind::Numbers => {
                    saved.numbers =
                        fixed(bytemuck::cast_slice(&entries::<f64>(reader, count, &mut hash)?));
                }
                Kind::Spread => saved.spread = entries(reader, count, &mut hash)?.into(),
                Kind::SpreadNumbers => {
                    saved.spread_numbers =
                        fixed(bytemuck::cast_slice(&entries::<f64>(reader, count, &mut hash)?));
                }
                Kind::Low => saved.low = entries(reader, count, &mut hash)?.into(),
                Kind::LowGram => saved.low_gram = entries(reader, count, &mut hash)?.into(),
                Kind::LowNumbers => {
                    saved.low_numbers =
                        fixed(bytemuck::cast_slice(&entries::<f64>(reader, count, &mut hash)?));
                }
                Kind::Bare => saved.uncoded = entries(reader, count, &mut hash)?.into(),
                Kind::Mean => saved.mean = entries(reader, count, &mut hash)?.into(),
                Kind::Radii => saved.radii = entries(reader, count, &mut hash)?.into(),
                Kind::Scales => saved.scales = entries(reader, count, &mut hash)?.into(),
                Kind::Codes => saved.lines = entries(reader, count, &mut hash)?.into(),
            }
        }
        judge(&about, hash).map_err(as_io)?;
        Self::load_of(about.content, &about.shape, &about.dtype, heads, Trust::Nothing)
            .map_err(as_io)
    }
}

impl Codes<'_> {
    /// A part as bytes, in pieces.
    fn part(&self, kind: Kind, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let saved = self.save_numbers();
        match kind {
            Kind::Fingerprint => take(bytemuck::cast_slice(&saved.fingerprint)),
            Kind::Gram => take(bytemuck::cast_slice(&self.matrix(Matrix::Gram))),
            Kind::Numbers => take(bytemuck::cast_slice(&saved.numbers)),
            Kind::Spread => take(bytemuck::cast_slice(&self.matrix(Matrix::Spread))),
            Kind::SpreadNumbers => take(bytemuck::cast_slice(&saved.spread_numbers)),
            Kind::Low => self.parts().try_for_each(|part| take(part.low)),
            Kind::LowGram => take(bytemuck::cast_slice(&self.matrix(Matrix::Low))),
            Kind::LowNumbers => take(bytemuck::cast_slice(&saved.low_numbers)),
            Kind::Mean => take(bytemuck::cast_slice(&saved.mean)),
            Kind::Bare => {
                self.parts().try_for_each(|part| take(bytemuck::cast_slice(part.uncoded)))
            }
            Kind::Radii => self.parts().try_for_each(|part| take(bytemuck::cast_slice(part.radii))),
            Kind::Scales => {
                self.parts().try_for_each(|part| take(bytemuck::cast_slice(part.scales)))
            }
            Kind::Codes => self.parts().try_for_each(|part| take(part.lines)),
        }
    }
}

/// Returns the error of the index or of a call that was ended, or else of the file.
fn of_io(error: io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) => Error::File { kind: error.kind(), problem: error.to_string() },
    }
}

/// Numbers are written as they lie in memory.
fn little_endian() -> Result<(), Error> {
    if cfg!(target_endian = "little") {
        Ok(())
    } else {
        Err(Error::IndexFile { problem: "it is little-endian, and this machine is not".into() })
    }
}

/// The length of a header's text, from its first eight bytes.
fn header_length(bytes: &[u8]) -> Result<usize, Error> {
    let length = u64::from_le_bytes(fixed(bytes));
    if length > LONGEST as u64 || !length.is_multiple_of(8) {
        return Err(Error::IndexFile {
            problem: "its header is not one that is written for an index".into(),
        });
    }
    Ok(length as usize)
}

/// Header and parts.
fn opened(content: Content, bytes: &[u8]) -> Result<(About, &[u8]), Error> {
    little_endian()?;
    let cut_off = || Error::IndexFile { problem: "it is cut off".into() };
    let length = header_length(bytes.get(..8).ok_or_else(cut_off)?)?;
    let (header, data) = bytes.split_at_checked(8 + length).ok_or_else(cut_off)?;
    let about = About::of_text(content, header)?;
    let needed = about.entries()?.last().map_or(0, |entry| entry.bytes.end);
    if data.len() < needed {
        return Err(cut_off());
    }
    if data.len() > needed {
        return Err(Error::IndexFile { problem: "there is more behind it".into() });
    }
    Ok((about, data))
}

fn judge(about: &About, hash: Sha256) -> Result<(), Error> {
    if hexadecimal(&hash.finalize()) == about.sha256 {
        return Ok(());
    }
    Err(Error::IndexFile { problem: "it does not have the SHA-256 that it states".into() })
}

fn hexadecimal(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Heads without anything yet.
fn blank<'a>(about: &About) -> Result<Vec<Saved<'a>>, Error> {
    let mut heads = list("an index", about.bare.len())?;
    heads.resize_with(about.bare.len(), Saved::default);
    Ok(heads)
}

/// A few numbers, as many as there are.
fn fixed<T: AnyBitPattern + NoUninit>(bytes: &[u8]) -> T {
    let mut numbers = T::zeroed();
    let to = bytemuck::bytes_of_mut(&mut numbers);
    let length = to.len().min(bytes.len());
    to[..length].copy_from_slice(&bytes[..length]);
    numbers
}

/// Numbers where they lie, or a copy where that is not aligned.
fn cast<T: AnyBitPattern + NoUninit>(bytes: &[u8]) -> Result<Cow<'_, [T]>, Error> {
    if let Ok(numbers) = bytemuck::try_cast_slice(bytes) {
        return Ok(Cow::Borrowed(numbers));
    }
    let mut numbers = list("an index", bytes.len() / size_of::<T>())?;
    numbers.extend(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>));
    Ok(Cow::Owned(numbers))
}

/// So many numbers of a reader, hashed.
fn entries<T: AnyBitPattern + NoUninit>(
    reader: &mut dyn Read,
    count: usize,
    hash: &mut Sha256,
) -> io::Result<Vec<T>> {
    let mut numbers = Vec::new();
    while numbers.len() < count {
        ambient::check().map_err(as_io)?;
        let from = numbers.len();
        // Not all at once: a header may claim anything.
        let more = (count - from).min((PORTION / size_of::<T>()).max(from));
        room("an index", &mut numbers, more).map_err(as_io)?;
        numbers.resize(from + more, T::zeroed());
        let bytes = bytemuck::cast_slice_mut(&mut numbers[from..]);
        exactly(reader, bytes)?;
        hash.update(bytes);
    }
    Ok(numbers)
}

fn exactly(reader: &mut dyn Read, to: &mut [u8]) -> io::Result<()> {
    reader.read_exact(to).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => as_io(Error::IndexFile { problem: "it is cut off".into() }),
        _ => error,
    })
}

/// Through the closures of readers and writers; `of_io` takes it out again.
fn as_io(error: Error) -> io::Error {
    io::Error::other(error)
}
