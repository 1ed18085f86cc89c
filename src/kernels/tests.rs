//! Every level against the portable code, and the exponential against the real one.

use half::{bf16, f16};

use super::{
    BatchScratch, Bracket, Doubled, EDGES, Element, Exp, Identity, LANES, PIVOTS, PartitionSums,
    Positions, RANKED, Scalar, ScaledBy, ScaledExp, Simd, SoftCap, TailTarget, Unscaled, WeightFn,
    WeightFnOf,
};
use crate::numerics::certified_sums;

/// Deterministic scores: a Weyl sequence through a logistic quantile.
fn scores(n: usize, spread: f64) -> Vec<f64> {
    (1..=n)
        .map(|i| {
            let u = (i as f64 * 0.618_033_988_749_894_9).fract().clamp(1e-9, 1.0 - 1e-9);
            spread * (u / (1.0 - u)).ln()
        })
        .collect()
}

/// Both sides of a group (16), of what is compared pair by pair (32), of a summed block (256), of a block of marks and
/// a sampled row (1024), of an emitting call and the longest row of a batch (4096), and short rows.
const LENGTHS: [usize; 20] =
    [1, 2, 3, 15, 16, 17, 31, 32, 33, 255, 256, 257, 513, 1023, 1024, 1025, 4095, 4096, 4097, 9000];

fn padded<E: Element>(values: impl Iterator<Item = E>) -> Vec<E> {
    let mut scores: Vec<E> = values.collect();
    scores.resize(scores.len().next_multiple_of(LANES), E::MASKED);
    scores
}

/// Zero for no, and for yes anything else, the bytes with the highest bit among them.
fn any_byte(i: usize, yes: bool) -> u8 {
    if yes { (i * 7 % 255 + 1) as u8 } else { 0 }
}

