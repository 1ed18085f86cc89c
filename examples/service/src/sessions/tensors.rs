//! Keys and values as a client brings them.

use axum::body::Bytes;
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::asked::Asked;
use crate::failure::Failure;
use crate::tensors::{Dtype, Numbers, Shape};

/// The most bytes that the header of a body may have: it names two tensors.
const HEADER: usize = 1 << 16;

/// Heads, and entries of a key or a value.
pub(super) const LENGTHS: std::ops::RangeInclusive<usize> = 1..=1 << 20;

/// Keys `(heads, n, d)`, and values `(heads, n, d_v)` of the same type if there are any; all numbers are finite.
pub(super) struct Brought {
    pub(super) layout: Layout,
    pub(super) n: usize,
    keys: Numbers,
    values: Option<Numbers>,
}

/// What all keys and values of a session have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) dtype: Dtype,
    pub(super) heads: usize,
    pub(super) dim: usize,
    /// Entries of a value, if there are values.
    pub(super) values: Option<usize>,
}

impl Layout {
    /// Bytes of a head's key.
    pub(super) fn key(&self) -> usize {
        self.dim * self.dtype.size()
    }

    /// Bytes of a head's value.
    pub(super) fn value(&self) -> usize {
        self.values.unwrap_or(0) * self.dtype.size()
    }
}

/// What JSON says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    #[serde(default)]
    dtype: Dtype,
    shape: Shape,
    keys: Vec<f64>,
    values_shape: Option<Shape>,
    values: Option<Vec<f64>>,
}

impl Brought {
    pub(super) fn read(asked: &Asked) -> Result<Self, Failure> {
        if asked.json {
            return Self::of_json(asked.body()?);
        }
        Self::of_safetensors(&asked.body.bytes)
    }

    fn of_json(listed: Listed) -> Result<Self, Failure> {
        let dtype = listed.dtype;
        let keys = ("keys", listed.shape.0, dtype, Numbers::of_json(&listed.keys, dtype));
        let values = match (listed.values_shape, listed.values) {
            (None, None) => None,
            (Some(shape), Some(values)) => {
                Some(("values", shape.0, dtype, Numbers::of_json(&values, dtype)))
            }
            _ => return Err(Failure::input("values and values_shape go together")),
        };
        Self::new(keys, values)
    }

    fn of_safetensors(body: &Bytes) -> Result<Self, Failure> {
        let wrong = |problem: String| Failure::input(format!("the body as safetensors: {problem}"));
        let header = body.first_chunk::<8>().map(|length| u64::from_le_bytes(*length));
        if header.is_none_or(|length| length > HEADER as u64) {
            return Err(wrong(format!("its header must have at most {HEADER} bytes")));
        }
        let file = SafeTensors::deserialize(body).map_err(|error| wrong(error.to_string()))?;
        let one = |name: &'static str| -> Result<Option<Tensor>, Failure> {
            let Ok(tensor) = file.tensor(name) else { return Ok(None) };
            let dtype = Dtype::of(tensor.dtype())
                .ok_or_else(|| wrong(format!("{name} are {}", tensor.dtype())))?;
            let numbers = Numbers::new(body.slice_ref(tensor.data()), dtype)?;
            Ok(Some((name, tensor.shape().to_vec(), dtype, numbers)))
        };
        let (keys, values) = (one("keys")?, one("values")?);
        let keys = keys.ok_or_else(|| wrong("it has no tensor keys".into()))?;
        if file.len() > 1 + usize::from(values.is_some()) {
            return Err(wrong("it may have the tensors keys and values, and no other".into()));
        }
        Self::new(keys, values)
    }

    fn new(keys: Tensor, values: Option<Tensor>) -> Result<Self, Failure> {
        let misfit = |name: &str, shape: &[usize], problem: &str| {
            Failure::input(format!("{name} of shape {shape:?}: {problem}"))
        };
        let (name, shape, dtype, keys) = keys;
        let &[heads, n, dim] = &shape[..] else {
            return Err(misfit(name, &shape, "they need the axes (heads, n, d)"));
        };
        if !LENGTHS.contains(&heads) || !LENGTHS.contains(&dim) {
            return Err(misfit(name, &shape, "heads and entries are 1 to 2^20"));
        }
        if dtype == Dtype::F64 {
            return Err(misfit(name, &shape, "a session holds f32, f16 or bf16; convert them"));
        }
        finite(name, &shape, dtype, &keys)?;
        let mut layout = Layout { dtype, heads, dim, values: None };
        let Some((name, shape, stored, values)) = values else {
            return Ok(Brought { layout, n, keys, values: None });
        };
        let &[value_heads, value_n, width] = &shape[..] else {
            return Err(misfit(name, &shape, "they need the axes (heads, n, d_v)"));
        };
        if (value_heads, value_n, stored) != (heads, n, dtype) || !LENGTHS.contains(&width) {
            let problem =
                "they need the heads, the length and the type of the keys, and 1 to 2^20 entries";
            return Err(misfit(name, &shape, problem));
        }
        finite(name, &shape, dtype, &values)?;
        layout.values = Some(width);
        Ok(Brought { layout, n, keys, values: Some(values) })
    }

    /// A head's keys.
    pub(super) fn keys(&self, head: usize) -> &[u8] {
        let bytes = self.n * self.layout.key();
        &self.keys.bytes()[head * bytes..][..bytes]
    }

    /// A head's values, none if there are none.
    pub(super) fn values(&self, head: usize) -> &[u8] {
        let bytes = self.n * self.layout.value();
        self.values.as_ref().map_or(&[], |values| &values.bytes()[head * bytes..][..bytes])
    }
}

type Tensor = (&'static str, Vec<usize>, Dtype, Numbers);

/// That there are as many numbers as the shape says, and all of them are numbers.
pub(super) fn finite(
    name: &str,
    shape: &[usize],
    dtype: Dtype,
    numbers: &Numbers,
) -> Result<(), Failure> {
    let count = shape.iter().try_fold(1usize, |all, &axis| all.checked_mul(axis));
    let have = numbers.bytes().len() / dtype.size();
    if count != Some(have) {
        return Err(Failure::input(format!(
            "{name}: there are {have} numbers for shape {shape:?}"
        )));
    }
    let Some(mut at) = numbers.infinite() else { return Ok(()) };
    let mut place = vec![0; shape.len()];
    for (place, &axis) in place.iter_mut().zip(shape).rev() {
        (*place, at) = (at % axis, at / axis);
    }
    Err(Failure::input(format!("{name}{place:?} is not finite as {dtype:?}: repair the input")))
}
