//! Tensors of requests, which come as safetensors files.

use certk_rs::Data;
use certk_rs::half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

use crate::failure::{Failure, Result};

#[cfg(target_endian = "big")]
compile_error!("safetensors are little-endian, and are read as they lie");

/// Numbers at an address where they can be read.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    words: Vec<u64>,
    bytes: usize,
}

/// Read the tensors of these names from a file that has no others.
pub(crate) fn tensors<const N: usize>(
    file: &[u8],
    names: [&'static str; N],
) -> Result<[Tensor; N]> {
    let wrong = |problem: String| Failure::input(format!("the body: {problem}"));
    let file = SafeTensors::deserialize(file).map_err(|error| wrong(error.to_string()))?;
    let read = |name| {
        let view = file.tensor(name).ok()?;
        let shape = view.shape().to_vec();
        let mut tensor = Tensor { name, dtype: view.dtype(), shape, words: vec![], bytes: 0 };
        tensor.extend(view.data());
        Some(tensor)
    };
    let found: Vec<Tensor> = names.into_iter().filter_map(read).collect();
    match found.try_into() {
        Ok(found) if file.len() == N => Ok(found),
        _ => Err(wrong(format!("it has the tensors {:?}: send {names:?}", file.names()))),
    }
}

impl Tensor {
    fn extend(&mut self, more: &[u8]) {
        let end = self.bytes + more.len();
        self.words.resize(end.div_ceil(8), 0);
        bytemuck::cast_slice_mut(&mut self.words)[self.bytes..end].copy_from_slice(more);
        self.bytes = end;
    }

    /// Append a tensor of the same type and shape behind the first axis.
    pub(crate) fn append(&mut self, more: &Tensor) {
        self.extend(more.bytes());
        self.shape[0] += more.shape[0];
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    pub(crate) fn data(&self) -> Result<Data<'_>> {
        let bytes = self.bytes();
        Ok(match self.dtype {
            Dtype::F32 => Data::F32(bytemuck::cast_slice(bytes)),
            Dtype::F64 => Data::F64(bytemuck::cast_slice(bytes)),
            Dtype::F16 => Data::F16(bytemuck::cast_slice::<u8, f16>(bytes)),
            Dtype::BF16 => Data::Bf16(bytemuck::cast_slice::<u8, bf16>(bytes)),
            other => return Err(Failure::input(format!("{} are {other}: send floats", self.name))),
        })
    }

    pub(crate) fn integers(&self) -> Result<&[i64]> {
        let integers = (self.dtype == Dtype::I64).then(|| bytemuck::cast_slice(self.bytes()));
        integers
            .ok_or_else(|| Failure::input(format!("{} are {}: send I64", self.name, self.dtype)))
    }
}