/// Returns the results of all passes, as bits.
fn digest<E: Element, W: WeightFn<E::Scalar>>(simd: Simd, scores: &[E], weight_fn: W) -> Vec<u64> {
    let bits = |value: f64| value.to_bits();
    let at = |share: usize| scores[scores.len() * share / 9].widen();
    let mut pivots: [E::Scalar; PIVOTS] = std::array::from_fn(at);
    pivots.sort_by(|a, b| a.partial_cmp(b).unwrap());
    let mut out = vec![bits(simd.mass(scores, weight_fn)), simd.count_visible(scores) as u64];
    let (least, most) = simd.extent(scores);
    out.extend([bits(least.into()), bits(most.into())]);
    let (least, most) = simd.extent_within(scores, (pivots[2], pivots[5]));
    out.extend([bits(least.into()), bits(most.into())]);
    let mut wide = vec![E::Scalar::default(); scores.len()];
    simd.widen(scores, &mut wide);
    let mut weights = wide.clone();
    out.push(bits(simd.weights(scores, weight_fn, &mut weights)));
    out.push(bits(simd.squares(&weights)));
    out.extend(wide.iter().chain(&weights).map(|&lane| bits(lane.into())));
    for count in [false, true] {
        let sums = simd.pivot_sums(&wide, &weights, &pivots, count);
        out.extend(sums.below.map(bits));
        out.extend(sums.at_least.map(|count| count as u64));
    }
    let mut inside = Bracket::default();
    let sides = |sides: PartitionSums| {
        let masses = [sides.below, sides.within, sides.above].map(bits);
        masses.into_iter().chain([sides.count_above as u64, sides.inside as u64])
    };
    inside.reserve(scores.len());
    out.extend(sides(simd.split(scores, weight_fn, (pivots[2], pivots[6]), None, &mut inside)));
    out.push(bits(simd.weigh(&mut inside, weight_fn)));
    out.extend(sides(simd.narrow(&mut inside, (pivots[3], pivots[5]))));
    out.extend(inside.scores().iter().map(|&score| bits(score.into())));
    out.extend(sides(simd.narrow_into(&wide, &weights, (pivots[1], pivots[7]), &mut inside)));
    let first = scores.len().min(RANKED);
    let mut few = Bracket::default();
    let bottom = (E::Scalar::LOWEST, E::Scalar::INFINITY);
    out.extend(sides(simd.narrow_into(&wide[..first], &weights[..first], bottom, &mut few)));
    for share in [0.1, 0.5, 0.9] {
        let room = E::Scalar::nearest(share * simd.weigh(&mut few, weight_fn));
        out.push(bits(simd.candidate(&mut few, room).into()));
    }
    let keep: Vec<u8> = (0..scores.len()).map(|i| any_byte(i, i % 3 == 0)).collect();
    let given = simd.given(scores, &keep, weight_fn);
    let masked = E::MASKED.widen();
    let kept =
        scores.iter().zip(&keep).filter(|(score, byte)| score.widen() > masked && **byte != 0);
    assert_eq!(given.kept, kept.count());
    assert_eq!(given.kept + given.dropped, simd.count_visible(scores));
    out.extend([bits(given.head), bits(given.tail), given.kept as u64, given.dropped as u64]);
    out.extend([bits(given.worst_kept.into()), bits(given.best_dropped.into())]);
    let list: Vec<u32> = (0..scores.len() as u32).map(|i| 3 * i).collect();
    let mut positions = Vec::new();
    for inclusive in [false, true] {
        simd.emit(scores, Positions::From(3), pivots[4], inclusive, &mut positions);
        simd.emit(scores, Positions::Listed(&list), pivots[3], inclusive, &mut positions);
    }
    out.extend(positions.iter().map(|&position| u64::from(position)));
    for nth in [1, 2, 17] {
        let (Ok(found) | Err(found)) = simd.find_equal(scores, pivots[4], nth);
        out.push(found as u64);
    }
    let allowed: Vec<u8> = (0..scores.len()).map(|i| any_byte(i, i % 5 != 0)).collect();
    let visible = &scores[..scores.len() - scores.len().min(5)];
    let (mut dense, mut from) = (Vec::new(), Vec::new());
    simd.compact(visible, &allowed[..visible.len()], &mut dense, &mut from);
    let admitted = (0..visible.len() as u32).filter(|i| i % 5 != 0);
    let admitted = admitted.filter(|&i| visible[i as usize].widen() > masked);
    assert_eq!(from, admitted.collect::<Vec<u32>>());
    out.extend(dense.iter().map(|&score| bits(score.into())));
    out.extend(from.iter().map(|&position| u64::from(position)));
    let mut copy = vec![E::MASKED; scores.len()];
    let seen = simd.survey(Some(visible), visible.len(), &mut copy);
    out.extend([bits(seen.largest.into()), bits(seen.smallest.into())]);
    out.extend(copy.iter().map(|score| bits(score.widen().into())));
    assert_eq!(seen, simd.survey(None, visible.len(), &mut copy));
    copy.copy_from_slice(scores);
    let seen = simd.survey(None, scores.len(), &mut copy);
    assert_eq!(simd.scan(scores, None), (seen, 0.0));
    let shift = E::Scalar::nearest(seen.largest.into() - 3.0);
    let (same, mass) = simd.scan(scores, Some((shift, 0.3)));
    assert_eq!(same, seen);
    out.push(bits(mass));
    out.push(bits(simd.rough(&copy, seen.largest, 0.3)));
    out
}

