//! Outputs of attention against exact averages: each as near as its bound says.

use certk_rs::{
    Attention, AttentionOptions, Budget, Error, IndexOptions, KeyIndex, Precision, ValueBall,
    Vectors, attention,
};

use crate::exact::{Average, Random, Real, least_tail, product, reals, weights};
use crate::levels::at_each;
use crate::stored::Stored;

struct Case {
    m: usize,
    n: usize,
    dim: usize,
    width: usize,
    queries: Stored,
    keys: Stored,
    values: Stored,
    sinks: Option<Vec<f64>>,
    scale: f64,
    causal: bool,
}

impl Case {
    /// Returns a case of queries, keys and values of a type, without a sink.
    fn of([m, n, dim, width]: [usize; 4], dtype: usize, numbers: [&[f64]; 3]) -> Self {
        let [queries, keys, values] = numbers.map(|list| Stored::narrowed(list, dtype));
        let (sinks, scale, causal) = (None, 1.0, false);
        Case { m, n, dim, width, queries, keys, values, sinks, scale, causal }
    }

    fn vectors(&self) -> [Vectors<'_>; 3] {
        let Case { m, n, dim, width, queries, keys, values, .. } = self;
        [("q", queries, m, dim), ("k", keys, n, dim), ("v", values, n, width)]
            .map(|(name, of, rows, dim)| Vectors::new(name, of.data(), &[*rows, *dim]).unwrap())
    }

    /// The real average of each row.
    fn real(&self) -> Vec<Average> {
        let rows = |stored: &Stored, dim: usize| -> Vec<Vec<Real>> {
            stored.wide().chunks_exact(dim).map(reals).collect()
        };
        let (queries, keys) = (rows(&self.queries, self.dim), rows(&self.keys, self.dim));
        let values = self.values.wide();
        let row = |(row, query): (usize, &Vec<Real>)| {
            let seen = if self.causal { (row + 1 + self.n).saturating_sub(self.m) } else { self.n };
            let scores = keys[..seen].iter().map(|key| product(self.scale, query, key));
            let mut scores: Vec<Real> = scores.collect();
            let sink = self.sinks.as_ref().map(|sinks| sinks[0]);
            scores.extend(sink.map(Real::from));
            let mut weights = crate::exact::weights(&scores);
            let more = if sink.is_some() { weights.pop() } else { None }.unwrap_or_else(Real::zero);
            Average::of(&weights, &values[..seen * self.width], self.width, |_| true, &more)
        };
        queries.iter().enumerate().map(row).collect()
    }

    /// Attends in every way there is, and judges the bounds; returns the largest.
    fn judge(&self, name: &str, eps: &[f64], precisions: &[Precision]) -> f64 {
        let real = self.real();
        let [q, k, v] = self.vectors();
        let ball = ValueBall::new(&v).unwrap();
        let index = match self.keys {
            Stored::F64(_) => None,
            _ => Some(KeyIndex::build(&k, &IndexOptions::default()).unwrap()),
        };
        let mut largest = 0.0f64;
        for index in [None, index.as_ref()] {
            for &eps in eps {
                for (precision, given) in precisions.iter().flat_map(|&p| [(p, false), (p, true)]) {
                    let options = AttentionOptions::new()
                        .scale(self.scale)
                        .causal(self.causal)
                        .sinks(self.sinks.as_deref())
                        .precision(precision)
                        .ball(given.then_some(&ball))
                        .even_if_slower(eps > 0.0);
                    let budget = Budget::TailMass(&[eps]);
                    let found = attention(&q, &k, &v, budget, index, &options).unwrap();
                    let bounds = found.error_bound(&q, &v, &options).unwrap();
                    for (row, real) in real.iter().enumerate() {
                        let out = found.row(row);
                        let near =
                            bounds[row] == f64::INFINITY || real.is_within(&out, bounds[row]);
                        assert!(near, "{name} {eps} {precision:?} {given} {row}: {}", bounds[row]);
                        assert!(found.tail_mass_upper[row] <= eps);
                        largest = largest.max(bounds[row]);
                    }
                }
            }
        }
        largest
    }
}

