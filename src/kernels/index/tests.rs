//! Every level against the portable code, and codes against exact sums.

use half::bf16;

use super::{BIAS, Coarse, Encoded, Frame, PANEL, Packed};
use crate::kernels::isa::{LANES, LINE, STEP, Step};
use crate::kernels::{Keys, Simd};

/// Where the bytes of a key's four dimensions are in the lines of its block.
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
    simd.encode(Keys::new(data, dim, dim), 0, frame, bytes, residuals, &mut out.encoded);
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
    // What is left after rounding is spread evenly over a unit, or less where residuals are smaller than one.
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

/// Prints times: `cargo test --release -- --ignored --nocapture the_codes_by_the_clock`.
#[test]
#[ignore = "a measurement"]
fn the_codes_by_the_clock() {
    let (n, dim) = (131_072, 128);
    let data = keys(n, dim);
    let time = |name: &str, run: &mut dyn FnMut()| {
        let mut best = f64::INFINITY;
        for _ in 0..15 {
            let start = std::time::Instant::now();
            run();
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!("{name:24} {:8.2} ns a key", best * 1e9 / n as f64);
    };
    for &(name, simd) in &Simd::all()[..Simd::all().len() - 1] {
        println!("{name}");
        let mut to = vec![0.0f32; data.len()];
        time("copy", &mut || to.copy_from_slice(std::hint::black_box(&data)));
        let (mean, signs) = (vec![0.0; dim], vec![1.0; dim]);
        let mut bytes = vec![0; 4096 * dim];
        let mut residuals = vec![0.0; 4096 * dim];
        let mut encoded = vec![Encoded::default(); 4096];
        for block in [1, 128] {
            let frame = Frame { mean: &mean, block, signs: &signs };
            time(&format!("encode, block {block}"), &mut || {
                for from in (0..n).step_by(64) {
                    simd.encode(
                        Keys::new(&data, dim, dim),
                        from,
                        frame,
                        &mut bytes[..64 * dim],
                        &mut residuals[..64 * dim],
                        &mut encoded[..64],
                    );
                }
            });
        }
        let mut gram = vec![0.0; dim * dim];
        let mut packed = Packed::default();
        time("outer", &mut || {
            for _ in (0..n).step_by(PANEL) {
                simd.outer(&residuals[..PANEL * dim], dim, 1e-3, &mut packed, &mut gram);
            }
        });
        let block = encode(simd, &data, dim, 1);
        let (lines, scales) = lines(&block, dim);
        let prepared: Vec<_> = (0..4).map(|salt| query(dim, salt)).collect();
        let coarse = |q: usize| Coarse { steps: &prepared[q].0, correction: 0, factor: 1e-5 };
        let mut to: Vec<_> = (0..4).map(|_| vec![0.0f32; n]).collect();
        time("scan, one query", &mut || {
            simd.scan_codes(&lines, &scales, [coarse(0)], [&mut to[0]]);
        });
        time("scan, four queries", &mut || {
            let [a, b, c, d] = &mut to[..] else { unreachable!() };
            simd.scan_codes(&lines, &scales, [0, 1, 2, 3].map(coarse), [a, b, c, d]);
        });
        let mut sink = 0u64;
        time("read all codes", &mut || {
            let (words, _) = lines.as_chunks::<8>();
            sink ^= words.iter().fold(0, |sum, word| sum ^ u64::from_ne_bytes(*word));
        });
        std::hint::black_box(sink);
    }
}
