//! Scores of which only is known that they lie within a radius: certificates hold wherever the real ones are.

use certk_rs::bounds::{Cuts, GapRule, multi_gap, score_gap, single_gap, smallest_k};
use certk_rs::{
    Keep, Mask, Options, OutputOptions, Scores, Status, Values, keep_set, output_error, select,
    select_output,
};

use crate::bounds::{averages, named};
use crate::exact::{Random, Real, flags, moved, ranked, reals, weights};
use crate::rows::{Truth, stepped};
use crate::stored::Stored;

const RADII: [f64; 4] = [1e-9, 1e-3, 0.2, 2.0];

fn rows() -> Vec<(f64, Vec<f64>)> {
    let mut random = Random::new(11);
    let mut rows = Vec::new();
    for n in [2, 5, 40, 300, 1500, 5000] {
        for eps in [0.4, 0.02] {
            rows.push((eps, stepped(&mut random, n, 2.0, 8.0)));
            // Two levels, far apart.
            rows.push((eps, (0..n).map(|i| if i % 5 == 0 { 9.0 } else { 0.0 }).collect()));
        }
        rows.push((0.25, vec![1.5; n]));
    }
    rows
}

#[test]
fn sets_hold_wherever_the_scores_are() {
    let mut random = Random::new(13);
    let mut proven = [0; 3];
    for (eps, numbers) in rows() {
        let n = numbers.len();
        for stored in Stored::all(&numbers) {
            for radius in RADII {
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().radius(&radii).unwrap();
                let truth = Truth::of_stored(&stored).within(radius).tight(&stored);
                let mut needed = 0;
                for prove in [false, true] {
                    let found = truth.select(&scores, eps, &Options::new().prove_minimal(prove));
                    assert_eq!(found.status[0], Status::Certified);
                    proven[0] += usize::from(found.minimal[0] && found.k[0] > 1);
                    needed = found.k[0] as usize;
                }
                if n > 2000 {
                    continue;
                }
                let order = ranked(&truth.scores);
                for (size, swap) in [
                    (needed, false),
                    (needed.saturating_sub(1).max(1), false),
                    (needed, true),
                    (1 + random.below(n), false),
                ] {
                    let mut kept = truth.best(size);
                    if swap && size < n {
                        kept[order[size - 1]] = false;
                        kept[order[size]] = true;
                    }
                    for (i, found) in truth.certify(&scores, &kept, eps).into_iter().enumerate() {
                        proven[1 + i] += usize::from(found.minimal.unwrap()[0] && size > 1);
                    }
                }
            }
        }
    }
    assert!(proven[0] > 100 && proven[1] > 10 && proven[2] > 10, "{proven:?}");
}

/// Each row has its own.
#[test]
fn a_radius_for_each_row() {
    let numbers = [4.0, 3.0, 3.0, 1.0, 0.0, -1.0].repeat(200);
    let (n, radii) = (numbers.len(), [0.0, 0.5, 1.25]);
    for (stored, one) in Stored::all(&numbers.repeat(3)).iter().zip(Stored::all(&numbers)) {
        let scores = Scores::new(stored.data(), &[3, n]).unwrap().radius(&radii).unwrap();
        let found = select(&scores, &[0.1], &Options::new()).unwrap();
        for (row, &radius) in radii.iter().enumerate() {
            Truth::of_stored(&one).within(radius).judge(&found, row, 0.1);
        }
        assert!(found.k[0] < found.k[1] && found.k[1] < found.k[2]);
    }
}

