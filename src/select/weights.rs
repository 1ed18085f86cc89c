//! Weights of a row in f32, relative to its largest.

use super::prepared::{Prepared, Source, Visitor};
use super::scratch::{PerDtype, Workspace};
use super::weight_fn::InvertibleWeightFn;
use crate::error::Error;
use crate::kernels::{Element, Scalar, Simd};
use crate::numerics::certified_sums::ErrorBound;
use crate::rows::Scores;
use crate::runtime::scratch::with_scratch;

/// Description of the weights that [`weigh_row`] wrote.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowWeights {
    /// Computed sum of the weights; 0 if nothing is visible.
    pub(crate) total: f64,
    /// Slack for a certificate of this row.
    pub(crate) slack: ErrorBound,
    /// `true` if no key is masked.
    pub(crate) whole: bool,
}

/// Value in place of the weight of a masked key.
pub(crate) const HIDDEN: f32 = -1.0;

/// Writes the weight of every key of a row, [`HIDDEN`] where it is masked, and 0 beyond the last.
///
/// # Errors
/// The error of an invalid row.
pub(crate) fn weigh_row(
    scores: &Scores<'_>,
    row: usize,
    out: &mut [f32],
) -> Result<RowWeights, Error> {
    let source =
        Source { scores, row, simd: Simd::current()?, threads: 1, copied: false, prefetch: None };
    let visitor = Write { simd: source.simd, n: scores.longest(), out };
    with_scratch(|workspace: &mut Workspace| {
        if source.is_plain(workspace)? {
            source.native(workspace, visitor)
        } else {
            source.double(workspace, visitor)
        }
    })
}

/// Marks the keys that a row sees. Returns `true` if it sees all.
///
/// # Errors
/// The error of an invalid row.
pub(crate) fn see_row(scores: &Scores<'_>, row: usize, seen: &mut [bool]) -> Result<bool, Error> {
    let source =
        Source { scores, row, simd: Simd::current()?, threads: 1, copied: false, prefetch: None };
    let visitor = See { seen };
    with_scratch(|workspace: &mut Workspace| {
        if source.is_plain(workspace)? {
            source.native(workspace, visitor)
        } else {
            source.double(workspace, visitor)
        }
    })
}

/// Visitor that marks the visible scores of a prepared row.
struct See<'a> {
    seen: &'a mut [bool],
}

impl Visitor for See<'_> {
    type Output = bool;

    fn searches(&self) -> bool {
        false
    }

    fn visit<E: PerDtype, W: InvertibleWeightFn<E::Scalar>>(
        self,
        row: Prepared<'_, E>,
        _weight_fn: W,
        _workspace: &mut Workspace,
    ) -> Result<bool, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let whole = row.visible == self.seen.len();
        if whole {
            self.seen.fill(true);
        } else {
            for (seen, score) in self.seen.iter_mut().zip(row.scores.as_slice()) {
                *seen |= score.widen() > E::Scalar::NEG_INFINITY;
            }
        }
        Ok(whole)
    }
}

/// Visitor that writes the weights of a prepared row.
struct Write<'a> {
    simd: Simd,
    n: usize,
    out: &'a mut [f32],
}

impl Visitor for Write<'_> {
    type Output = RowWeights;

    fn searches(&self) -> bool {
        false
    }

    fn visit<E: PerDtype, W: InvertibleWeightFn<E::Scalar>>(
        self,
        row: Prepared<'_, E>,
        weight_fn: W,
        _workspace: &mut Workspace,
    ) -> Result<RowWeights, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let scores = row.scores.as_slice();
        let unit: f64 = if row.weights { row.largest.into() } else { 1.0 };
        let total = self.simd.weights_f32(scores, weight_fn, unit, &mut self.out[..scores.len()]);
        let whole = row.visible == self.n;
        if !whole {
            self.out[scores.len()..].fill(HIDDEN);
            for (out, score) in self.out.iter_mut().zip(scores) {
                if score.widen() == E::Scalar::NEG_INFINITY {
                    *out = HIDDEN;
                }
            }
            self.out[self.n..].fill(0.0);
        }
        Ok(RowWeights { total, slack: row.slack, whole })
    }
}
