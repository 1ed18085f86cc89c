//! A row made ready for the passes: copied, masked, judged, with the law of its weights and the slack of its sums.

use half::{bf16, f16};
use rayon::prelude::*;

use super::row::Law;
use super::workspace::{Buffers, Workspace, padded};
use crate::error::Error;
use crate::kernels::{Element, LANES, Loaded, Scalar, Scaled, Shifted, Simd, Stored};
use crate::mass::{CHUNK, Slack};
use crate::scores::{Data, Keys64, Kind, Law as Meaning, Mask, Scores, Span};

/// One row, prepared.
pub(crate) struct Prepared<'a, E: Element, W> {
    /// Larger is better; masked entries are -inf, and whole groups of lanes are filled up with such.
    pub(crate) keys: &'a mut [E],
    pub(crate) largest: E::Scalar,
    /// Unmasked keys.
    pub(crate) live: usize,
    pub(crate) law: W,
    pub(crate) slack: Slack,
    /// Whether equal keys have exactly equal real weights.
    pub(crate) exact_ties: bool,
    /// Whether keys are weights, whose sums can be compared exactly.
    pub(crate) weights: bool,
}

/// What is done with a prepared row, whatever it is stored in.
pub(crate) trait Visitor {
    type Output;

    fn visit<E: Buffers, W: Law<E::Scalar>>(
        self,
        row: Prepared<'_, E, W>,
        workspace: &mut Workspace,
    ) -> Result<Self::Output, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>;
}

/// Which row, and how it is read.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) scores: &'a Scores<'a>,
    pub(crate) row: usize,
    pub(crate) simd: Simd,
    /// Whether its chunks are shared out over the pool that this runs on.
    pub(crate) shared: bool,
}

impl Source<'_> {
    /// Whether the row can be decided in the precision of its own dtype.
    pub(crate) fn is_plain(&self) -> bool {
        self.scores.kind != Kind::Probs
            && self.scores.scale != 0.0
            && !matches!(self.scores.mask, Some(Mask::Additive(_)))
    }

    /// Whether that precision is f32, so that f64 could decide more.
    pub(crate) fn is_single(&self) -> bool {
        !matches!(self.scores.data, Data::F64(_))
    }

    /// Prepares a plain row in its own dtype.
    pub(crate) fn native<V: Visitor>(
        &self,
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error> {
        match self.scores.data {
            Data::F32(data) => self.stored::<f32, V>(data, workspace, visitor),
            Data::F64(data) => self.stored::<f64, V>(data, workspace, visitor),
            Data::F16(data) => self.stored::<f16, V>(data, workspace, visitor),
            Data::Bf16(data) => self.stored::<bf16, V>(data, workspace, visitor),
        }
    }

    fn stored<E: Buffers, V: Visitor>(
        &self,
        data: &[E],
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let span = self.scores.span(self.row);
        let mut buffer = std::mem::take(E::keys(workspace));
        let keys = padded(&mut buffer, span.visible, E::MASKED);
        let Loaded { largest, finite: live, bad } = self.load(data, &span, keys);
        let result = if bad {
            // Judging names the place. Should it find nothing, the buffer changed meanwhile: nothing is certified.
            let place = self.scores.place(self.row, None);
            Err(self.scores.judge(self.row).err().unwrap_or(Error::ScoreNan { place }))
        } else {
            let radius = self.scores.row_radius(self.row);
            let slack = if self.is_single() {
                Slack::f32(radius)
            } else {
                Slack::f64(span.visible, radius)
            };
            let (exact_ties, weights) = (radius == 0.0, false);
            let scale = self.scores.scale.abs();
            if scale == 1.0 {
                let law = Shifted(largest);
                let row = Prepared { keys, largest, live, law, slack, exact_ties, weights };
                visitor.visit(row, workspace)
            } else {
                let law = Scaled { shift: largest.into(), scale };
                let row = Prepared { keys, largest, live, law, slack, exact_ties, weights };
                visitor.visit(row, workspace)
            }
        };
        *E::keys(workspace) = buffer;
        result
    }

    /// Prepares any row in f64.
    pub(crate) fn double<V: Visitor>(
        &self,
        workspace: &mut Workspace,
        visitor: V,
    ) -> Result<V::Output, Error> {
        let mut buffer = std::mem::take(&mut workspace.f64);
        let result = self.scores.keys64(self.row, &mut buffer).and_then(|meaning| {
            let Keys64 { law, largest, error } = meaning;
            let n = buffer.len();
            let live = buffer.iter().filter(|key| **key > f64::NEG_INFINITY).count();
            buffer.resize(n.next_multiple_of(LANES), f64::NEG_INFINITY);
            let keys = &mut buffer[..];
            let exact_ties = error == 0.0;
            match law {
                Meaning::Exp { scale } => {
                    let (slack, weights) = (Slack::f64(n, error), false);
                    if scale == 1.0 {
                        let law = Shifted(largest);
                        let row = Prepared { keys, largest, live, law, slack, exact_ties, weights };
                        visitor.visit(row, workspace)
                    } else {
                        let law = Scaled { shift: largest, scale };
                        let row = Prepared { keys, largest, live, law, slack, exact_ties, weights };
                        visitor.visit(row, workspace)
                    }
                }
                Meaning::Weight => {
                    let (law, slack, weights) = (Stored, Slack::weights(n), true);
                    let row = Prepared { keys, largest, live, law, slack, exact_ties, weights };
                    visitor.visit(row, workspace)
                }
            }
        });
        workspace.f64 = buffer;
        result
    }

    /// Copies the visible part of the row into padded scratch.
    fn load<E: Element>(&self, data: &[E], span: &Span, keys: &mut [E]) -> Loaded<E::Scalar> {
        let from = &data[span.start..span.start + span.visible];
        let allowed = match self.scores.mask {
            Some(Mask::Allowed(bytes)) => {
                Some(&bytes[span.mask_start..span.mask_start + span.visible])
            }
            _ => None,
        };
        let negate = self.scores.scale < 0.0;
        if !self.shared {
            return self.simd.load(from, allowed, negate, keys);
        }
        let parts: Vec<_> = keys
            .par_chunks_mut(CHUNK)
            .enumerate()
            .map(|(c, chunk)| {
                let (start, end) = (c * CHUNK, (c * CHUNK + chunk.len()).min(from.len()));
                let allowed = allowed.map(|bytes| &bytes[start..end]);
                self.simd.load(&from[start..end], allowed, negate, chunk)
            })
            .collect();
        let mut total = Loaded { largest: E::Scalar::NEG_INFINITY, finite: 0, bad: false };
        for part in parts {
            total.largest = if part.largest > total.largest { part.largest } else { total.largest };
            total.finite += part.finite;
            total.bad |= part.bad;
        }
        total
    }
}
