//! Every level against the portable code, and codes against exact sums.

use half::bf16;

use super::{Above, BIAS, Coarse, Encoded, Frame, Packed, Passing, SPLIT_KEYS};
use super::{Triangle, low_step, pack_low};
use crate::kernels::isa::{LANES, LINE, STEP, Step};
use crate::kernels::{Keys, Simd};

/// Returns the offset of the bytes of a key's four dimensions in the lines of its block.
fn place(key: usize, step: usize, steps: usize) -> usize {
    (key / LANES * steps + step) * LINE + key % LANES * STEP
}

fn keys(n: usize, dim: usize) -> Vec<f32> {
    let value = |i: usize| {
        let u = (i as f64 * 0.754_877_666).fract() + (i as f64 * 0.569_840_291).fract() - 1.0;
        (u * [1.0, 0.1, 4.0][i / dim % 3]) as f32
    };
    (0..n * dim).map(value).collect()
}

struct EncodedBlock {
    bytes: Vec<u8>,
    residuals: Vec<f32>,
    encoded: Vec<Encoded>,
    width: usize,
}

fn encode(simd: Simd, data: &[f32], dim: usize, block: usize) -> EncodedBlock {
    let (n, width) = (data.len() / dim, dim.next_multiple_of(LANES));
    let mean: Vec<f32> = (0..width).map(|j| if j < dim { 0.01 * j as f32 } else { 0.0 }).collect();
    let signs: Vec<f32> = (0..width).map(|j| if j % 3 == 0 { -1.0 } else { 1.0 }).collect();
    let mut out = EncodedBlock {
        bytes: vec![0; n * width],
        residuals: vec![0.0; n * width],
        encoded: vec![Encoded::default(); n],
        width,
    };
    let frame = Frame { mean: &mean, block, signs: &signs };
    let (bytes, residuals) = (&mut out.bytes, &mut out.residuals);
    simd.encode(Keys::new(data, dim, dim), 0, (frame, 1.0), bytes, residuals, &mut out.encoded);
    out
}

fn lines(block: &EncodedBlock, dim: usize) -> (Vec<u8>, Vec<bf16>) {
    let n = block.encoded.len().next_multiple_of(LANES);
    let steps = dim.div_ceil(STEP);
    let mut lines = vec![BIAS; n * steps * STEP];
    let mut scales = vec![bf16::ZERO; n];
    for (key, encoded) in block.encoded.iter().enumerate() {
        scales[key] = encoded.scale;
        for step in 0..steps {
            let from = &block.bytes[key * block.width + step * STEP..][..STEP];
            lines[place(key, step, steps)..][..STEP].copy_from_slice(from);
        }
    }
    (lines, scales)
}

fn query(dim: usize, salt: i32) -> (Vec<Step>, Vec<i16>) {
    let numbers: Vec<i16> = (0..dim.next_multiple_of(STEP))
        .map(|j| if j < dim { ((j as i32 * 7919 + salt * 31_337) % 32_639) as i16 } else { 0 })
        .map(|number| if number % 2 == 0 { number } else { -number })
        .collect();
    let steps = numbers.chunks(STEP).map(|four| Step::new([four[0], four[1], four[2], four[3]]));
    (steps.collect(), numbers)
}

