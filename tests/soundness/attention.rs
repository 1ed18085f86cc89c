//! Outputs of attention against exact averages: each as near as its bound says.

use certk_rs::{
    AttentionOptions, Budget, IndexOptions, KeyIndex, Precision, ValueBall, Vectors, attention,
};

use crate::exact::{Average, Random, Real, least_tail, product, reals, weights};
use crate::rows::Stored;

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
        let q = Vectors::new("q", self.queries.data(), &[self.m, self.dim]).unwrap();
        let k = Vectors::new("k", self.keys.data(), &[self.n, self.dim]).unwrap();
        let v = Vectors::new("v", self.values.data(), &[self.n, self.width]).unwrap();
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

fn stored(dtype: usize, numbers: &[f64]) -> Stored {
    let [single, double, half, brain] = Stored::all(numbers);
    [single, double, half, brain].into_iter().nth(dtype).unwrap()
}

/// f64 values that are all equal, and a sink beside scores of 1e10: nothing but the errors of the scores moves the output.
#[test]
fn large_scores_beside_a_sink() {
    let mut random = Random::new(31);
    for m in [1, 4, 18] {
        for dim in [1, 3, 20] {
            let n = 12;
            let queries: Vec<f64> =
                random.normals(dim, 1.0).iter().map(|x| 3e5 * (x + 7.0)).collect();
            // Keys nearly alike, so that scores differ by a few nats.
            let base: Vec<f64> =
                random.normals(dim, 1.0).iter().map(|x| 3e4 * (x + 5.0) / dim as f64).collect();
            let keys: Vec<f64> = (0..n)
                .flat_map(|_| base.iter().map(|b| b + 1e-6 * random.normal()).collect::<Vec<f64>>())
                .collect();
            let top: f64 = queries.iter().zip(&base).map(|(q, k)| q * k).sum();
            let case = Case {
                m,
                n,
                dim,
                width: 2,
                queries: Stored::F64(queries.repeat(m)),
                keys: Stored::F64(keys),
                values: Stored::F64([1.0, -3.0].repeat(n)),
                sinks: Some(vec![top + 1.0]),
                scale: 1.0,
                causal: false,
            };
            let most = case.judge("large scores", &[0.0], &[Precision::F64]);
            assert!(most > 1e-9 && most < 1.0, "{dim}: {most}");
        }
    }
}

/// The same in f32, for many rows at once: scores of 1e4 to 1e6.
#[test]
fn many_rows_beside_a_sink() {
    let mut random = Random::new(32);
    for (dim, n, size) in [(3, 20, 1.0), (40, 300, 1.0), (2, 5, 10.0), (3, 20, 30.0), (5, 9, 100.0)]
    {
        let m = 20;
        let query: Vec<f64> =
            random.normals(dim, 1.0).iter().map(|x| 100.0 * size * (x + 7.0)).collect();
        let base: Vec<f64> =
            random.normals(dim, 1.0).iter().map(|x| 3.0 * (x + 5.0) / dim as f64).collect();
        let keys: Vec<f64> = (0..n)
            .flat_map(|_| {
                base.iter().map(|b| b + 1e-4 / size * random.normal()).collect::<Vec<f64>>()
            })
            .collect();
        let top: f64 = query.iter().zip(&base).map(|(q, k)| q * k).sum();
        let case = Case {
            m,
            n,
            dim,
            width: 3,
            queries: stored(0, &query.repeat(m)),
            keys: stored(0, &keys),
            values: stored(0, &[1.0, -2.0, 5.0].repeat(n)),
            sinks: Some(vec![top + (n as f64).ln()]),
            scale: 1.0,
            causal: false,
        };
        let most = case.judge("many rows", &[0.0], &[Precision::F64]);
        assert!(most > 1e-5, "{dim}: {most}");
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
                let case = Case {
                    m,
                    n,
                    dim: 2,
                    width: 2,
                    queries: stored(dtype, &random.normals(2 * m, sigma)),
                    keys: stored(dtype, &random.normals(2 * n, 1.0)),
                    values: stored(dtype, &[value, -value].repeat(n)),
                    sinks: None,
                    scale: 1.0,
                    causal: false,
                };
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
        let query: Vec<f64> = random.normals(dim, 1.0).iter().map(|x| 3e5 * (x + 7.0)).collect();
        let base: Vec<f64> =
            random.normals(dim, 1.0).iter().map(|x| 3e3 * (x + 5.0) / dim as f64).collect();
        let keys: Vec<f64> = (0..n)
            .flat_map(|_| base.iter().map(|b| b + 1e-6 * random.normal()).collect::<Vec<f64>>())
            .collect();
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
            let case = Case {
                m,
                n,
                dim,
                width,
                queries: stored(dtype, &random.normals(m * dim, sigma)),
                keys: stored(dtype, &random.normals(n * dim, 1.0)),
                values: stored(dtype, &random.normals(n * width, 1.0)),
                sinks: (round % 2 == 1).then(|| vec![1.5]),
                scale: 1.0 / (dim as f64).sqrt(),
                causal: dtype % 2 == 0,
            };
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
            let case = Case {
                m,
                n,
                dim,
                width: 1,
                queries: stored(dtype, &[1.0, 0.1, -0.1, 0.2].repeat(m)),
                keys: stored(dtype, &keys),
                values: stored(dtype, &values),
                sinks: None,
                scale: 1.0,
                causal: false,
            };
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
            let case = Case {
                m,
                n,
                dim: 2,
                width: 1,
                queries: stored(dtype, &vec![0.0; 2 * m]),
                keys: stored(dtype, &random.normals(2 * n, 1.0)),
                values: stored(dtype, &values),
                sinks: None,
                scale: 1.0,
                causal: false,
            };
            case.judge("cancelling", &[0.0], &[Precision::F64]);
        }
    }
}

/// Budgets on the output are kept to.
#[test]
fn outputs_within_a_tolerance() {
    let mut random = Random::new(36);
    for (m, n, dim, width) in [(3, 500, 16, 4), (18, 400, 24, 5)] {
        let case = Case {
            m,
            n,
            dim,
            width,
            queries: stored(0, &random.normals(m * dim, 4.0)),
            keys: stored(0, &random.normals(n * dim, 1.0)),
            values: stored(0, &random.normals(n * width, 1.0)),
            sinks: None,
            scale: 0.25,
            causal: false,
        };
        let real = case.real();
        let q = Vectors::new("q", case.queries.data(), &[m, dim]).unwrap();
        let k = Vectors::new("k", case.keys.data(), &[n, dim]).unwrap();
        let v = Vectors::new("v", case.values.data(), &[n, width]).unwrap();
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
