//! One set of bits: whatever is asked, every level answers alike, and so does another processor.
//!
//! With `CERTK_BITS` set to a file, answers are compared with what stands there, or written there if nothing does: so `make
//! test-aarch64` compares an emulated processor with the one that it runs on.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};

use certk_rs::{
    AttentionOptions, Budget, CertifyOptions, IndexOptions, Keep, KeyIndex, Mask, Options,
    OutputOptions, Precision, Rule, Scores, SearchOptions, Values, Vectors, attention, certify,
    force_simd_level, keep_set, output_error, select, simd_level,
};

use crate::levels::{alone, at_each};
use crate::stored::Stored;

/// Numbers that need no function of a mathematical library, whose bits differ between systems.
struct Random(u64);

impl Random {
    /// A multiple of 2^-32 in [0, 1).
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 32) as f64 / 4_294_967_296.0
    }

    /// Nearly Gaussian; sums and multiples of these are exact.
    fn normals(&mut self, n: usize, sigma: f64) -> Vec<f64> {
        (0..n).map(|_| sigma * ((0..12).map(|_| self.uniform()).sum::<f64>() - 6.0)).collect()
    }
}

/// A hash per name of an answer.
type Answers = BTreeMap<String, String>;

fn note(answers: &mut Answers, name: &str, answer: &impl Debug) {
    // As text, in which each float has one form. This hash is the same on every processor and in every process.
    let text = format!("{answer:?}");
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let error = text.starts_with("Err");
    let said = if error { text } else { format!("{:016x}", hasher.finish()) };
    let before = answers.insert(name.to_owned(), said);
    assert!(before.is_none(), "{name} is there twice");
}

/// Of the types, as [`Stored::all`] has them.
const NAMES: [&str; 4] = ["f32", "f64", "f16", "bf16"];

fn of_rows(answers: &mut Answers) {
    let mut random = Random(1);
    let lengths: &[usize] = &[1, 5, 16, 33, 100, 129, 513, 1000, 4096, 4097, 20_000];
    for &n in lengths {
        for sigma in [0.5, 3.0, 30.0] {
            let rows = if n > 4000 { 1 } else { 7 };
            let mut numbers = random.normals(rows * n, sigma);
            for at in (0..numbers.len()).step_by(11) {
                numbers[at] = if at % 2 == 0 { f64::NEG_INFINITY } else { 1.0 };
            }
            let visible: Vec<u8> = (0..n).map(|i| u8::from(i % 7 != 3)).collect();
            for (name, stored) in NAMES.into_iter().zip(Stored::all(&numbers)) {
                for scale in [1.0, -0.3] {
                    let scores = Scores::new(stored.data(), &[rows, n]).unwrap();
                    let scores = scores.scale(scale).unwrap();
                    let masked = scores.clone().mask(Mask::Allowed(&visible), &[0]).unwrap();
                    let called = |what: &str| format!("{what} {name} {n} {sigma} {scale}");
                    let plain = Options::new().threads(1);
                    for eps in [1e-9, 1e-3, 0.3] {
                        let first = select(&scores, &[eps], &plain).unwrap();
                        let kept: Vec<u8> = (0..rows * n)
                            .map(|at| {
                                let (row, i) = (at / n, at % n);
                                u8::from(first.row(row).contains(&(i as u32)))
                            })
                            .collect();
                        if n <= 1000 {
                            let keep = Keep::Mask { kept: &kept, strides: &[n] };
                            let fast = certify(
                                &scores,
                                &keep,
                                &CertifyOptions::new().eps(&[eps]).threads(1),
                            );
                            let slow = certify(
                                &scores,
                                &keep,
                                &CertifyOptions::new().eps(&[eps]).independent(true).threads(1),
                            );
                            note(answers, &called(&format!("certify {eps}")), &(fast, slow));
                        }
                        note(answers, &called(&format!("select {eps}")), &first);
                    }
                    let proven = plain.clone().prove_minimal(true);
                    note(answers, &called("proven"), &select(&masked, &[0.01], &proven));
                    let blocks = plain.clone().block_size(16);
                    note(answers, &called("blocks"), &select(&masked, &[0.05], &blocks));
                    if n <= 1000 {
                        note(answers, &called("keep set"), &keep_set(&masked, &[0.05], &plain));
                    }
                }
            }
        }
    }
}

