//! Codes of fewer keys: the first so many, or all but some.
//!
//! What is known of all keys together may stay: every term of the Gram form is a square, so that it bounds the errors of any part of
//! the keys. It only loosens. How much of it is of keys that are gone is known by their radii; once that is half, the keys that stay
//! are encoded anew.

use super::super::chunks::shrink::Spare;
use super::super::element::Coded;
use super::super::fingerprint::Fingerprint;
use super::super::gram::Gram;
use super::{Codes, Refused};
use crate::error::{Error, Place};
use crate::kernels::{Keys, Simd};
use crate::runtime::ambient;
use crate::runtime::memory::list;

/// Keys that are read between two questions whether to go on.
const PORTION: usize = 1 << 12;
/// The share of the Gram form that may be of keys that are gone.
const STALE: f64 = 0.5;
/// Fewer keys do not say how those are spread that will follow.
const FEW: usize = 64;

/// Plan for removing codes from the end.
pub(in crate::index) struct Cut<'a> {
    len: usize,
    fingerprint: Fingerprint,
    stale: f64,
    spare: Spare,
    /// All of them anew, where too much of what is known is of keys that go.
    anew: Option<Codes<'a>>,
}

impl<'a> Codes<'a> {
    /// Prepares to keep the first keys; all are lent. Nothing has changed yet.
    ///
    /// # Errors
    /// [`Error::NoMemory`], [`Error::OtherKeys`], or what stops the call.
    pub(in crate::index) fn prepare_cut<E: Coded>(
        &self,
        simd: Simd,
        keys: Keys<'_, E>,
        len: usize,
        threads: usize,
    ) -> Result<Cut<'a>, Error> {
        let mut fingerprint = self.fingerprint;
        for key in len..self.n {
            if key.is_multiple_of(PORTION) {
                ambient::check()?;
            }
            fingerprint.replace(key, None, keys.row(key));
        }
        let stale = self.stale + self.chunks.squares(len..self.n);
        let anew = self.is_stale(stale).then(|| self.anew(simd, keys, len, threads)).transpose()?;
        Ok(Cut { len, fingerprint, stale, spare: self.chunks.spare_group()?, anew })
    }

    /// Keeps the first keys.
    pub(in crate::index) fn cut(&mut self, cut: Cut<'a>) {
        if let Some(anew) = cut.anew {
            *self = anew;
            return;
        }
        self.chunks.cut(cut.len, cut.spare);
        (self.n, self.fingerprint, self.stale) = (cut.len, cut.fingerprint, cut.stale);
    }

    /// Returns memory for [`Codes::crop`].
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(in crate::index) fn spare(&self) -> Result<Spare, Error> {
        self.chunks.spare_group()
    }

    /// Keeps the first keys without being lent any, and forgets which keys these are.
    pub(in crate::index) fn crop(&mut self, len: usize, spare: Spare) {
        self.stale += self.chunks.squares(len..self.n);
        self.chunks.cut(len, spare);
        (self.n, self.fingerprint) = (len, Fingerprint::UNKNOWN);
    }

    /// Codes of all keys but some, ascending; all are lent.
    ///
    /// # Errors
    /// As [`Codes::prepare_cut`].
    pub(in crate::index) fn without<E: Coded>(
        &self,
        simd: Simd,
        keys: Keys<'_, E>,
        gone: &[u32],
        threads: usize,
    ) -> Result<Self, Error> {
        let Some(first) = gone.first().map(|key| *key as usize) else { return Ok(self.clone()) };
        let len = self.n - gone.len();
        let squares = |key: &u32| self.chunks.squares(*key as usize..*key as usize + 1);
        let stale = self.stale + gone.iter().map(squares).sum::<f64>();
        let anew = self.is_stale(stale);
        let mut kept = list("keys", if anew { len.saturating_mul(self.dim) } else { 0 })?;
        let (mut fingerprint, mut left) = (self.fingerprint, gone);
        for key in if anew { 0 } else { first }..self.n {
            if key.is_multiple_of(PORTION) {
                ambient::check()?;
            }
            let goes = left.first().is_some_and(|gone| *gone as usize == key);
            left = &left[usize::from(goes)..];
            if anew {
                kept.extend_from_slice(if goes { &[] } else { keys.row(key) });
            } else {
                let to = (!goes).then(|| key + left.len() - gone.len());
                fingerprint.replace(key, to, keys.row(key));
            }
        }
        if anew {
            return self.anew(simd, Keys::new(&kept, self.dim, self.dim), len, threads);
        }
        let chunks = self.chunks.without(gone, len)?;
        Ok(Codes { n: len, chunks, fingerprint, stale, ..self.clone() })
    }

    /// Codes of the first keys that are lent. Few of them say less of what will follow than the frame that there is.
    fn anew<E: Coded>(
        &self,
        simd: Simd,
        keys: Keys<'_, E>,
        len: usize,
        threads: usize,
    ) -> Result<Self, Error> {
        let mut anew = match self.content() {
            content if content.of_values() => Codes::plain(content, self.dim, keys, len),
            content => Codes::new(content, self.dim, keys, len, Some(self.frame.block > 1)),
        };
        if len < FEW {
            anew.frame = self.frame.clone();
            anew.spared = self.spared;
        }
        let room = anew.make_room(len, threads)?;
        anew.append(simd, keys, (len, room), threads).map_err(|refused| match refused {
            Refused::Stopped(error) => error,
            // Those that were encoded before were finite.
            Refused::NotFinite { .. } => Error::OtherKeys {
                argument: "keys",
                place: Place(vec![]),
                problem: "have entries that are not finite".into(),
            },
        })?;
        Ok(anew)
    }

    /// Returns `true` if this sum of squares, of removed keys, is too large a part of the Gram form's trace.
    fn is_stale(&self, gone: f64) -> bool {
        // Where nothing is lost nothing loosens.
        let trace = self.gram.trace();
        trace > 0.0 && gone > STALE * trace
    }

    /// Returns the part of the Gram form's trace that must be of removed keys, if it was not counted.
    pub(super) fn unaccounted(gram: &Gram<'_>, present: f64) -> f64 {
        (gram.trace() - present).max(0.0)
    }
}