/// Returns the results of the passes over several short rows, as bits: the row, a part of it, and one with a spike.
fn digest_short<E: Element, M: WeightFnOf<E::Scalar>>(
    simd: Simd,
    row: &[E],
    spike: E,
    weight_fn: M,
    scale: f64,
) -> Vec<u64> {
    let bits = |value: f64| value.to_bits();
    let mut spiked = row.to_vec();
    spiked[row.len() / 2] = spike;
    let rows = [row, &row[..=row.len() / 2], &spiked];
    let stride = row.len().next_multiple_of(LANES) + 2 * RANKED;
    let mut scores = vec![E::MASKED; 3 * stride];
    let mut lists = [(); 3].map(|()| vec![E::Scalar::default(); 3 * stride]);
    let [weights, inside, inside_weights] = &mut lists;
    let scores = &mut scores[..];
    let mut room = BatchScratch { stride, scores, weights, inside, inside_weights };
    let target = TailTarget { share: 0.01, ln_share: -4.605, reach: 15.0 / scale, scale };
    let found = simd.find_candidate(&rows, &target, weight_fn, &mut room);
    let mut out = Vec::new();
    for (r, row) in rows.iter().enumerate() {
        let Some(edge) = found[r].edge else {
            out.push(0);
            continue;
        };
        let (scores, weights) = room.row(r, row);
        let mut positions = Vec::new();
        let sums =
            simd.sum_and_emit(scores, weights, edge.score, Positions::From(3), &mut positions);
        let tie_sums = simd.sum_around_ties(scores, weights, edge.score);
        out.extend([bits(edge.score.into()), bits(edge.weight.into()), edge.ties as u64]);
        out.extend([bits(sums.below), bits(sums.above), sums.kept as u64]);
        out.extend([bits(tie_sums.below), bits(tie_sums.above)]);
        out.extend([tie_sums.count_below as u64, tie_sums.count_above as u64]);
        out.extend(positions.iter().map(|&position| u64::from(position)));
    }
    out
}

/// The one comparison that every level goes through.
fn same_bits<E: Element>(from: impl Fn(f64) -> E) {
    let levels = Simd::all();
    let portable = levels[levels.len() - 1].1;
    for n in LENGTHS {
        for spread in [0.0, 0.7, 3.0, 60.0] {
            let scores = padded(scores(n, spread).into_iter().map(&from));
            let largest = scores
                .iter()
                .map(|score| score.widen())
                .fold(E::Scalar::LOWEST, |a, b| if b > a { b } else { a });
            let scaled = ScaledExp { shift: largest.into(), scale: 0.176_776_695_296_636_9 };
            let want = digest(portable, &scores, Exp(largest));
            let want_scaled = digest(portable, &scores, scaled);
            let row = &scores[..n.min(4096)];
            let short = |level: Simd| {
                let spike = from(2.0 * spread + 9.0);
                let plain = digest_short(level, row, spike, Unscaled, 1.0);
                (plain, digest_short(level, row, spike, ScaledBy(scaled.scale), scaled.scale))
            };
            let want_short = short(portable);
            for (name, level) in levels {
                assert_eq!(digest(*level, &scores, Exp(largest)), want, "{name} {n} {spread}");
                assert_eq!(digest(*level, &scores, scaled), want_scaled, "{name} {n} {spread}");
                assert!(short(*level) == want_short, "{name} {n} {spread}");
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
    same_bits(|v| Doubled(v as f32));
    same_bits(|v| Doubled(f16::from_f64(v)));
    same_bits(|v| Doubled(bf16::from_f64(v)));
    // Stored weights.
    let levels = Simd::all();
    let weights = padded(scores(1000, 1.0).into_iter().map(f64::exp));
    let want = digest(levels[levels.len() - 1].1, &weights, Identity);
    for (name, level) in levels {
        assert_eq!(digest(*level, &weights, Identity), want, "{name}");
    }
}

#[test]
fn every_half_widens_exactly() {
    let scores: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let mut wide = vec![0f32; scores.len()];
    for (name, level) in Simd::all() {
        level.widen(&scores, &mut wide);
        for (score, got) in scores.iter().zip(&wide) {
            let same = got.to_bits() == score.to_f32().to_bits() || score.is_nan() && got.is_nan();
            assert!(same, "{name} {score:?}: {got}");
        }
    }
}

/// Sums of a whole row are those below an edge above it.
#[test]
fn sums_below_an_edge_have_the_same_bits() {
    let levels = Simd::all();
    let portable = levels[levels.len() - 1].1;
    for (n, masks) in LENGTHS.into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let mut row = padded(scores(n, 3.0).into_iter().map(|score| score as f32));
        if masks {
            row.iter_mut().step_by(3).for_each(|score| *score = f32::NEG_INFINITY);
        }
        let shift = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if shift == f32::NEG_INFINITY {
            continue;
        }
        for (name, level) in levels {
            for edge in [shift - 9.0, shift - 1.0, shift] {
                let want = portable.below(&row, shift, edge);
                assert_eq!(level.below(&row, shift, edge), want, "{name} {n} {masks}");
            }
            let want = portable.below(&row, shift, f32::INFINITY);
            assert_eq!(level.whole(&row, shift), want, "{name} {n} {masks}");
        }
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
                    let seen = level.survey(Some(&row), n, &mut copy);
                    let found = seen.nan || seen.largest == f32::INFINITY;
                    assert_eq!(found, bad, "{name} {n} {at} {value}");
                    assert_eq!(
                        seen.smallest == f32::NEG_INFINITY,
                        value < 0.0 || n == 1 && value.is_nan()
                    );
                    let allowed: Vec<u8> = (0..n).map(|i| u8::from(i != at)).collect();
                    let (mut dense, mut positions) = (Vec::new(), Vec::new());
                    level.compact(&row, &allowed, &mut dense, &mut positions);
                    assert_eq!(dense, vec![1f32; n - 1], "{name} {n} {at} {value}");
                }
            }
        }
    }
}

