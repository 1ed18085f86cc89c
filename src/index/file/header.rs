//! Header of an index file: the one safetensors header that is written, and no other.

use std::fmt::Write as _;
use std::ops::Range;

use crate::error::Error;
use crate::index::content::Content;
use crate::kernels::LANES;
use crate::runtime::memory::{list, product};

const VERSION: usize = 2;
/// No reader of this format takes a longer one.
pub(super) const LONGEST: usize = 1 << 24;
/// Placeholder of the file's hash while it is computed.
pub(super) const NO_SHA256: &str =
    "0000000000000000000000000000000000000000000000000000000000000000";

/// Parts of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Fingerprint,
    Gram,
    Numbers,
    Spread,
    SpreadNumbers,
    Low,
    LowGram,
    LowNumbers,
    Bare,
    Mean,
    Radii,
    Scales,
    Codes,
}

/// In the order of a file: the largest entries first, then by name.
const KINDS: [&[(Kind, &str, &str, usize)]; 4] = [
    &[
        (Kind::Fingerprint, "fingerprint", "U64", 8),
        (Kind::Gram, "gram", "F64", 8),
        (Kind::LowGram, "low_gram", "F64", 8),
        (Kind::LowNumbers, "low_numbers", "F64", 8),
        (Kind::Numbers, "numbers", "F64", 8),
        (Kind::Spread, "spread", "F64", 8),
        (Kind::SpreadNumbers, "spread_numbers", "F64", 8),
    ],
    &[(Kind::Bare, "bare", "U32", 4), (Kind::Mean, "mean", "F32", 4)],
    &[(Kind::Radii, "radii", "BF16", 2), (Kind::Scales, "scales", "BF16", 2)],
    &[(Kind::Codes, "codes", "U8", 1), (Kind::Low, "low", "U8", 1)],
];

/// Contents of a header.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct About {
    pub(super) content: Content,
    /// That of the keys or values.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: String,
    pub(super) sha256: String,
    /// Of each head, how many keys have no code.
    pub(super) bare: Vec<usize>,
}

/// A part of a head, where it is behind the header, and how many entries it has.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub(super) head: usize,
    pub(super) kind: Kind,
    pub(super) count: usize,
    pub(super) bytes: Range<usize>,
    name: &'static str,
    dtype: &'static str,
}

/// Returns the name that a file begins with.
fn format(content: Content) -> &'static str {
    match content {
        Content::Keys => "certk-key-index",
        Content::Keys12 => "certk-key-index-of-12-bits",
        Content::Keys16 => "certk-key-index-of-16-bits",
        Content::Values => "certk-value-index",
        Content::HalfValues => "certk-value-index-of-4-bits",
    }
}

fn refused(problem: &str) -> Error {
    Error::IndexFile { problem: problem.into() }
}

/// Heads in the order of their names.
fn named(heads: usize) -> Result<Vec<(String, usize)>, Error> {
    let mut names = list("an index", heads)?;
    names.extend((0..heads).map(|head| (format!("{head}."), head)));
    names.sort_unstable();
    Ok(names)
}

impl About {
    /// All parts, in the order of the file.
    ///
    /// # Errors
    /// [`Error::IndexFile`] for a shape that nobody could have, [`Error::NoMemory`].
    pub(super) fn entries(&self) -> Result<Vec<Entry>, Error> {
        let none = || refused("the shape that it states is of no keys");
        let &[.., n, dim] = &self.shape[..] else { return Err(none()) };
        if dim == 0 || dim > 1 << 20 || n >= u32::MAX as usize {
            return Err(none());
        }
        let (width, keys) = (dim.next_multiple_of(LANES), n.next_multiple_of(LANES));
        let codes = (keys / LANES).checked_mul(self.content.block(dim)).ok_or_else(none)?;
        let low = self.content.low_row(dim);
        keys.checked_mul(low).ok_or_else(none)?;
        let heads = named(self.bare.len())?;
        let mut entries = list("an index", self.bare.len().saturating_mul(11))?;
        let mut end = 0usize;
        for kinds in KINDS {
            for &(_, head) in &heads {
                for &(kind, name, dtype, size) in kinds {
                    let there = match kind {
                        Kind::Spread | Kind::SpreadNumbers => self.content.of_values(),
                        Kind::Low | Kind::LowGram | Kind::LowNumbers => low > 0,
                        _ => true,
                    };
                    if !there {
                        continue;
                    }
                    let count = match kind {
                        Kind::Fingerprint | Kind::SpreadNumbers => 2,
                        Kind::Gram | Kind::Spread | Kind::LowGram => width * width,
                        Kind::LowNumbers => 3,
                        Kind::Low => keys * low,
                        Kind::Numbers => 7,
                        Kind::Bare => self.bare[head],
                        Kind::Mean => width,
                        Kind::Radii | Kind::Scales => keys,
                        Kind::Codes => codes,
                    };
                    let bytes = count.checked_mul(size).and_then(|bytes| bytes.checked_add(end));
                    let bytes = end..bytes.ok_or_else(none)?;
                    end = bytes.end;
                    entries.push(Entry { head, kind, count, bytes, name, dtype });
                }
            }
        }
        Ok(entries)
    }

