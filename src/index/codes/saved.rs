//! One head's codes as they are written to a file, and back.

use std::borrow::Cow;

use half::bf16;

use super::super::chunks::{Chunks, Part};
use super::super::content::Content;
use super::super::fingerprint::Fingerprint;
use super::super::frame::{OwnFrame, sign};
use super::super::gram::Gram;
use super::super::spread::{Spread, Tops};
use super::Codes;
use crate::kernels::LANES;

/// Everything that cannot be worked out from the number of keys and their entries.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Saved<'a> {
    /// Bytes, sixteen keys to a block.
    pub lines: Cow<'a, [u8]>,
    /// Low plane of keys that have one, a row a key.
    pub low: Cow<'a, [u8]>,
    /// Factor of each key's codes, in whole groups.
    pub scales: Cow<'a, [bf16]>,
    /// Upper bound on the quantization error of each key.
    pub radii: Cow<'a, [bf16]>,
    /// Keys without a code, ascending.
    pub uncoded: Cow<'a, [u32]>,
    /// Mean subtracted from every key, in whole groups.
    pub mean: Cow<'a, [f32]>,
    /// Gram matrix of the quantization errors.
    pub gram: Cow<'a, [f64]>,
    /// Gram matrix of what codes of values stand for; nothing of keys.
    pub spread: Cow<'a, [f64]>,
    /// The error of that matrix, and the number of additions in it.
    pub spread_numbers: [f64; 2],
    /// Bounds on the largest eigenvalues of both matrices of values, which are trusted; `None` to find them.
    pub tops: Option<Tops>,
    /// Gram matrix of what codes and low plane together lose of keys; nothing of others.
    pub low_gram: Cow<'a, [f64]>,
    /// The error of that matrix, the largest such loss, and the number of additions in it.
    pub low_numbers: [f64; 3],
    /// In order: the error of the Gram matrix, the largest quantization error, the largest key, the number of additions
    /// in the Gram matrix, the largest error that gets a code, the largest entry of any key, and the size of the
    /// frame's blocks.
    pub numbers: [f64; 7],
    /// Fingerprint of the keys.
    pub fingerprint: [u64; 2],
}

/// The matrices of an index: of what codes lose, of what codes of values stand for, and of what both planes of keys lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::index) enum Matrix {
    Gram,
    Spread,
    Low,
}

/// Parts of a saved index that are not checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// Nothing that can be judged without the keys.
    Nothing,
    /// That scales and radii are those of keys: judging them takes time proportional to the keys. Others make certificates of
    /// nothing; scores that are not numbers, or overflow, are met by reading the keys.
    Scales,
}

impl Saved<'_> {
    /// The same, with arrays of its own.
    pub fn owned(self) -> Saved<'static> {
        Saved {
            lines: self.lines.into_owned().into(),
            low: self.low.into_owned().into(),
            scales: self.scales.into_owned().into(),
            radii: self.radii.into_owned().into(),
            uncoded: self.uncoded.into_owned().into(),
            mean: self.mean.into_owned().into(),
            gram: self.gram.into_owned().into(),
            spread: self.spread.into_owned().into(),
            low_gram: self.low_gram.into_owned().into(),
            ..self
        }
    }
}

/// Lends nothing instead of owning it, so that what is beside it is lent as well.
fn lent_if_empty<T: Clone>(list: Cow<'_, [T]>) -> Cow<'_, [T]> {
    if list.is_empty() { Cow::Borrowed(&[]) } else { list }
}

/// A list of all keys: that of the only chunk, or those of several in one.
fn joined<'c, T: Clone>(
    chunks: &'c Chunks<'_>,
    list: impl Fn(Part<'c>) -> &'c [T],
) -> Cow<'c, [T]> {
    let mut parts = chunks.parts();
    match (parts.next(), parts.next()) {
        (Some(all), None) => list(all).into(),
        _ => chunks.parts().flat_map(list).cloned().collect(),
    }
}

