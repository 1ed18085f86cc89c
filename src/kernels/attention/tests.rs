//! Every level against the portable code.

use half::{bf16, f16};

use super::tile::{BLOCK, BlockMask, Rows};
use crate::kernels::{Element, Keys, LANES, Picked, Simd};

/// Numbers of many sizes, the same at every run.
fn entries(count: usize, seed: u32) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 8) / f64::from(1 << 23) - 1.0
    };
    (0..count).map(|_| 3.0 * next() * next()).collect()
}

/// Returns the results of the passes over stored vectors, as bits.
fn digest<E: Element>(simd: Simd, (count, dim): (usize, usize), from: fn(f64) -> E) -> Vec<u64> {
    let stride = dim + 3;
    let stored: Vec<E> = entries(count * stride, 1).into_iter().map(from).collect();
    let keys = Keys::new(&stored, stride, dim);
    let width = dim.next_multiple_of(LANES);
    let query = |seed| {
        let mut query = entries(dim, seed);
        query.resize(width, 0.0);
        query
    };
    let (one, two) = (query(2), query(3));
    let list: Vec<u32> = (0..count as u32).filter(|key| key % 3 != 1).collect();
    let mut out = Vec::new();
    for (picked, count) in [(Picked::From(0), count), (Picked::Listed(&list), list.len())] {
        let mut products = vec![0.0; count];
        simd.products_f64(keys, picked, &one, &mut products);
        let weights: Vec<f64> = products.iter().map(|product| product.exp()).collect();
        let mut sums = vec![0.25; width];
        simd.average(keys, picked, &weights, &mut sums);
        out.extend(products.into_iter().chain(sums));
        out.push(simd.largest(keys, picked, count));
    }
    let (mut a, mut b) = (vec![0.0; count - 1], vec![0.0; count - 1]);
    simd.shared_products(keys, 1, [&one, &two], [&mut a, &mut b]);
    let (mut sum_a, mut sum_b) = (vec![0.5; width], vec![0.0; width]);
    simd.shared_average(keys, 1, [&a, &b], [&mut sum_a, &mut sum_b]);
    out.push(simd.farthest(keys, count, &two));
    out.extend([a, b, sum_a, sum_b].concat());
    out.extend(shared::<E, 1>(simd, keys, count));
    out.extend(shared::<E, 4>(simd, keys, count));
    out.extend(shared::<E, 8>(simd, keys, count));
    out.into_iter().map(f64::to_bits).collect()
}

/// Several rows to write to.
fn lent<const Q: usize>(rows: &mut [Vec<f64>]) -> [&mut [f64]; Q] {
    let mut rows = rows.iter_mut();
    std::array::from_fn(|_| &mut rows.next().unwrap()[..])
}

/// Of several queries side by side, one in the first half and another in the second, each has the scores that it has alone.
fn halved<const Q: usize>(
    simd: Simd,
    keys: Keys<'_, f32>,
    [(one, its), (other, others)]: [(&[f32], &Vec<f64>); 2],
) {
    let mut found = vec![vec![0.0; its.len()]; Q];
    let queries = std::array::from_fn(|q| if q < Q / 2 { one } else { other });
    simd.scores_shared::<f32, Q>(keys, 1, (queries, 0.37), lent(&mut found));
    let (first, second) = found.split_at(Q / 2);
    assert!(first.iter().all(|found| found == its) && second.iter().all(|found| found == others));
}

/// Products and averages for some queries side by side, each what it is alone.
fn shared<E: Element, const Q: usize>(simd: Simd, keys: Keys<'_, E>, count: usize) -> Vec<f64> {
    let width = keys.dim().next_multiple_of(LANES);
    let queries: [Vec<f64>; Q] = std::array::from_fn(|q| {
        let mut query = entries(keys.dim(), 5 + q as u32);
        query.resize(width, 0.0);
        query
    });
    let mut products = vec![vec![0.0; count - 1]; Q];
    let mut sums = vec![vec![0.5; width]; Q];
    simd.shared_products(keys, 1, queries.each_ref().map(|query| &query[..]), lent(&mut products));
    let weights: [&[f64]; Q] = std::array::from_fn(|q| &products[q][..]);
    simd.shared_average(keys, 1, weights, lent(&mut sums));
    for (q, query) in queries.iter().enumerate() {
        let (mut alone, mut sum) = (vec![0.0; count - 1], vec![0.5; width]);
        simd.products_f64(keys, Picked::From(1), query, &mut alone);
        simd.average(keys, Picked::From(1), &alone, &mut sum);
        assert!(alone == products[q] && sum == sums[q], "{Q} {q}");
    }
    [products.concat(), sums.concat()].concat()
}

