//! Rows that once had a false certificate or no end, kept by name.

use std::cell::Cell;
use std::rc::Rc;

use certk_rs::{
    CertifyOptions, Error, Keep, Kind, Options, Scores, certify, interruptible, keep_set, select,
};

#[test]
fn weights_whose_sum_nearly_overflows() {
    // Summed one after another the small weights vanish and the total stays finite; in lanes it overflows.
    let mut row = vec![9e291; 101];
    row[0] = f64::MAX;
    let scores = Scores::new(&row, &[1, 101]).unwrap().kind(Kind::Probs).unwrap();
    let refused = select(&scores, &[1e-17], &Options::new());
    assert!(matches!(refused, Err(Error::ProbabilityTotal { .. })));
}

#[test]
fn a_subnormal_tail_keeps_its_slack() {
    // The tail is one subnormal weight, the head a long sum of weights near half an ulp: its rounding must be covered.
    let small = 1e-290 * 1.1 * 2f64.powi(-53) / 16.0;
    let mut row = vec![small; 256 * 1001];
    row[..256].fill(1e-290 / 16.0);
    row.push(5e-324);
    let n = row.len();
    let mut kept = vec![1u8; n];
    kept[n - 1] = 0;
    let scores = Scores::new(&row, &[1, n]).unwrap().kind(Kind::Probs).unwrap();
    let keep = Keep::Mask { kept: &kept, strides: &[n] };
    let judged = certify(&scores, &keep, &CertifyOptions::new().threads(1)).unwrap();
    // Exact rational arithmetic gives 3.0879102865074137e-35.
    assert!(judged.tail_mass_upper[0] > 3.087_910_286_507_414e-35);
    assert!(judged.tail_mass_lower[0] < 3.087_910_286_507_413e-35);
}

#[test]
fn long_sums_of_forced_blocks_keep_their_slack() {
    for factor in [1.1, 0.9] {
        let n = (2 << 18) + 2;
        let mut row = vec![factor * 2f64.powi(-54); n];
        (row[0], row[1], row[n - 2], row[n - 1]) = (1.0, 0.0, 0.01, 0.0);
        let scores = Scores::new(&row, &[1, n]).unwrap().kind(Kind::Probs).unwrap();
        let options = Options::new().block_size(2).keep_first(n - 3).threads(1);
        let found = select(&scores, &[0.5], &options).unwrap();
        let rest = factor * 2f64.powi(-54) * (n - 4) as f64;
        let real = 0.01 / (1.01 + rest);
        assert!(found.tail_mass_upper[0] > real * (1.0 + 1e-15));
        assert!(found.tail_mass_lower[0] < real * (1.0 - 1e-15));
    }
}

#[test]
fn budgets_below_every_weight_end_in_the_full_set() {
    for (row, eps) in [([0.0, -95.0], 1e-51), ([0.0, -115.0], 1e-51), ([0.0, -0.1], 4e-309)] {
        let scores = Scores::new(&row[..], &[1, 2]).unwrap();
        let set = keep_set(&scores, &[eps], &Options::new()).unwrap();
        assert_eq!(set.indices, [0, 1]);
        assert!(set.weights[0].is_finite() && set.lower_bound <= 2);
    }
    let row = [1.0, 1e-50];
    let scores = Scores::new(&row[..], &[1, 2]).unwrap().kind(Kind::Probs).unwrap();
    assert_eq!(keep_set(&scores, &[1e-72], &Options::new()).unwrap().indices, [0, 1]);
}

#[test]
fn lower_bounds_do_not_trust_subnormal_weights() {
    // The real weights are below the smallest normal f32, and their sum is well within the budget.
    let mut row = [0.8e-45f64.ln(); 11];
    row[0] = 0.0;
    let scores = Scores::new(&row[..], &[1, 11]).unwrap();
    let set = keep_set(&scores, &[8.5e-45], &Options::new()).unwrap();
    assert!(set.lower_bound <= 1);
}

