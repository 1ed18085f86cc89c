//! Rows as the passes read them: masked, checked and padded, in place where they can be.

use super::candidates::Candidates;
use super::scratch::{Buffered, PerDtype, ReadScratch, grow, padded_for};
use super::weight_fn::is_near;
use crate::error::Error;
use crate::kernels::{Element, InDouble, LANES, Prefetch, Scalar, Simd, Strided, Survey};
use crate::numerics::certified_sums::{CHUNK, ErrorBound};
use crate::rows::{Kind, Scores, StoredMask, WeightKind, WideScores};
use crate::runtime::ambient;
use crate::runtime::threads;

/// Row as it was read.
pub(super) struct Row<'a, E: Element> {
    /// Scores, larger is better. Masked entries are -inf, and so is the padding to whole groups of lanes.
    pub(super) scores: RowScores<'a, E>,
    /// Positions of the scores, if only those that a mask admits are present.
    pub(super) positions: Option<&'a [u32]>,
    /// Description of all its keys, without the scores.
    pub(super) keys: Candidates<'a, E>,
    pub(super) slack: ErrorBound,
    /// Slack of f64 sums, if the sums of this row are in f32.
    pub(super) finer: Option<ErrorBound>,
    /// `true` if equal scores have exactly equal real weights.
    pub(super) exact_ties: bool,
}

/// Scores copied to scratch, or borrowed from the input.
pub(super) enum RowScores<'a, E> {
    Copied(&'a mut [E]),
    Lent(&'a [E]),
}

impl<E> RowScores<'_, E> {
    pub(super) fn as_slice(&self) -> &[E] {
        match self {
            RowScores::Copied(scores) => scores,
            RowScores::Lent(scores) => scores,
        }
    }

    /// Returns the copy, for writing.
    pub(super) fn copied(&mut self) -> &mut [E] {
        match self {
            RowScores::Copied(scores) => scores,
            RowScores::Lent(_) => unreachable!("a row that is written to is copied"),
        }
    }
}

/// Row to read, and the way to read it.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) scores: &'a Scores<'a>,
    pub(super) row: usize,
    pub(super) simd: Simd,
    /// Number of threads that share the chunks.
    pub(super) threads: usize,
    /// `true` to copy the row, so that it can be written to and concurrent writes to the input have no effect later.
    pub(super) copied: bool,
    /// `true` to prepare a search: long rows are weighed roughly at the same time.
    pub(super) searched: bool,
    /// Memory worth prefetching during this row.
    pub(super) prefetch: Option<Prefetch>,
}

impl<'a> Source<'a> {
    /// Returns a row that one thread reads, in place where it can.
    pub(super) fn new(scores: &'a Scores<'a>, row: usize, simd: Simd) -> Self {
        let (threads, copied, searched, prefetch) = (1, false, false, None);
        Source { scores, row, simd, threads, copied, searched, prefetch }
    }

