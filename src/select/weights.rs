//! Weights of a row in f32, relative to its largest.

use super::read::{Row, Source};
use super::scratch::{ReadScratch, Workspace};
use super::weight_fn::{InvertibleWeightFn, for_scale, for_weights};
use crate::error::Error;
use crate::kernels::{InDouble, Scalar, Simd};
use crate::numerics::certified_sums::ErrorBound;
use crate::rows::{Scores, for_dtype};
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
    let source = Source::new(scores, row, Simd::current()?);
    let n = scores.longest();
    with_scratch(|workspace: &mut Workspace| {
        let read = &mut workspace.row.read;
        if source.is_plain(&mut read.admitted)? {
            return for_dtype!(scores.data, stored => {
                let row = source.whole(stored, read)?;
                for_scale!(scores.scale.abs(), row.keys.largest, weight_fn =>
                    Ok(write(&row, weight_fn, n, out)))
            });
        }
        let (row, kind) = source.double(&mut read.copies.f64)?;
        for_weights!(kind, row.keys.largest, weight_fn => Ok(write(&row, weight_fn, n, out)))
    })
}

fn write<E: InDouble, W: InvertibleWeightFn<E::Scalar>>(
    row: &Row<'_, E>,
    weight_fn: W,
    n: usize,
    out: &mut [f32],
) -> RowWeights {
    let (scores, keys) = (row.scores.as_slice(), &row.keys);
    let unit: f64 = if W::EXACT { keys.largest.into() } else { 1.0 };
    let total = keys.simd.weights_f32(scores, weight_fn, unit, &mut out[..scores.len()]);
    let whole = keys.visible == n;
    if !whole {
        out[scores.len()..].fill(HIDDEN);
        for (out, score) in out.iter_mut().zip(scores) {
            if score.widen() == E::Scalar::NEG_INFINITY {
                *out = HIDDEN;
            }
        }
        out[n..].fill(0.0);
    }
    RowWeights { total, slack: row.slack, whole }
}

/// Marks the keys that a row sees. Returns `true` if it sees all.
///
/// # Errors
/// The error of an invalid row.
pub(crate) fn see_row(scores: &Scores<'_>, row: usize, seen: &mut [bool]) -> Result<bool, Error> {
    let source = Source::new(scores, row, Simd::current()?);
    with_scratch(|workspace: &mut Workspace| {
        let read: &mut ReadScratch = &mut workspace.row.read;
        if source.is_plain(&mut read.admitted)? {
            return for_dtype!(scores.data, stored => Ok(mark(&source.whole(stored, read)?, seen)));
        }
        Ok(mark(&source.double(&mut read.copies.f64)?.0, seen))
    })
}

fn mark<E: InDouble>(row: &Row<'_, E>, seen: &mut [bool]) -> bool {
    let whole = row.keys.visible == seen.len();
    for (seen, score) in seen.iter_mut().zip(row.scores.as_slice()) {
        *seen |= whole || score.widen() > E::Scalar::NEG_INFINITY;
    }
    whole
}