/// A bias is added to each score before the radius counts.
#[test]
fn biased_scores_within_a_radius() {
    let mut random = Random::new(17);
    for n in [2, 9, 70] {
        let numbers = random.normals(n, 1.5);
        let bias: Vec<f64> = random.normals(n, 1.0);
        for stored in Stored::all(&numbers) {
            let pairs = reals(&stored.wide()).into_iter().zip(reals(&bias));
            let real: Vec<Real> = pairs.map(|(score, bias)| score.plus(&bias)).collect();
            for radius in RADII {
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[n]).unwrap().radius(&radii).unwrap();
                let scores = scores.mask(Mask::Additive((&bias).into()), &[]).unwrap();
                let truth = Truth::of(real.clone()).within(radius);
                assert!(truth.select(&scores, 0.3, &Options::new()).tail_mass_upper[0] <= 0.3);
                truth.certify(&scores, &truth.best(1 + random.below(n - 1)), 0.3);
            }
        }
    }
}

#[test]
fn gaps_count_the_radius_on_both_sides() {
    let numbers = [3.0, -1.0, 2.5, 0.25, 0.25, -4.0];
    for stored in Stored::all(&numbers) {
        let real = reals(&stored.wide());
        let order = ranked(&real);
        for radius in RADII {
            let radii = [radius];
            let scores = Scores::new(stored.data(), &[1, 6]).unwrap().radius(&radii).unwrap();
            for k in 1..6 {
                let gap = score_gap(&scores, &[k as i64]).unwrap()[0];
                let apart = real[order[k - 1]].minus(&real[order[k]]);
                let least = apart.minus(&Real::from(2.0 * radius));
                assert!(Real::from(gap) <= least, "{k} {radius}");
                assert!(least.minus(&Real::from(gap)) < Real::from(1e-12), "{k} {radius}");
            }
        }
    }
}

#[test]
fn bounds_from_a_few_scores_hold_wherever_they_are() {
    let mut random = Random::new(14);
    let mut rows = vec![vec![1.5; 4], vec![0.0; 33], vec![2.0, 2.0, 0.0, 0.0, 0.0, 0.0]];
    for n in [7, 30] {
        rows.push(random.normals(n, 1.5));
    }
    for numbers in rows {
        let n = numbers.len();
        for stored in Stored::all(&numbers).into_iter().take(2) {
            for radius in RADII {
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().radius(&radii).unwrap();
                let truth = Truth::of_stored(&stored).within(radius);
                let worst_of_best = |k| truth.extremes(&truth.best(k)).0;
                for k in 1..n {
                    let most = worst_of_best(k);
                    let count = [k as i64];
                    let single = single_gap(&scores, &count).unwrap()[0];
                    assert!(most.at_most(single), "{n} {k} {radius}");
                    for cuts in [0, 2, n] {
                        let multi = multi_gap(&scores, &count, Cuts::Best(cuts)).unwrap()[0];
                        assert!(most.at_most(multi), "{n} {k} {radius} {cuts}");
                        if cuts == n {
                            assert!(multi <= most.up() * (1.0 + 1e-10), "{n} {k} {radius}");
                        }
                    }
                    let at: Vec<i64> = (1..n as i64).filter(|&cut| cut != count[0]).collect();
                    let exact = multi_gap(&scores, &count, Cuts::At(&at)).unwrap()[0];
                    assert!(most.at_most(exact) && exact <= most.up() * (1.0 + 1e-10));
                }
                for eps in [0.25, 0.1, 0.5] {
                    for rule in [
                        GapRule::SingleGap,
                        GapRule::MultiGap { cuts: 0 },
                        GapRule::MultiGap { cuts: 3 },
                    ] {
                        let k = smallest_k(&scores, &[eps], rule).unwrap()[0] as usize;
                        let most = worst_of_best(k);
                        assert!(most.at_most(eps), "{n} {radius} {eps} {rule:?} {k}");
                    }
                    // The threshold keeps, of the stored scores, what may be that near the largest; two of them each.
                    let k = smallest_k(&scores, &[eps], GapRule::Threshold).unwrap()[0] as usize;
                    assert!(worst_of_best(k).at_most(eps), "{n} {radius} {eps} {k}");
                }
            }
        }
    }
}