    /// Returns `true` if the row can be decided in the precision of its own dtype. Leaves the admitted entries of an
    /// additive mask that adds no bias in the scratch, for the functions that read the row.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(super) fn is_plain(&self, admitted: &mut Vec<u8>) -> Result<bool, Error> {
        let scores = self.scores;
        Ok(scores.kind != Kind::Probs
            && scores.scale != 0.0
            && (!matches!(scores.mask, Some(StoredMask::Additive(_)))
                || scores.only_masks(self.row, admitted)?))
    }

    /// Returns a byte per visible entry of a plain row, non-zero if its mask admits it; `None` without a mask.
    pub(super) fn allowed<'b>(&'b self, admitted: &'b [u8]) -> Option<&'b [u8]> {
        let prefix = self.scores.span(self.row).prefix;
        match &self.scores.mask {
            None => None,
            Some(StoredMask::Allowed(bytes)) => Some(&bytes.row(self.row)[..prefix]),
            Some(StoredMask::Additive(_)) => Some(&admitted[..prefix]),
        }
    }

    /// Reads a plain row in its own dtype, every score at its position.
    pub(super) fn whole<'b, E: PerDtype>(
        &self,
        stored: &Strided<'b, E>,
        scratch: &'b mut ReadScratch,
    ) -> Result<Row<'b, E>, Error> {
        let ReadScratch { copies, admitted, .. } = scratch;
        let from = self.scores.visible(stored, self.row);
        let (n, allowed, negate) = (from.len(), self.allowed(admitted), self.scores.scale < 0.0);
        let in_place = !negate && !self.copied && allowed.is_none();
        if in_place && n.is_multiple_of(LANES) {
            let (survey, rough) = self.scan(from)?;
            return self.surveyed(RowScores::Lent(from), n, survey, rough);
        }
        let copy = E::buffer(copies);
        grow(copy, n)?;
        let scores = padded_for(from, copy, n, E::MASKED);
        let sign = |value: E| if negate { value.negated() } else { value };
        let survey = if let Some(allowed) = allowed {
            for ((score, &value), &allow) in scores.iter_mut().zip(from).zip(allowed) {
                *score = if allow == 0 { E::MASKED } else { sign(value) };
            }
            self.simd.survey(None, n, scores)
        } else if negate {
            scores.iter_mut().zip(from).for_each(|(score, value)| *score = value.negated());
            self.simd.survey(None, n, scores)
        } else {
            self.copy(from, scores)?
        };
        self.surveyed(RowScores::Copied(scores), n, survey, None)
    }

    /// Reads the admitted scores of a plain row and their positions; `None` for a row without a mask.
    pub(super) fn listed<'b, E: PerDtype>(
        &self,
        stored: &Strided<'_, E>,
        scratch: &'b mut ReadScratch,
    ) -> Result<Option<Row<'b, E::Scalar>>, Error> {
        let ReadScratch { copies, admitted, positions } = scratch;
        let Some(allowed) = self.allowed(admitted) else { return Ok(None) };
        let from = self.scores.visible(stored, self.row);
        let scores = <E::Scalar as Buffered>::buffer(copies);
        grow(scores, from.len())?;
        grow(positions, from.len())?;
        self.simd.compact(from, allowed, scores, positions);
        let n = scores.len();
        if self.scores.scale < 0.0 {
            for score in scores.iter_mut() {
                *score = score.negated();
            }
        }
        scores.resize(n.next_multiple_of(LANES), E::Scalar::MASKED);
        positions.resize(n.next_multiple_of(LANES), u32::MAX);
        let survey = self.simd.survey(None, n, scores);
        let row = self.surveyed(RowScores::Copied(scores), n, survey, None)?;
        Ok(Some(Row { positions: Some(positions), ..row }))
    }

    /// Returns a row after a survey of its first `n` entries and perhaps a rough weighing.
    fn surveyed<'b, E: InDouble>(
        &self,
        scores: RowScores<'b, E>,
        n: usize,
        survey: Survey<E::Scalar>,
        rough: Option<f64>,
    ) -> Result<Row<'b, E>, Error> {
        let Survey { largest, smallest, nan } = survey;
        if nan || largest == E::Scalar::INFINITY {
            // The check names the place. If it finds nothing, the buffer changed meanwhile, and nothing is certified.
            let place = self.scores.place(self.row, None);
            return Err(self.scores.judge(self.row).err().unwrap_or(Error::Changed { place }));
        }
        let all = smallest > E::Scalar::NEG_INFINITY;
        let visible = if all { n } else { self.simd.count_visible(scores.as_slice()) };
        let radius = self.scores.row_radius(self.row);
        let double = ErrorBound::f64(n, radius);
        let (slack, finer) =
            if E::SINGLE { (ErrorBound::f32(radius), Some(double)) } else { (double, None) };
        let keys = Candidates::new(self.simd, &[], visible, largest);
        let (prefetch, threads) = (self.prefetch, self.threads);
        let keys = Candidates { rough, smallest, prefetch, threads, ..keys };
        Ok(Row { scores, positions: None, keys, slack, finer, exact_ties: radius == 0.0 })
    }

    /// Reads any row in f64, every score at its position.
    pub(super) fn double<'b>(
        &self,
        scores: &'b mut Vec<f64>,
    ) -> Result<(Row<'b, f64>, WeightKind), Error> {
        let about = self.scores.wide_scores(self.row, scores)?;
        let WideScores { weight_kind, largest, error } = about;
        let n = scores.len();
        let visible = scores.iter().filter(|score| **score > f64::NEG_INFINITY).count();
        scores.resize(n.next_multiple_of(LANES), f64::NEG_INFINITY);
        let slack = match weight_kind {
            WeightKind::Exp { .. } => ErrorBound::f64(n, error),
            WeightKind::Weight => ErrorBound::weights(n),
        };
        let keys = Candidates::new(self.simd, &[], visible, largest);
        let keys = Candidates { threads: self.threads, ..keys };
        let (scores, exact_ties) = (RowScores::Copied(scores), error == 0.0);
        Ok((Row { scores, positions: None, keys, slack, finer: None, exact_ties }, weight_kind))
    }

    /// Copies the visible part of a row and surveys it.
    fn copy<E: Element>(&self, from: &[E], scores: &mut [E]) -> Result<Survey<E::Scalar>, Error> {
        let survey =
            |(scores, from): (&mut [E], &[E])| self.simd.survey(Some(from), from.len(), scores);
        if self.threads == 1 {
            return Ok(survey((scores, from)));
        }
        let chunks = scores.chunks_mut(CHUNK).zip(from.chunks(CHUNK));
        let parts = threads::map(self.threads, chunks, 1, survey)?;
        let joined = parts.into_iter().reduce(Survey::join);
        Ok(joined.unwrap_or_else(|| self.simd.survey(None, 0, scores)))
    }

    /// Surveys the visible part of a row in place, in whole groups. Long rows are roughly weighed at the same time,
    /// against the largest of a few scores.
    fn scan<E: Element>(&self, from: &[E]) -> Result<(Survey<E::Scalar>, Option<f64>), Error> {
        /// Length from which a row is weighed roughly; shorter rows are weighed whole.
        const LONG: usize = 2048;
        /// Spread of scores up to which a sample will do.
        const FLAT: f64 = 7.0;
        /// Largest distance above the shift at which scores are weighed in f32.
        const HIGHEST: f64 = 60.0;
        let scale = self.scores.scale;
        let (mut shift, mut least) = (E::Scalar::NEG_INFINITY, E::Scalar::INFINITY);
        if self.searched && from.len() >= LONG {
            for score in from.iter().step_by(from.len() / 64) {
                let score = score.widen();
                shift = if score > shift { score } else { shift };
                least = if score < least { score } else { least };
            }
        }
        let near = is_near(shift.into(), scale) && (shift.into() - least.into()) * scale > FLAT;
        let rough = near.then_some((shift, scale));
        let mut seen: Option<Survey<E::Scalar>> = None;
        let mut mass = 0.0;
        let mut join = |(part, weight): (Survey<E::Scalar>, f64)| {
            seen = Some(seen.map_or(part, |seen| seen.join(part)));
            mass += weight;
        };
        let scan = |from: &[E]| self.simd.scan(from, rough);
        if self.threads == 1 {
            for chunk in from.chunks(CHUNK) {
                ambient::check()?;
                join(scan(chunk));
            }
        } else {
            let parts = threads::map(self.threads, from.chunks(CHUNK), 1, scan)?;
            parts.into_iter().for_each(&mut join);
        }
        let seen = seen.unwrap_or_else(|| self.simd.scan(from, None).0);
        let above = (seen.largest.into() - shift.into()) * scale;
        Ok((seen, (near && above < HIGHEST).then(|| mass * (-above).exp())))
    }
}
