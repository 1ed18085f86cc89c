//! Bounds from a few scores, and of the output, beside what is true.

use certk_rs::bounds::{Cuts, GapRule, multi_gap, score_gap, single_gap, smallest_k};
use certk_rs::{
    Keep, Kind, Mask, OutputError, OutputOptions, Scores, Values, output_error, select_output,
};

use crate::exact::{Average, Random, Real, Share, flags, least_tail, ranked, reals, tail, weights};
use crate::stored::Stored;

/// Returns the share that `n - k` scores of `low` have beside `k` scores of `high`.
fn of_levels(n: usize, k: usize, high: &Real, low: &Real) -> Share {
    let scores: Vec<Real> = (0..n).map(|i| if i < k { high } else { low }.clone()).collect();
    tail(&weights(&scores), |i| i < k)
}

/// Returns all bounds of the first row's output error with their names.
pub(crate) fn named(found: &OutputError) -> [(&'static str, f64); 8] {
    [
        ("exact", found.exact[0]),
        ("diameter", found.diameter[0]),
        ("ball", found.ball[0]),
        ("spectral", found.spectral[0]),
        ("variance", found.variance[0]),
        ("best", found.best[0]),
        ("norm", found.norm[0]),
        ("chi_square", found.chi_square[0]),
    ]
}

/// Returns the average over all values, and that over the kept ones.
pub(crate) fn averages(weights: &[Real], values: &[f64], d: usize, kept: &[bool]) -> [Average; 2] {
    let of = |kept: &dyn Fn(usize) -> bool| Average::of(weights, values, d, kept, &Real::zero());
    [of(&|_| true), of(&|i| kept[i])]
}

#[test]
fn gaps_of_all_kinds_of_rows() {
    let mut random = Random::new(61);
    for n in [2, 6, 25] {
        for (scale, sigma) in [(1.0, 2.0), (-0.3, 5.0), (1e-3, 3000.0), (0.0, 1.0)] {
            for stored in Stored::all(&random.normals(n, sigma)) {
                let real: Vec<Real> =
                    (reals(&stored.wide()).iter()).map(|x| x.times(&Real::from(scale))).collect();
                let (weights, order) = (weights(&real), ranked(&real));
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().scale(scale).unwrap();
                for k in 1..n {
                    let count = [k as i64];
                    let lost = least_tail(&weights, k);
                    let (high, low) = (&real[order[k - 1]], &real[order[k]]);
                    let gap = score_gap(&scores, &count).unwrap()[0];
                    let off = high.minus(low).minus(&Real::from(gap));
                    assert!(off >= Real::zero() && off < Real::from(1e-9), "{n} {k} {scale}");
                    let single = single_gap(&scores, &count).unwrap()[0];
                    let levels = of_levels(n, k, high, low);
                    assert!(levels.at_most(single) && lost.at_most(single));
                    assert!(single <= levels.up() * (1.0 + 1e-12));
                    let at: Vec<i64> = (1..n as i64).filter(|&cut| cut != count[0]).collect();
                    for cuts in [Cuts::At(&at), Cuts::Best(n), Cuts::Best(2)] {
                        let multi = multi_gap(&scores, &count, cuts).unwrap()[0];
                        assert!(lost.at_most(multi) && multi <= single * (1.0 + 1e-12));
                        if cuts == Cuts::At(&at) {
                            assert!(multi <= lost.up() * (1.0 + 1e-12));
                        }
                    }
                    for eps in [lost.down(), lost.up(), levels.down(), single, 0.3] {
                        if eps >= 1.0 {
                            continue;
                        }
                        let rules = [
                            GapRule::SingleGap,
                            GapRule::MultiGap { cuts: 2 },
                            GapRule::MultiGap { cuts: n },
                            GapRule::Threshold,
                        ];
                        for rule in rules {
                            let k = smallest_k(&scores, &[eps], rule).unwrap()[0];
                            assert!(
                                least_tail(&weights, k as usize).at_most(eps),
                                "{rule:?} {eps}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Weights as they are stored, and scores with biases, go the same ways.
#[test]
fn gaps_of_weights_and_biased_scores() {
    let mut random = Random::new(62);
    for n in [3, 9] {
        let numbers = random.normals(n, 2.0);
        let stored: Vec<f64> = numbers.iter().map(|x| x.exp()).collect();
        let probs = Scores::new(&stored, &[n]).unwrap().kind(Kind::Probs).unwrap();
        let biases: Vec<f64> = random.normals(n, 1e5);
        let biased = Scores::new(&numbers, &[n]).unwrap().scale(0.1).unwrap();
        let biased = biased.mask(Mask::Additive((&biases).into()), &[]).unwrap();
        let real: Vec<Real> = (numbers.iter().zip(&biases))
            .map(|(&x, &b)| Real::from(x).times(&Real::from(0.1)).plus(&b.into()))
            .collect();
        for (scores, weights) in [(&probs, reals(&stored)), (&biased, weights(&real))] {
            for k in 1..n {
                let lost = least_tail(&weights, k);
                let count = [k as i64];
                let single = single_gap(scores, &count).unwrap()[0];
                let multi = multi_gap(scores, &count, Cuts::Best(n)).unwrap()[0];
                assert!(lost.at_most(single) && lost.at_most(multi) && multi <= single);
            }
        }
    }
}

/// Output errors of rows whose values lie all on one side, in two places, or anywhere.
#[test]
fn output_errors_beside_exact_averages() {
    let mut random = Random::new(65);
    for round in 0..60 {
        let (n, d) = (2 + random.below(30), 1 + random.below(4));
        let numbers = random.normals(n, [0.01, 2.0, 20.0][round % 3]);
        let mut points = random.normals(n * d, 1.0);
        let mut kept = flags(n, (0..n).filter(|_| random.below(2) == 0));
        match round % 4 {
            // Kept and dropped values in two places: the bounds are equalities.
            1 => points.chunks_mut(d).zip(&kept).for_each(|(point, &kept)| {
                point.fill(if kept { 1.0 } else { -1e-3 });
            }),
            2 => points.iter_mut().for_each(|p| *p = 1e6 + 1e-6 * *p),
            3 => kept.fill(false),
            _ => {}
        }
        let stored: Vec<f64>;
        let (scores, weights) = if round % 5 == 4 {
            stored = numbers.iter().map(|x| x.exp()).collect();
            let scores = Scores::new(&stored, &[1, n]).unwrap().kind(Kind::Probs).unwrap();
            (scores, reals(&stored))
        } else {
            (Scores::new(&numbers, &[1, n]).unwrap(), weights(&reals(&numbers)))
        };
        let values = Values::new(&points, &[n, d]).unwrap();
        let near = |kept: &[bool], bound: f64| {
            let [all, some] = averages(&weights, &points, d, kept);
            if kept.contains(&true) {
                all.is_near(&some, bound)
            } else {
                all.is_within(&vec![0.0; d], bound)
            }
        };
        let bytes: Vec<u8> = kept.iter().map(|&kept| u8::from(kept)).collect();
        let keep = Keep::Mask { kept: &bytes, strides: &[n] };
        let found = output_error(&scores, &values, &keep, &OutputOptions::new()).unwrap();
        for (name, bound) in named(&found) {
            assert!(bound == f64::INFINITY || near(&kept, bound), "{round} {name} {bound}");
        }
        assert!(!near(&kept, found.exact[0] * (1.0 - 1e-6)) || found.exact[0] < 1e-9, "{round}");
        for tolerance in [0.5, 1e-3] {
            let found =
                select_output(&scores, &values, &[tolerance], &OutputOptions::new()).unwrap();
            let kept = flags(n, found.indices.iter().map(|&i| i as usize));
            let lost = tail(&weights, |i| kept[i]);
            assert!(near(&kept, found.error_upper[0]) && found.error_upper[0] <= tolerance);
            assert!(lost.at_most(found.tail_mass_upper[0]));
            assert!(lost.at_least(found.tail_mass_lower[0]));
            if found.minimal[0] {
                let order = ranked(&weights);
                for size in 1..kept.iter().filter(|kept| **kept).count() {
                    let fewer = flags(n, order.iter().copied().take(size));
                    assert!(!near(&fewer, tolerance), "{round} {size}");
                }
            }
        }
    }
}