/// Returns a query of large entries, keys that are nearly alike, so that scores differ by a few nats, and the score of their mean.
fn nearly_alike(
    random: &mut Random,
    n: usize,
    dim: usize,
    sizes: [f64; 3],
) -> (Vec<f64>, Vec<f64>, f64) {
    let [query, key, step] = sizes;
    let query: Vec<f64> = random.normals(dim, 1.0).iter().map(|x| query * (x + 7.0)).collect();
    let base = random.normals(dim, 1.0);
    let base: Vec<f64> = base.iter().map(|x| key * (x + 5.0) / dim as f64).collect();
    let keys = (0..n * dim).map(|i| base[i % dim] + step * random.normal()).collect();
    let top = query.iter().zip(&base).map(|(q, k)| q * k).sum();
    (query, keys, top)
}

/// Values that are all equal, and a sink beside scores of 1e4 to 1e10: nothing but the errors of the scores moves the output.
#[test]
fn large_scores_beside_a_sink() {
    let mut random = Random::new(31);
    let f64s = [1, 4, 18].into_iter().flat_map(|m| [(m, 1), (m, 3), (m, 20)]);
    let f64s = f64s.map(|(m, dim)| (1, m, 12, dim, [3e5, 3e4, 1e-6]));
    let f32s = [(20, 3, 1.0), (300, 40, 1.0), (5, 2, 10.0), (20, 3, 30.0), (9, 5, 100.0)];
    let f32s = f32s.map(|(n, dim, size)| (0, 20, n, dim, [100.0 * size, 3.0, 1e-4 / size]));
    for (dtype, m, n, dim, sizes) in f64s.chain(f32s) {
        let (query, keys, top) = nearly_alike(&mut random, n, dim, sizes);
        let values = [1.0, -3.0].repeat(n);
        let mut case = Case::of([m, n, dim, 2], dtype, [&query.repeat(m), &keys, &values]);
        case.sinks = Some(vec![top + (n as f64).ln()]);
        let most = case.judge("large scores", &[0.0], &[Precision::F64]);
        assert!(most > [1e-5, 1e-9][dtype] && most < 10.0, "{dtype} {n} {dim}: {most}");
    }
}

/// Values that are all equal: weights do not matter, and what summing loses is all there is, whichever way it rounds.
#[test]
fn sums_of_equal_values() {
    let mut random = Random::new(37);
    for (m, n) in [(1, 100), (4, 500), (17, 50), (16, 300)] {
        for value in [1.0 + 2f64.powi(-23), 1.1, -0.3] {
            for (dtype, sigma) in [(0, 0.0), (0, 1.0), (1, 0.5)] {
                // Equal scores have equal weights, however many they are.
                let sigma = if n > 100 { 0.0 } else { sigma };
                let case = Case::of(
                    [m, n, 2, 2],
                    dtype,
                    [
                        &random.normals(2 * m, sigma),
                        &random.normals(2 * n, 1.0),
                        &[value, -value].repeat(n),
                    ],
                );
                let most = case.judge("equal values", &[0.0], &[Precision::F64]);
                assert!(most < 1e-3, "{most}");
            }
        }
    }
}