/// A row of two levels whose gap is the very one that the threshold needs, or that less a radius.
#[test]
fn the_threshold_counts_the_radius_twice() {
    for (n, eps) in [(5usize, 0.1), (40, 0.01)] {
        let needed = (((n - 1) as f64) * (1.0 - eps) / eps).ln();
        for radius in [1e-3, 0.2] {
            for apart in [0.5, 1.5, 2.5] {
                let mut row = vec![0.0; n];
                row[n / 2] = needed + apart * radius;
                let radii = [radius];
                let scores = Scores::new(&row, &[n]).unwrap().radius(&radii).unwrap();
                let k = smallest_k(&scores, &[eps], GapRule::Threshold).unwrap()[0] as usize;
                assert_eq!(k, if apart > 2.0 { 1 } else { n }, "{n} {radius} {apart}");
                let truth = Truth::of(reals(&row)).within(radius);
                assert!(truth.extremes(&truth.best(k)).0.at_most(eps));
            }
        }
    }
}

/// The output error where kept and dropped scores are moved as far as they may, both ways.
#[test]
fn output_errors_hold_wherever_the_scores_are() {
    let mut random = Random::new(15);
    for (n, d) in [(2, 1), (6, 3), (60, 5)] {
        for equal in [false, true] {
            let numbers = if equal { vec![0.5; n] } else { random.normals(n, 1.5) };
            let points = random.normals(n * d, 1.0);
            let values = Values::new(&points, &[n, d]).unwrap();
            for radius in [1e-6, 1e-2, 0.5] {
                let radii = [radius];
                let scores = Scores::new(&numbers, &[1, n]).unwrap().radius(&radii).unwrap();
                let truth = Truth::of(reals(&numbers)).within(radius);
                let near = |kept: &[bool], bounds: &[f64]| {
                    for by in [-radius, -radius / 2.0, 0.0, radius] {
                        let weights = weights(&moved(&truth.scores, kept, by));
                        let [all, some] = averages(&weights, &points, d, kept);
                        for &bound in bounds {
                            assert!(all.is_near(&some, bound), "{n} {radius} {by} {bound}");
                        }
                    }
                };
                for size in [1, n / 2, n - 1] {
                    let indices: Vec<i64> = (0..size as i64).collect();
                    let keep = Keep::Indices { indptr: &[0, size as i64], indices: &indices };
                    let found = output_error(&scores, &values, &keep, &OutputOptions::new());
                    near(&flags(n, 0..size), &named(&found.unwrap()).map(|(_, bound)| bound));
                }
                let found = select_output(&scores, &values, &[0.4], &OutputOptions::new()).unwrap();
                let kept = flags(n, found.indices.iter().map(|&i| i as usize));
                near(&kept, &found.error_upper);
                assert!(found.error_upper[0] <= 0.4);
                let ends = (found.tail_mass_lower[0], found.tail_mass_upper[0]);
                truth.check(&truth.extremes(&kept), ends);
            }
        }
    }
}

#[test]
fn one_set_for_rows_with_a_radius() {
    let mut random = Random::new(16);
    for _ in 0..20 {
        let (rows, n) = (1 + random.below(4), 4 + random.below(60));
        let numbers: Vec<f32> = random.normals(rows * n, 2.0).iter().map(|&x| x as f32).collect();
        for radius in [1e-3, 0.3] {
            let radii = [radius];
            let scores = Scores::new(&numbers, &[rows, n]).unwrap().radius(&radii).unwrap();
            let set = keep_set(&scores, &[0.2], &Options::new()).unwrap();
            let kept = flags(n, set.indices.iter().map(|&i| i as usize));
            assert_eq!(set.status, Status::Certified);
            assert!(set.lower_bound <= set.indices.len());
            for (row, numbers) in numbers.chunks(n).enumerate() {
                let truth = Truth::of(reals(numbers)).within(radius);
                let lost = truth.extremes(&kept);
                truth.check(&lost, (set.tail_mass_lower[row], set.tail_mass_upper[row]));
                assert!(lost.0.at_most(0.2));
                if rows == 1 {
                    // For one row the least size is known, wherever the scores are.
                    let fewest = (1..=n).find(|&k| truth.least(k).at_most(0.2)).unwrap();
                    assert!(set.lower_bound <= fewest, "{} {fewest}", set.lower_bound);
                }
            }
        }
    }
}