#[test]
fn the_rough_mass_is_near_the_mass() {
    for spread in [0.0, 0.3, 1.0, 3.0, 20.0] {
        let scores = padded(scores(5000, spread).into_iter().map(|v| v as f32));
        for (name, level) in Simd::all() {
            let largest = level.extent(&scores).1;
            let ratio = level.rough(&scores, largest, 1.0) / level.mass(&scores, Exp(largest));
            let (_, from_below) = level.scan(&scores, Some((largest - 20.0, 1.0)));
            let other = from_below / level.mass(&scores, Exp(largest)) / 20f64.exp();
            assert!((other - 1.0).abs() < 0.07, "{name} {spread}: {other} from below");
            assert!((ratio - 1.0).abs() < 0.07, "{name} {spread}: {ratio}");
        }
    }
}

/// The bound that `mass` budgets for an exponential whose argument is exact: the rounding of x * log2(e) - 1, the
/// constant, and `rest` units for the polynomial and its evaluation.
fn allowance(x: f64, unit: f64, constant: f64, rest: f64) -> f64 {
    ((1.0 + constant) * x.abs() + rest) * unit
}

#[test]
fn exp_stays_within_its_bound() {
    let unit = 2f64.powi(-24);
    let scores = padded((0..200_000).map(|i| -(i as f32) * 4.4e-4));
    let mut weights = vec![0f32; scores.len()];
    Simd::all()[0].1.weights(&scores, Exp(0.0), &mut weights);
    for (&x, &weight) in scores.iter().zip(&weights) {
        if x < f32::CUT {
            assert_eq!(weight, 0.0);
        } else {
            let want = certified_sums::exp(f64::from(x));
            let error = (f64::from(weight) / want - 1.0).abs();
            assert!(error <= allowance(f64::from(x), unit, 0.23, 5.0), "{x}: {error:e}");
        }
    }
}

#[test]
fn double_exp_stays_within_its_bound() {
    // The checker's exp is proven to 2^-50, the kernel's bound is looser where |x| is large.
    let unit = 2f64.powi(-53);
    let scores = padded((0..200_000).map(|i| -f64::from(i) * 3.6e-3));
    let mut weights = vec![0f64; scores.len()];
    Simd::all()[0].1.weights(&scores, Exp(0.0), &mut weights);
    for (&x, &weight) in scores.iter().zip(&weights) {
        if x < f64::CUT {
            assert_eq!(weight, 0.0);
        } else {
            let error = (weight / certified_sums::exp(x) - 1.0).abs();
            assert!(error <= allowance(x, unit, 0.7, 145.0) + 2f64.powi(-50), "{x}: {error:e}");
        }
    }
}

