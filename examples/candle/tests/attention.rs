//! Certified attention against candle's own in f64, which holds all dtypes exactly.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{kv_cache::KvCache, ops::softmax};
use certk_candle::{CertifiedAttention, Codes};

const HEADS: usize = 6;
const DIM: usize = 32;

/// Returns `(2, n, heads, DIM)`, as models make them.
fn random(size: f64, heads: usize, n: usize, dtype: DType) -> Result<Tensor> {
    Tensor::randn(0.0, size, (2, n, heads, DIM), &Device::Cpu)?.to_dtype(dtype)
}

fn dense(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool) -> Result<Tensor> {
    let wide = |x: &Tensor| -> Result<Tensor> {
        let (batch, heads, n, d) = x.dims4()?;
        let each = x.to_dtype(DType::F64)?.unsqueeze(2)?;
        each.broadcast_as((batch, heads, HEADS / heads, n, d))?.reshape((batch, HEADS, n, d))
    };
    let (m, n) = (q.dim(2)?, k.dim(2)?);
    let hidden = |at| if causal && at % n > at / n + n - m { f64::NEG_INFINITY } else { 0.0 };
    let mask = Tensor::from_iter((0..m * n).map(hidden), &Device::Cpu)?.reshape((m, n))?;
    let scores = (wide(q)?.matmul(&wide(k)?.transpose(2, 3)?)? / (DIM as f64).sqrt())?;
    softmax(&scores.broadcast_add(&mask)?, D::Minus1)?.matmul(&wide(v)?)
}

#[test]
fn outputs_are_within_their_bound_of_dense_attention() -> Result<()> {
    let (mut fewer, cases) = (0, [1, 1, 1, 3, 40]);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut cache = KvCache::new(1, 512); // grows
        let (k, v) = cache.append(&random(1.0, 2, 900, dtype)?, &random(1.0, 2, 900, dtype)?)?;
        let mut codes = Codes::build(&k.transpose(1, 2)?, &v.transpose(1, 2)?)?;
        for m in cases {
            let q = random(6.0, HEADS, m, dtype)?.transpose(1, 2)?;
            let (key, value) = (random(1.0, 2, m, dtype)?, random(1.0, 2, m, dtype)?);
            let (k, v) = cache.append(&key, &value)?;
            codes.append(&key.transpose(1, 2)?, &value.transpose(1, 2)?)?;
            let (k, v) = (k.transpose(1, 2)?, v.transpose(1, 2)?);
            assert!(!k.is_contiguous() && !v.is_contiguous());
            for (eps, causal) in [(0.0, false), (0.0, true), (0.01, false), (0.01, true)] {
                let exact = dense(&q, &k, &v, causal)?;
                for codes in [None, Some(&codes)] {
                    let op = CertifiedAttention { eps, causal, codes, ..Default::default() };
                    let out = q.apply_op3_no_bwd(&k, &v, &op)?;
                    assert_eq!((out.dtype(), out.dims()), (dtype, exact.dims()));
                    let off =
                        (out.to_dtype(DType::F64)? - &exact)?.sqr()?.sum(D::Minus1)?.sqrt()?;
                    let proof = op.certificate.into_inner().expect("nothing has panicked");
                    let off = off.flatten_all()?.to_vec1::<f64>()?;
                    assert_eq!((off.len(), proof.error_bound.len()), (12 * m, 12 * m));
                    for (off, bound) in off.iter().zip(proof.error_bound) {
                        assert!(bound < if eps == 0.0 { 0.1 } else { 0.6 }, "{dtype:?}: {bound}");
                        assert!(*off <= bound + 1e-12, "{dtype:?}: off by {off}, not {bound}");
                    }
                    assert!(proof.tail_mass_upper.iter().all(|&lost| lost <= eps));
                    fewer += i32::from(proof.scored[0] < 900);
                }
            }
        }
    }
    assert!(fewer > 0, "codes have saved nothing");
    Ok(())
}

#[test]
fn tensors_that_cannot_be_read_in_place_are_refused() -> Result<()> {
    let good = random(1.0, 2, 8, DType::F32)?;
    let refused = |q: &Tensor, k: &Tensor, said: &str| {
        let error = q.apply_op3_no_bwd(k, &good, &CertifiedAttention::default()).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    };
    refused(&good, &good.transpose(2, 3)?, "k has entries 32 apart; call contiguous()");
    refused(&good, &good.to_dtype(DType::U8)?, "k is U8; use f16, bf16, f32 or f64");
    refused(&good, &good.narrow(3, 0, 16)?, "keys have 16 entries");
    refused(&Tensor::new(1f32, &Device::Cpu)?, &good, "q is a scalar");
    refused(&good, &(&good * f64::NAN)?, "k[0, 0, 0, 0]");
    Ok(())
}
