//! Memory that warm calls ask for: none, on one thread, once what they returned was given back.

use certk_rs::{
    AttentionOptions, Budget, CertifyOptions, Context, IndexOptions, Keep, KeyIndex, LogMass, Mask,
    Options, Precision, RecallOptions, Rule, Rung, Scores, SearchOptions, ValueIndex, Vectors,
    Workspace, attention, certify, select,
};

use crate::{alone, gaussian};

fn asked(name: &str, work: &dyn Fn()) -> u64 {
    (0..8).for_each(|_| work());
    let found = allocation_counter::measure(work);
    println!("{name}: {} times, {} bytes", found.count_total, found.bytes_total);
    found.count_total
}

#[test]
fn warm_calls_ask_for_no_memory() {
    let _alone = alone();
    let workspace = Workspace::new();
    let mut all = 0;
    for (how, context) in [
        ("one thread", Context::new().serial()),
        ("own workspace", Context::new().serial().workspace(&workspace)),
    ] {
        let mut count = |name: &str, work: &dyn Fn()| {
            all += asked(&format!("{name}, {how}"), &|| context.run(work));
        };
        let options = Options::new();
        let long = gaussian(1 << 18, 3.0);
        let wide: Vec<f64> = long.iter().map(|&score| f64::from(score)).collect();
        for (rows, n) in [(1, 17), (1, 100), (1, 5000), (100, 512), (3, 65_535), (1, 1 << 18)] {
            let scores = Scores::new(&long[..rows * n], &[rows, n]).unwrap();
            let scores64 = Scores::new(&wide[..rows * n], &[rows, n]).unwrap();
            let mask = scores.clone().scale(0.37).unwrap();
            let blocks = Options::new().block_size(16);
            for (name, scores) in [("f32", &scores), ("f64", &scores64), ("scaled", &mask)] {
                count(&format!("select {rows} x {n} {name}"), &|| {
                    select(scores, &[0.05], &options).unwrap().recycle();
                });
            }
            count(&format!("select blocks {rows} x {n}"), &|| {
                select(&scores, &[0.05], &blocks).unwrap().recycle();
            });
            let found = select(&scores, &[0.05], &options).unwrap();
            let indices: Vec<i64> = found.indices.iter().map(|&i| i64::from(i)).collect();
            let keep = Keep::Indices { indptr: &found.indptr, indices: &indices };
            for independent in [false, true] {
                count(&format!("certify {rows} x {n} {independent}"), &|| {
                    certify(
                        &scores,
                        &keep,
                        &CertifyOptions::new().eps(&[0.05]).independent(independent),
                    )
                    .unwrap()
                    .recycle();
                });
            }
        }
        let (n, dim) = (1 << 12, 64);
        let mask: Vec<u8> = (0..n).map(|key| u8::from(key % 7 != 0)).collect();
        let bias: Vec<f32> = long[..n].iter().map(|score| score / 10.0).collect();
        let row = Scores::new(&long[..n], &[1, n]).unwrap();
        let rows = [
            ("masked", row.clone().mask(Mask::Allowed(&mask), &[0]).unwrap()),
            ("biased", row.clone().mask(Mask::Additive((&bias[..]).into()), &[0]).unwrap()),
        ];
        for (name, scores) in &rows {
            let forced = Options::new().keep_first(9).keep_last(99);
            for options in [&options, &forced] {
                count(&format!("select {name}"), &|| {
                    select(scores, &[0.05], options).unwrap().recycle();
                });
            }
        }
        let keys = Vectors::new("k", &long[..n * dim], &[n, dim]).unwrap();
        let queries = Vectors::new("q", &long[..4 * dim], &[4, dim]).unwrap();
        let index = KeyIndex::build(&keys, &IndexOptions::default()).unwrap();
        for rule in [Rule::Mass, Rule::Gap, Rule::TopK(20)] {
            let mut options = SearchOptions::default();
            options.rule = rule;
            count(&format!("search {rule:?}"), &|| {
                index.search(&queries, Some(&keys), &[0.05], &options).unwrap().recycle();
            });
        }
        let many = Vectors::new("q", &long[..64 * dim], &[64, dim]).unwrap();
        for (name, index) in [("dense", None), ("index", Some(&index))] {
            count(&format!("attention of many {name}"), &|| {
                let budget = Budget::TailMass(&[0.05]);
                let how = AttentionOptions::new().causal(true);
                attention(&many, &keys, &keys, budget, index, &how).unwrap().recycle();
            });
            count(&format!("attention of masked {name}"), &|| {
                let budget = Budget::TailMass(&[0.05]);
                let how = AttentionOptions::new().mask(&mask, &[0]);
                attention(&queries, &keys, &keys, budget, index, &how).unwrap().recycle();
            });
            count(&format!("attention {name}"), &|| {
                let budget = Budget::TailMass(&[0.05]);
                let how = AttentionOptions::default();
                attention(&queries, &keys, &keys, budget, index, &how).unwrap().recycle();
            });
        }
        let values = ValueIndex::build(&keys).unwrap();
        let flat: Vec<f32> = long[..4 * dim].iter().map(|entry| entry / 99.0).collect();
        let flat = Vectors::new("q", &flat, &[4, dim]).unwrap();
        count("attention by codes", &|| {
            let budget = Budget::TailMass(&[0.05]);
            let how = AttentionOptions::new().value_index(&values);
            let found = attention(&flat, &keys, &keys, budget, Some(&index), &how).unwrap();
            assert_eq!(found.rung, [Rung::Coded; 4]);
            found.recycle();
        });
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            count(&format!("attention in {precision:?}"), &|| {
                let budget = Budget::TailMass(&[0.05]);
                let how = AttentionOptions::new().precision(precision);
                attention(&queries, &keys, &keys, budget, None, &how).unwrap().recycle();
            });
        }
        let weights = [LogMass::new(1.0, 1.5)];
        count("recall", &|| {
            let how = RecallOptions::default();
            index.recall(&queries, &weights, &[0.05], &how).unwrap().recycle();
        });
        // What is returned is the caller's, and cannot be given back.
        let log_mass = || drop(index.log_mass(&queries, &RecallOptions::default()).unwrap());
        assert_eq!(asked(&format!("log_mass, {how}"), &|| context.run(log_mass)), 1);
    }
    assert_eq!(all, 0);
}
