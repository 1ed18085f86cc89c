//! Bytes that say what is seen or kept: anything but 0 says yes, on every instruction-set level.

use certk_rs::bounds::{Blocks, blockwise, single_gap};
use certk_rs::montecarlo::{Method, TailOptions, tail_mass};
use certk_rs::{
    AttentionOptions, Budget, CertifyOptions, IndexOptions, Keep, KeyIndex, Mask, Options,
    OutputOptions, Scores, Values, Vectors, attention, certify, keep_set, output_error, select,
};

use crate::exact::Random;
use crate::levels::at_each;
use crate::stored::Stored;

/// Calls with zeros and ones, and with other bytes in place of the ones, each of 1 to 255 somewhere: the answer is the same, at
/// every level.
fn of_any_bytes<R: PartialEq>(random: &mut Random, n: usize, run: impl Fn(&[u8]) -> R) {
    let ones: Vec<u8> = (0..n).map(|_| u8::from(random.uniform() < 0.7)).collect();
    let any = ones.iter().enumerate().map(|(i, &one)| one * (i * 91 % 255 + 1) as u8);
    let any: Vec<u8> = any.collect();
    assert!(n < 255 || any.contains(&128) && any.contains(&255));
    let want = run(&ones);
    at_each(|level| {
        assert!(run(&ones) == want, "{level} gives other bits for {n}");
        assert!(run(&any) == want, "{level} takes bytes for something else in {n}");
    });
}

#[test]
fn rows_of_any_bytes() {
    let mut random = Random::new(21);
    for n in [9, 33, 100, 1000, 4096, 5001, 66_000] {
        for stored in Stored::all(&random.normals(n, 3.0)) {
            for scale in [1.0, 0.3, -1.0] {
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().scale(scale).unwrap();
                of_any_bytes(&mut random, n, |bytes| {
                    let shown = scores.clone().mask(Mask::Allowed(bytes), &[n]).unwrap();
                    let plain = Options::new().threads(1);
                    let forced = plain.clone().keep_first(4).keep_last(4);
                    let blocks = plain.clone().block_size(16);
                    let found =
                        [&plain, &forced, &blocks].map(|how| select(&shown, &[0.05], how).unwrap());
                    let set = keep_set(&shown, &[0.05], &plain).unwrap();
                    let kept = found[..2].iter().flat_map(|found| &found.indices);
                    assert!(kept.chain(&set.indices).all(|key| bytes[*key as usize] != 0));
                    (found, set, single_gap(&shown, &[3]).unwrap())
                });
            }
            let scores = Scores::new(stored.data(), &[1, n]).unwrap();
            of_any_bytes(&mut random, n, |bytes| {
                let keep = Keep::Mask { kept: bytes, strides: &[n] };
                let options = CertifyOptions::new().eps(&[0.9]).threads(1);
                let found = [false, true].map(|independent| {
                    certify(&scores, &keep, &options.clone().independent(independent)).unwrap()
                });
                let count = bytes.iter().filter(|byte| **byte != 0).count();
                assert!(found.iter().all(|found| found.k == [count as i64]));
                let drawn = TailOptions::new(0.1, 1).method(Method::Hoeffding).seed(3).threads(1);
                (found, tail_mass(&scores, &keep, None, &drawn).unwrap())
            });
        }
    }
}

#[test]
fn values_and_blocks_of_any_bytes() {
    let mut random = Random::new(22);
    let (n, d) = (1000, 3);
    let (row, points) = (random.normals(n, 2.0), random.normals(n * d, 1.0));
    let scores = Scores::new(&row, &[1, n]).unwrap();
    let values = Values::new(&points, &[n, d]).unwrap();
    let (sizes, upper, lower) = (vec![3; n], vec![1.0; n], vec![0.5; n]);
    of_any_bytes(&mut random, n, |bytes| {
        let keep = Keep::Mask { kept: bytes, strides: &[n] };
        let blocks = Blocks::new(&[n], &sizes, &upper, &lower, bytes).unwrap();
        let error = output_error(&scores, &values, &keep, &OutputOptions::new()).unwrap();
        (error, blockwise(&blocks).unwrap())
    });
}

#[test]
fn attention_under_masks_of_any_bytes() {
    let mut random = Random::new(23);
    for (m, n, dim, width) in
        [(1, 40, 5, 3), (3, 300, 16, 20), (20, 700, 24, 9), (70, 2000, 32, 16)]
    {
        let numbers = [(m * dim, 4.0), (n * dim, 1.0), (n * width, 1.0)];
        let [queries, keys, values] =
            numbers.map(|(count, sigma)| Stored::narrowed(&random.normals(count, sigma), 0));
        let q = Vectors::new("q", queries.data(), &[m, dim]).unwrap();
        let k = Vectors::new("k", keys.data(), &[n, dim]).unwrap();
        let v = Vectors::new("v", values.data(), &[n, width]).unwrap();
        let index = KeyIndex::build(&k, &IndexOptions::default()).unwrap();
        for (index, eps) in [(None, 0.0), (None, 0.1), (Some(&index), 0.1)] {
            of_any_bytes(&mut random, m * n, |bytes| {
                let strides = [n];
                let options =
                    AttentionOptions::new().mask(bytes, &strides).even_if_slower(eps > 0.0);
                let budget = Budget::TailMass(&[eps]);
                let found = attention(&q, &k, &v, budget, index, &options).unwrap();
                for (k, bytes) in found.k.iter().zip(bytes.chunks(n)) {
                    let seen = bytes.iter().filter(|byte| **byte != 0).count() as i64;
                    assert!(if eps == 0.0 { *k == seen } else { *k <= seen });
                }
                let bound = found.error_bound(&q, &v, &options).unwrap();
                (found, bound)
            });
        }
    }
}
