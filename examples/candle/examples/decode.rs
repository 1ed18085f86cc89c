//! Decoding with candle's `KvCache`: `cargo run --release --example decode`.

use std::time::{Duration, Instant};

use candle_core::{Device, Result, Tensor};
use candle_nn::{kv_cache::KvCache, ops::softmax_last_dim};
use certk_candle::{CertifiedAttention, Codes};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 128;
const PROMPT: usize = 16384;
const STEPS: usize = 32;

fn main() -> Result<()> {
    let random = |size: f32, n: usize, heads: usize| {
        Tensor::randn(0.0, size, (1, heads, n, DIM), &Device::Cpu)
    };
    let mut cache = KvCache::new(2, PROMPT + STEPS);
    let (k, v) = cache.append(&random(1.0, PROMPT, KV_HEADS)?, &random(1.0, PROMPT, KV_HEADS)?)?;
    let mut codes = Codes::build(&k, &v)?;
    let (mut kept, mut scored, mut off, mut times) = (0, 0, 0.0_f64, [Duration::ZERO; 2]);
    for _ in 0..STEPS {
        let q = random(4.0, 1, HEADS)?;
        let (key, value) = (random(1.0, 1, KV_HEADS)?, random(1.0, 1, KV_HEADS)?);
        let (k, v) = cache.append(&key, &value)?;

        let begun = Instant::now();
        codes.append(&key, &value)?;
        let op = CertifiedAttention { eps: 0.01, codes: Some(&codes), ..Default::default() };
        q.apply_op3_no_bwd(&k, &v, &op)?;
        times[0] += begun.elapsed();

        let begun = Instant::now();
        let grouped = q.reshape((1, KV_HEADS, HEADS / KV_HEADS, DIM))?;
        let scores = (grouped.matmul(&k.transpose(2, 3)?)? / (DIM as f64).sqrt())?;
        softmax_last_dim(&scores)?.matmul(&v)?;
        times[1] += begun.elapsed();

        let proof = op.certificate.into_inner().expect("nothing has panicked");
        kept += proof.kept.iter().sum::<i64>();
        scored += proof.scored.iter().sum::<i64>();
        off = proof.error_bound.into_iter().fold(off, f64::max);
    }
    let all = (STEPS * HEADS * (PROMPT + STEPS / 2)) as f64 / 100.0;
    let [certified, dense] = times.map(|time| time.as_secs_f64() * 1e3 / STEPS as f64);
    println!("eps = .01: {:.1} % of keys kept, most by codes", kept as f64 / all);
    println!("{:.1} % scored exactly; output off by at most {off:.3}", scored as f64 / all);
    println!(
        "a step: {certified:.2} ms, by candle's products {dense:.2} ms: {:.2}",
        certified / dense
    );
    Ok(())
}
