//! How attention is to be computed, and what it may lose.

use half::{bf16, f16};

use super::ball::{ValueBall, norm, norm_of_square};
use crate::builders::builders_of_defaults;
use crate::names::names;

/// How attention is to be computed.
///
/// ```
/// use certk_rs::{AttentionOptions, Precision};
/// let options = AttentionOptions::new().causal(true).precision(Precision::F32).threads(1);
/// assert!(options.causal && options.precision == Precision::F32 && options.scale.is_none());
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct AttentionOptions<'a> {
    /// What products are multiplied by to be scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Query i of m sees keys up to i + n - m.
    pub causal: bool,
    /// How many keys a row sees, from the first; one for all rows or one per row.
    pub lengths: Option<&'a [i64]>,
    /// A byte per key and row, zero where it is masked, and the strides of the rows' axes in it.
    pub mask: Option<(&'a [u8], &'a [usize])>,
    /// A score per query head, or one for all, that joins the softmax of each of its rows with no value (an attention sink, as
    /// learned by gpt-oss); negative infinity for none.
    pub sinks: Option<&'a [f64]>,
    /// What the output is rounded to.
    pub precision: Precision,
    /// A ball around the values, so that they need not be read for a bound of the output's error.
    pub ball: Option<&'a ValueBall>,
    /// Drop what may be dropped also where computing everything is faster: to see how many keys are needed.
    pub even_if_slower: bool,
    /// Whether keys or values lie in mapped files: what an index chooses is then asked of the system before it is read, so that
    /// it comes at once and nothing else does.
    pub mapped: bool,
    /// How many threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

builders_of_defaults! { AttentionOptions<'a> {
    /// What products are multiplied by to be scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    scale(scale: impl Into<Option<f64>>) = scale.into();
    /// Query i of m sees keys up to i + n - m.
    causal(causal: bool) = causal;
    /// How many keys a row sees, from the first; one for all rows or one per row.
    lengths(lengths: impl Into<Option<&'a [i64]>>) = lengths.into();
    /// A byte per key and row, zero where it is masked, and the strides of the rows' axes in it.
    mask(mask: &'a [u8], strides: &'a [usize]) = Some((mask, strides));
    /// A score per query head, or one for all, that joins the softmax of each of its rows with no value.
    sinks(sinks: impl Into<Option<&'a [f64]>>) = sinks.into();
    /// What the output is rounded to.
    precision(precision: Precision) = precision;
    /// A ball around the values, so that they need not be read for a bound of the output's error.
    ball(ball: impl Into<Option<&'a ValueBall>>) = ball.into();
    /// Drops what may be dropped also where computing everything is faster.
    even_if_slower(slower: bool) = slower;
    /// Whether keys or values lie in mapped files.
    mapped(mapped: bool) = mapped;
    /// How many threads; `None` for all available.
    threads(threads: impl Into<Option<usize>>) = threads.into();
} }

/// What a row may lose. One number for all rows, or one per row.
///
/// ```
/// # use certk_rs::{AttentionOptions, Budget, Precision, Vectors, attention};
/// # let q = Vectors::new("q", &[4.0_f32, 0.0], &[1, 1, 2])?;
/// # let k = Vectors::new("k", &[3.0_f32, 0.0, 0.0, 3.0, -3.0, 0.0], &[1, 3, 2])?;
/// # let v = Vectors::new("v", &[0.1_f32, 20.0, 30.0], &[1, 3, 1])?;
/// let options = AttentionOptions::new();
/// let found = attention(&q, &k, &v, Budget::Output(&[0.25]), None, &options)?;
/// let within = found.within.expect("the budget is on the output");
/// assert!(within[0] <= 0.25);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Budget<'a> {
    /// Its tail mass is to be at most this, at least 0 and below 1; 0 is plain attention.
    TailMass(&'a [f64]),
    /// Its output is to be off by at most this in the Euclidean norm, all rounding included; finite and not negative.
    Output(&'a [f64]),
}

/// The precision of an output.
///
/// ```
/// # use certk_rs::{AttentionOptions, Budget, Precision, Vectors, attention};
/// # let q = Vectors::new("q", &[4.0_f32, 0.0], &[1, 1, 2])?;
/// # let k = Vectors::new("k", &[3.0_f32, 0.0, 0.0, 3.0, -3.0, 0.0], &[1, 3, 2])?;
/// # let v = Vectors::new("v", &[0.1_f32, 20.0, 30.0], &[1, 3, 1])?;
/// let options = AttentionOptions::new().precision(Precision::F32);
/// let found = attention(&q, &k, &v, Budget::TailMass(&[0.0]), None, &options)?;
/// assert!(found.out.as_slice::<f32>().is_some());
/// assert!(found.rounding[0] > 0.0);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Precision {
    /// f64, in which it is computed.
    #[default]
    F64,
    /// f32.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain floating point.
    Bf16,
}

names! { Precision, "precision", "use \"float64\", \"float32\", \"float16\" or \"bfloat16\"", {
    "float64" => Precision::F64,
    "float32" => Precision::F32,
    "float16" => Precision::F16,
    "bfloat16" => Precision::Bf16,
} }

impl Precision {
    /// The nearest number of this precision (f16 and bf16 by way of f32).
    pub(super) fn nearest(self, entry: f64) -> f64 {
        match self {
            Precision::F64 => entry,
            Precision::F32 => f64::from(entry as f32),
            Precision::F16 => f64::from(f16::from_f32(entry as f32)),
            Precision::Bf16 => f64::from(bf16::from_f32(entry as f32)),
        }
    }

    /// Rounds a vector, and says how far that moved it at most.
    pub(super) fn round(self, vector: &mut [f64]) -> f64 {
        match self {
            Precision::F64 => return 0.0,
            Precision::F32 => return round_to_f32(vector),
            Precision::F16 | Precision::Bf16 => {}
        }
        norm(vector.iter_mut().map(|entry| {
            let exact = std::mem::replace(entry, self.nearest(*entry));
            *entry - exact
        }))
    }

    /// Rounding moves a vector of this length and so many entries by at most this.
    pub(super) fn moves(self, length: f64, dim: usize) -> f64 {
        let (relative, absolute) = match self {
            Precision::F64 => return 0.0,
            Precision::F32 => (2f64.powi(-24), 2f64.powi(-149)),
            Precision::F16 => (2f64.powi(-11) * 1.001, 2f64.powi(-24)),
            Precision::Bf16 => (2f64.powi(-8) * 1.001, 2f64.powi(-132)),
        };
        relative * length + absolute * dim as f64
    }
}

/// The same to f32, in steps that compilers see lanes in.
fn round_to_f32(vector: &mut [f64]) -> f64 {
    let count = vector.len();
    let (mut squares, mut moved) = ([0.0; 8], [0u64; 8]);
    let (eights, rest) = vector.as_chunks_mut::<8>();
    for eight in eights {
        for ((entry, square), moved) in eight.iter_mut().zip(&mut squares).zip(&mut moved) {
            let rounded = f64::from(*entry as f32);
            let off = rounded - *entry;
            *entry = rounded;
            *square += off * off;
            *moved |= off.to_bits() << 1;
        }
    }
    let rest = norm(rest.iter_mut().map(|entry| {
        let exact = std::mem::replace(entry, f64::from(*entry as f32));
        *entry - exact
    }));
    if moved == [0; 8] {
        return rest;
    }
    norm_of_square(squares.iter().sum::<f64>() + rest * rest, count)
}
