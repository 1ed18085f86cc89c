//! Every level against the portable code, and the exponential against the real one.

use half::{bf16, f16};

use super::{Bracket, Element, LANES, PIVOTS, Scalar, Scaled, Shifted, Simd, Stored, Weigh};
use crate::mass;

/// Deterministic scores: a Weyl sequence through a logistic quantile.
fn scores(n: usize, spread: f64) -> Vec<f64> {
    (1..=n)
        .map(|i| {
            let u = (i as f64 * 0.618_033_988_749_894_9).fract().clamp(1e-9, 1.0 - 1e-9);
            spread * (u / (1.0 - u)).ln()
        })
        .collect()
}

/// Both sides of a group (16), of a summed block (256), of an emitting call (4096), and short rows.
const LENGTHS: [usize; 16] =
    [1, 2, 3, 15, 16, 17, 31, 33, 255, 256, 257, 513, 4095, 4096, 4097, 9000];

fn padded<E: Element>(values: impl Iterator<Item = E>) -> Vec<E> {
    let mut keys: Vec<E> = values.collect();
    keys.resize(keys.len().next_multiple_of(LANES), E::MASKED);
    keys
}

/// Everything that the passes return, as bits.
fn digest<E: Element, W: Weigh<E::Scalar>>(simd: Simd, keys: &[E], law: W) -> Vec<u64>
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let bits = |value: f64| value.to_bits();
    let at = |share: usize| keys[keys.len() * share / 9].widen();
    let mut pivots: [E::Scalar; PIVOTS] = std::array::from_fn(at);
    pivots.sort_by(|a, b| a.partial_cmp(b).unwrap());
    let mut out = vec![bits(simd.mass(keys, law))];
    let sums = simd.pivot_sums(keys, law, &pivots);
    out.extend(sums.below.map(bits));
    out.extend(sums.at_least.map(|count| count as u64));
    let mut inside = Bracket::default();
    inside.reserve(keys.len());
    let sides = simd.split(keys, 7, law, (pivots[2], pivots[6]), &mut inside);
    out.extend([bits(sides.below), bits(sides.above)]);
    out.extend([sides.count_above as u64, sides.inside as u64]);
    let narrower = simd.narrow(&mut inside, law, (pivots[3], pivots[5]));
    out.extend([bits(narrower.below), bits(narrower.above), narrower.inside as u64]);
    out.extend(inside.keys().iter().map(|&key| bits(key.into())));
    out.extend(inside.positions().iter().map(|&position| u64::from(position)));
    let keep: Vec<u8> = (0..keys.len()).map(|i| if i % 3 == 0 { 2 } else { 0 }).collect();
    let given = simd.given(keys, &keep, law);
    out.extend([bits(given.head), bits(given.tail), given.kept as u64, given.dropped as u64]);
    out.extend([bits(given.worst_kept.into()), bits(given.best_dropped.into())]);
    let mut positions = Vec::new();
    simd.emit(keys, 3, (pivots[4], 40), &mut positions);
    out.extend(positions.iter().map(|&position| u64::from(position)));
    let mut weights = vec![E::Scalar::default(); keys.len()];
    simd.weights(keys, law, &mut weights);
    out.extend(weights.iter().map(|&weight| bits(weight.into())));
    let allowed: Vec<u8> = (0..keys.len()).map(|i| u8::from(i % 5 != 0)).collect();
    let mut copy = vec![E::MASKED; keys.len()];
    let loaded = simd.load(keys, Some(&allowed), true, &mut copy);
    out.extend([bits(loaded.largest.into()), loaded.finite as u64, u64::from(loaded.bad)]);
    out.extend(copy.iter().map(|key| bits(key.widen().into())));
    out
}

