//! Rows prepared for the passes: copied, masked and checked, with their weight function and slack.

use super::scratch::{PerDtype, Workspace, grow, padded, padded_for};
use super::weight_fn::{InvertibleWeightFn, is_near};
use crate::error::Error;
use crate::kernels::{
    Element, Exp, Identity, LANES, Prefetch, Scalar, ScaledExp, Simd, Strided, Survey,
};
use crate::numerics::certified_sums::{CHUNK, ErrorBound};
use crate::rows::{Kind, Scores, Stored, StoredMask, WeightKind, WideScores, for_dtype};
use crate::runtime::ambient;
use crate::runtime::threads;

/// A prepared row.
pub(crate) struct Prepared<'a, E: Element> {
    /// Scores, larger is better. Masked entries are -inf, and so is the padding to whole groups of lanes.
    pub(crate) scores: RowScores<'a, E>,
    /// Positions of the scores in the row, if only those that a mask admits are present.
    pub(crate) positions: Option<&'a [u32]>,
    pub(crate) largest: E::Scalar,
    /// Approximate mass of the keys relative to the largest, if known.
    pub(crate) rough: Option<f64>,
    /// Memory worth prefetching during this row.
    pub(crate) prefetch: Option<Prefetch>,
    /// Lower bound on every key; -inf if unknown.
    pub(crate) smallest: E::Scalar,
    /// Number of unmasked keys.
    pub(crate) visible: usize,
    pub(crate) slack: ErrorBound,
    /// Slack of f64 sums, if the sums of this row are in f32.
    pub(crate) finer: Option<ErrorBound>,
    /// `true` if equal scores have exactly equal real weights.
    pub(crate) exact_ties: bool,
    /// `true` if scores are weights, whose sums can be compared exactly.
    pub(crate) weights: bool,
}

/// Scores copied to scratch, or borrowed from the input.
pub(crate) enum RowScores<'a, E> {
    Copied(&'a mut [E]),
    Lent(&'a [E]),
}

impl<'a, E> RowScores<'a, E> {
    pub(crate) fn as_slice(&self) -> &[E] {
        match self {
            RowScores::Copied(scores) => scores,
            RowScores::Lent(scores) => scores,
        }
    }

    /// Returns the copy, for writing.
    pub(crate) fn copied(self) -> &'a mut [E] {
        match self {
            RowScores::Copied(scores) => scores,
            RowScores::Lent(_) => unreachable!("a visitor that changes rows gets a copy"),
        }
    }
}

/// Work on a prepared row, generic over its element type.
pub(crate) trait Visitor {
    type Output;

    /// Returns `true` if the visitor searches the row. Of a masked row it then gets only the admitted scores.
    fn searches(&self) -> bool;

    /// Returns `true` if the visitor writes to the row.
    fn changes(&self) -> bool {
        false
    }

    fn visit<E: PerDtype, W: InvertibleWeightFn<E::Scalar>>(
        self,
        row: Prepared<'_, E>,
        weight_fn: W,
        workspace: &mut Workspace,
    ) -> Result<Self::Output, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>;
}

/// A row and the way to read it.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) scores: &'a Scores<'a>,
    pub(crate) row: usize,
    pub(crate) simd: Simd,
    /// Number of threads that share the chunks.
    pub(crate) threads: usize,
    /// `true` to copy the row first, so that concurrent writes to it have no effect later.
    pub(crate) copied: bool,
    /// Memory worth prefetching during this row.
    pub(crate) prefetch: Option<Prefetch>,
}

