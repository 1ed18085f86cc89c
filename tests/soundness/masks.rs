//! Bytes that say what is seen or kept: anything but 0 says yes, on every instruction-set level.

use certk_rs::bounds::{Blocks, blockwise, single_gap};
use certk_rs::montecarlo::{Method, TailOptions, tail_mass};
use certk_rs::{
    AttentionOptions, Budget, CertifyOptions, IndexOptions, Keep, KeyIndex, Mask, Options,
    OutputOptions, Scores, Values, Vectors, attention, certify, force_simd_level, keep_set,
    output_error, select,
};

use crate::exact::Random;
use crate::levels::at_each;
use crate::stored::Stored;

/// Names that this CPU knows; whatever they are, answers have the same bits.
fn on_every_level<R: PartialEq + std::fmt::Debug>(what: &str, run: impl Fn(bool) -> R) {
    force_simd_level(None).unwrap();
    let want = run(false);
    at_each(|level| {
        assert!(run(false) == want, "{what}: {level} gives other bits");
        assert!(run(true) == want, "{what}: {level} takes bytes for something else");
    });
}

/// Zeros and ones, and the same with other bytes in place of the ones: each of 1 to 255 somewhere.
fn bytes(n: usize, random: &mut Random) -> [Vec<u8>; 2] {
    let ones: Vec<u8> = (0..n).map(|_| u8::from(random.uniform() < 0.7)).collect();
    let any = ones.iter().enumerate();
    let any = any.map(|(i, &one)| if one == 0 { 0 } else { (i * 91 % 255 + 1) as u8 });
    let any: Vec<u8> = any.collect();
    assert!(n < 255 || any.contains(&128) && any.contains(&255));
    [ones, any]
}

const LENGTHS: [usize; 7] = [9, 33, 100, 1000, 4096, 5001, 66_000];

#[test]
fn masks_of_any_bytes() {
    let mut random = Random::new(21);
    for n in LENGTHS {
        let masks = bytes(n, &mut random);
        for stored in Stored::all(&random.normals(n, 3.0)) {
            for scale in [1.0, 0.3, -1.0] {
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().scale(scale).unwrap();
                on_every_level(&format!("select {n} {scale}"), |any| {
                    let mask = Mask::Allowed(&masks[usize::from(any)]);
                    let scores = scores.clone().mask(mask, &[n]).unwrap();
                    let plain = Options::new().threads(1);
                    let first = select(&scores, &[0.05], &plain).unwrap();
                    let forced = plain.keep_first(4).keep_last(4);
                    let second = select(&scores, &[0.05], &forced).unwrap();
                    let blocks = select(&scores, &[0.05], &Options::new().block_size(16)).unwrap();
                    let set = keep_set(&scores, &[0.05], &Options::new()).unwrap();
                    let gap = single_gap(&scores, &[3]).unwrap();
                    // What is hidden is not among what is kept.
                    let all = [&first.indices, &second.indices, &set.indices];
                    let seen = |i: &u32| masks[0][*i as usize] == 1;
                    assert!(all.iter().all(|kept| kept.iter().all(seen)));
                    (first, second, blocks, set, gap)
                });
            }
        }
    }
}

#[test]
fn kept_sets_of_any_bytes() {
    let mut random = Random::new(22);
    for n in LENGTHS {
        let masks = bytes(n, &mut random);
        let count = masks[0].iter().filter(|byte| **byte == 1).count() as i64;
        for stored in Stored::all(&random.normals(n, 3.0)) {
            let scores = Scores::new(stored.data(), &[1, n]).unwrap();
            on_every_level(&format!("certify {n}"), |any| {
                let keep = Keep::Mask { kept: &masks[usize::from(any)], strides: &[n] };
                let fast =
                    certify(&scores, &keep, &CertifyOptions::new().eps(&[0.9]).threads(1)).unwrap();
                let slow = certify(
                    &scores,
                    &keep,
                    &CertifyOptions::new().eps(&[0.9]).independent(true).threads(1),
                )
                .unwrap();
                assert_eq!((fast.k[0], slow.k[0]), (count, count));
                assert!(fast.tail_mass_lower[0] > 0.0 && fast.tail_mass_upper[0] < 1.0);
                let options = TailOptions::new(0.1, 1).method(Method::Hoeffding).seed(3).threads(1);
                (fast, slow, tail_mass(&scores, &keep, None, &options).unwrap())
            });
        }
    }
    let (n, d) = (300, 3);
    let (masks, row) = (bytes(n, &mut random), random.normals(n, 2.0));
    let points = random.normals(n * d, 1.0);
    let scores = Scores::new(&row, &[1, n]).unwrap();
    let values = Values::new(&points, &[n, d]).unwrap();
    on_every_level("output_error", |any| {
        let keep = Keep::Mask { kept: &masks[usize::from(any)], strides: &[n] };
        output_error(&scores, &values, &keep, &OutputOptions::new()).unwrap()
    });
    let (sizes, upper, lower) = (vec![3; n], vec![1.0; n], vec![0.5; n]);
    on_every_level("blockwise", |any| {
        let kept = &masks[usize::from(any)];
        let blocks = Blocks::new(&[n], &sizes, &upper, &lower, kept).unwrap();
        blockwise(&blocks).unwrap()
    });
}

#[test]
fn attention_under_masks_of_any_bytes() {
    let mut random = Random::new(23);
    for (m, n, dim, width) in
        [(1, 40, 5, 3), (3, 300, 16, 20), (20, 700, 24, 9), (70, 2000, 32, 16)]
    {
        let narrow = |numbers: Vec<f64>| numbers.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let queries = narrow(random.normals(m * dim, 4.0));
        let (keys, values) =
            (narrow(random.normals(n * dim, 1.0)), narrow(random.normals(n * width, 1.0)));
        let each = bytes(m * n, &mut random);
        let q = Vectors::new("q", &queries, &[m, dim]).unwrap();
        let k = Vectors::new("k", &keys, &[n, dim]).unwrap();
        let v = Vectors::new("v", &values, &[n, width]).unwrap();
        let index = KeyIndex::build(&k, &IndexOptions::default()).unwrap();
        for (index, eps) in [(None, 0.0), (None, 0.1), (Some(&index), 0.1)] {
            on_every_level(&format!("attention {m} {n} {eps}"), |any| {
                let strides = [n];
                let options = AttentionOptions::new()
                    .mask(&each[usize::from(any)], &strides)
                    .even_if_slower(eps > 0.0);
                let found =
                    attention(&q, &k, &v, Budget::TailMass(&[eps]), index, &options).unwrap();
                let bound = found.error_bound(&q, &v, &options).unwrap();
                for (row, k) in found.k.iter().enumerate() {
                    let seen = each[0][row * n..][..n].iter().filter(|byte| **byte == 1).count();
                    assert!(if eps == 0.0 { *k == seen as i64 } else { *k <= seen as i64 });
                }
                (found, bound)
            });
        }
    }
}