/// The one comparison that every level goes through.
fn same_bits<E: Element>(from: impl Fn(f64) -> E)
where
    E::Scalar: Element<Scalar = E::Scalar>,
{
    let levels = Simd::all();
    let portable = levels[levels.len() - 1].1;
    for n in LENGTHS {
        for spread in [0.0, 0.7, 3.0, 60.0] {
            let keys = padded(scores(n, spread).into_iter().map(&from));
            let largest = keys
                .iter()
                .map(|key| key.widen())
                .fold(E::Scalar::LOWEST, |a, b| if b > a { b } else { a });
            let scaled = Scaled { shift: largest.into(), scale: 0.176_776_695_296_636_9 };
            let want = digest(portable, &keys, Shifted(largest));
            let want_scaled = digest(portable, &keys, scaled);
            for (name, level) in levels {
                assert_eq!(digest(*level, &keys, Shifted(largest)), want, "{name} {n} {spread}");
                assert_eq!(digest(*level, &keys, scaled), want_scaled, "{name} {n} {spread}");
            }
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
fn stored_weights_have_the_same_bits() {
    let levels = Simd::all();
    let keys = padded(scores(1000, 1.0).into_iter().map(f64::exp));
    let want = digest(levels[levels.len() - 1].1, &keys, Stored);
    for (name, level) in levels {
        assert_eq!(digest(*level, &keys, Stored), want, "{name}");
    }
}

#[test]
fn bad_values_are_seen_wherever_they_are() {
    for (name, level) in Simd::all() {
        for n in [1, 16, 17, 300] {
            for at in [0, n / 2, n - 1] {
                for (value, bad) in
                    [(f32::NAN, true), (f32::INFINITY, true), (f32::NEG_INFINITY, false)]
                {
                    let mut row = vec![1f32; n];
                    row[at] = value;
                    let mut copy = vec![0f32; n.next_multiple_of(LANES)];
                    let loaded = level.load(&row, None, false, &mut copy);
                    assert_eq!(loaded.bad, bad, "{name} {n} {at} {value}");
                    let allowed: Vec<u8> = (0..n).map(|i| u8::from(i != at)).collect();
                    let loaded = level.load(&row, Some(&allowed), false, &mut copy);
                    assert!(!loaded.bad && loaded.finite == n - 1, "{name} {n} {at} {value}");
                }
            }
        }
    }
}

/// The bound that `mass` budgets for an exponential whose argument is exact: the rounding of x * log2(e), the
/// constant, and 4.4 units for the rest.
fn allowance(x: f64, unit: f64, constant: f64) -> f64 {
    (1.0 + constant) * x.abs() * unit + 4.4 * unit
}

#[test]
fn exp_stays_within_its_bound() {
    let unit = 2f64.powi(-24);
    let keys = padded((0..200_000).map(|i| -(i as f32) * 4.4e-4));
    let mut weights = vec![0f32; keys.len()];
    Simd::all()[0].1.weights(&keys, Shifted(0.0), &mut weights);
    for (&x, &weight) in keys.iter().zip(&weights) {
        if x < f32::CUT {
            assert_eq!(weight, 0.0);
        } else {
            let want = mass::exp(f64::from(x));
            let error = (f64::from(weight) / want - 1.0).abs();
            assert!(error <= allowance(f64::from(x), unit, 0.23), "{x}: {error:e}");
        }
    }
}

#[test]
fn double_exp_stays_within_its_bound() {
    // The checker's exp is proven to 2^-50, the kernel's bound is looser where |x| is large.
    let unit = 2f64.powi(-53);
    let keys = padded((0..200_000).map(|i| -f64::from(i) * 3.6e-3));
    let mut weights = vec![0f64; keys.len()];
    Simd::all()[0].1.weights(&keys, Shifted(0.0), &mut weights);
    for (&x, &weight) in keys.iter().zip(&weights) {
        if x < f64::CUT {
            assert_eq!(weight, 0.0);
        } else {
            let error = (weight / mass::exp(x) - 1.0).abs();
            assert!(
                error <= allowance(x, unit, 0.7) + 2f64.powi(-50) + 14.0 * unit,
                "{x}: {error:e}"
            );
        }
    }
}

/// The proof by enumeration: every f32 from -0 down to below the cut, at every level.
/// `cargo test --release -- --ignored every_f32` takes some minutes.
#[test]
#[ignore = "enumerates 1.1e9 floats; run by hand when the exponential changes"]
fn every_f32_exponent_is_within_the_bound() {
    const CHUNK: u32 = 1 << 16;
    let unit = 2f64.powi(-24);
    let (first, last) = ((-0.0f32).to_bits(), (-88.0f32).to_bits());
    let levels = Simd::all();
    let (mut worst, mut at) = (0.0, 0.0);
    let (mut worst_flat, mut flushed) = (0.0, 0u64);
    let mut weights = vec![0f32; CHUNK as usize];
    let mut other = weights.clone();
    let mut start = first;
    while start <= last {
        let keys: Vec<f32> = (0..CHUNK).map(|i| f32::from_bits((start + i).min(last))).collect();
        levels[0].1.weights(&keys, Shifted(0.0), &mut weights);
        for (name, level) in &levels[1..] {
            if *name == "portable-nofma" && !start.is_multiple_of(CHUNK * 64) {
                continue; // a library call per operation: every 64th chunk
            }
            level.weights(&keys, Shifted(0.0), &mut other);
            let equal = weights.iter().zip(&other).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(equal, "{name} differs near {}", keys[0]);
        }
        for (&x, &weight) in keys.iter().zip(&weights) {
            if x < f32::CUT {
                assert_eq!(weight.to_bits(), 0, "{x}");
                flushed += 1;
                continue;
            }
            assert!(weight >= f32::MIN_POSITIVE, "{x}");
            // The standard library's exp is within one unit of f64: nothing beside 2^-24.
            let error = (f64::from(weight) / f64::from(x).exp() - 1.0).abs();
            let share = error / allowance(f64::from(x), unit, 0.23);
            if share > worst {
                (worst, at) = (share, x);
            }
            if error > worst_flat {
                worst_flat = error;
            }
        }
        start = start.saturating_add(CHUNK);
    }
    println!(
        "worst share of the bound {worst:.4} at x = {at:e}; largest relative error {:.2} u; {flushed} flushed",
        worst_flat / unit
    );
    assert!(worst <= 1.0);
}