fn same_bits<E: Element>(from: fn(f64) -> E) {
    let levels = Simd::all();
    for shape in [(2, 1), (3, 15), (17, 16), (33, 64), (40, 70), (130, 200)] {
        let want = digest(levels[levels.len() - 1].1, shape, from);
        for (name, level) in levels {
            assert!(digest(*level, shape, from) == want, "{name} {shape:?}");
        }
    }
}

#[test]
fn every_level_has_the_same_bits() {
    same_bits(|v| v as f32);
    same_bits(|v| v);
    same_bits(f16::from_f64);
    same_bits(bf16::from_f64);
}

#[test]
fn scores_of_listed_keys_have_the_same_bits_and_are_near() {
    let levels = Simd::all();
    for (count, dim) in [(3, 1), (17, 16), (33, 64), (21, 70), (40, 200)] {
        let stride = dim + 3;
        let stored: Vec<f32> = entries(count * stride, 1).into_iter().map(|x| x as f32).collect();
        let halves: Vec<bf16> = stored.iter().map(|&x| bf16::from_f32(x)).collect();
        let list: Vec<u32> = (0..count as u32).filter(|key| key % 3 != 1).collect();
        let mut query: Vec<f32> = entries(dim, 2).into_iter().map(|x| x as f32).collect();
        query.resize(dim.next_multiple_of(LANES), 0.0);
        let twice: Vec<f32> = query.iter().map(|x| 2.0 * x).collect();
        let told = |simd: Simd| {
            let (mut a, mut b) = (vec![0.0; list.len()], vec![0.0; list.len() - 1]);
            let by = (&query[..], 0.37);
            // It asks for lines and changes nothing.
            simd.fetch_listed(Keys::new(&stored, stride, dim), &list);
            simd.scores_listed(Keys::new(&stored, stride, dim), &list, by, &mut a);
            simd.scores_listed(Keys::new(&halves, stride, dim), &list, by, &mut b);
            // Side by side each is what it is alone.
            let (mut c, mut d) = (vec![0.0; count - 1], vec![0.0; count - 1]);
            let two = ([&query[..], &twice[..]], 0.37);
            simd.scores_shared(Keys::new(&stored, stride, dim), 1, two, [&mut c, &mut d]);
            for (at, &key) in list.iter().enumerate().filter(|(_, key)| **key > 0) {
                assert_eq!(f64::from(a[at]).to_bits(), c[key as usize - 1].to_bits());
            }
            assert!(c.iter().zip(&d).all(|(one, two)| 2.0 * one == *two));
            let keys = Keys::new(&stored, stride, dim);
            halved::<4>(simd, keys, [(&query, &c), (&twice, &d)]);
            halved::<8>(simd, keys, [(&query, &c), (&twice, &d)]);
            [a, b].concat()
        };
        let want = told(levels[levels.len() - 1].1);
        for (name, level) in levels {
            let found = told(*level);
            assert!(found.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
        }
        for (&key, score) in list.iter().zip(want) {
            let terms = stored[key as usize * stride..].iter().zip(&query[..dim]);
            let (mut real, mut size) = (0.0, 0.0f64);
            for (k, q) in terms {
                real += f64::from(*k) * f64::from(*q);
                size += (f64::from(*k) * f64::from(*q)).abs();
            }
            let off = (f64::from(score) - real * f64::from(0.37f32)).abs();
            assert!(off <= size * f64::from(f32::EPSILON) * (dim / LANES + 6) as f64);
        }
    }
}

#[test]
fn tiles_have_the_same_bits() {
    let levels = Simd::all();
    for (rows, dim) in [(1, 3), (16, 32), (17, 70), (64, 96)] {
        let queries = entries(rows * dim, 4);
        let width = dim.next_multiple_of(LANES);
        let stored = |seed| -> Vec<f32> {
            entries(BLOCK * width, seed).into_iter().map(|entry| entry as f32).collect()
        };
        let (keys, values) = (stored(5), stored(6));
        let ends: Vec<f32> = (0..super::PANEL_ROWS).map(|row| (row % 37) as f32).collect();
        let told = |simd: Simd| {
            let mut found = Rows::new(queries.chunks(dim), (dim, width), 0.37);
            for (count, first) in [(BLOCK, false), (37, true)] {
                let lend = |data| Keys::new(data, width, width).lend(0, count).unwrap();
                let each = vec![1.0; count * super::PANEL_ROWS];
                let ends = ends.as_slice().try_into().unwrap();
                let mask = if first { BlockMask::First(ends) } else { BlockMask::Each(&each) };
                simd.attend(&mut found, lend(&keys), lend(&values), count, mask);
            }
            format!("{found:?}")
        };
        let want = told(levels[levels.len() - 1].1);
        for (name, level) in levels {
            assert!(told(*level) == want, "{name} {rows} {dim}");
        }
    }
}