/// Scores of 1e9, whose roundings move weights far more than sums do: the reported mass is that of the real scores.
#[test]
fn tail_masses_of_large_scores() {
    let mut random = Random::new(38);
    let (mut dropped, mut close) = (0, 0);
    for round in 0..60 {
        let (n, dim) = (6 + random.below(20), [2, 3, 20][round % 3]);
        let (query, keys, _) = nearly_alike(&mut random, n, dim, [3e5, 3e3, 1e-6]);
        let values = vec![1.0; n];
        let q = Vectors::new("q", &query, &[1, dim]).unwrap();
        let k = Vectors::new("k", &keys, &[n, dim]).unwrap();
        let v = Vectors::new("v", &values, &[n, 1]).unwrap();
        let options = AttentionOptions::new().scale(1.0).even_if_slower(true);
        let wide = reals(&query);
        let scores = keys.chunks_exact(dim).map(|key| product(1.0, &wide, &reals(key)));
        let weights = weights(&scores.collect::<Vec<Real>>());
        for eps in [0.5, 0.2, 0.05] {
            let budget = Budget::TailMass(&[eps]);
            let found = attention(&q, &k, &v, budget, None, &options).unwrap();
            let (kept, upper) = (found.k[0] as usize, found.tail_mass_upper[0]);
            // No set of this size loses less than the best keys do.
            let least = least_tail(&weights, kept);
            assert!(upper <= eps && least.at_most(upper), "{n} {dim} {eps}: {upper}");
            dropped += usize::from(kept < n);
            close += usize::from(kept < n && !least.at_most(upper * (1.0 - 1e-2)));
        }
    }
    assert!(dropped > 100 && close > 50, "{dropped} {close}");
}

/// Ordinary rows in all dtypes: few and many, with and without an index, a sink, causal, rounded.
#[test]
fn ordinary_rows() {
    let mut random = Random::new(33);
    let all = [Precision::F64, Precision::F32, Precision::F16, Precision::Bf16];
    for (round, (m, n, dim, width)) in
        [(1, 5, 3, 1), (3, 200, 16, 4), (4, 300, 30, 17), (18, 150, 20, 6), (17, 40, 8, 3)]
            .into_iter()
            .enumerate()
    {
        for dtype in 0..4 {
            let sigma = [1.0, 4.0][(round + dtype) % 2];
            let mut case = Case::of(
                [m, n, dim, width],
                dtype,
                [
                    &random.normals(m * dim, sigma),
                    &random.normals(n * dim, 1.0),
                    &random.normals(n * width, 1.0),
                ],
            );
            case.sinks = (round % 2 == 1).then(|| vec![1.5]);
            case.scale = 1.0 / (dim as f64).sqrt();
            case.causal = dtype % 2 == 0;
            case.judge("ordinary", &[0.0, 0.01, 0.3], &all);
        }
    }
}

/// Dropped values on the other side of the kept ones: the bound is at most twice the error.
#[test]
fn dropped_values_far_from_the_kept_ones() {
    let (n, dim) = (400, 4);
    for dtype in 0..3 {
        for m in [1, 4, 17] {
            let mut random = Random::new(34);
            let mut keys = random.normals(n * dim, 0.05);
            let mut values = vec![-1.0; n];
            for i in 0..40 {
                keys[i * 10 * dim] += 4.0;
                values[i * 10] = 1.0;
            }
            let case =
                Case::of([m, n, dim, 1], dtype, [&[1.0, 0.1, -0.1, 0.2].repeat(m), &keys, &values]);
            let most = case.judge("two sides", &[0.2, 0.4], &[Precision::F64]);
            assert!(most > 0.2, "{most}");
        }
    }
}

/// Long sums of values that cancel: what summing loses is all there is.
#[test]
fn values_that_cancel() {
    let mut random = Random::new(35);
    for (m, n) in [(2, 3000), (16, 600)] {
        let values: Vec<f64> =
            (0..n).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 } + 1e-3 * random.normal()).collect();
        for dtype in 0..2 {
            let case = Case::of(
                [m, n, 2, 1],
                dtype,
                [&vec![0.0; 2 * m], &random.normals(2 * n, 1.0), &values],
            );
            case.judge("cancelling", &[0.0], &[Precision::F64]);
        }
    }
}

