//! Selections, and what is certified of sets.

use std::sync::Arc;

use certk_rs::{
    CertifyOptions, Context, Keep, Mask, Options, Scores, Selection, Status, certify, select,
};
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;

use crate::made::{budget, cases, flagged, normal, row, scale};
use crate::truth::{check, check_minimal, weights};

fn proven() -> Options {
    Options::new().prove_minimal(true).threads(1)
}

fn one(row: &[f32], scale: f64, eps: f64) -> Selection {
    let scores = Scores::new(row, &[1, row.len()]).unwrap().scale(scale).unwrap();
    select(&scores, &[eps], &proven()).unwrap()
}

fn real(row: &[f32], scale: f64) -> Vec<f64> {
    weights(
        row.iter().map(|&score| (score > f32::NEG_INFINITY).then_some(scale * f64::from(score))),
    )
}

/// The scores of a row's set, sorted.
fn kept(row: &[f32], of: &Selection) -> Vec<f32> {
    let mut kept: Vec<f32> = of.row(0).iter().map(|&key| row[key as usize]).collect();
    kept.sort_by(f32::total_cmp);
    kept
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn certificates_are_true((row, eps, scale) in (row(400), budget(), scale())) {
        let found = one(&row, scale, eps);
        let weights = real(&row, scale);
        let upper = found.tail_mass_upper[0];
        check(&weights, found.row(0), found.tail_mass_lower[0], upper);
        prop_assert!(found.status[0] == Status::Certified && upper <= eps);
        if found.minimal[0] {
            check_minimal(&weights, found.row(0).len(), eps);
        }
    }

    #[test]
    fn the_order_of_keys_does_not_matter(
        (row, other) in row(300).prop_flat_map(|row| (Just(row.clone()), Just(row).prop_shuffle())),
        eps in budget(),
        scale in scale(),
    ) {
        let (one, other_found) = (one(&row, scale, eps), self::one(&other, scale, eps));
        if one.minimal[0] && other_found.minimal[0] {
            prop_assert_eq!(one.k[0], other_found.k[0]);
            if scale != 0.0 {
                prop_assert_eq!(kept(&row, &one), kept(&other, &other_found));
            }
        }
    }

    #[test]
    fn a_larger_budget_keeps_no_more((row, scale) in (row(300), scale()), a in budget(), b in budget()) {
        let (tight, loose) = (one(&row, scale, a.min(b)), one(&row, scale, a.max(b)));
        if loose.minimal[0] {
            prop_assert!(loose.k[0] <= tight.k[0]);
        }
    }

    #[test]
    fn hidden_is_hidden_however_it_is_said((row, shown) in flagged(300), eps in budget(), scale in scale()) {
        // A score of minus infinity is hidden where the scale is positive.
        let scale = scale.abs().max(0.01);
        let n = row.len();
        let gone: Vec<f32> =
            row.iter().zip(&shown).map(|(x, shown)| if *shown { *x } else { f32::NEG_INFINITY }).collect();
        let biases: Vec<f32> =
            shown.iter().map(|shown| if *shown { 0.0 } else { f32::NEG_INFINITY }).collect();
        let scores = || Scores::new(&row[..], &[1, n]).unwrap().scale(scale).unwrap();
        let masked = scores().mask(&shown[..], &[n]).unwrap();
        let biased = scores().mask(Mask::Additive(biases[..].into()), &[n]).unwrap();
        let by_mask = select(&masked, &[eps], &proven()).unwrap();
        let weights = real(&gone, scale);
        for other in [one(&gone, scale, eps), select(&biased, &[eps], &proven()).unwrap()] {
            check(&weights, other.row(0), other.tail_mass_lower[0], other.tail_mass_upper[0]);
            prop_assert_eq!(other.status[0], by_mask.status[0]);
            if other.minimal[0] && by_mask.minimal[0] {
                prop_assert_eq!(&other.indices, &by_mask.indices);
            }
        }
        // Only those that are shown, alone.
        let alone: Vec<f32> = row.iter().zip(&shown).filter(|(_, shown)| **shown).map(|(x, _)| *x).collect();
        if !alone.is_empty() {
            let alone = one(&alone, scale, eps);
            prop_assert!(!(alone.minimal[0] && by_mask.minimal[0]) || alone.k == by_mask.k);
        }
    }

    #[test]
    fn a_length_is_a_slice(row in row(300), share in 0.0f64..=1.0, eps in budget(), scale in scale()) {
        let n = row.len();
        let length = (n as f64 * share) as usize;
        let lengths = [length as i64];
        let scores = Scores::new(&row[..], &[1, n]).unwrap().scale(scale).unwrap();
        let found = select(&scores.lengths(&lengths).unwrap(), &[eps], &proven()).unwrap();
        prop_assert_eq!(found, one(&row[..length], scale, eps));
    }

    #[test]
    fn hidden_keys_at_the_end_change_nothing(row in row(300), more in 1usize..200, eps in budget()) {
        let mut longer = row.clone();
        longer.resize(row.len() + more, f32::NEG_INFINITY);
        let (short, long) = (one(&row, 1.0, eps), one(&longer, 1.0, eps));
        if short.minimal[0] && long.minimal[0] {
            prop_assert_eq!(&short.indices, &long.indices);
        }
        check(&real(&longer, 1.0), long.row(0), long.tail_mass_lower[0], long.tail_mass_upper[0]);
    }

    #[test]
    fn what_is_selected_is_certified_in_every_form((row, scale) in (row(300), scale()), eps in budget()) {
        let n = row.len();
        let scores = Scores::new(&row[..], &[1, n]).unwrap().scale(scale).unwrap();
        let found = select(&scores, &[eps], &proven()).unwrap();
        let mut mask = vec![0u8; n];
        for &key in &found.indices {
            mask[key as usize] = 1;
        }
        // In any order.
        let indices: Vec<i64> = found.indices.iter().rev().map(|&key| key.into()).collect();
        for independent in [false, true] {
            let judged = |keep: Keep<'_>| certify(&scores, &keep, &CertifyOptions::new().eps(&[eps]).independent(independent).threads(1)).unwrap();
            let first = judged(Keep::from(&found));
            prop_assert_eq!(&first.k, &found.k);
            prop_assert_eq!(first.holds.as_ref(), Some(&vec![true]));
            // Both intervals have the truth.
            prop_assert!(first.tail_mass_lower[0] <= found.tail_mass_upper[0]);
            prop_assert!(found.tail_mass_lower[0] <= first.tail_mass_upper[0]);
            check(&real(&row, scale), found.row(0), first.tail_mass_lower[0], first.tail_mass_upper[0]);
            prop_assert_eq!(&judged(Keep::Mask { kept: &mask, strides: &[n] }), &first);
            prop_assert_eq!(&judged(Keep::Indices { indptr: &found.indptr, indices: &indices }), &first);
        }
    }
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn who_works_does_not_matter(
        rows in 1usize..20,
        n in prop_oneof![1usize..3000, 30_000usize..200_000],
        seed in any::<u64>(),
        size in prop_oneof![Just(0.3f32), Just(3.0), Just(20.0)],
        eps in budget(),
    ) {
        let rows = if n > 3000 { 1 + rows % 3 } else { rows };
        let data: Vec<f32> = normal(rows * n, seed).iter().map(|x| x * size).collect();
        let scores = Scores::new(&data[..], &[rows, n]).unwrap();
        let options = Options::new();
        let alone = select(&scores, &[eps], &options.clone().threads(1)).unwrap();
        prop_assert_eq!(&select(&scores, &[eps], &options.clone().threads(2)).unwrap(), &alone);
        let pool = Arc::new(ThreadPoolBuilder::new().num_threads(2).build().unwrap());
        let contexts = [
            Context::new().serial(),
            Context::new().pool(&pool),
            Context::new().current_pool(),
        ];
        for context in contexts {
            prop_assert_eq!(&context.run(|| select(&scores, &[eps], &options)).unwrap(), &alone);
        }
        for (row, of) in data.chunks(n).enumerate() {
            let (lower, upper) = (alone.tail_mass_lower[row], alone.tail_mass_upper[row]);
            check(&real(of, 1.0), alone.row(row), lower, upper);
        }
    }
}
