//! Inputs that end where memory ends, of every length and type, at every level: nothing is read beside them, and answers have the
//! bits that they have elsewhere.

use std::fmt::Debug;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use certk_rs::montecarlo::{TailOptions, tail_mass};
use certk_rs::{
    AttentionOptions, Budget, CertifyOptions, Data, IndexOptions, Keep, KeyIndex, Kind, Mask,
    Options, OutputOptions, Rule, Scores, SearchOptions, ValueBall, Values, Vectors, attention,
    certify, keep_set, output_error, select,
};

use crate::exact::Random;
use crate::guarded::{Guarded, Place};
use crate::levels;
use crate::stored::Stored;

/// Copies a list to a place in memory.
fn put<'m>(list: &Stored, memory: &'m mut Guarded, place: Place) -> Data<'m> {
    match list {
        Stored::F32(list) => Data::F32(memory.put(list, place)),
        Stored::F64(list) => Data::F64(memory.put(list, place)),
        Stored::F16(list) => Data::F16(memory.put(list, place)),
        Stored::Bf16(list) => Data::Bf16(memory.put(list, place)),
    }
}

/// Returns bytes of which any but 0 says yes.
fn bytes(random: &mut Random, n: usize) -> Vec<u8> {
    let byte = |x: f64| if x < 0.9 { u8::from(x > 0.25) } else { u8::MAX };
    (0..n).map(|_| byte(random.uniform())).collect()
}

/// Under an emulator everything is tens of times slower: fewer lengths are tried.
fn emulated() -> bool {
    std::env::var_os("CERTK_EMULATED").is_some()
}

/// All lengths up to 200, and those around powers of two.
fn lengths() -> impl Iterator<Item = usize> {
    let most = if emulated() { 70 } else { 200 };
    let powers = if emulated() { 7..=9 } else { 8..=16 };
    (0..=most).chain(powers.flat_map(|k| [(1 << k) - 1, 1 << k, (1 << k) + 1]))
}

/// Runs it for each item, some at a time, as only one level is tried at a time.
fn on_each_level<T: Copy + Send + Sync>(
    items: impl IntoIterator<Item = T>,
    run: impl Fn(&'static str, T) + Sync,
) {
    let items: Vec<T> = items.into_iter().collect();
    levels::at_each(|level| {
        // The last take longest.
        let next = AtomicUsize::new(items.len());
        let work = || {
            while let Ok(left) = next.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)) {
                run(level, items[left - 1]);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
                scope.spawn(work);
            }
        });
    });
}

const ENDS: [Place; 2] = [Place::Before(0), Place::Behind(0)];

/// Answers about rows, as text, in all the ways in which rows are read.
#[derive(Debug, PartialEq)]
struct Said(Vec<String>);

impl Said {
    fn add(&mut self, answer: &impl Debug) {
        // As text, every bit counts, and an error is an answer, too.
        self.0.push(format!("{answer:?}"));
    }
}

/// Returns one mapping for each list of a row.
fn memory(n: usize) -> [Guarded; 7] {
    std::array::from_fn(|_| Guarded::new(8 * n + 64 * 8))
}

/// Returns all that is said of a row whose lists are at some place in memory.
fn ask(memory: &mut [Guarded; 7], place: Place, [n, dtype, of_biases]: [usize; 3]) -> Said {
    let mut random = Random::new((n * 4 + dtype) as u64);
    let numbers = random.normals(n, 3.0);
    let weights: Vec<f64> = numbers.iter().map(|x| x.exp()).collect();
    let flags = bytes(&mut random, n);
    let listed = || flags.iter().enumerate().filter(|(_, byte)| **byte > 0).map(|(j, _)| j);
    let [a, b, c, d, e, f, g] = memory;
    let scores = put(&Stored::narrowed(&numbers, dtype), a, place);
    let weights = put(&Stored::narrowed(&weights, dtype), b, place);
    let biases = put(&Stored::narrowed(&random.normals(n, 1.0), of_biases), c, place);
    let (shown, kept) = (d.put(&bytes(&mut random, n), place), e.put(&flags, place));
    let indices = f.put(&listed().map(|j| j as i64).collect::<Vec<i64>>(), place);
    let positions = g.put(&listed().map(|j| j as u32).collect::<Vec<u32>>(), place);
    let mut said = Said(Vec::new());
    let plain = Scores::new(scores, &[1, n]).unwrap();
    let options = Options::new().threads(1);
    let ways = [
        plain.clone(),
        plain.clone().scale(-0.3).unwrap(),
        plain.clone().mask(Mask::Allowed(shown), &[n]).unwrap(),
        plain.clone().scale(0.5).unwrap().mask(Mask::Additive(biases), &[n]).unwrap(),
        plain.clone().radius(&[0.01]).unwrap(),
        Scores::new(weights, &[1, n]).unwrap().kind(Kind::Probs).unwrap(),
    ];
    for scores in &ways {
        said.add(&select(scores, &[0.05], &options));
        let strides = [n];
        let keep = Keep::Mask { kept, strides: &strides };
        said.add(&certify(scores, &keep, &CertifyOptions::new().eps(&[0.3]).threads(1)));
    }
    said.add(&select(&plain, &[1e-4], &options.clone().prove_minimal(true).keep_last(3)));
    said.add(&select(&plain, &[0.02], &options.clone().block_size(7)));
    let indptr = [0, indices.len() as i64];
    let keep = Keep::Indices { indptr: &indptr, indices };
    said.add(&certify(
        &plain,
        &keep,
        &CertifyOptions::new().eps(&[0.3]).independent(true).threads(1),
    ));
    let keep = Keep::Positions { indptr: &indptr, positions };
    said.add(&certify(&plain, &keep, &CertifyOptions::new().eps(&[0.3]).threads(1)));
    said
}