/// Budgets on the output are kept to.
#[test]
fn outputs_within_a_tolerance() {
    let mut random = Random::new(36);
    for (m, n, dim, width) in [(3, 500, 16, 4), (18, 400, 24, 5)] {
        let mut case = Case::of(
            [m, n, dim, width],
            0,
            [
                &random.normals(m * dim, 4.0),
                &random.normals(n * dim, 1.0),
                &random.normals(n * width, 1.0),
            ],
        );
        case.scale = 0.25;
        let real = case.real();
        let [q, k, v] = case.vectors();
        let index = KeyIndex::build(&k, &IndexOptions::default()).unwrap();
        for tolerance in [0.3, 1e-2, 1e-4, 1e-5] {
            for (index, precision) in [(None, Precision::F64), (Some(&index), Precision::F32)] {
                let options =
                    AttentionOptions::new().scale(0.25).precision(precision).even_if_slower(true);
                let budget = Budget::Output(&[tolerance]);
                let found = attention(&q, &k, &v, budget, index, &options).unwrap();
                let bounds = found.error_bound(&q, &v, &options).unwrap();
                for (row, real) in real.iter().enumerate() {
                    let out = found.row(row);
                    assert!(real.is_within(&out, bounds[row]) && bounds[row] <= tolerance);
                }
            }
        }
    }
}

/// Returns the average of the values that a row sees, in f64.
fn average(case: &Case, row: usize) -> Vec<f64> {
    let [queries, keys, values] = [&case.queries, &case.keys, &case.values].map(Stored::wide);
    let seen = if case.causal { row + 1 + case.n - case.m } else { case.n };
    let query = &queries[row * case.dim..][..case.dim];
    let score = |key: &[f64]| case.scale * key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>();
    let scores: Vec<f64> = keys.chunks_exact(case.dim).take(seen).map(score).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut sums, mut whole) = (vec![0.0; case.width], 0.0);
    for (score, value) in scores.iter().zip(values.chunks_exact(case.width)) {
        let weight = (score - top).exp();
        whole += weight;
        sums.iter_mut().zip(value).for_each(|(sum, entry)| *sum += weight * entry);
    }
    sums.iter().map(|sum| sum / whole).collect()
}

/// Shapes that take every path of the engines: at all levels and numbers of threads they have the same bits, near the average.
#[test]
fn every_shape_is_near_and_the_same_everywhere() {
    let mut random = Random::new(39);
    for ([m, n, dim, width], causal, by_index, eps, sigma) in [
        ([70, 300, 33, 40], false, false, 0.0, 1.0),
        ([20, 129, 128, 7], true, false, 0.01, 2.0),
        ([66, 400, 64, 64], true, true, 0.02, 4.0),
        ([16, 1000, 32, 80], false, true, 0.01, 0.3),
        ([4, 700, 40, 20], false, true, 0.01, 4.0),
        ([4, 700, 40, 20], false, false, 0.01, 0.5),
        ([3, 200, 16, 16], false, false, 0.1, 6.0),
        // Rows that are searched by panels, of many and of few, of which little can be dropped, and alone.
        ([40, 1500, 64, 16], true, true, 0.02, 7.0),
        ([64, 1200, 40, 24], false, true, 0.1, 9.0),
        ([5, 1100, 64, 20], true, true, 0.01, 6.0),
        ([4, 1100, 32, 20], false, true, 0.01, 0.5),
        ([1, 1040, 48, 16], false, true, 0.05, 5.0),
        // Rows together, in units that are whole and not, with numbers in eight bits and in f32.
        ([300, 2500, 64, 24], true, true, 0.05, 8.0),
        ([70, 2100, 128, 130], false, true, 0.01, 10.0),
        ([300, 2304, 32, 16], false, false, 0.0, 9.0),
        // Few rows of so many keys that threads share them, from 2^21 products on, or 2^18: by lists, in full, and in parts.
        ([1, 40_000, 64, 16], false, true, 0.05, 5.0),
        ([4, 40_000, 16, 20], true, true, 0.1, 2.5),
        ([1, 17_000, 128, 16], false, false, 0.01, 0.5),
        ([5, 14_000, 32, 16], true, false, 0.2, 3.0),
    ] {
        let numbers = [(m * dim, sigma), (n * dim, 1.0), (n * width, 1.0)];
        let [queries, keys, values] = numbers.map(|(count, sigma)| random.normals(count, sigma));
        let mut case = Case::of([m, n, dim, width], 0, [&queries, &keys, &values]);
        (case.scale, case.causal) = (1.0 / (dim as f64).sqrt(), causal);
        let [q, k, v] = case.vectors();
        let index = by_index.then(|| KeyIndex::build(&k, &IndexOptions::default()).unwrap());
        let options = AttentionOptions::new().scale(case.scale).causal(causal);
        let run = |threads: usize| {
            let options = options.clone().threads(threads);
            attention(&q, &k, &v, Budget::TailMass(&[eps]), index.as_ref(), &options).unwrap()
        };
        let mut all: Vec<Attention> = Vec::new();
        at_each(|level| {
            let found = run(1);
            assert!(found == run(3) && found == run(16));
            let sets = |of: &Attention| (of.k.clone(), of.scored.clone(), of.rung.clone());
            if let Some(first) = all.first() {
                assert!(found == *first || level == "amx", "{level} {m} {n} {dim}");
                assert_eq!(sets(&found), sets(first), "{level} {m} {n} {dim}");
                assert_eq!(found.tail_mass_upper, first.tail_mass_upper, "{level} {m} {n} {dim}");
            }
            all.push(found);
        });
        all.dedup();
        for found in &all {
            let bounds = found.error_bound(&q, &v, &options).unwrap();
            for (row, bound) in bounds.iter().enumerate() {
                let near = found.row(row).into_iter().zip(average(&case, row));
                let off = near.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                assert!(
                    off <= bound + 1e-12 && found.tail_mass_upper[row] <= eps,
                    "{m} {n}: {off}"
                );
            }
        }
    }
}

