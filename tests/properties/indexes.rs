//! Indexes: however one came to be, what it finds is certified.

use certk_rs::{IndexOptions, KeyIndex, SearchOptions, SearchResult, Status, Vectors};
use proptest::prelude::*;

use crate::made::{budget, cases, normal};
use crate::truth::{check, check_minimal, weights};

const HEADS: usize = 2;

/// Keys and a few queries for two heads.
#[derive(Debug, Clone)]
struct Case {
    n: usize,
    dim: usize,
    m: usize,
    seed: u64,
    /// Keys come in steps of this: few levels make scores that tie.
    step: f32,
    eps: f64,
}

fn case() -> impl Strategy<Value = Case> {
    let dim = prop_oneof![1usize..5, Just(8), Just(17), Just(64)];
    let step = prop_oneof![3 => Just(1e-6f32), 1 => Just(1.0)];
    (1usize..600, dim, 1usize..4, any::<u64>(), step, budget())
        .prop_map(|(n, dim, m, seed, step, eps)| Case { n, dim, m, seed, step, eps })
}

impl Case {
    fn keys(&self) -> Vec<f32> {
        let keys = normal(HEADS * self.n * self.dim, self.seed);
        keys.iter().map(|x| (x / self.step).round() * self.step).collect()
    }

    fn queries(&self) -> Vec<f32> {
        normal(HEADS * self.m * self.dim, !self.seed).iter().map(|x| x * 2.0).collect()
    }

    /// Some keys of each head, in order.
    fn only(&self, keys: &[f32], stays: impl Fn(usize) -> bool) -> Vec<f32> {
        let rows = keys.chunks(self.dim).enumerate();
        rows.filter(|(at, _)| stays(at % self.n)).flat_map(|(_, row)| row).copied().collect()
    }

    fn search(&self, index: &KeyIndex<'_>, keys: &[f32], threads: usize) -> SearchResult {
        let queries = self.queries();
        let queries = Vectors::new("q", &queries[..], &[HEADS, self.m, self.dim]).unwrap();
        let shape = [HEADS, index.len(), self.dim];
        let keys = Vectors::new("keys", keys, &shape).unwrap();
        index.check(&keys).unwrap();
        let options = SearchOptions::new().threads(threads);
        index.search(&queries, Some(&keys), &[self.eps], &options).unwrap()
    }

    /// That all that was found is true.
    fn judge(&self, found: &SearchResult, keys: &[f32]) {
        let (set, queries) = (&found.selection, self.queries());
        let n = keys.len() / HEADS / self.dim;
        let scale = 1.0 / (self.dim as f64).sqrt();
        for (row, query) in queries.chunks(self.dim).enumerate() {
            let head = &keys[row / self.m * n * self.dim..][..n * self.dim];
            let product = |key: &[f32]| -> f64 {
                query.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
            };
            let weights = weights(head.chunks(self.dim).map(|key| Some(scale * product(key))));
            check(&weights, set.row(row), set.tail_mass_lower[row], set.tail_mass_upper[row]);
            if n > 0 {
                assert_eq!(set.status[row], Status::Certified);
                assert!(set.tail_mass_upper[row] <= self.eps);
            }
            if set.minimal[row] {
                check_minimal(&weights, set.row(row).len(), self.eps);
            }
        }
    }
}

fn built(case: &Case, keys: &[f32]) -> KeyIndex<'static> {
    let n = keys.len() / HEADS / case.dim;
    let keys = Vectors::new("keys", keys, &[HEADS, n, case.dim]).unwrap();
    KeyIndex::build(&keys, &IndexOptions::new().threads(1)).unwrap()
}

fn append(case: &Case, index: &mut KeyIndex<'_>, keys: &[f32]) {
    let n = keys.len() / HEADS / case.dim;
    let keys = Vectors::new("keys", keys, &[HEADS, n, case.dim]).unwrap();
    index.append(&keys).unwrap();
}

proptest! {
    #![proptest_config(cases(600))]

    #[test]
    fn built_at_once_or_in_parts(case in case(), cuts in prop::collection::vec(0.0f64..1.0, 1..4)) {
        let keys = case.keys();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| (cut * case.n as f64) as usize).collect();
        cuts.sort_unstable();
        let mut index = built(&case, &case.only(&keys, |at| at < cuts[0]));
        for (i, &from) in cuts.iter().enumerate() {
            let to = cuts.get(i + 1).copied().unwrap_or(case.n);
            append(&case, &mut index, &case.only(&keys, |at| (from..to).contains(&at)));
        }
        let (at_once, in_parts) =
            (case.search(&built(&case, &keys), &keys, 1), case.search(&index, &keys, 1));
        case.judge(&at_once, &keys);
        case.judge(&in_parts, &keys);
        let (one, other) = (&at_once.selection, &in_parts.selection);
        for row in 0..HEADS * case.m {
            prop_assert!(!(one.minimal[row] && other.minimal[row]) || one.k[row] == other.k[row]);
        }
        prop_assert_eq!(case.search(&index, &keys, 2), in_parts);
    }

    #[test]
    fn a_snapshot_stays_what_it_was(case in case(), cut in 0.1f64..1.0, gone in prop::collection::vec(0.0f64..1.0, 1..9)) {
        let keys = case.keys();
        let first = (cut * case.n as f64) as usize;
        let before = case.only(&keys, |at| at < first);
        let mut index = built(&case, &before);
        let snapshot = index.snapshot();
        let said = case.search(&snapshot, &before, 1);
        append(&case, &mut index, &case.only(&keys, |at| at >= first));
        let grown = index.snapshot();
        let of_all = case.search(&grown, &keys, 1);
        let mut gone: Vec<u32> = gone.iter().map(|at| (at * case.n as f64) as u32).collect();
        gone.sort_unstable();
        gone.dedup();
        let all = Vectors::new("keys", &keys[..], &[HEADS, case.n, case.dim]).unwrap();
        index.evict(&[&gone], &all).unwrap();
        let stay = case.only(&keys, |at| !gone.contains(&(at as u32)));
        let of_some = case.search(&index, &stay, 1);
        let half = stay.len() / HEADS / case.dim / 2;
        let shape = [HEADS, stay.len() / HEADS / case.dim, case.dim];
        let rest = Vectors::new("keys", &stay[..], &shape).unwrap();
        index.truncate(half, &rest).unwrap();
        case.judge(&of_some, &stay);
        case.judge(&of_all, &keys);
        prop_assert_eq!(index.len(), half);
        prop_assert_eq!(case.search(&snapshot, &before, 1), said);
        prop_assert_eq!(case.search(&grown, &keys, 1), of_all);
    }

    #[test]
    fn a_file_holds_all_of_it(case in case(), cut in 0.0f64..1.0) {
        let keys = case.keys();
        let first = (cut * case.n as f64) as usize;
        let mut index = built(&case, &case.only(&keys, |at| at < first));
        append(&case, &mut index, &case.only(&keys, |at| at >= first));
        let mut file = Vec::new();
        index.write_to(&mut file).unwrap();
        prop_assert_eq!(file.len(), index.file_bytes().unwrap());
        let mut read = KeyIndex::read_from(&file[..]).unwrap();
        prop_assert!(read == index);
        prop_assert_eq!(case.search(&read, &keys, 1), case.search(&index, &keys, 1));
        // It goes on as the other does.
        append(&case, &mut read, &keys);
        append(&case, &mut index, &keys);
        prop_assert!(read == index);
    }
}
