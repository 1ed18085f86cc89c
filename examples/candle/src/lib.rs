//! Certified attention as an operator of candle: tensors are read where candle stores them.

use std::sync::Mutex;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp3, DType, Error, Layout, Result, Shape, Storage, Tensor, bail,
};
use certk_rs::{
    AttentionOptions, Budget, Data, IndexOptions, KeyIndex, Outputs, Precision, ValueBall,
    ValueIndex, Vectors, attention,
};

/// Attention that drops from each row a tail mass of at most `eps`, as `q.apply_op3_no_bwd(&k, &v, &op)`.
///
/// Shapes are `(..., heads, m, d)` for queries and `(..., kv_heads, n, d)` for keys and values, with `heads` a multiple of
/// `kv_heads`. All axes but the last may have any strides. The output has the queries' dtype.
#[derive(Default)]
pub struct CertifiedAttention<'a> {
    /// Budget of tail mass: at least 0, which is full attention, and below 1.
    pub eps: f64,
    /// Causal mask: query i of m sees keys up to i + n - m.
    pub causal: bool,
    /// Codes of the keys and values, so that a step of decoding reads few of these.
    pub codes: Option<&'a Codes>,
    /// Proof of the last call.
    pub certificate: Mutex<Certificate>,
}

/// Proof of a call, with an entry for each query.
#[derive(Debug, Default)]
pub struct Certificate {
    /// Upper bound on the dropped mass, or on the total variation distance where weights came from codes.
    pub tail_mass_upper: Vec<f64>,
    /// Upper bound on the Euclidean distance of the output from real-number attention over all keys.
    pub error_bound: Vec<f64>,
    /// Number of keys in the average.
    pub kept: Vec<i64>,
    /// Number of keys that were scored exactly.
    pub scored: Vec<i64>,
}

impl CustomOp3 for CertifiedAttention<'_> {
    fn name(&self) -> &'static str {
        "certified-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (queries, keys) = (vectors("q", q, q_layout)?, vectors("k", k, k_layout)?);
        let values = vectors("v", v, v_layout)?;
        let mut options = AttentionOptions::new().causal(self.causal).precision(match q.dtype() {
            DType::F32 => Precision::F32,
            DType::F16 => Precision::F16,
            DType::BF16 => Precision::Bf16,
            _ => Precision::F64,
        });
        if let Some(codes) = self.codes {
            options = options.value_index(&codes.values).ball(&codes.ball);
        }
        let (budget, index) = ([self.eps], self.codes.map(|codes| &codes.keys));
        let budget = Budget::TailMass(&budget);
        let found = attention(&queries, &keys, &values, budget, index, &options);
        let found = found.map_err(Error::wrap)?;
        let error_bound = found.error_bound(&queries, &values, &options).map_err(Error::wrap)?;
        *self.certificate.lock().map_err(|error| Error::msg(error.to_string()))? = Certificate {
            tail_mass_upper: found.tail_mass_upper,
            error_bound,
            kept: found.k,
            scored: found.scored,
        };
        let rows = &q_layout.dims()[..q_layout.dims().len() - 1];
        let out = match found.out {
            Outputs::F32(out) => CpuStorage::F32(out),
            Outputs::F16(out) => CpuStorage::F16(out),
            Outputs::Bf16(out) => CpuStorage::BF16(out),
            out => CpuStorage::F64(out.to_f64()),
        };
        Ok((out, [rows, &v_layout.dims()[rows.len()..]].concat().into()))
    }
}

/// Codes of the keys and values of a cache, and a ball around the values.
pub struct Codes {
    keys: KeyIndex<'static>,
    values: ValueIndex<'static>,
    ball: ValueBall,
}

impl Codes {
    /// Returns the codes of keys and values `(..., kv_heads, n, d)` in f32, f16 or bf16.
    pub fn build(k: &Tensor, v: &Tensor) -> Result<Self> {
        lend(k, v, |keys, values| {
            let index = KeyIndex::build(keys, &IndexOptions::new())?;
            let (values, ball) = (ValueIndex::build(values)?, ValueBall::new(values)?);
            Ok(Self { keys: index, values, ball })
        })
    }

    /// Appends the codes of keys and values that follow.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        lend(k, v, |keys, values| {
            self.values.append_beside(values, &mut self.keys, keys)?;
            self.ball.append(values)
        })
    }
}

/// Lends the keys and values of two tensors to `work`.
fn lend<R>(
    k: &Tensor,
    v: &Tensor,
    work: impl FnOnce(&Vectors<'_>, &Vectors<'_>) -> std::result::Result<R, certk_rs::Error>,
) -> Result<R> {
    let ((k, k_layout), (v, v_layout)) = (k.storage_and_layout(), v.storage_and_layout());
    let (Storage::Cpu(k), Storage::Cpu(v)) = (&*k, &*v) else {
        bail!("k or v is not on the CPU; move it with to_device(&Device::Cpu)")
    };
    work(&vectors("k", k, k_layout)?, &vectors("v", v, v_layout)?).map_err(Error::wrap)
}

/// Returns the vectors of a tensor, in place.
fn vectors<'a>(
    name: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<Vectors<'a>> {
    let (shape, start) = (layout.dims(), layout.start_offset());
    let Some((&last, strides)) = layout.stride().split_last() else {
        bail!("{name} is a scalar; pass vectors of shape (..., n, d)")
    };
    if last != 1 && shape.last() != Some(&1) {
        bail!("{name} has entries {last} apart; call contiguous() for its last axis")
    }
    let data = match storage {
        CpuStorage::F32(stored) => Data::F32(&stored[start..]),
        CpuStorage::F16(stored) => Data::F16(&stored[start..]),
        CpuStorage::BF16(stored) => Data::Bf16(&stored[start..]),
        CpuStorage::F64(stored) => Data::F64(&stored[start..]),
        _ => bail!("{name} is {:?}; use f16, bf16, f32 or f64", storage.dtype()),
    };
    Vectors::strided(name, data, shape, strides).map_err(Error::wrap)
}