/// A place like any other, for the answers that all places must give.
const INSIDE: Place = Place::Behind(9);

#[test]
fn rows_of_every_length_and_type() {
    on_each_level(lengths(), |level, n| {
        let mut memory = memory(n);
        for dtype in 0..4 {
            let row = [n, dtype, n % 4];
            let want = ask(&mut memory, INSIDE, row);
            for place in ENDS {
                assert!(ask(&mut memory, place, row) == want, "{level} {row:?} {place:?}");
            }
        }
    });
}

#[test]
fn rows_at_every_alignment() {
    on_each_level([1, 15, 16, 17, 100, 1000, 4097], |level, n| {
        let mut memory = memory(n);
        for dtype in 0..4 {
            let row = [n, dtype, (n + 1) % 4];
            let want = ask(&mut memory, INSIDE, row);
            // Bytes are at as many places as there are.
            for off in (0..64).step_by(if emulated() { 7 } else { 1 }) {
                for place in [Place::Before(off), Place::Behind(off)] {
                    assert!(ask(&mut memory, place, row) == want, "{level} {row:?} {place:?}");
                }
            }
        }
    });
}

/// Several rows: sets for all of them, samples, and values.
#[test]
fn batches_of_rows() {
    on_each_level(
        [(2, 1), (3, 17), (5, 64), (4, 200), (9, 31), (16, 33), (3, 1025)],
        |level, (m, n)| {
            let mut noise = Random::new(7);
            let values = noise.normals(n * 5, 0.5);
            let mut memory: [Guarded; 3] = std::array::from_fn(|_| Guarded::new(8 * n * m.max(5)));
            for dtype in 0..4 {
                let scores = Stored::narrowed(&noise.normals(m * n, 3.0), dtype);
                let kept = bytes(&mut noise, m * n);
                let values = Stored::narrowed(&values, dtype);
                let ask = |scores: Data<'_>, kept: &[u8], values: Data<'_>| {
                    let mut said = Said(Vec::new());
                    let scores = Scores::new(scores, &[m, n]).unwrap();
                    let keep = Keep::Mask { kept, strides: &[n] };
                    let options = Options::new().threads(1);
                    said.add(&select(&scores, &[0.05], &options));
                    said.add(&keep_set(&scores, &[0.05], &options));
                    said.add(&keep_set(&scores, &[0.05], &options.clone().block_size(8)));
                    said.add(&certify(
                        &scores,
                        &keep,
                        &CertifyOptions::new().eps(&[0.3]).threads(1),
                    ));
                    let values = Values::new(values, &[n, 5]).unwrap();
                    said.add(&output_error(&scores, &values, &keep, &OutputOptions::new()));
                    let options = TailOptions::new(0.1, 40).seed(3).threads(1);
                    said.add(&tail_mass(&scores, &keep, None, &options));
                    said
                };
                let want = ask(scores.data(), &kept, values.data());
                for place in ENDS {
                    let [a, b, c] = &mut memory;
                    let scores = put(&scores, a, place);
                    let said = ask(scores, b.put(&kept, place), put(&values, c, place));
                    assert!(said == want, "{level} {m} {n} {dtype} {place:?}");
                }
            }
        },
    );
}

/// Queries, keys and values.
struct Heads {
    m: usize,
    n: usize,
    dim: usize,
    width: usize,
}