/// A sink that outweighs its row by hundreds of nats leaves something of what was dropped.
#[test]
fn a_sink_makes_no_loss_nothing() {
    let case = Case::of([1, 4, 1, 1], 0, [&[1.0], &[0.0, -600.0, -600.0, -600.0], &[1.0; 4]]);
    let [q, k, v] = case.vectors();
    let index = KeyIndex::build(&k, &IndexOptions::default()).unwrap();
    for sink in [-900.0, 0.0, 200.0, 400.0, 700.0, 1e300] {
        for index in [None, Some(&index)] {
            let sinks = [sink];
            let options = AttentionOptions::new().sinks(&sinks[..]).even_if_slower(true);
            let found = attention(&q, &k, &v, Budget::TailMass(&[0.1]), index, &options).unwrap();
            let real = 3.0 * (-600.0 - f64::max(sink, 0.0)).exp();
            assert_eq!(found.tail_mass_upper[0] > 0.0, found.k[0] < 4, "{sink}");
            assert!(found.k[0] == 4 || found.tail_mass_upper[0] >= real * 0.5);
            assert!(found.tail_mass_upper[0] <= 1e-250);
        }
    }
}

/// Masked keys, and keys behind a row's length, may hold anything.
#[test]
fn keys_that_no_row_sees_may_hold_anything() {
    for m in [1, 3, 20] {
        let (n, dim) = (300, 24);
        let mut random = Random::new(40);
        let [queries, keys, values] = [m, n, n].map(|rows| random.normals(rows * dim, 1.0));
        let clean = Case::of([m, n, dim, dim], 0, [&queries, &keys, &values]);
        let hidden = |list: &[f64], bad: f64| [&list[..200 * dim], &vec![bad; 100 * dim]].concat();
        let (keys, values) = (hidden(&keys, f64::NAN), hidden(&values, f64::INFINITY));
        let bad = Case::of([m, n, dim, dim], 0, [&queries, &keys, &values]);
        let run = |case: &Case, options: &AttentionOptions<'_>| {
            let [q, k, v] = case.vectors();
            attention(&q, &k, &v, Budget::TailMass(&[0.0]), None, options)
        };
        let (lengths, plain) = (vec![200; m], AttentionOptions::new());
        let short = plain.clone().lengths(&lengths[..]);
        let found = run(&bad, &short).unwrap();
        assert_eq!(found, run(&clean, &short).unwrap());
        let bytes: Vec<u8> = (0..n).map(|key| u8::from(key < 200)).collect();
        let again = run(&bad, &plain.clone().mask(&bytes, &[0])).unwrap();
        assert_eq!(again.k, vec![200; m]);
        let pairs = again.out.to_f64().into_iter().zip(found.out.to_f64());
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-5));
        let error = run(&bad, &plain).unwrap_err();
        assert!(matches!(error, Error::KeyNotFinite { argument: "k", .. }), "{error}");
    }
}