/// The real mass of scores below a shift, by the checker's exponential and compensated sums: good to 2^-49.
fn real_mass(scores: &[f64], shift: f64) -> f64 {
    scores
        .iter()
        .map(|score| certified_sums::exp(score - shift))
        .collect::<certified_sums::Compensated>()
        .value()
}

/// The budgets of `mass`: 216 units on either side in f32, 3110 in f64.
#[test]
fn sums_of_weights_stay_within_what_is_budgeted() {
    for n in LENGTHS {
        for spread in [0.0, 0.7, 3.0, 9.0] {
            for below in [0.0, 40.3, 86.9] {
                // Weights far below the largest lose most.
                let mut numbers: Vec<f64> =
                    scores(n, spread).iter().map(|x| x.clamp(-80.0, 0.0) / 2.0 - below).collect();
                for x in &mut numbers {
                    *x = f64::from(x.max(-87.3) as f32);
                }
                let want = real_mass(&numbers, 0.0);
                let single = padded(numbers.iter().map(|&x| x as f32));
                let double = padded(numbers.iter().copied());
                for (name, level) in Simd::all() {
                    let off = (level.mass(&single, Exp(0.0)) / want - 1.0).abs();
                    assert!(off <= 216.0 * 2f64.powi(-24), "{name} {n} {spread}: {off:e}");
                    let off = (level.mass(&double, Exp(0.0)) / want - 1.0).abs();
                    assert!(off <= 3110.0 * 2f64.powi(-53), "{name} {n} {spread}: {off:e}");
                    // Both sides of any set.
                    let keep: Vec<u8> =
                        (0..single.len()).map(|i| any_byte(i, i % 2 == 0)).collect();
                    let side = |parity: usize| -> f64 {
                        let some: Vec<f64> =
                            numbers.iter().skip(parity).step_by(2).copied().collect();
                        real_mass(&some, 0.0)
                    };
                    let given = level.given(&single, &keep, Exp(0.0));
                    for (got, want) in [(given.head, side(0)), (given.tail, side(1))] {
                        let off = (got - want).abs();
                        assert!(off <= 216.0 * 2f64.powi(-24) * want, "{name} {n}: {off:e}");
                    }
                }
            }
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
        let scores: Vec<f32> = (0..CHUNK).map(|i| f32::from_bits((start + i).min(last))).collect();
        levels[0].1.weights(&scores, Exp(0.0), &mut weights);
        for (name, level) in &levels[1..] {
            if *name == "portable-nofma" && !start.is_multiple_of(CHUNK * 64) {
                continue; // a library call per operation: every 64th chunk
            }
            level.weights(&scores, Exp(0.0), &mut other);
            let equal = weights.iter().zip(&other).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(equal, "{name} differs near {}", scores[0]);
        }
        for (&x, &weight) in scores.iter().zip(&weights) {
            if x < f32::CUT {
                assert_eq!(weight.to_bits(), 0, "{x}");
                flushed += 1;
                continue;
            }
            assert!(weight >= f32::MIN_POSITIVE, "{x}");
            // The standard library's exp is within one unit of f64: nothing beside 2^-24.
            let error = (f64::from(weight) / f64::from(x).exp() - 1.0).abs();
            let share = error / allowance(f64::from(x), unit, 0.23, 5.0);
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

/// Scores of up to a hundred times a soft cap, nearer to each other where they are small.
fn capped<S: Scalar>(allowed: f64) {
    for cap in [1e-30, 0.3, 30.0, 50.0, 1e30] {
        let steps = (-50_000..=50_000).map(|step| (f64::from(step) / 50_000.0).powi(5) * 100.0);
        let ends = [1e-30, f64::INFINITY, f64::NEG_INFINITY];
        let scores: Vec<S> = steps.chain(ends).map(|share| S::nearest(share * cap)).collect();
        let mut first: Option<Vec<S>> = None;
        for (name, level) in Simd::all() {
            let mut found = scores.clone();
            level.cap(&mut found, SoftCap::new(cap));
            for (score, found) in scores.iter().zip(&found) {
                let (score, found): (f64, f64) = ((*score).into(), (*found).into());
                let off = (found - cap * (score / cap).tanh()).abs();
                assert!(off <= allowed * cap, "{name} {cap} {score}: {off:e}");
            }
            let first = first.get_or_insert_with(|| found.clone());
            assert!(first.iter().zip(&found).all(|(a, b)| a.rank() == b.rank()), "{name}");
        }
    }
}

#[test]
fn soft_caps_are_within_their_bound() {
    capped::<f32>(12.0 * 2f64.powi(-24));
    capped::<f64>(2f64.powi(-46));
}

/// `cargo test --release -- --ignored every_f32` takes some minutes.
#[test]
#[ignore = "enumerates 2.2e9 floats; run by hand when the soft cap changes"]
fn every_f32_is_capped_within_the_bound() {
    let (level, mut worst) = (Simd::all()[0].1, 0.0f64);
    for cap in [50.0f64, 0.7] {
        for start in (0..1000f32.to_bits()).step_by(1 << 16) {
            let scores: Vec<f32> = (start..start + (1 << 16)).map(f32::from_bits).collect();
            let mut found = scores.clone();
            level.cap(&mut found, SoftCap::new(cap));
            for (&score, &found) in scores.iter().zip(&found) {
                let off = (f64::from(found) - cap * (f64::from(score) / cap).tanh()).abs();
                worst = worst.max(off / cap * 2f64.powi(24));
            }
        }
    }
    println!("largest error {worst:.2} units of 2^-24 of the cap");
    assert!(worst <= 12.0);
}

#[test]
fn edges_are_looked_at_alike_at_all_levels() {
    for groups in [1, 2, 5, 16] {
        let count = groups * LANES;
        let mut scores: Vec<f32> =
            (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 8.0).collect();
        scores[count - 3] = f32::NEG_INFINITY;
        let weights: Vec<f32> =
            scores.iter().map(|score| if *score > -9.0 { 1.0 } else { 0.0 }).collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let edges: [f32; EDGES] = std::array::from_fn(|i| i as f32 * 1.5 - 6.0);
        for &(name, simd) in Simd::all() {
            assert_eq!(simd.top(&scores), (largest, false), "{name}");
            let mut bad = scores.clone();
            bad[count / 2] = f32::NAN;
            assert!(simd.top(&bad).1, "{name}");
            // Whole numbers: exact.
            let (ones, squares) = simd.sums(&weights);
            let above = scores.iter().filter(|score| **score > -9.0).count() as f32;
            assert_eq!((ones, squares), (above, above), "{name}");
            let sums = simd.below_each(&scores, &weights, edges);
            for (edge, sums) in edges.into_iter().zip(sums) {
                let below = scores.iter().filter(|score| (-9.0..edge).contains(*score)).count();
                let (below, found) = (below as f64, (sums.weights(), sums.squares()));
                assert_eq!(found, (below, below), "{name} {edge}");
            }
        }
    }
}

/// A closure that is not inlined is compiled without its level's instructions, and each of these becomes a call. Optimised
/// programs show it by the names of such functions; sanitized ones have them all.
#[cfg(all(target_arch = "x86_64", not(debug_assertions)))]
#[test]
fn no_instruction_of_a_level_is_a_call() {
    if std::env::var_os("CERTK_EMULATED").is_some() {
        return;
    }
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let names = program.windows(8).enumerate().filter(|(_, name)| name.starts_with(b"_mm"));
    let called: Vec<_> = names
        .map(|(at, _)| String::from_utf8_lossy(&program[at.max(24) - 24..at + 8]).into_owned())
        .filter(|name| name.contains("3x86") && name.contains("avx"))
        .collect();
    assert!(called.is_empty(), "{called:?}");
}
