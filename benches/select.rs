//! Certified selection of Gaussian rows on one thread, flat and peaked, at the best instruction level and at avx2,
//! beside `select_nth_unstable` told k: `cargo bench`. Every result is checked once before it is timed.
#![allow(missing_docs)] // what criterion's macros make
#![allow(clippy::cast_sign_loss)] // of counts

use std::time::Duration;

use certk_rs::{
    CertifyOptions, Keep, Options, Scores, Selection, Status, certify, force_simd_level, select,
};
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

/// Puts the positions of the k largest of each row first, as `numpy.argpartition` does.
fn nth(data: &[f32], n: usize, found: &Selection, order: &mut [u32]) {
    for ((row, order), &k) in data.chunks_exact(n).zip(order.chunks_exact_mut(n)).zip(&found.k) {
        for (i, at) in order.iter_mut().enumerate() {
            *at = i as u32;
        }
        order.select_nth_unstable_by(k as usize - 1, |&a, &b| {
            row[b as usize].total_cmp(&row[a as usize])
        });
    }
}

fn benches(criterion: &mut Criterion) {
    let options = Options::new().threads(1);
    let eps = [0.01];
    let sizes = [(2048, 512), (256, 4096), (32, 32_768), (8, 131_072), (1, 1 << 20)];
    for ((rows, n), sigma) in
        sizes.into_iter().flat_map(|size| [1.0, 5.0].map(|sigma| (size, sigma)))
    {
        let data = gaussian(rows * n, sigma);
        let scores = Scores::new(&data, &[rows, n]).expect("the shape fits");
        let found = select(&scores, &eps, &options).expect("finite scores");
        assert!(found.status.iter().all(|&status| status == Status::Certified));
        let indices: Vec<i64> = found.indices.iter().map(|&i| i64::from(i)).collect();
        let keep = Keep::Indices { indptr: &found.indptr, indices: &indices };
        let judged = certify(&scores, &keep, &CertifyOptions::new().eps(&eps).independent(true))
            .expect("a kept set");
        assert!(judged.holds.expect("budgets were given").iter().all(|&holds| holds));
        let mut order = vec![0; rows * n];
        nth(&data, n, &found, &mut order);
        assert!(data.chunks_exact(n).zip(order.chunks_exact(n)).zip(&found.k).all(
            |((row, order), &k)| {
                let last = row[order[k as usize - 1] as usize];
                row.iter().filter(|&&score| score > last).count() < k as usize
            }
        ));

        let mut group = criterion.benchmark_group(format!("gaussian, sigma {sigma}, eps 0.01"));
        group.throughput(Throughput::Elements((rows * n) as u64)).sample_size(10);
        group.warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(2));
        for level in [None, Some("avx2")] {
            if force_simd_level(level).is_err() {
                continue; // a CPU of another kind
            }
            let at = level.map_or(String::new(), |name| format!(" at {name}"));
            group.bench_function(BenchmarkId::new(format!("select{at}"), n), |b| {
                b.iter(|| select(&scores, &eps, &options));
            });
            group.bench_function(BenchmarkId::new(format!("certify{at}"), n), |b| {
                b.iter(|| certify(&scores, &keep, &CertifyOptions::new().eps(&eps).threads(1)));
            });
        }
        force_simd_level(None).expect("the level of before");
        group.bench_function(BenchmarkId::new("select_nth_unstable", n), |b| {
            b.iter(|| nth(&data, n, &found, &mut order));
        });
        group.finish();
    }
}

criterion_group!(group, benches);
criterion_main!(group);
