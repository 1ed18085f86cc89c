//! Every level against the portable code.

use half::{bf16, f16};

use super::tile::{BlockScratch, Precise, Rows, WeightScratch};
use super::weighed::{BLOCK, BlockMask};
use super::{Cutting, Scored, Weighed};
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
    }
    out.push(simd.farthest(keys, count, &two));
    out.into_iter().map(f64::to_bits).collect()
}

/// Returns the scores and the sums of `Q` rows over some keys that are values, too, and the square of their longest.
fn few<E: Element<Scalar = f32>, const Q: usize>(
    simd: Simd,
    keys: Keys<'_, E>,
    queries: &[Vec<f32>],
    count: usize,
) -> Vec<(Vec<f32>, Vec<f64>, f32)> {
    let width = keys.dim().next_multiple_of(LANES);
    let mut scores = vec![vec![0.0; count]; Q];
    let mut places = queries.iter().zip(&mut scores);
    let mut rows: [Scored<'_>; Q] = std::array::from_fn(|_| {
        let (query, to) = places.next().unwrap();
        Scored { query, to }
    });
    let square = simd.score_few(keys, &mut rows, 0.37);
    let mut sums = vec![vec![0.5; width + 1]; Q];
    let mut places = scores.iter().zip(&mut sums);
    let mut rows: [Weighed<'_>; Q] = std::array::from_fn(|_| {
        let (scores, sums) = places.next().unwrap();
        Weighed { scores, top: scores.iter().copied().fold(f32::NEG_INFINITY, f32::max), sums }
    });
    simd.average_few(keys, &mut rows);
    scores.into_iter().zip(sums).map(|(scores, sums)| (scores, sums, square)).collect()
}

fn few_rows<E: Element<Scalar = f32>>(from: fn(f64) -> E) {
    let levels = Simd::all();
    for (count, dim) in [(1, 1), (3, 15), (17, 16), (33, 64), (40, 70), (64, 200), (63, 128)] {
        let stride = dim + 3;
        let stored: Vec<E> = entries(count * stride, 1).into_iter().map(from).collect();
        let keys = Keys::new(&stored, stride, dim);
        let queries: Vec<Vec<f32>> = (0..8)
            .map(|q| {
                let mut query: Vec<f32> = entries(dim, 5 + q).iter().map(|&x| x as f32).collect();
                query.resize(dim.next_multiple_of(LANES), 0.0);
                query
            })
            .collect();
        let want = few::<E, 8>(levels[levels.len() - 1].1, keys, &queries, count);
        for &(name, simd) in levels {
            // Each is what it is beside others.
            assert!(few::<E, 1>(simd, keys, &queries, count) == want[..1], "{name} {dim}");
            assert!(few::<E, 2>(simd, keys, &queries, count) == want[..2], "{name} {dim}");
            assert!(few::<E, 4>(simd, keys, &queries, count) == want[..4], "{name} {dim}");
            assert!(few::<E, 8>(simd, keys, &queries, count) == want, "{name} {dim}");
        }
        let wide =
            |key: usize, i: usize| f64::from(Into::<f64>::into(keys.row(key)[i].widen()) as f32);
        let squares = (0..count).map(|key| (0..dim).map(|i| wide(key, i).powi(2)).sum::<f64>());
        let longest = squares.fold(0.0, f64::max);
        for (query, (scores, sums, square)) in queries.iter().zip(&want) {
            assert!(
                f64::from(*square) >= longest * (1.0 - 1e-5) && *square <= 20.0 * longest as f32
            );
            for (key, &score) in scores.iter().enumerate() {
                let terms = (0..dim).map(|i| f64::from(query[i]) * wide(key, i));
                let size = terms.clone().map(f64::abs).sum::<f64>();
                let off = (f64::from(score) - terms.sum::<f64>() * f64::from(0.37f32)).abs();
                assert!(off <= size * f64::from(f32::EPSILON) * (dim / LANES + 6) as f64);
            }
            let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weight = |key: usize| f64::from(scores[key] - top).exp();
            let real: f64 = (0..count).map(weight).sum();
            assert!((sums[sums.len() - 1] - 0.5 - real).abs() <= 2e-5 * real);
            for (i, sum) in sums[..dim].iter().enumerate() {
                let terms = (0..count).map(|key| weight(key) * wide(key, i));
                let size = terms.clone().map(f64::abs).sum::<f64>();
                assert!((sum - 0.5 - terms.sum::<f64>()).abs() <= 3e-5 * size + 1e-30);
            }
        }
    }
}

#[test]
fn a_few_rows_have_the_same_bits_and_are_near() {
    few_rows(|v| v as f32);
    few_rows(f16::from_f64);
    few_rows(bf16::from_f64);
}

/// A key that is not finite is told, and values behind scores of negative infinity are not read.
#[test]
fn a_few_rows_tell_what_is_not_finite() {
    for (name, simd) in Simd::all() {
        for (bad, at) in [(f32::NAN, 0), (f32::INFINITY, 17), (f32::NEG_INFINITY, 40), (2e19, 63)] {
            let mut stored = vec![1.0f32; 64 * 20];
            stored[at * 20 + 5] = bad;
            let keys = Keys::new(&stored, 20, 20);
            let (query, mut to) = ([1.0; 32], [0.0; 64]);
            let mut rows = [Scored { query: &query, to: &mut to }];
            assert_eq!(simd.score_few(keys, &mut rows, 1.0), f32::INFINITY, "{name}");
            let mut sums = [0.25; 33];
            let scores = &[f32::NEG_INFINITY; 64];
            simd.average_few(keys, &mut [Weighed { scores, top: 1.0, sums: &mut sums }]);
            assert!(sums == [0.25; 33], "{name}");
            simd.average_few(
                keys,
                &mut [Weighed { scores: &[0.0; 64], top: 0.0, sums: &mut sums }],
            );
            assert!(!sums[5].is_finite() || bad == 2e19, "{name}");
        }
    }
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
        let told = |simd: Simd| {
            let (mut a, mut b) = (vec![0.0; list.len()], vec![0.0; list.len() - 1]);
            let by = (&query[..], 0.37);
            simd.scores_listed(Keys::new(&stored, stride, dim), &list, by, &mut a);
            simd.scores_listed(Keys::new(&halves, stride, dim), &list, by, &mut b);
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
    let mut rows = Rows::new(queries.chunks(dim), (dim, width), (SCALE, None), cutting);
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
    // Some of half a step, and of one entry more.
    for (rows, dim) in [(1, 3_usize), (9, 17), (16, 32), (3, 48), (17, 70), (40, 33), (64, 96)] {
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
