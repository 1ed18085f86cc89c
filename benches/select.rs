//! Certified selection of Gaussian rows on one thread: `cargo bench`. Every result is checked once before it is timed.
#![allow(missing_docs)] // what criterion's macros make

use std::time::Duration;

use certk_rs::{CertifyOptions, Keep, Options, Scores, Status, certify, select};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Standard normal numbers by Box and Muller from a Weyl sequence.
fn gaussian(count: usize, sigma: f64) -> Vec<f32> {
    (1..=count)
        .map(|i| {
            let u = (i as f64 * 0.618_033_988_749_894_9).fract().max(1e-12);
            let v = (i as f64 * 0.754_877_666_246_692_8).fract();
            (sigma * (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
        })
        .collect()
}

fn benches(criterion: &mut Criterion) {
    let options = Options::new().threads(1);
    let eps = [0.01];
    for (rows, n) in [(2048, 512), (256, 4096), (32, 32_768), (8, 131_072), (1, 1 << 20)] {
        let data = gaussian(rows * n, 3.0);
        let scores = Scores::new(&data, &[rows, n]).expect("the shape fits");
        let found = select(&scores, &eps, &options).expect("finite scores");
        assert!(found.status.iter().all(|&status| status == Status::Certified));
        let indices: Vec<i64> = found.indices.iter().map(|&i| i64::from(i)).collect();
        let keep = Keep::Indices { indptr: &found.indptr, indices: &indices };
        let judged = certify(&scores, &keep, &CertifyOptions::new().eps(&eps).independent(true))
            .expect("a kept set");
        assert!(judged.holds.expect("budgets were given").iter().all(|&holds| holds));

        let mut group = criterion.benchmark_group("gaussian, sigma 3, eps 0.01");
        group.throughput(Throughput::Elements((rows * n) as u64)).sample_size(10);
        group.warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(2));
        group.bench_function(BenchmarkId::new("select", n), |b| {
            b.iter(|| select(&scores, &eps, &options));
        });
        group.bench_function(BenchmarkId::new("certify", n), |b| {
            b.iter(|| certify(&scores, &keep, &CertifyOptions::new().eps(&eps).threads(1)));
        });
        group.finish();
    }
}

criterion_group!(group, benches);
criterion_main!(group);