    /// The header, from the eight bytes that hold its length on.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if it is longer than is read; [`Error::NoMemory`].
    pub(super) fn text(&self, sha256: &str) -> Result<Vec<u8>, Error> {
        let shape: Vec<String> = self.shape.iter().map(ToString::to_string).collect();
        let mut text = format!(
            r#"{{"__metadata__":{{"certk":"{{\"format\": \"{}\", \"version\": {VERSION}, \"shape\": [{}], \"dtype\": \"{}\", \"sha256\": \"{sha256}\"}}"}}"#,
            format(self.content),
            shape.join(", "),
            self.dtype,
        );
        for Entry { head, name, dtype, count, bytes, .. } in self.entries()? {
            let Range { start, end } = bytes;
            // Writing to a string does not fail.
            let _ = write!(
                text,
                r#","{head}.{name}":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[{start},{end}]}}"#
            );
            if text.len() > LONGEST {
                return Err(refused(
                    "its header is longer than is read: keep heads in several indexes",
                ));
            }
        }
        text.push('}');
        let length = text.len().next_multiple_of(8);
        let mut header = (length as u64).to_le_bytes().to_vec();
        header.extend_from_slice(text.as_bytes());
        header.resize(8 + length, b' ');
        Ok(header)
    }

    /// Returns the contents of a header, which starts with the eight bytes of its length. Keys and values are read in any number of bits.
    ///
    /// # Errors
    /// [`Error::IndexFile`] for any header that is not written for an index of this version; [`Error::NoMemory`].
    pub(super) fn of_text(content: Content, header: &[u8]) -> Result<Self, Error> {
        let other = || refused("its header is not one that is written for an index");
        let text = header.get(8..).and_then(|text| std::str::from_utf8(text).ok());
        let mut rest = Rest(text.ok_or_else(other)?);
        let none = || refused("it does not say that it is one");
        rest.skip(r#"{"__metadata__":{"certk":"{\"format\": \""#).ok_or_else(none)?;
        let stated = rest.until(r#"\", \"version\": "#).ok_or_else(none)?;
        let keys = [Content::Keys, Content::Keys12, Content::Keys16];
        let mut all = keys.into_iter().chain([Content::Values, Content::HalfValues]);
        let known = all.find(|one| format(*one) == stated).ok_or_else(none)?;
        if known.of_values() != content.of_values() {
            let (held, wanted) = (known.name(), content.name());
            let problem = format!("it holds {held}, and an index of {wanted} is read here");
            return Err(Error::IndexFile { problem });
        }
        let version = rest.number().ok_or_else(other)?;
        if version != VERSION {
            let problem =
                format!("it has format version {version}, and {VERSION} is what this reads");
            return Err(Error::IndexFile { problem });
        }
        let about = rest.about(known).ok_or_else(other)?;
        let heads = product("an index", &about.shape[..about.shape.len().saturating_sub(2)])?;
        // A head has eight parts, of which each takes more than so many letters.
        if heads > header.len() / (8 * 32) {
            return Err(other());
        }
        let mut about = About { bare: vec![0; heads], ..about };
        for (name, head) in named(heads)? {
            let count = rest.skip_to(&format!(r#","{name}bare":{{"dtype":"U32","shape":["#));
            about.bare[head] = count.and_then(|()| rest.number()).ok_or_else(other)?;
        }
        // All that was not looked at is judged here.
        if about.text(&about.sha256)? == header { Ok(about) } else { Err(other()) }
    }
}

/// Rest of a text that is parsed from the front.
struct Rest<'t>(&'t str);

impl Rest<'_> {
    fn skip(&mut self, text: &str) -> Option<()> {
        self.0 = self.0.strip_prefix(text)?;
        Some(())
    }

    fn skip_to(&mut self, text: &str) -> Option<()> {
        let at = self.0.find(text)?;
        self.0 = &self.0[at + text.len()..];
        Some(())
    }

    fn number(&mut self) -> Option<usize> {
        let digits = self.0.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = self.0.split_at(digits);
        self.0 = rest;
        number.parse().ok()
    }

    /// Up to a mark, which is skipped.
    fn until(&mut self, mark: &str) -> Option<String> {
        let (before, rest) = self.0.split_once(mark)?;
        self.0 = rest;
        Some(before.into())
    }

    /// Parses the rest after the version.
    fn about(&mut self, content: Content) -> Option<About> {
        self.skip(r#", \"shape\": ["#)?;
        let mut shape = vec![self.number()?];
        while self.skip(", ").is_some() {
            shape.push(self.number()?);
        }
        self.skip(r#"], \"dtype\": \""#)?;
        let dtype = self.until(r#"\", \"sha256\": \""#)?;
        let sha256 = self.until(r#"\"}"}"#)?;
        let hex = |letter: u8| letter.is_ascii_digit() || (b'a'..=b'f').contains(&letter);
        let whole = sha256.len() == 64 && sha256.bytes().all(hex);
        whole.then_some(About { content, shape, dtype, sha256, bare: Vec::new() })
    }
}