#[test]
fn all_levels_encode_and_score_alike() {
    for (n, dim) in [(1, 1), (17, 3), (33, 20), (100, 32), (64, 80), (70, 128)] {
        let data = keys(n, dim);
        let want: Vec<_> = [1, 4]
            .map(|block| if dim % block == 0 { block } else { 1 })
            .map(|block| encode(Simd::all().last().unwrap().1, &data, dim, block))
            .into_iter()
            .collect();
        for &(name, simd) in Simd::all() {
            for (block, want) in [1, 4].into_iter().zip(&want) {
                if dim % block != 0 {
                    continue;
                }
                let got = encode(simd, &data, dim, block);
                assert_eq!(got.bytes, want.bytes, "{name} {n} {dim}");
                assert_eq!(got.encoded, want.encoded, "{name} {n} {dim}");
                assert_eq!(got.residuals, want.residuals, "{name} {n} {dim}");
                let gram = |simd: Simd| {
                    let mut sums = vec![0.0; got.width * got.width];
                    let mut residuals = got.residuals.clone();
                    residuals.resize(n.next_multiple_of(STEP) * got.width, 0.0);
                    let lost =
                        simd.outer(&residuals, got.width, 0.001, &mut Packed::default(), &mut sums);
                    let mut own = vec![0.0; Triangle::packed(got.width)];
                    simd.outer(&residuals, got.width, 0.001, &mut Packed::default(), &mut own);
                    assert_eq!(own, packed(got.width, &sums));
                    (sums, lost)
                };
                assert_eq!(gram(simd), gram(Simd::all().last().unwrap().1));
                let (lines, scales) = lines(&got, dim);
                let prepared = [query(dim, 1), query(dim, 2)];
                let coarse = [0, 1].map(|q: usize| Coarse {
                    steps: &prepared[q].0,
                    correction: prepared[q]
                        .1
                        .iter()
                        .fold(0, |sum: i32, &x| sum.wrapping_sub(128 * i32::from(x))),
                    factor: 0.01,
                });
                let mut both = [vec![0.0; scales.len()], vec![0.0; scales.len()]];
                let [one, other] = &mut both;
                simd.scan_codes(&lines, &scales, coarse, [one, other]);
                for (scores, (_, numbers)) in both.iter().zip(&prepared) {
                    for (key, &score) in scores[..n].iter().enumerate() {
                        let exact: i64 = (0..dim)
                            .map(|j| {
                                let code = i64::from(got.bytes[key * got.width + j]) - 128;
                                code * i64::from(numbers[j])
                            })
                            .sum();
                        let want = exact as f32 * got.encoded[key].scale.to_f32() * 0.01;
                        assert_eq!(score, want, "{name} {n} {dim} {key}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_lost_is_what_the_codes_leave() {
    let (n, dim) = (52, 24);
    let data = keys(n, dim);
    let block = encode(Simd::current().unwrap(), &data, dim, 1);
    let mut gram = vec![0.0; block.width * block.width];
    let unit = 0.5 * 4.0 * 2.0 / 127.0 / 127.0;
    let (rest, packed) = (&block.residuals, &mut Packed::default());
    let lost = Simd::current().unwrap().outer(rest, block.width, unit, packed, &mut gram);
    let mut want = vec![0.0; dim * dim];
    for (key, encoded) in block.encoded.iter().enumerate() {
        let scale = f64::from(encoded.scale.to_f32());
        let rest: Vec<f64> = (0..dim)
            .map(|j| {
                let code = f64::from(block.bytes[key * block.width + j]) - 128.0;
                assert!(code.abs() <= 127.0);
                let moved = f64::from(data[key * dim + j] - 0.01 * j as f32);
                assert!((moved - scale * code).abs() <= 0.5001 * scale);
                moved - scale * code
            })
            .collect();
        for (i, a) in rest.iter().enumerate() {
            assert!((f64::from(block.residuals[key * block.width + i]) - a).abs() < 1e-9);
            for (j, b) in rest.iter().enumerate() {
                want[i * dim + j] += a * b;
            }
        }
    }
    // The rounding error is spread evenly over a unit, or less where residuals are smaller than one.
    let even = (n * dim) as f64 * f64::from(unit).powi(2) / 12.0;
    assert!((0.3..1.1).contains(&(lost / even)), "{lost} {even}");
    for i in 0..dim {
        for j in i..dim {
            let got = gram[i * block.width + j];
            let size = want[i * dim + i].max(want[j * dim + j]);
            assert!((got - want[i * dim + j]).abs() < 0.02 * size);
        }
    }
}

#[test]
fn keys_without_codes_say_so() {
    let mut data = keys(4, 16);
    data[3] = f32::NAN;
    data[20] = f32::INFINITY;
    data[40] = 3e38;
    data[48..].fill(0.0);
    let block = encode(Simd::current().unwrap(), &data, 16, 16);
    assert!(block.encoded[0].largest.is_nan() && block.encoded[1].largest.is_nan());
    assert!(block.encoded[2].largest == 3e38 && block.encoded[2].lost == f32::INFINITY);
    assert!(block.encoded[..3].iter().all(|key| key.scale == bf16::ZERO));
    assert!(block.residuals[..48].iter().all(|&rest| rest == 0.0));
    assert!(block.encoded[3].lost < f32::INFINITY);
}

/// Lists above an edge have what scores say; what lies below is bounded from above, and not by much.
#[test]
fn all_levels_split_alike_and_bound_what_is_below() {
    const Q: usize = 4;
    for (n, dim) in [(1, 4), (16, 3), (40, 20), (250, 64), (256, 33)] {
        let data = keys(n, dim);
        let block = encode(Simd::current().unwrap(), &data, dim, 1);
        let (lines, scales) = lines(&block, dim);
        let first = 3 * SPLIT_KEYS;
        // For integers below 128 both forms agree.
        let numbers: [Vec<[i8; STEP]>; Q] = std::array::from_fn(|q| {
            let number =
                |j: usize| if j < dim { ((j * 37 + q * 91) % 255) as i32 - 127 } else { 0 };
            (0..dim.div_ceil(STEP))
                .map(|s| std::array::from_fn(|i| number(s * STEP + i) as i8))
                .collect()
        });
        let words = numbers.each_ref().map(|numbers| {
            numbers.iter().map(|four| Step::new(four.map(i16::from))).collect::<Vec<_>>()
        });
        let factor = [0.002, -0.01, 0.05, 0.5];
        let correction = |q: usize| -> i32 {
            numbers[q].iter().flatten().map(|&number| -128 * i32::from(number)).sum()
        };
        let coarse = |q: usize| Coarse {
            steps: &words[q][..],
            correction: correction(q),
            factor: factor[q],
        };
        let mut scored: [Vec<f32>; Q] = std::array::from_fn(|_| vec![0.0; scales.len()]);
        let to = scored.each_mut().map(|scores| &mut scores[..]);
        Simd::current().unwrap().scan_codes(&lines, &scales, [0, 1, 2, 3].map(coarse), to);
        // One sees all, others less, one nothing.
        let prefixes = [first + n, first + n / 2, first + n.saturating_sub(1), first];
        let seen = prefixes.map(|prefix| prefix - first);
        let edges: [(f32, f32); Q] = std::array::from_fn(|q| {
            let mut sorted = scored[q][..n].to_vec();
            sorted.sort_by(f32::total_cmp);
            (sorted[n * 3 / 4].max(sorted[n - 1] - 1.0), sorted[n * 3 / 4])
        });
        let mut wanted = None;
        for &(name, simd) in Simd::all() {
            for form in 0..3 {
                let mut above: [Above; Q] = std::array::from_fn(|_| Above::default());
                for (above, edges) in above.iter_mut().zip(edges) {
                    above.begin(edges);
                    above.positions.reserve(n + 2 * LANES);
                    above.scores.reserve(n + 2 * LANES);
                }
                let piece = (&lines[..], &scales[..], first);
                let mut passing: Passing<Q> = [[[0.0; LANES]; SPLIT_KEYS / LANES]; Q];
                let mut alone: Passing<1> = [[[0.0; LANES]; SPLIT_KEYS / LANES]; 1];
                let all = [0, 1, 2, 3];
                match form {
                    0 => {
                        let (queries, to) = (all.map(coarse), above.each_mut());
                        simd.split_codes::<Q, 2>(piece, queries, prefixes, &mut passing, to);
                    }
                    1 => {
                        for (q, to) in above.iter_mut().enumerate() {
                            let (query, prefix) = ([coarse(q)], [prefixes[q]]);
                            simd.split_codes::<1, 8>(piece, query, prefix, &mut alone, [to]);
                        }
                    }
                    _ => {
                        let mut again: [Vec<f32>; Q] =
                            std::array::from_fn(|_| vec![0.0; scales.len()]);
                        let to = again.each_mut().map(|scores| &mut scores[..]);
                        simd.scan_codes(&lines, &scales, all.map(coarse), to);
                        assert_eq!(again, scored, "{name} {n} {dim}");
                        continue;
                    }
                }
                for (q, above) in above.iter().enumerate() {
                    let (shift, edge) = edges[q];
                    let scores = scored[q][..seen[q]].iter().copied().enumerate();
                    let listed = scores.clone().filter(|(_, score)| *score >= edge);
                    let (positions, high): (Vec<u32>, Vec<f32>) =
                        listed.map(|(key, score)| ((first + key) as u32, score)).unzip();
                    assert_eq!((&above.positions, &above.scores), (&positions, &high), "{name}");
                    let low = scores.filter(|(_, score)| *score < edge);
                    let weights = low.map(|(_, score)| f64::from(score - shift).exp());
                    let (mut sum, mut squares) = (0.0, 0.0);
                    weights.for_each(|weight| {
                        sum += weight;
                        squares += weight * weight;
                    });
                    let (upper, upper_squares) = above.below();
                    let flushed = n as f64 * 2f64.powi(-126);
                    let least = 1.0 - 190.0 * 2f64.powi(-24);
                    assert!(upper + flushed >= sum * least, "{name} {upper} {sum}");
                    assert!(upper <= sum * 1.0625 + flushed, "{name} {upper} {sum}");
                    assert!(upper_squares + flushed >= squares * least * least);
                    assert!(upper_squares <= squares * 1.0625 * 1.0625 + flushed);
                }
                let found = above.map(|above| (above.below(), above.positions, above.scores));
                match &wanted {
                    None => wanted = Some(found),
                    Some(wanted) => assert_eq!(&found, wanted, "{name} {form} {n} {dim}"),
                }
            }
        }
    }
}

/// A chord is above the power of two that it stands for, all over an exponent, and so are its sums.
#[test]
fn chords_are_not_below_powers() {
    let (steps, scales) = (vec![Step::new([1, 0, 0, 0])], vec![bf16::ONE; LANES]);
    let mut worst = 0.0f64;
    for i in 0..4000 {
        // Scores are a whole number times a factor.
        let factor = -(f32::from(i as i16) + 0.5) * (87.0 / 4000.0) / 127.0;
        let mut lines = [BIAS; LINE];
        lines.iter_mut().step_by(STEP).for_each(|byte| *byte = BIAS + 127);
        let query = Coarse { steps: &steps[..], correction: -128, factor };
        let mut above = Above::default();
        above.begin((0.0, 0.0));
        above.positions.reserve(64);
        above.scores.reserve(64);
        let mut passing: Passing<1> = [[[0.0; LANES]; SPLIT_KEYS / LANES]; 1];
        let simd = Simd::current().unwrap();
        let piece = (&lines[..], &scales[..], 0);
        simd.split_codes::<1, 8>(piece, [query], [LANES], &mut passing, [&mut above]);
        let exact = (f64::from(127.0f32 * factor)).exp() * LANES as f64;
        let ratio = above.below().0 / exact;
        assert!(ratio >= 1.0 - 190.0 * 2f64.powi(-24), "{factor} {ratio}");
        assert!(ratio <= 1.0625, "{factor} {ratio}");
        worst = worst.max(ratio);
    }
    assert!(worst > 1.06, "{worst}");
}

/// A matrix without the entries left of the diagonal's groups.
fn packed(width: usize, whole: &[f64]) -> Vec<f64> {
    let places = Triangle::of(width, width * width).unwrap();
    (0..width).flat_map(|row| whole[places.row(row)].to_vec()).collect()
}

#[test]
fn all_levels_sum_forms_alike() {
    for width in [16, 32, 64, 128] {
        let number = |i: usize| ((i * 7919 % 1009) as f64 - 504.0) / 16.0;
        let mut matrix: Vec<f64> = (0..width * width).map(number).collect();
        // Left of the diagonal's groups nothing is read.
        for row in 0..width {
            matrix[row * width..][..row / LANES * LANES].fill(f64::NAN);
        }
        let vector: Vec<f64> = (0..width).map(|i| ((i * 31 % 17) as f64 - 8.0) / 4.0).collect();
        let mut exact = 0.0;
        for i in 0..width {
            exact += vector[i] * vector[i] * matrix[i * width + i];
            for j in i + 1..width {
                exact += 2.0 * vector[i] * vector[j] * matrix[i * width + j];
            }
        }
        for &(name, simd) in Simd::all() {
            // All terms are whole multiples of 2^-8, and their sums are exact.
            assert_eq!(simd.form(&matrix, &vector), exact, "{name} {width}");
            assert_eq!(simd.form(&packed(width, &matrix), &vector), exact, "{name} {width}");
        }
    }
}

/// Low codes and what they leave, against the nearest whole numbers in f64.
#[test]
fn all_levels_refine_alike() {
    for (n, dim) in [(1, 1), (5, 16), (17, 20), (40, 33), (9, 128)] {
        let data = keys(n, dim);
        let mut block = encode(Simd::current().unwrap(), &data, dim, 1);
        // One key has no code.
        block.encoded[n / 2].scale = bf16::ZERO;
        block.residuals[n / 2 * block.width..][..block.width].fill(0.0);
        for bits in [4, 8] {
            let top = f64::from((1i32 << (bits - 1)) - 1);
            let mut wanted = None;
            for &(name, simd) in Simd::all() {
                let (mut bytes, mut left) = (block.bytes.clone(), block.residuals.clone());
                let most = simd.refine(bits, &block.encoded, &mut bytes, &mut left);
                let mut worst = 0.0f64;
                for (key, encoded) in block.encoded.iter().enumerate() {
                    let here = key * block.width..(key + 1) * block.width;
                    let step = f64::from(low_step(encoded.scale.to_f32(), bits));
                    let mut square = 0.0;
                    for ((&byte, &left), &rest) in bytes[here.clone()]
                        .iter()
                        .zip(&left[here.clone()])
                        .zip(&block.residuals[here])
                    {
                        let code = f64::from(byte) - 128.0;
                        let nearest = if step == 0.0 { 0.0 } else { f64::from(rest) / step };
                        assert!((code - nearest).abs() <= 0.502, "{name} {bits} {code} {nearest}");
                        assert!(code.abs() <= top);
                        let exact = f64::from(rest) - step * code;
                        assert!((f64::from(left) - exact).abs() <= 6e-8 * exact.abs());
                        square += exact * exact;
                    }
                    worst = worst.max(square);
                }
                assert!((f64::from(most) - worst).abs() <= 1e-5 * worst, "{name} {most} {worst}");
                // Half a step is reached, or nearly.
                assert!(n < 5 || worst > 0.0);
                let found = (bytes, left, most.to_bits());
                match &wanted {
                    None => wanted = Some(found),
                    Some(wanted) => assert!(found == *wanted, "{name} {bits} {n} {dim}"),
                }
            }
        }
    }
}

/// Products with numbers of a query against sums in i64, in rows of any whole groups, whatever the keys' order.
#[test]
fn all_levels_multiply_low_codes_exactly() {
    let mut state = 1u64;
    let mut next = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
        (state >> 33) % most
    };
    for width in [16, 32, 48, 80, 128, 208, 512] {
        for (bits, top) in [(4usize, 7), (8, 127)] {
            for extreme in [false, true] {
                let (n, first) = (40usize, 32u32);
                let mut codes = |key: usize, at: usize| -> i64 {
                    match (extreme, key % 4) {
                        (true, 0) => top,
                        (true, 1) => -top,
                        (true, 2) => {
                            if at.is_multiple_of(2) {
                                top
                            } else {
                                -top
                            }
                        }
                        _ => next(2 * top.cast_unsigned() + 1).cast_signed() - top,
                    }
                };
                let codes: Vec<Vec<i64>> =
                    (0..n).map(|key| (0..width).map(|at| codes(key, at)).collect()).collect();
                let size = width * bits / 8;
                let mut rows = vec![0u8; n * size];
                for (codes, row) in codes.iter().zip(rows.chunks_exact_mut(size)) {
                    let bytes: Vec<u8> =
                        codes.iter().map(|code| u8::try_from(code + 128).unwrap()).collect();
                    pack_low(&bytes, bits, row);
                }
                // As large as the sum of their sizes may be.
                let largest = (16_700_000 / width as i64).min(32_639);
                let number = |at: usize| match (extreme, at % 3) {
                    (true, 2) if width < 512 => -largest,
                    (true, _) => largest,
                    (false, _) => (at as i64 * 7919 + 31_337) % (2 * largest + 1) - largest,
                };
                let numbers: Vec<i16> = (0..width).map(|at| number(at) as i16).collect();
                let list: Vec<u32> =
                    (0..70).map(|at| first + if at < 40 { at } else { at * 7 % 40 }).collect();
                let exact: Vec<i64> = list
                    .iter()
                    .map(|key| {
                        let codes = &codes[(key - first) as usize];
                        codes.iter().zip(&numbers).map(|(c, &x)| c * i64::from(x)).sum()
                    })
                    .collect();
                assert!(exact.iter().all(|sum| i32::try_from(*sum).is_ok()));
                for &(name, simd) in Simd::all() {
                    for count in [0, 1, 15, 17, 70] {
                        let mut to = vec![7; count];
                        simd.low_products((&rows, bits, first), &list[..count], &numbers, &mut to);
                        let found: Vec<i64> = to.into_iter().map(i64::from).collect();
                        assert_eq!(found, exact[..count], "{name} {width} {bits} {extreme}");
                    }
                }
            }
        }
    }
}
