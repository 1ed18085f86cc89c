//! Options and budgets of attention.

use half::f16;

use super::ball::{ValueBall, norm, norm_of_square};
use crate::builders::builders_of_defaults;
use crate::index::ValueIndex;
use crate::names::names;
use crate::rows::Vectors;

/// Options of [`attention`](crate::attention()).
///
/// ```
/// use certk_rs::{AttentionOptions, Precision};
/// let options = AttentionOptions::new().causal(true).precision(Precision::F32).threads(1);
/// assert!(options.causal && options.precision == Precision::F32 && options.scale.is_none());
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct AttentionOptions<'a> {
    /// Factor from products to scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Causal mask: query i of m sees keys up to i + n - m.
    pub causal: bool,
    /// Number of keys that a row sees, from the first; one for all rows or one per row.
    pub lengths: Option<&'a [i64]>,
    /// A byte per key and row, zero where it is masked, and the strides of the rows' axes in it.
    pub mask: Option<(&'a [u8], &'a [usize])>,
    /// A score per query head, or one for all, that joins the softmax of each of its rows with no value (an attention sink, as
    /// learned by gpt-oss); negative infinity for none.
    pub sinks: Option<&'a [f64]>,
    /// Soft cap of scores c, from 1e-30 to 1e30: a score x becomes c tanh(x / c), as in Gemma 2.
    pub soft_cap: Option<f64>,
    /// Numbers that are added to capped scores, one per row and key, `(..., m, n)`: finite where the row sees the key.
    pub bias: Option<&'a Vectors<'a>>,
    /// Precision of the output.
    pub precision: Precision,
    /// Ball around the values, so that they need not be read for a bound of the output's error.
    pub ball: Option<&'a ValueBall>,
    /// Index of the values: rows from which little can be dropped then take most weights and values from codes.
    pub value_index: Option<&'a ValueIndex<'a>>,
    /// Drop keys even where full attention is faster, to measure how many are needed.
    pub even_if_slower: bool,
    /// Sources of weights.
    pub weights: Weights,
    /// `true` if keys or values lie in mapped files. The keys selected by an index are then requested from the system
    /// before they are read.
    pub mapped: bool,
    /// Number of threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

builders_of_defaults! { AttentionOptions<'a> {
    /// Sets the factor from products to scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    scale(scale: impl Into<Option<f64>>) = scale.into();
    /// Sets the causal mask: query i of m sees keys up to i + n - m.
    causal(causal: bool) = causal;
    /// Sets the number of keys that a row sees, from the first; one for all rows or one per row.
    lengths(lengths: impl Into<Option<&'a [i64]>>) = lengths.into();
    /// Masks keys by a byte per key and row, zero where it is masked; `strides` are those of the rows' axes in it.
    mask(mask: &'a [u8], strides: &'a [usize]) = Some((mask, strides));
    /// Adds a score per query head, or one for all, that joins the softmax of each of its rows with no value.
    sinks(sinks: impl Into<Option<&'a [f64]>>) = sinks.into();
    /// Caps scores softly at c, from 1e-30 to 1e30: a score x becomes c tanh(x / c).
    soft_cap(cap: impl Into<Option<f64>>) = cap.into();
    /// Adds numbers to capped scores, one per row and key, `(..., m, n)`. Axes that repeat have a stride of 0.
    bias(bias: impl Into<Option<&'a Vectors<'a>>>) = bias.into();
    /// Sets the precision of the output.
    precision(precision: Precision) = precision;
    /// Gives a ball around the values, so that they need not be read for a bound of the output's error.
    ball(ball: impl Into<Option<&'a ValueBall>>) = ball.into();
    /// Gives an index of the values, so that weights and values may come from codes.
    value_index(index: impl Into<Option<&'a ValueIndex<'a>>>) = index.into();
    /// Drops keys even where full attention is faster.
    even_if_slower(slower: bool) = slower;
    /// Sets the sources of weights.
    weights(weights: Weights) = weights;
    /// States that keys or values lie in mapped files.
    mapped(mapped: bool) = mapped;
    /// Sets the number of threads; `None` for all available.
    threads(threads: impl Into<Option<usize>>) = threads.into();
} }

/// Budget of a row's loss. One number for all rows, or one per row.
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
    /// Largest tail mass, at least 0 and below 1; 0 is full attention.
    TailMass(&'a [f64]),
    /// Largest error of the output in the Euclidean norm, all rounding included; finite and not negative.
    Output(&'a [f64]),
}

/// Sources of weights.
///
/// ```
/// use certk_rs::{AttentionOptions, Weights};
/// assert_eq!(AttentionOptions::new().weights, Weights::Codes);
/// assert_eq!("exact".parse(), Ok(Weights::Exact));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Weights {
    /// Codes of keys and values, where there is an index of both, and bf16 of many rows, as far as the budget allows.
    #[default]
    Codes,
    /// Exact scores alone: keys are dropped, and nothing else is lost but rounding.
    Exact,
}

names! { Weights, "weights", "use \"codes\" or \"exact\"", {
    "codes" => Weights::Codes,
    "exact" => Weights::Exact,
} }

/// Precision of an output.
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
    /// Returns the nearest number of this precision (f16 and bf16 by way of f32).
    pub(super) fn nearest(self, entry: f64) -> f64 {
        match self {
            Precision::F64 => entry,
            Precision::F32 => f64::from(entry as f32),
            Precision::F16 => f64::from(f16::from_f32(entry as f32)),
            Precision::Bf16 => nearest_bf16(entry),
        }
    }

    /// Rounds a vector, and returns an upper bound on the distance.
    pub(super) fn round(self, vector: &mut [f64]) -> f64 {
        match self {
            Precision::F64 => 0.0,
            Precision::F32 => round_by(vector, |entry| f64::from(entry as f32)),
            Precision::F16 => round_by(vector, |entry| Precision::F16.nearest(entry)),
            Precision::Bf16 => round_by(vector, nearest_bf16),
        }
    }

    /// Returns a bound on the distance by which rounding moves a vector of this length and dimension.
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

/// Returns the nearest bf16 of the nearest f32, in steps that compilers vectorize.
fn nearest_bf16(entry: f64) -> f64 {
    let bits = (entry as f32).to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000;
    if entry.is_nan() { entry } else { f64::from(f32::from_bits(rounded)) }
}

/// Rounds a vector, and returns an upper bound on the distance.
fn round_by(vector: &mut [f64], nearest: impl Fn(f64) -> f64) -> f64 {
    let count = vector.len();
    let (mut squares, mut moved) = ([0.0; 8], [0u64; 8]);
    let (eights, rest) = vector.as_chunks_mut::<8>();
    for eight in eights {
        for ((entry, square), moved) in eight.iter_mut().zip(&mut squares).zip(&mut moved) {
            let rounded = nearest(*entry);
            let off = rounded - *entry;
            *entry = rounded;
            *square += off * off;
            *moved |= off.to_bits() << 1;
        }
    }
    let rest = norm(rest.iter_mut().map(|entry| {
        let exact = std::mem::replace(entry, nearest(*entry));
        *entry - exact
    }));
    if moved == [0; 8] {
        return rest;
    }
    norm_of_square(squares.iter().sum::<f64>() + rest * rest, count)
}