/// Returns `true` if `sqrt(tau/(1-tau)) sqrt(Var_P - (1-tau) Var_S)` is at most `bound`.
///
/// Squares are compared. With sums over kept (S) and dropped (T) weights w and points v, the left one is
/// `[(S + T) S (T sum_T w v^2 - (sum_T w v)^2) + (S sum_T w v - T sum_S w v)^2] / (S (S + T))^2`.
fn spread_is_within(weights: &[Real], points: &[f64], d: usize, kept: &[bool], bound: f64) -> bool {
    let sum = |keep: bool, term: &dyn Fn(usize) -> Real| -> Real {
        (0..kept.len()).filter(|&i| kept[i] == keep).map(|i| weights[i].times(&term(i))).sum()
    };
    let (head, tail) = (sum(true, &|_| Real::from(1.0)), sum(false, &|_| Real::from(1.0)));
    let both = head.times(&head.plus(&tail));
    let axis = |axis: usize| -> Real {
        let point = |i: usize| Real::from(points[i * d + axis]);
        let (of_head, of_tail) = (sum(true, &point), sum(false, &point));
        let squares = sum(false, &|i| point(i).times(&point(i)));
        let within = tail.times(&squares).minus(&of_tail.times(&of_tail));
        let between = head.times(&of_tail).minus(&tail.times(&of_head));
        both.times(&within).plus(&between.times(&between))
    };
    let most = Real::from(bound).times(&both);
    (0..d).map(axis).sum::<Real>() <= most.times(&most)
}

/// Scores that move one by one, so that the averages of the kept and of the dropped values move towards or away from each other.
#[test]
fn output_errors_hold_wherever_each_score_is() {
    let mut random = Random::new(18);
    for (n, d) in [(3, 1), (12, 1), (30, 2), (60, 5)] {
        let numbers = random.normals(n, 0.7);
        let points = random.normals(n * d, 1.0);
        let values = Values::new(&points, &[n, d]).unwrap();
        let real = reals(&numbers);
        for radius in [1e-9, 1e-3, 0.3] {
            let radii = [radius];
            let scores = Scores::new(&numbers, &[n]).unwrap().radius(&radii).unwrap();
            for size in [1, n / 2, n - 1] {
                let kept = flags(n, 0..size);
                let bytes: Vec<u8> = kept.iter().map(|&kept| u8::from(kept)).collect();
                let keep = Keep::Mask { kept: &bytes, strides: &[] };
                let found = output_error(&scores, &values, &keep, &OutputOptions::new()).unwrap();
                let bounds = named(&found);
                for (axis, ways) in (0..d).flat_map(|axis| (0..4).map(move |ways| (axis, ways))) {
                    let move_one = |(i, score): (usize, &Real)| {
                        let way = ways >> usize::from(kept[i]) & 1 == 0;
                        let up = (points[i * d + axis] > 0.0) == way;
                        score.plus(&Real::from(if up { radius } else { -radius }))
                    };
                    let moved: Vec<Real> = real.iter().enumerate().map(move_one).collect();
                    let weights = weights(&moved);
                    let spread = spread_is_within(&weights, &points, d, &kept, found.variance[0]);
                    assert!(spread, "{n} {d} {radius} {size} {axis} {ways}");
                    let [all, some] = averages(&weights, &points, d, &kept);
                    for (name, bound) in bounds {
                        let near = bound == f64::INFINITY || all.is_near(&some, bound);
                        assert!(near, "{name} {n} {d} {radius} {size} {axis} {ways}: {bound}");
                    }
                }
            }
        }
    }
}