impl Source<'_> {
    /// Returns `true` if the row can be decided in the precision of its own dtype. The admitted entries of an additive
    /// mask that adds no bias are left in the workspace for [`Source::native`].
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn is_plain(&self, workspace: &mut Workspace) -> Result<bool, Error> {
        let scores = self.scores;
        Ok(scores.kind != Kind::Probs
            && scores.scale != 0.0
            && (!matches!(scores.mask, Some(StoredMask::Additive(_)))
                || scores.only_masks(self.row, &mut workspace.admitted)?))
    }

    /// Returns `true` if that precision is f32, so that f64 could decide more.
    pub(crate) fn is_single(&self) -> bool {
        !matches!(self.scores.data, Stored::F64(_))
    }

    /// Lists the admitted scores and their positions. Returns `false` if the mask adds a bias.
    pub(crate) fn compact<E: Element>(
        &self,
        from: &[E],
        workspace: &mut Workspace,
        scores: &mut Vec<E::Scalar>,
        positions: &mut Vec<u32>,
    ) -> Result<bool, Error> {
        if !self.is_plain(workspace)? {
            return Ok(false);
        }
        match self.allowed(&workspace.admitted) {
            Some(allowed) => self.simd.compact(from, allowed, scores, positions),
            None => return Ok(false),
        }
        Ok(true)
    }

    /// Returns a byte per visible entry of a plain row, non-zero if its mask admits it; `None` without a mask. The
    /// bytes of an additive mask are those that [`Source::is_plain`] left in the workspace.
    fn allowed<'b>(&'b self, admitted: &'b [u8]) -> Option<&'b [u8]> {
        let prefix = self.scores.span(self.row).prefix;
        match &self.scores.mask {
            None => None,
            Some(StoredMask::Allowed(bytes)) => Some(&bytes.row(self.row)[..prefix]),
            Some(StoredMask::Additive(_)) => Some(&admitted[..prefix]),
        }
    }

    /// Prepares a plain row in its own dtype.
    pub(crate) fn native<V: Visitor>(
        &self,
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error> {
        for_dtype!(self.scores.data, stored => self.stored(stored, workspace, visitor))
    }

    fn stored<E: PerDtype, V: Visitor>(
        &self,
        stored: &Strided<'_, E>,
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar> + PerDtype,
    {
        let from = self.scores.visible(stored, self.row);
        let negate = self.scores.scale < 0.0;
        let admitted = std::mem::take(&mut workspace.admitted);
        let result = match self.allowed(&admitted) {
            None => self.whole(from, negate, workspace, visitor),
            Some(allowed) => self.masked(from, allowed, negate, workspace, visitor),
        };
        workspace.admitted = admitted;
        result
    }

    /// Prepares a row without a mask.
    fn whole<E: PerDtype, V: Visitor>(
        &self,
        from: &[E],
        negate: bool,
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let stays = !negate && !visitor.changes() && !self.copied;
        if stays && from.len().is_multiple_of(LANES) {
            let (survey, rough) = self.scan(from, visitor.searches())?;
            let scores = RowScores::Lent(from);
            let row = (scores, from.len(), rough);
            return self.surveyed(row, None, survey, workspace, visitor);
        }
        let mut buffer = std::mem::take(E::scores(workspace));
        grow(&mut buffer, from.len())?;
        let scores = padded_for(from, &mut buffer, from.len(), E::MASKED);
        let result = self.survey(from, negate, scores).and_then(|survey| {
            let scores = RowScores::Copied(scores);
            self.surveyed((scores, from.len(), None), None, survey, workspace, visitor)
        });
        *E::scores(workspace) = buffer;
        result
    }

    /// Prepares a row with an admission byte per entry.
    fn masked<E: PerDtype, V: Visitor>(
        &self,
        from: &[E],
        allowed: &[u8],
        negate: bool,
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar> + PerDtype,
    {
        if visitor.searches() {
            let mut buffer = std::mem::take(E::Scalar::scores(workspace));
            let mut positions = std::mem::take(&mut workspace.positions);
            grow(&mut buffer, from.len())?;
            grow(&mut positions, from.len())?;
            self.simd.compact(from, allowed, &mut buffer, &mut positions);
            let visible = buffer.len();
            if negate {
                for score in &mut buffer {
                    *score = score.negated();
                }
            }
            buffer.resize(visible.next_multiple_of(LANES), E::Scalar::MASKED);
            positions.resize(visible.next_multiple_of(LANES), u32::MAX);
            let scores = &mut buffer[..];
            let survey = self.simd.survey(None, visible, scores);
            let listed = Some(&positions[..]);
            let scores = RowScores::Copied(scores);
            let result = self.surveyed((scores, visible, None), listed, survey, workspace, visitor);
            *E::Scalar::scores(workspace) = buffer;
            workspace.positions = positions;
            return result;
        }
        let mut buffer = std::mem::take(E::scores(workspace));
        grow(&mut buffer, from.len())?;
        let scores = padded(&mut buffer, from.len(), E::MASKED);
        for ((score, &value), &allow) in scores.iter_mut().zip(from).zip(allowed) {
            let value = if negate { value.negated() } else { value };
            *score = if allow == 0 { E::MASKED } else { value };
        }
        let survey = self.simd.survey(None, from.len(), scores);
        let scores = RowScores::Copied(scores);
        let result = self.surveyed((scores, from.len(), None), None, survey, workspace, visitor);
        *E::scores(workspace) = buffer;
        result
    }

    /// Hands a row to the visitor, after a survey of its first `len` entries and perhaps a rough weighing.
    fn surveyed<E: PerDtype, V: Visitor>(
        &self,
        (scores, len, rough): (RowScores<'_, E>, usize, Option<f64>),
        positions: Option<&[u32]>,
        survey: Survey<E::Scalar>,
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let Survey { largest, smallest, nan } = survey;
        if nan || largest == E::Scalar::INFINITY {
            // The check names the place. If it finds nothing, the buffer changed meanwhile, and nothing is certified.
            let place = self.scores.place(self.row, None);
            return Err(self.scores.judge(self.row).err().unwrap_or(Error::Changed { place }));
        }
        let visible = if smallest > E::Scalar::NEG_INFINITY {
            len
        } else {
            self.simd.count_visible(scores.as_slice())
        };
        let radius = self.scores.row_radius(self.row);
        let double = ErrorBound::f64(len, radius);
        let (slack, finer) =
            if self.is_single() { (ErrorBound::f32(radius), Some(double)) } else { (double, None) };
        let (exact_ties, weights, prefetch) = (radius == 0.0, false, self.prefetch);
        let row = Prepared {
            scores,
            positions,
            largest,
            rough,
            prefetch,
            smallest,
            visible,
            slack,
            finer,
            exact_ties,
            weights,
        };
        exponential(row, self.scores.scale.abs(), workspace, visitor)
    }

    /// Prepares any row in f64.
    pub(crate) fn double<V: Visitor>(
        &self,
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error> {
        let mut buffer = std::mem::take(&mut workspace.f64);
        let result = self.scores.wide_scores(self.row, &mut buffer).and_then(|about| {
            let WideScores { weight_kind, largest, error } = about;
            let n = buffer.len();
            let visible = buffer.iter().filter(|score| **score > f64::NEG_INFINITY).count();
            buffer.resize(n.next_multiple_of(LANES), f64::NEG_INFINITY);
            let scores = RowScores::Copied(&mut buffer[..]);
            let (slack, weights) = match weight_kind {
                WeightKind::Exp { .. } => (ErrorBound::f64(n, error), false),
                WeightKind::Weight => (ErrorBound::weights(n), true),
            };
            let row = Prepared {
                scores,
                positions: None,
                largest,
                rough: None,
                prefetch: None,
                smallest: f64::NEG_INFINITY,
                visible,
                slack,
                finer: None,
                exact_ties: error == 0.0,
                weights,
            };
            match weight_kind {
                WeightKind::Exp { scale } => exponential(row, scale, workspace, visitor),
                WeightKind::Weight => visitor.visit(row, Identity, workspace),
            }
        });
        workspace.f64 = buffer;
        result
    }

    /// Copies the visible part of a row into padded scratch and surveys it.
    fn survey<E: Element>(
        &self,
        from: &[E],
        negate: bool,
        scores: &mut [E],
    ) -> Result<Survey<E::Scalar>, Error> {
        if negate {
            scores.iter_mut().zip(from).for_each(|(score, value)| *score = value.negated());
            return Ok(self.simd.survey(None, from.len(), scores));
        }
        if self.threads == 1 {
            return Ok(self.simd.survey(Some(from), from.len(), scores));
        }
        let chunks = scores.chunks_mut(CHUNK).zip(from.chunks(CHUNK));
        let survey =
            |(scores, from): (&mut [E], &[E])| self.simd.survey(Some(from), from.len(), scores);
        let parts = threads::map(self.threads, chunks, 1, survey)?;
        let joined = parts.into_iter().reduce(Survey::join);
        Ok(joined.unwrap_or_else(|| self.simd.survey(None, 0, scores)))
    }

    /// Surveys the visible part of a row in place, in whole groups. Long rows are roughly weighed at the same time,
    /// against the largest of a few scores.
    fn scan<E: Element>(
        &self,
        from: &[E],
        weigh: bool,
    ) -> Result<(Survey<E::Scalar>, Option<f64>), Error> {
        /// Length from which a row is weighed roughly; shorter rows are weighed whole.
        const LONG: usize = 2048;
        /// Spread of scores up to which a sample will do.
        const FLAT: f64 = 7.0;
        /// Largest distance above the shift at which scores are weighed in f32.
        const HIGHEST: f64 = 60.0;
        let scale = self.scores.scale;
        let (mut shift, mut least) = (E::Scalar::NEG_INFINITY, E::Scalar::INFINITY);
        if weigh && from.len() >= LONG {
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

/// Hands a row whose weights are `exp(scale * score)` to the visitor.
fn exponential<E: PerDtype, V: Visitor>(
    row: Prepared<'_, E>,
    scale: f64,
    workspace: &mut Workspace,
    visitor: V,
) -> Result<V::Output, Error>
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let shift = row.largest;
    if scale == 1.0 {
        visitor.visit(row, Exp(shift), workspace)
    } else {
        visitor.visit(row, ScaledExp { shift: shift.into(), scale }, workspace)
    }
}