impl<'a> Codes<'a> {
    pub(crate) fn save(&self) -> Saved<'_> {
        Saved {
            lines: joined(&self.chunks, |part| part.lines),
            low: joined(&self.chunks, |part| part.low),
            scales: joined(&self.chunks, |part| part.scales),
            radii: joined(&self.chunks, |part| part.radii),
            uncoded: self.chunks.uncoded().collect(),
            ..self.save_but_keys()
        }
    }

    /// The same without what there is of each key.
    fn save_but_keys(&self) -> Saved<'_> {
        Saved {
            gram: self.matrix(Matrix::Gram),
            spread: self.matrix(Matrix::Spread),
            low_gram: self.matrix(Matrix::Low),
            ..self.save_numbers()
        }
    }

    /// Returns all entries of a matrix; nothing if it is of others than these.
    pub(in crate::index) fn matrix(&self, matrix: Matrix) -> Cow<'_, [f64]> {
        let gram = match matrix {
            Matrix::Gram => Some(&self.gram),
            Matrix::Spread => self.spread.as_ref().map(Spread::gram),
            Matrix::Low => self.low.as_ref(),
        };
        gram.map_or(Cow::Borrowed(&[]), Gram::whole)
    }

    /// Returns what is of one size for any number of keys, without matrices.
    pub(in crate::index) fn save_numbers(&self) -> Saved<'_> {
        let [lost, loss, norm, additions] = self.gram.numbers();
        let Codes { spared, largest, .. } = *self;
        let block = self.frame.block as f64;
        let spread_numbers = self.spread.as_ref().map_or([0.0; 2], |spread| {
            let [lost, _, _, additions] = spread.gram().numbers();
            [lost, additions]
        });
        let low_numbers = self.low.as_ref().map_or([0.0; 3], |gram| {
            let [lost, loss, _, additions] = gram.numbers();
            [lost, loss, additions]
        });
        Saved {
            mean: (&*self.frame.mean).into(),
            spread_numbers,
            low_numbers,
            numbers: [lost, loss, norm, additions, spared, f64::from(largest), block],
            fingerprint: self.fingerprint.0,
            ..Saved::default()
        }
    }

    /// Returns the stored data of the keys, piece by piece.
    #[cfg(feature = "files")]
    pub(in crate::index) fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        self.chunks.parts()
    }

    /// Codes of `n` keys or values of `dim` entries; an error says what of it no index would have written.
    pub(crate) fn load(
        content: Content,
        (n, dim): (usize, usize),
        saved: Saved<'a>,
        trust: Trust,
    ) -> Result<Self, &'static str> {
        let need = |fits: bool, problem: &'static str| if fits { Ok(()) } else { Err(problem) };
        let [lost, loss, norm, additions, spared, largest, block] = saved.numbers;
        let (width, keys) = (dim.next_multiple_of(LANES), n.next_multiple_of(LANES));
        need(saved.lines.len() == keys / LANES * content.block(dim), "codes")?;
        need(saved.low.len() == keys * content.low_row(dim), "the low plane")?;
        need(saved.scales.len() == keys && saved.radii.len() == keys, "scales or radii")?;
        let ascending = saved.uncoded.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = saved.uncoded.last().is_none_or(|last| (*last as usize) < n);
        need(ascending && inside, "keys without codes")?;
        let number = |number: &bf16| (0.0..f32::INFINITY).contains(&number.to_f32());
        let mut uncoded = saved.uncoded.iter().peekable();
        let mut pairs = saved.scales.iter().zip(saved.radii.iter()).take(n).enumerate();
        let coded = trust == Trust::Scales
            || pairs.all(|(i, (s, r))| {
                let left = uncoded.next_if(|key| **key as usize == i).is_some();
                left || (number(s) && s.to_f32() > 0.0 && number(r))
            });
        need(coded, "a scale or radius")?;
        let finite = saved.mean.iter().all(|mean| mean.is_finite());
        let padded = saved.mean.get(dim..).is_some_and(|rest| rest.iter().all(|mean| *mean == 0.0));
        need(saved.mean.len() == width && finite && padded, "the mean")?;
        let whole = 1usize << dim.trailing_zeros();
        let turned = !content.of_values() && block == whole as f64;
        need(block == 1.0 || turned, "the rotation")?;
        need(spared > 0.0 && largest >= 0.0 && largest <= f64::from(f32::MAX), "a bound")?;
        let gram = Gram::of_parts(width, saved.gram, [lost, loss, norm, additions]);
        let gram = gram.ok_or("the Gram matrix")?;
        let spread = content.of_values().then(|| {
            let [lost, additions] = saved.spread_numbers;
            let sums = Gram::of_parts(width, saved.spread, [lost, 0.0, 0.0, additions]);
            Ok::<_, &str>(Spread::new(sums.ok_or("the matrix of values")?, &gram, saved.tops))
        });
        let spread = spread.transpose()?;
        let low_gram = (content.low_bits() > 0).then(|| {
            let [lost, loss, additions] = saved.low_numbers;
            Gram::of_parts(width, saved.low_gram, [lost, loss, norm, additions])
                .ok_or("the matrix of the low plane")
        });
        let low_gram = low_gram.transpose()?;
        let size = (content, dim);
        let (low, uncoded) = (lent_if_empty(saved.low), lent_if_empty(saved.uncoded));
        let chunks = match (saved.lines, low, saved.scales, saved.radii, uncoded) {
            (
                Cow::Borrowed(lines),
                Cow::Borrowed(low),
                Cow::Borrowed(scales),
                Cow::Borrowed(radii),
                Cow::Borrowed(uncoded),
            ) => Chunks::lent(size, Part { lines, scales, radii, low, uncoded }),
            (lines, low, scales, radii, uncoded) => {
                let codes = [lines.into_owned(), low.into_owned()];
                let of_keys = [scales.into_owned(), radii.into_owned()];
                Chunks::owned(size, codes, of_keys, uncoded.into_owned())
            }
        };
        // Only who looks at the radii knows how much of the sums is of keys that are gone.
        let stale = match trust {
            Trust::Nothing => Codes::unaccounted(&gram, chunks.squares(0..n)),
            Trust::Scales => 0.0,
        };
        let signs = (0..width).map(|j| if sign(j) { -1.0 } else { 1.0 }).collect();
        Ok(Codes {
            dim,
            n,
            frame: OwnFrame {
                mean: saved.mean,
                block: if block == 1.0 { 1 } else { whole },
                signs,
            },
            chunks,
            gram,
            spread,
            low: low_gram,
            spared,
            stale,
            largest: largest as f32,
            fingerprint: Fingerprint(saved.fingerprint),
        })
    }
}
