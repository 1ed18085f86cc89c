//! Every level against the portable code.

use half::{bf16, f16};

use super::Cutting;
use super::tile::{BlockScratch, Precise, Rows, WeightScratch};
use super::weighed::{BLOCK, BlockMask};
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

/// Attends to a whole block and a part of one, of which rows see parts, and returns each row's largest score, sum of
/// weights and sums of values.
fn tile(
    simd: Simd,
    (queries, keys, values): (&[f64], &[f32], &[f32]),
    (dim, width): (usize, usize),
    cutting: Option<Cutting>,
) -> Vec<(f64, f64, Vec<f64>)> {
    let mut rows = Rows::new(queries.chunks(dim), (dim, width), SCALE, cutting);
    let (mut of_block, mut of_weights) = (BlockScratch::default(), WeightScratch::default());
    for (from, count) in BLOCKS {
        let ends: [f32; super::PANEL_ROWS] = std::array::from_fn(|row| end(row) as f32);
        let each = vec![1.0; count * super::PANEL_ROWS];
        let mask = if from > 0 { BlockMask::First(&ends) } else { BlockMask::Each(&each) };
        let (keys, values) = (Keys::new(keys, width, dim), Keys::new(values, width, width));
        let block = simd.block(keys, values, (from, count), cutting, &mut of_block);
        simd.attend(&mut rows, block, mask, &mut of_weights);
    }
    (0..queries.len() / dim)
        .map(|row| {
            let mut sums = Vec::new();
            let (top, total) = rows.row(row, &mut sums);
            (top, total, sums)
        })
        .collect()
}

const SCALE: f32 = 0.37;
const BLOCKS: [(usize, usize); 2] = [(0, BLOCK), (BLOCK, 37)];

/// Returns the number of keys of the second block that a row sees.
fn end(row: usize) -> usize {
    row % 37
}

#[test]
fn tiles_have_the_same_bits_and_are_near_in_every_cutting() {
    let levels = Simd::all();
    let pieces = |entries, weights| Some(Cutting { entries, weights });
    for (rows, dim) in [(1, 3_usize), (16, 32), (17, 70), (40, 33), (64, 96)] {
        let width = dim.next_multiple_of(LANES);
        for cutting in [None, pieces(2, 1), pieces(1, 2), pieces(1, 1)] {
            let stored_short = cutting.is_some_and(|cutting| cutting.entries == 1);
            let round = |entry: f64| {
                let entry = entry as f32;
                if stored_short { bf16::from_f32(entry).to_f32() } else { entry }
            };
            let made = |count, seed| entries(count, seed).into_iter().map(round);
            let queries: Vec<f64> = made(rows * dim, 4).map(f64::from).collect();
            let keys: Vec<f32> = made(2 * BLOCK * width, 5).collect();
            let values: Vec<f32> = made(2 * BLOCK * width, 6).collect();
            let given = (&queries[..], &keys[..], &values[..]);
            let want = tile(levels[levels.len() - 1].1, given, (dim, width), cutting);
            for (name, level) in levels {
                let found = tile(*level, given, (dim, width), cutting);
                assert!(found == want, "{name} {rows} {dim} {cutting:?}");
            }
            let off = match cutting {
                // Scores are at most 100; weights and values have eight bits or more.
                Some(Cutting { weights: 1, .. }) => 1.1 / 128.0,
                _ => 5e-5,
            };
            for (row, (top, total, sums)) in want.into_iter().enumerate() {
                let query = &queries[row * dim..][..dim];
                let seen = BLOCK + end(row);
                let (mut all, mut real, mut size) = (0.0, vec![0.0; width], vec![0.0; width]);
                for (key, value) in keys.chunks(width).zip(values.chunks(width)).take(seen) {
                    let product = key.iter().zip(query).map(|(&k, q)| f64::from(k) * q);
                    let weight = (product.sum::<f64>() * f64::from(SCALE) - top).exp();
                    all += weight;
                    for (j, &entry) in value.iter().enumerate() {
                        real[j] += weight * f64::from(entry);
                        size[j] += weight * f64::from(entry.abs());
                    }
                }
                assert!((total - all).abs() <= all * off, "{cutting:?} {total} {all}");
                for ((sum, real), size) in sums.iter().zip(real).zip(size) {
                    assert!((sum - real).abs() <= size * off, "{cutting:?} {sum} {real}");
                }
            }
        }
    }
}

#[test]
fn rows_are_cut_where_the_level_has_tiles() {
    for &(name, simd) in Simd::all() {
        for (short, stored_short) in [(false, false), (true, false), (false, true), (true, true)] {
            let cutting = simd.cutting(Precise { short, stored_short });
            assert_eq!(cutting.is_some(), name == "amx" && (short || stored_short));
        }
    }
}

#[test]
fn lent_rows_hold_the_stored_numbers() {
    let stored: Vec<bf16> = (0..70).map(|i| bf16::from_f32(i as f32)).collect();
    for &(name, simd) in Simd::all() {
        let mut scratch = vec![7.0; 3];
        assert!(simd.lend(Keys::new(&stored, 7, 5), (2, 3), LANES, &mut scratch).holds(3, LANES));
        for (row, lent) in scratch.chunks(LANES).enumerate() {
            let first = (row + 2) * 7;
            assert!(lent[..5].iter().enumerate().all(|(j, &x)| x == (first + j) as f32), "{name}");
            assert!(lent[5..].iter().all(|&x| x == 0.0), "{name}");
        }
    }
}