fn of_vectors(answers: &mut Answers) {
    let mut random = Random(2);
    for (m, n, dim, width) in
        [(1, 3000, 64, 64), (5, 700, 24, 9), (33, 1500, 128, 32), (80, 600, 8, 16)]
    {
        let numbers = [
            random.normals(m * dim, 2.0),
            random.normals(n * dim, 1.0),
            random.normals(n * width, 1.0),
        ];
        let stored = numbers.map(|numbers| Stored::all(&numbers));
        for (kind, name) in NAMES.into_iter().enumerate() {
            let [q, k, v] = stored.each_ref().map(|kinds| &kinds[kind]);
            let q = Vectors::new("q", q.data(), &[m, dim]).unwrap();
            let k = Vectors::new("k", k.data(), &[n, dim]).unwrap();
            let v = Vectors::new("v", v.data(), &[n, width]).unwrap();
            let called = |what: &str| format!("{what} {name} {m} {n} {dim} {width}");
            let index = match KeyIndex::build(&k, &IndexOptions::default()) {
                Ok(index) => index,
                Err(error) => {
                    note(answers, &called("index"), &error);
                    continue;
                }
            };
            for eps in [1e-6, 0.01, 0.3] {
                for all in [false, true] {
                    let keys = all.then_some(&k);
                    for rule in &[Rule::Mass, Rule::Gap, Rule::TopK(20)][..if all { 3 } else { 1 }]
                    {
                        let options = SearchOptions::new().rule(*rule);
                        let found = index.search(&q, keys, &[eps], &options);
                        note(answers, &called(&format!("search {eps} {all} {rule:?}")), &found);
                    }
                }
                for (with, index) in [(false, None), (true, Some(&index))] {
                    for precision in [Precision::F32, Precision::F64] {
                        for dear in [false, true] {
                            let options = AttentionOptions::new();
                            let options = options.precision(precision).even_if_slower(dear);
                            let budget = [eps];
                            let found =
                                attention(&q, &k, &v, Budget::TailMass(&budget), index, &options);
                            let bound =
                                found.as_ref().map(|found| found.error_bound(&q, &v, &options));
                            let what = format!("attention {eps} {with} {precision:?} {dear}");
                            let sets = found.as_ref().map(|found| {
                                (&found.tail_mass_upper, &found.k, &found.scored, &found.rung)
                            });
                            note(answers, &called(&what), &sets);
                            let all = (&found, bound);
                            note(answers, &called(&format!("{OUTPUT}{what}")), &all);
                        }
                    }
                }
            }
        }
    }
    let (n, width) = (300, 3);
    let (row, points) = (random.normals(n, 2.0), random.normals(n * width, 1.0));
    let scores = Scores::new(&row, &[1, n]).unwrap();
    let values = Values::new(&points, &[n, width]).unwrap();
    let kept: Vec<u8> = (0..n).map(|i| u8::from(i % 3 == 0)).collect();
    let keep = Keep::Mask { kept: &kept, strides: &[n] };
    note(answers, "output error", &output_error(&scores, &values, &keep, &OutputOptions::new()));
}

fn answers() -> Answers {
    let mut answers = Answers::new();
    of_rows(&mut answers);
    of_vectors(&mut answers);
    answers
}

/// A line per answer.
fn written(answers: &Answers) -> String {
    answers.iter().fold(String::new(), |mut text, (name, hash)| {
        writeln!(text, "{name}: {hash}").unwrap();
        text
    })
}

/// Outputs of attention have other last bits where products go by AMX.
const OUTPUT: &str = "output of ";

/// Compares answers, with outputs or without.
fn compare(name: &str, here: &str, there: &str, outputs: bool) {
    let told = |line: &&str| outputs || !line.starts_with(OUTPUT);
    let (here, there) = (here.lines().filter(told), there.lines().filter(told));
    assert_eq!(here.clone().count(), there.clone().count(), "{name}");
    let other: Vec<_> = here.zip(there).filter(|(a, b)| a != b).collect();
    assert!(
        other.is_empty(),
        "{name}: {} answers differ: {:?}",
        other.len(),
        &other[..other.len().min(5)]
    );
}

#[test]
fn every_level_and_every_processor_has_the_same_bits() {
    let best = {
        let _alone = alone();
        if simd_level().unwrap() == "amx" {
            force_simd_level(Some("avx512")).unwrap();
        }
        let best = written(&answers());
        force_simd_level(None).unwrap();
        best
    };
    let errors = best.lines().filter(|line| line.contains(": Err")).count();
    assert!(best.lines().count() > 2000 && errors < 10, "{best}");
    if let Some(file) = std::env::var_os("CERTK_BITS") {
        match std::fs::read_to_string(&file) {
            Ok(there) => compare("another processor", &best, &there, true),
            Err(_) => std::fs::write(&file, &best).unwrap(),
        }
    }
    // Under emulation it takes minutes, and all that is here is run once for each level.
    if std::env::var_os("CERTK_EMULATED").is_none() {
        at_each(|level| compare(level, &written(&answers()), &best, level != "amx"));
    }
}