#[test]
fn rows_without_memory_are_an_error() {
    // Of every row a few numbers are held, and of every key; weights only of rows that set a limit.
    let row = [0f32; 4];
    let scores = Scores::strided(&row[..], &[1 << 45, 4], &[0]).unwrap();
    let refused = keep_set(&scores, &[0.1], &Options::new());
    assert!(matches!(refused, Err(Error::NoMemory { .. })));
}

#[test]
fn more_scores_than_can_be_held_are_read_until_the_caller_has_enough() {
    // Sixteen million rows of a million scores each are hours of work, and their weights no machine's memory.
    let row = vec![0f32; 1 << 20];
    let scores = Scores::strided(&row, &[1 << 24, 1 << 20], &[0]).unwrap();
    let asked = Rc::new(Cell::new(0));
    let count = Rc::clone(&asked);
    let enough = move || {
        count.set(count.get() + 1);
        if count.get() < 3 { Ok(()) } else { Err(Error::Interrupted) }
    };
    let stopped = interruptible(enough, || keep_set(&scores, &[0.1], &Options::new()));
    assert_eq!((stopped, asked.get()), (Err(Error::Interrupted), 3));
}

/// Scores of a few levels, where rounding decides at the very budget that an answer reported.
fn levels(n: usize, count: u32, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let step = 0.3 + (next() % 1000) as f32 / 500.0;
    (0..n).map(|_| -((next() % count) as f32) * step / 3.0).collect()
}

#[test]
fn the_search_ends_at_budgets_on_the_edge() {
    // The two sides of the boundary were summed in two orders, each of which sent the search to the other side.
    for n in [1040, 4096, 9000] {
        for seed in 0..40 {
            let row = levels(n, if seed % 2 == 0 { 4 } else { 16 }, seed);
            let double: Vec<f64> = row.iter().map(|&score| f64::from(score)).collect();
            let single = Scores::new(&row[..], &[1, n]).unwrap();
            let double = Scores::new(&double[..], &[1, n]).unwrap();
            for scores in [single, double] {
                let mut eps = 0.15;
                for _ in 0..6 {
                    let found = select(&scores, &[eps], &Options::new().threads(1)).unwrap();
                    assert!(found.tail_mass_upper[0] <= eps);
                    eps = found.tail_mass_upper[0];
                }
            }
        }
    }
}

#[test]
fn a_rows_bits_do_not_depend_on_longer_rows_beside_it() {
    // Rows shared out over threads took their short neighbours along, on another path.
    let long = levels(1 << 18, 1 << 16, 1);
    for n in [33, 200, 1024, 4096, 8191] {
        let mut all = long.clone();
        all.extend(levels(n, 1 << 16, 2).iter().map(|score| score / 5000.0));
        let indptr = [0, 1 << 18, (1 << 18) + n as i64];
        let scores = Scores::ragged(&all[..], &indptr).unwrap();
        let alone = Scores::new(&all[1 << 18..], &[1, n]).unwrap();
        for eps in [0.055, 1e-3] {
            let one = select(&scores, &[eps], &Options::new().threads(1)).unwrap();
            let two = select(&scores, &[eps], &Options::new().threads(2)).unwrap();
            assert_eq!(one, two);
            let alone = select(&alone, &[eps], &Options::new().threads(2)).unwrap();
            assert_eq!(alone.row(0), one.row(1));
            assert_eq!(alone.tail_mass_upper[0].to_bits(), one.tail_mass_upper[1].to_bits());
        }
    }
}

#[test]
fn forced_keys_are_forced_whatever_their_number() {
    let row = levels(300, 1 << 16, 3);
    let scores = Scores::new(&row[..], &[1, 300]).unwrap();
    let all = Options::new().keep_first(usize::MAX).keep_last(1);
    assert_eq!(select(&scores, &[0.5], &all).unwrap().k, [300]);
}
