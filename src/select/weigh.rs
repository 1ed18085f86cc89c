//! The weights of a row in f32, relative to its largest.

use super::batch::{load, with_workspace};
use super::workspace::{Buffers, Workspace, padded};
use crate::error::Error;
use crate::kernels::{Element, LANES, Scalar, Scaled, Shifted, Simd, Stored, Weigh};
use crate::mass::Slack;
use crate::scores::{Data, Keys64, Kind, Law as Meaning, Mask, Scores};

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
    let simd = Simd::current()?;
    let plain = scores.kind != Kind::Probs
        && scores.scale != 0.0
        && !matches!(scores.mask, Some(Mask::Additive(_)));
    with_workspace(|workspace| match scores.data {
        Data::F32(data) if plain => native(data, scores, row, simd, workspace, out),
        Data::F64(data) if plain => native(data, scores, row, simd, workspace, out),
        Data::F16(data) if plain => native(data, scores, row, simd, workspace, out),
        Data::Bf16(data) if plain => native(data, scores, row, simd, workspace, out),
        _ => double(scores, row, simd, workspace, out),
    })
}

fn native<E: Buffers>(
    data: &[E],
    scores: &Scores<'_>,
    row: usize,
    simd: Simd,
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<RowWeights, Error> {
    let span = scores.span(row);
    let mut buffer = std::mem::take(E::keys(workspace));
    let keys = padded(&mut buffer, span.n, E::MASKED);
    let loaded = load(simd, scores, data, &span, false, keys);
    let result = if loaded.bad {
        let place = scores.place(row, None);
        Err(scores.judge(row).err().unwrap_or(Error::ScoreNan { place }))
    } else {
        let scale = scores.scale.abs();
        let radius = scores.row_radius(row);
        let slack = if size_of::<E::Scalar>() == 8 {
            Slack::f64(span.n, radius)
        } else {
            Slack::f32(radius)
        };
        Ok(if scale == 1.0 {
            write(simd, keys, Shifted(loaded.largest), 1.0, slack, out)
        } else {
            let law = Scaled { shift: loaded.largest.into(), scale };
            write(simd, keys, law, 1.0, slack, out)
        })
    };
    *E::keys(workspace) = buffer;
    result
}

fn double(
    scores: &Scores<'_>,
    row: usize,
    simd: Simd,
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<RowWeights, Error> {
    let mut keys = std::mem::take(&mut workspace.f64);
    let result = scores.keys64(row, &mut keys).map(|meaning| {
        let Keys64 { law, largest, error } = meaning;
        let n = keys.len();
        keys.resize(n.next_multiple_of(LANES), f64::NEG_INFINITY);
        let slack = Slack::f64(n, error);
        match law {
            Meaning::Exp { scale: 1.0 } => write(simd, &keys, Shifted(largest), 1.0, slack, out),
            Meaning::Exp { scale } => {
                write(simd, &keys, Scaled { shift: largest, scale }, 1.0, slack, out)
            }
            Meaning::Weight => write(simd, &keys, Stored, largest, Slack::weights(n), out),
        }
    });
    workspace.f64 = keys;
    result
}

fn write<E: Element, W: Weigh<E::Scalar>>(
    simd: Simd,
    keys: &[E],
    law: W,
    unit: f64,
    slack: Slack,
    out: &mut [f32],
) -> RowWeights {
    let mut weights = vec![E::Scalar::default(); keys.len()];
    simd.weights(keys, law, &mut weights);
    let mut total = 0.0;
    for ((out, key), &weight) in out.iter_mut().zip(keys).zip(&weights) {
        if key.widen() > E::Scalar::NEG_INFINITY {
            let weight: f64 = weight.into();
            // Never more than it is: a subnormal would not be within a relative error.
            let weight = (weight / unit) as f32;
            *out = if weight < f32::MIN_POSITIVE { 0.0 } else { weight };
            total += f64::from(*out);
        } else {
            *out = HIDDEN;
        }
    }
    RowWeights { total, slack }
}
