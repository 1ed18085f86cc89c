//! The weights of a row in f32, relative to its largest.

use super::batch::with_workspace;
use super::prepared::{Prepared, Source, Visitor};
use super::row::Law;
use super::workspace::{Buffers, Workspace};
use crate::error::Error;
use crate::kernels::{Element, Scalar, Simd};
use crate::mass::Slack;
use crate::scores::Scores;

/// What [`weigh_row`] says about the weights that it wrote.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowWeights {
    /// Their computed sum; 0 if nothing is visible.
    pub(crate) total: f64,
    /// The slack that a certificate of this row is judged with.
    pub(crate) slack: Slack,
}

/// What is written in place of the weight of a masked key.
pub(crate) const HIDDEN: f32 = -1.0;

/// Writes the weight of every key of a row, [`HIDDEN`] where it is masked.
///
/// # Errors
/// Whatever is wrong with the row.
pub(crate) fn weigh_row(
    scores: &Scores<'_>,
    row: usize,
    out: &mut [f32],
) -> Result<RowWeights, Error> {
    out.fill(HIDDEN);
    let source = Source { scores, row, simd: Simd::current()?, shared: false, next: None };
    let visitor = Write { simd: source.simd, out };
    with_workspace(|workspace| {
        if source.is_plain() {
            source.native(workspace, visitor)
        } else {
            source.double(workspace, visitor)
        }
    })
}

/// Writes the weights of a prepared row.
struct Write<'a> {
    simd: Simd,
    out: &'a mut [f32],
}

impl Visitor for Write<'_> {
    type Output = RowWeights;

    fn searches(&self) -> bool {
        false
    }

    fn visit<E: Buffers, W: Law<E::Scalar>>(
        self,
        row: Prepared<'_, E, W>,
        _workspace: &mut Workspace,
    ) -> Result<RowWeights, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let mut weights = vec![E::Scalar::default(); row.keys.len()];
        self.simd.weights(row.keys, row.law, &mut weights);
        let unit: f64 = if row.weights { row.largest.into() } else { 1.0 };
        let mut total = 0.0;
        for ((out, key), &weight) in self.out.iter_mut().zip(row.keys.iter()).zip(&weights) {
            if key.widen() > E::Scalar::NEG_INFINITY {
                let weight: f64 = weight.into();
                // Never more than it is: a subnormal would not be within a relative error.
                let weight = (weight / unit) as f32;
                *out = if weight < f32::MIN_POSITIVE { 0.0 } else { weight };
                total += f64::from(*out);
            }
        }
        Ok(RowWeights { total, slack: row.slack })
    }
}
