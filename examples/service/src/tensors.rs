//! Arrays in bodies: raw numbers in, a safetensors file or JSON out.

use std::collections::HashMap;
use std::fmt;

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use certk_rs::Data;
use certk_rs::half::{bf16, f16};
use safetensors::tensor::{Dtype as Stored, TensorView};
use serde::de::{SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::failure::Failure;

/// The content type of a safetensors file.
pub(crate) const SAFETENSORS: &str = "application/vnd.safetensors";

/// What a number is stored in, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    #[default]
    F32,
    F64,
    F16,
    Bf16,
}

impl Dtype {
    pub(crate) fn size(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// The same in a safetensors file.
    pub(crate) fn stored(self) -> Stored {
        match self {
            Dtype::F32 => Stored::F32,
            Dtype::F64 => Stored::F64,
            Dtype::F16 => Stored::F16,
            Dtype::Bf16 => Stored::BF16,
        }
    }

    /// The type of a tensor in a safetensors file.
    pub(crate) fn of(stored: Stored) -> Option<Self> {
        [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16]
            .into_iter()
            .find(|dtype| dtype.stored() == stored)
    }

    /// Bytes as numbers; `None` if they lie at an odd address, or end within a number.
    pub(crate) fn numbers(self, bytes: &[u8]) -> Option<Data<'_>> {
        Some(match self {
            Dtype::F32 => Data::F32(bytemuck::try_cast_slice(bytes).ok()?),
            Dtype::F64 => Data::F64(bytemuck::try_cast_slice(bytes).ok()?),
            Dtype::F16 => Data::F16(bytemuck::try_cast_slice::<u8, f16>(bytes).ok()?),
            Dtype::Bf16 => Data::Bf16(bytemuck::try_cast_slice::<u8, bf16>(bytes).ok()?),
        })
    }
}

/// Numbers of a body, where they can be read as numbers.
pub(crate) enum Numbers {
    /// Where they came in.
    Lent(Bytes, Dtype),
    /// Copied, because they lay at an odd address.
    Copied(Vec<u64>, usize, Dtype),
}

impl Numbers {
    pub(crate) fn new(bytes: Bytes, dtype: Dtype) -> Result<Self, Failure> {
        if cfg!(target_endian = "big") {
            return Err(Failure::new(StatusCode::NOT_IMPLEMENTED, "raw numbers are little-endian"));
        }
        if !bytes.len().is_multiple_of(dtype.size()) {
            return Err(Failure::input(format!(
                "the body has {} bytes, no multiple of the {} that a {dtype:?} takes",
                bytes.len(),
                dtype.size()
            )));
        }
        Ok(Numbers::aligned(bytes, dtype))
    }

    /// Numbers of a JSON body, rounded to what they are to be stored in.
    pub(crate) fn of_json(numbers: &[f64], dtype: Dtype) -> Self {
        Numbers::aligned(stored_bytes(numbers, dtype).into(), dtype)
    }

    /// Numbers at an address where they can be read as such.
    fn aligned(bytes: Bytes, dtype: Dtype) -> Self {
        if bytes.as_ptr().addr().is_multiple_of(8) {
            return Numbers::Lent(bytes, dtype);
        }
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(&bytes);
        Numbers::Copied(words, bytes.len(), dtype)
    }

    pub(crate) fn data(&self) -> Data<'_> {
        let dtype = self.dtype();
        // They are whole numbers at an address for any of them.
        dtype.numbers(self.bytes()).unwrap_or(Data::F32(&[]))
    }

    pub(crate) fn dtype(&self) -> Dtype {
        let (Numbers::Lent(_, dtype) | Numbers::Copied(_, _, dtype)) = self;
        *dtype
    }

    /// The first that is not finite.
    pub(crate) fn infinite(&self) -> Option<usize> {
        match self.data() {
            Data::F32(numbers) => numbers.iter().position(|number| !number.is_finite()),
            Data::F64(numbers) => numbers.iter().position(|number| !number.is_finite()),
            Data::F16(numbers) => numbers.iter().position(|number| !number.is_finite()),
            Data::Bf16(numbers) => numbers.iter().position(|number| !number.is_finite()),
            // No tensor of another type comes this far.
            _ => Some(0),
        }
    }

    /// Their bytes, little-endian.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Numbers::Lent(bytes, _) => bytes,
            Numbers::Copied(words, len, _) => &bytemuck::cast_slice(words)[..*len],
        }
    }
}

/// Numbers rounded to what they are to be stored in (f16 and bf16 as by one rounding).
pub(crate) fn stored_bytes(numbers: &[f64], dtype: Dtype) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(numbers.len() * dtype.size());
    for &number in numbers {
        match dtype {
            Dtype::F64 => bytes.extend_from_slice(&number.to_ne_bytes()),
            Dtype::F32 => bytes.extend_from_slice(&(number as f32).to_ne_bytes()),
            Dtype::F16 => bytes.extend_from_slice(&f16::from_f64(number).to_ne_bytes()),
            Dtype::Bf16 => bytes.extend_from_slice(&bf16::from_f64(number).to_ne_bytes()),
        }
    }
    bytes
}

/// Lengths of axes: `8,4096` in a query, `[8, 4096]` in JSON.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shape(pub(crate) Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Axes;
        impl<'de> Visitor<'de> for Axes {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("lengths of axes, such as 8,4096")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Shape, E> {
                let axes = text.split(',').map(|axis| axis.trim().parse());
                let axes: Result<_, _> = axes.collect();
                axes.map(Shape).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut axes = Vec::new();
                while let Some(axis) = seq.next_element()? {
                    axes.push(axis);
                }
                Ok(Shape(axes))
            }
        }
        deserializer.deserialize_any(Axes)
    }
}

/// Whether the body says that it is JSON.
pub(crate) fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("application/json"))
}

/// An answer: arrays by name, and the same as a value for JSON.
pub(crate) trait Answer: Serialize {
    /// Name, type, shape, little-endian bytes.
    fn tensors(&self) -> Vec<(&'static str, Stored, Vec<usize>, &[u8])>;

    /// What goes into the file's metadata: what is said of all of it.
    fn about(&self) -> Option<HashMap<String, String>> {
        None
    }
}

/// Whether the client wants JSON, rather than a safetensors file.
pub(crate) fn wants_json(headers: &HeaderMap, otherwise: bool) -> bool {
    match headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()) {
        Some(accept) if accept.contains("application/json") => true,
        Some(accept) if accept.contains(SAFETENSORS) => false,
        _ => otherwise,
    }
}

pub(crate) fn respond(answer: &impl Answer, as_json: bool) -> Result<Response, Failure> {
    let failed = |error: String| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error);
    if as_json {
        let text = serde_json::to_vec(answer).map_err(|error| failed(error.to_string()))?;
        return Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response());
    }
    let tensors = answer.tensors();
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            TensorView::new(*dtype, shape.clone(), bytes).map(|view| (*name, view))
        })
        .collect();
    let views = views.map_err(|error| failed(error.to_string()))?;
    let file = safetensors::serialize(views, answer.about());
    let file = file.map_err(|error| failed(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, SAFETENSORS)], file).into_response())
}