/// Few rows that see up to an edge of a block, or past it, or nothing: each is what it is alone, masked or short.
#[test]
fn rows_of_all_lengths_beside_each_other() {
    let (lengths, n, dim, width) = ([200, 64, 0, 65, 1, 63, 130], 200, 20, 17);
    let m = lengths.len();
    let mut random = Random::new(41);
    let numbers = [(m * dim, 1.0), (n * dim, 1.0), (n * width, 1.0)];
    let [queries, keys, values] = numbers.map(|(count, sigma)| random.normals(count, sigma));
    let bytes: Vec<u8> =
        lengths.iter().flat_map(|&end| (0..n).map(move |key| u8::from(key < end))).collect();
    for (dtype, eps) in [(0, 0.0), (0, 0.2), (2, 0.0), (3, 0.0)] {
        let mut case = Case::of([m, n, dim, width], dtype, [&queries, &keys, &values]);
        case.scale = 0.3;
        let run = |case: &Case, options: &AttentionOptions<'_>| {
            let [q, k, v] = case.vectors();
            let options = options.clone().scale(0.3).precision(Precision::F64);
            let found = attention(&q, &k, &v, Budget::TailMass(&[eps]), None, &options).unwrap();
            let bounds = found.error_bound(&q, &v, &options).unwrap();
            (found, bounds)
        };
        let plain = AttentionOptions::new();
        let ends = lengths.map(|length| length as i64);
        let (found, bounds) = run(&case, &plain.clone().lengths(&ends[..]));
        let (masked, _) = run(&case, &plain.clone().mask(&bytes, &[n]));
        for (row, &length) in lengths.iter().enumerate() {
            let query = &queries[row * dim..][..dim];
            let alone = Case::of([1, n, dim, width], dtype, [query, &keys, &values]);
            let (alone, _) = run(&alone, &plain.clone().lengths(&ends[row..=row]));
            // How much is dropped depends on the other rows.
            let same = |row: &[f64]| eps > 0.0 || row == alone.row(0);
            assert!(same(&found.row(row)) && found.tail_mass_upper[row] <= eps);
            // What sees little is scored by itself.
            assert!(length < n / 4 || same(&masked.row(row)));
            assert!(eps > 0.0 || [found.k[row], masked.k[row]] == [ends[row]; 2]);
            let mut seen = Case::of(
                [1, length, dim, width],
                dtype,
                [query, &keys[..length * dim], &values[..length * width]],
            );
            seen.scale = 0.3;
            if length > 0 {
                assert!(seen.real()[0].is_within(&found.row(row), bounds[row]));
            }
        }
    }
}

/// Keys whose squares or products f32 does not hold: answers are as near as they say.
#[test]
fn few_rows_of_any_size() {
    let mut random = Random::new(42);
    let (m, n, dim) = (3, 90, 20);
    for (query, key) in
        [(1e-18, 1e18), (1e-25, 1e25), (1e25, 1e-25), (1e-38, 1e37), (1e37, 1e-38), (100.0, 30.0)]
    {
        let numbers = [(m, query), (n, key), (n, 1.0)];
        let [queries, keys, values] =
            numbers.map(|(count, size)| random.normals(count * dim, size));
        let case = Case::of([m, n, dim, dim], 0, [&queries, &keys, &values]);
        let most = case.judge("sizes", &[0.0], &[Precision::F64]);
        assert!(most < 2e-3, "{query:e} {key:e}: {most}");
    }
}