/// Indexes are built, searched and attended by; attention without one takes also f64.
fn attend(shape: &Heads, [q, k, v]: [Data<'_>; 3], shown: &[u8]) -> Said {
    let Heads { m, n, dim, width } = *shape;
    let mut said = Said(Vec::new());
    let q = Vectors::new("q", q, &[m, dim]).unwrap();
    let keys = Vectors::new("k", k, &[n, dim]).unwrap();
    let values = Vectors::new("v", v, &[n, width]).unwrap();
    let index = KeyIndex::build(&keys, &IndexOptions::new().threads(1)).ok();
    let ball = ValueBall::new(&values).unwrap();
    let plain = AttentionOptions::new().even_if_slower(true).threads(1);
    let strides = [n];
    let ways = [plain.clone(), plain.clone().ball(&ball).causal(true), plain.mask(shown, &strides)];
    for options in &ways {
        for (index, eps) in [(None, 0.0), (None, 0.1), (index.as_ref(), 0.1)] {
            let found = attention(&q, &keys, &values, Budget::TailMass(&[eps]), index, options);
            said.add(&found.as_ref().map(|found| found.error_bound(&q, &values, options)));
            said.add(&found);
        }
    }
    let Some(index) = index else { return said };
    said.add(&index.check(&keys));
    let options = SearchOptions::new().threads(1);
    for options in
        [options.mask(shown, &strides), options.rule(Rule::Gap), options.rule(Rule::TopK(3))]
    {
        said.add(&index.search(&q, Some(&keys), &[0.05], &options));
    }
    said.add(&index.search(&q, None, &[0.3], &options));
    said
}

fn judge_heads(level: &str, shape: &Heads, memory: &mut [Guarded; 4], dtypes: [usize; 3]) {
    let Heads { m, n, dim, width } = *shape;
    let mut noise = Random::new((n * 131 + dim) as u64);
    let q = Stored::narrowed(&noise.normals(m * dim, 1.0), dtypes[0]);
    let k = Stored::narrowed(&noise.normals(n * dim, 1.0), dtypes[1]);
    let v = Stored::narrowed(&noise.normals(n * width, 0.5), dtypes[2]);
    let shown = bytes(&mut noise, m * n);
    let want = attend(shape, [q.data(), k.data(), v.data()], &shown);
    for place in ENDS {
        let [a, b, c, d] = &mut *memory;
        let all = [put(&q, a, place), put(&k, b, place), put(&v, c, place)];
        let said = attend(shape, all, d.put(&shown, place));
        assert!(said == want, "{level} {m} {n} {dim} {width} {dtypes:?} {place:?}");
    }
}

fn memory_for(entries: usize) -> [Guarded; 4] {
    std::array::from_fn(|_| Guarded::new(8 * entries))
}

#[test]
fn attention_and_indexes_of_every_length() {
    on_each_level(lengths().filter(|n| *n < 5000), |level, n| {
        let mut memory = memory_for(20 * n.max(200));
        let (m, dim) = ([1, 3, 4, 18][n % 4], [1, 3, 8, 16, 17][n % 5]);
        let shape = Heads { m, n, dim, width: [1, 4, 16, 19][n / 2 % 4] };
        for key in [0, 2, 3] {
            judge_heads(level, &shape, &mut memory, [[key, 0, 1][n % 3], key, key]);
        }
        judge_heads(level, &shape, &mut memory, [1, 1, n % 4]);
    });
}

#[test]
fn vectors_of_every_length() {
    let most = if emulated() { 40 } else { 200 };
    let dims = (1..=most).chain([255, 256, 257, 511, 512, 513]);
    on_each_level(dims, |level, dim| {
        let mut memory = memory_for(40 * dim);
        let n = [5, 16, 33][dim % 3];
        for dtype in 0..4 {
            let shape = Heads { m: [1, 4, 17][dim / 3 % 3], n, dim, width: dim };
            judge_heads(level, &shape, &mut memory, [dtype; 3]);
        }
    });
}

/// Codes that lie in a file: it ends with them.
#[test]
fn codes_of_every_length() {
    on_each_level(lengths().filter(|n| *n < 9000), |level, n| {
        let dim = [1, 4, 16, 20, 33][n % 5];
        let mut noise = Random::new(n as u64);
        let keys: Vec<f32> = noise.normals(n * dim, 1.0).iter().map(|&x| x as f32).collect();
        let queries: Vec<f32> = noise.normals(5 * dim, 1.0).iter().map(|&x| x as f32).collect();
        let keys = Vectors::new("keys", &keys, &[n, dim]).unwrap();
        let q = Vectors::new("q", &queries, &[5, dim]).unwrap();
        let built = KeyIndex::build(&keys, &IndexOptions::new().threads(1)).unwrap();
        let mut file = Vec::new();
        built.write_to(&mut file).unwrap();
        let ask = |index: &KeyIndex<'_>| {
            let mut said = Said(Vec::new());
            let options = SearchOptions::new().threads(1);
            said.add(&index.search(&q, Some(&keys), &[0.05], &options));
            said.add(&index.search(&q, None, &[0.4], &options));
            said.add(&index.search(&q, Some(&keys), &[], &options.rule(Rule::TopK(4))));
            said
        };
        let want = ask(&built);
        let mut memory = Guarded::new(file.len());
        for place in ENDS {
            let bytes = memory.put(&file, place);
            for index in [KeyIndex::from_bytes(bytes), KeyIndex::from_trusted_bytes(bytes)] {
                assert!(ask(&index.unwrap()) == want, "{level} {n} {dim} {place:?}");
            }
        }
    });
}
