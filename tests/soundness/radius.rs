//! Scores of which only is known that they lie within a radius: certificates hold wherever the real ones are.

use certk_rs::bounds::{Cuts, GapRule, multi_gap, score_gap, single_gap, smallest_k};
use certk_rs::{
    CertifyOptions, Keep, Mask, Options, OutputOptions, Scores, Status, Values, certify, keep_set,
    output_error, select, select_output,
};

use crate::exact::{Average, Random, Real, Share, flags, moved, ranked, reals, tail, weights};
use crate::rows::Stored;

/// The most and the least that a set may lose, wherever the real scores are.
fn extremes(scores: &[Real], kept: &[bool], radius: f64) -> (Share, Share) {
    let lost = |by: f64| tail(&weights(&moved(scores, kept, by)), |i| kept[i]);
    (lost(-radius), lost(radius))
}

/// The least that any set of a size may lose.
fn least(scores: &[Real], size: usize, radius: f64) -> Share {
    let best = flags(scores.len(), ranked(scores).into_iter().take(size));
    extremes(scores, &best, radius).1
}

const RADII: [f64; 4] = [1e-9, 1e-3, 0.2, 2.0];

fn rows() -> Vec<(f64, Vec<f64>)> {
    let mut random = Random::new(11);
    let mut rows = Vec::new();
    for n in [2, 5, 40, 300, 1500, 5000] {
        for eps in [0.4, 0.02] {
            rows.push((
                eps,
                random.normals(n, 2.0).iter().map(|x| (x * 8.0).round() / 8.0).collect(),
            ));
            // Two levels, far apart.
            rows.push((eps, (0..n).map(|i| if i % 5 == 0 { 9.0 } else { 0.0 }).collect()));
        }
        rows.push((0.25, vec![1.5; n]));
    }
    rows
}

#[test]
fn selected_sets_hold_wherever_the_scores_are() {
    let mut proven = 0;
    for (eps, numbers) in rows() {
        let n = numbers.len();
        for stored in Stored::all(&numbers) {
            let real = reals(&stored.wide());
            for radius in RADII {
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().radius(&radii).unwrap();
                for prove in [false, true] {
                    let options = Options::new().prove_minimal(prove);
                    let found = select(&scores, &[eps], &options).unwrap();
                    let kept = flags(n, found.row(0).iter().map(|&i| i as usize));
                    let (most, fewest) = extremes(&real, &kept, radius);
                    let (lower, upper) = (found.tail_mass_lower[0], found.tail_mass_upper[0]);
                    assert!(most.at_most(upper) && fewest.at_least(lower), "{n} {radius}");
                    assert!(
                        upper <= most.up() * (1.0 + stored.slack()),
                        "{n} {radius} {upper} {}",
                        most.up()
                    );
                    assert!(lower >= fewest.down() * (1.0 - stored.slack()), "{n} {radius}");
                    assert_eq!(found.status[0], Status::Certified);
                    assert!(upper <= eps && most.at_most(eps));
                    if found.minimal[0] && found.k[0] > 1 {
                        proven += 1;
                        assert!(
                            !least(&real, kept.iter().filter(|k| **k).count() - 1, radius)
                                .at_most(eps)
                        );
                    }
                }
            }
        }
    }
    assert!(proven > 100);
}

/// Each row has its own.
#[test]
fn a_radius_for_each_row() {
    let row = [4.0, 3.0, 3.0, 1.0, 0.0, -1.0];
    let numbers = row.repeat(200);
    let n = numbers.len();
    for stored in Stored::all(&numbers.repeat(3)) {
        let real = reals(&stored.wide()[..n]);
        let radii = [0.0, 0.5, 1.25];
        let scores = Scores::new(stored.data(), &[3, n]).unwrap().radius(&radii).unwrap();
        let found = select(&scores, &[0.1], &Options::new()).unwrap();
        for (row, &radius) in radii.iter().enumerate() {
            let kept = flags(n, found.row(row).iter().map(|&i| i as usize));
            let (most, fewest) = extremes(&real, &kept, radius);
            assert!(most.at_most(found.tail_mass_upper[row]) && most.at_most(0.1));
            assert!(fewest.at_least(found.tail_mass_lower[row]));
        }
        assert!(found.k[0] < found.k[1] && found.k[1] < found.k[2]);
    }
}

/// Blocks and forced keys go through sums of their own.
#[test]
fn blocks_and_forced_keys_with_a_radius() {
    let mut random = Random::new(12);
    for n in [24, 600, 3000] {
        let numbers: Vec<f64> =
            random.normals(n, 2.0).iter().map(|x| (x * 8.0).round() / 8.0).collect();
        for stored in Stored::all(&numbers) {
            let real = reals(&stored.wide());
            for radius in [1e-3, 0.3] {
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().radius(&radii).unwrap();
                let plain = Options::new();
                for options in [plain.clone().block_size(4), plain.keep_first(2).keep_last(2)] {
                    let found = select(&scores, &[0.2], &options).unwrap();
                    let kept = flags(n, found.row(0).iter().map(|&i| i as usize));
                    let (most, fewest) = extremes(&real, &kept, radius);
                    assert!(most.at_most(found.tail_mass_upper[0]) && most.at_most(0.2));
                    assert!(fewest.at_least(found.tail_mass_lower[0]));
                }
            }
        }
    }
}

#[test]
fn given_sets_are_judged_wherever_the_scores_are() {
    let mut random = Random::new(13);
    let mut proven = [0, 0];
    for (eps, numbers) in rows() {
        let n = numbers.len();
        if n > 2000 {
            continue;
        }
        for stored in Stored::all(&numbers).into_iter().take(2) {
            let real = reals(&stored.wide());
            let order = ranked(&real);
            for radius in RADII {
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().radius(&radii).unwrap();
                let needed = select(&scores, &[eps], &Options::new()).unwrap().k[0] as usize;
                for (size, swap) in [
                    (needed, false),
                    (needed.saturating_sub(1).max(1), false),
                    (needed, true),
                    (1 + random.below(n), false),
                ] {
                    let mut kept = flags(n, order.iter().copied().take(size));
                    if swap && size < n {
                        kept[order[size - 1]] = false;
                        kept[order[size]] = true;
                    }
                    let (most, fewest) = extremes(&real, &kept, radius);
                    let indices: Vec<i64> = (0..n as i64).filter(|&i| kept[i as usize]).collect();
                    let keep = Keep::Indices { indptr: &[0, size as i64], indices: &indices };
                    for independent in [false, true] {
                        let found = certify(
                            &scores,
                            &keep,
                            &CertifyOptions::new().eps(&[eps]).independent(independent),
                        )
                        .unwrap();
                        let (lower, upper) = (found.tail_mass_lower[0], found.tail_mass_upper[0]);
                        let at = format!("{n} {radius} {size} {independent}");
                        assert!(most.at_most(upper) && fewest.at_least(lower), "{at}");
                        assert!(
                            upper <= most.up() * (1.0 + stored.slack()),
                            "{at} {upper} {}",
                            most.up()
                        );
                        assert!(lower >= fewest.down() * (1.0 - stored.slack()), "{at}");
                        let holds = found.holds.unwrap()[0];
                        assert!(!holds || most.at_most(eps), "{at}");
                        if found.minimal.unwrap()[0] && size > 1 {
                            proven[usize::from(independent)] += 1;
                            assert!(holds && !least(&real, size - 1, radius).at_most(eps), "{at}");
                        }
                        let open = certify(
                            &scores,
                            &keep,
                            &CertifyOptions::new().independent(independent),
                        )
                        .unwrap();
                        assert!(most.at_most(open.tail_mass_upper[0]), "{at}");
                    }
                }
            }
        }
    }
    assert!(proven[0] > 10 && proven[1] > 10, "{proven:?}");
}

/// The worst that the best k of a row may lose.
fn worst_of_best(real: &[Real], k: usize, radius: f64) -> Share {
    let best = flags(real.len(), ranked(real).into_iter().take(k));
    extremes(real, &best, radius).0
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
            let real = reals(&stored.wide());
            for radius in RADII {
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[1, n]).unwrap().radius(&radii).unwrap();
                for k in 1..n {
                    let most = worst_of_best(&real, k, radius);
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
                        let most = worst_of_best(&real, k, radius);
                        assert!(most.at_most(eps), "{n} {radius} {eps} {rule:?} {k}");
                    }
                    // The threshold keeps, of the stored scores, what may be that near the largest; two of them each.
                    let k = smallest_k(&scores, &[eps], GapRule::Threshold).unwrap()[0] as usize;
                    assert!(worst_of_best(&real, k, radius).at_most(eps), "{n} {radius} {eps} {k}");
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
                assert!(worst_of_best(&reals(&row), k, radius).at_most(eps));
            }
        }
    }
}

/// The exact output error where kept and dropped scores are moved as far as they may, both ways.
#[test]
fn output_errors_hold_wherever_the_scores_are() {
    let mut random = Random::new(15);
    for (n, d) in [(2, 1), (6, 3), (60, 5)] {
        for equal in [false, true] {
            let numbers = if equal { vec![0.5; n] } else { random.normals(n, 1.5) };
            let points = random.normals(n * d, 1.0);
            let values = Values::new(&points, &[n, d]).unwrap();
            let real = reals(&numbers);
            for radius in [1e-6, 1e-2, 0.5] {
                let radii = [radius];
                let scores = Scores::new(&numbers, &[1, n]).unwrap().radius(&radii).unwrap();
                let none = Real::zero();
                let near = |kept: &[bool], bound: f64| {
                    for by in [-radius, -radius / 2.0, 0.0, radius] {
                        let weights = weights(&moved(&real, kept, by));
                        let all = Average::of(&weights, &points, d, |_| true, &none);
                        let some = Average::of(&weights, &points, d, |i| kept[i], &none);
                        assert!(all.is_near(&some, bound), "{n} {radius} {by} {bound}");
                    }
                };
                for size in [1, n / 2, n - 1] {
                    let indices: Vec<i64> = (0..size as i64).collect();
                    let kept = flags(n, 0..size);
                    let keep = Keep::Indices { indptr: &[0, size as i64], indices: &indices };
                    let found =
                        output_error(&scores, &values, &keep, &OutputOptions::new()).unwrap();
                    for bound in [
                        &found.exact,
                        &found.diameter,
                        &found.ball,
                        &found.spectral,
                        &found.variance,
                        &found.best,
                        &found.norm,
                        &found.chi_square,
                    ] {
                        near(&kept, bound[0]);
                    }
                }
                let found = select_output(&scores, &values, &[0.4], &OutputOptions::new()).unwrap();
                let kept = flags(n, found.indices.iter().map(|&i| i as usize));
                near(&kept, found.error_upper[0]);
                let (most, fewest) = extremes(&real, &kept, radius);
                assert!(most.at_most(found.tail_mass_upper[0]) && found.error_upper[0] <= 0.4);
                assert!(fewest.at_least(found.tail_mass_lower[0]));
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
            for (row, numbers) in numbers.chunks(n).enumerate() {
                let (most, fewest) = extremes(&reals(numbers), &kept, radius);
                assert!(most.at_most(set.tail_mass_upper[row]) && most.at_most(0.2));
                assert!(fewest.at_least(set.tail_mass_lower[row]));
                // No row can be met by fewer keys than the whole set needs, and the bound is for all at once.
                assert!(set.lower_bound <= kept.iter().filter(|k| **k).count());
            }
            if rows == 1 {
                // For one row the least size is known, wherever the scores are.
                let real = reals(&numbers);
                let fewest = (1..=n).find(|&k| least(&real, k, radius).at_most(0.2)).unwrap();
                assert!(set.lower_bound <= fewest, "{} {fewest}", set.lower_bound);
            }
        }
    }
}

/// Tails that are flushed where they are stored, but may weigh something where they are.
#[test]
fn flushed_tails_within_a_radius() {
    for (depth, radius) in
        [(88.0, 0.5), (95.0, 10.0), (300.0, 120.0), (720.0, 12.0), (720.0, 290.0)]
    {
        for count in [1, 50, 1100] {
            let mut numbers = vec![-depth; count + 1];
            numbers[count / 2] = 0.0;
            let kept = flags(count + 1, [count / 2]);
            for stored in Stored::all(&numbers) {
                let (most, _) = extremes(&reals(&stored.wide()), &kept, radius);
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[1, count + 1]).unwrap();
                let scores = scores.radius(&radii).unwrap();
                let indices = [(count / 2) as i64];
                let keep = Keep::Indices { indptr: &[0, 1], indices: &indices };
                for independent in [false, true] {
                    let found =
                        certify(&scores, &keep, &CertifyOptions::new().independent(independent))
                            .unwrap();
                    assert!(most.at_most(found.tail_mass_upper[0]), "{depth} {radius} {count}");
                }
                for eps in [1e-3, most.down().max(1e-300)] {
                    if eps >= 1.0 {
                        continue;
                    }
                    let found = select(&scores, &[eps], &Options::new()).unwrap();
                    let kept = flags(count + 1, found.row(0).iter().map(|&i| i as usize));
                    let (most, _) = extremes(&reals(&stored.wide()), &kept, radius);
                    assert!(most.at_most(found.tail_mass_upper[0]) && most.at_most(eps));
                }
            }
        }
    }
}

/// Kept sets that are flushed where they are stored, but may weigh most where they are.
#[test]
fn flushed_heads_within_a_radius() {
    for (depth, radius) in [(88.0, 60.0), (95.0, 10.0), (300.0, 155.0), (590.0, 300.0)] {
        for count in [1, 50, 1100] {
            let mut numbers = vec![-depth; count + 1];
            numbers[count / 2] = 0.0;
            let kept = flags(count + 1, (0..=count).filter(|&i| i != count / 2));
            let indices: Vec<i64> = (0..=count as i64).filter(|&i| kept[i as usize]).collect();
            for stored in Stored::all(&numbers) {
                let (most, fewest) = extremes(&reals(&stored.wide()), &kept, radius);
                let radii = [radius];
                let scores = Scores::new(stored.data(), &[1, count + 1]).unwrap();
                let scores = scores.radius(&radii).unwrap();
                let keep = Keep::Indices { indptr: &[0, count as i64], indices: &indices };
                for independent in [false, true] {
                    let found =
                        certify(&scores, &keep, &CertifyOptions::new().independent(independent))
                            .unwrap();
                    let (lower, upper) = (found.tail_mass_lower[0], found.tail_mass_upper[0]);
                    let at = format!("{depth} {radius} {count} {independent}");
                    assert!(fewest.at_least(lower), "{at}: {lower} > {}", fewest.down());
                    assert!(most.at_most(upper), "{at}: {upper} < {}", most.down());
                }
            }
        }
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
                let found = select(&scores, &[0.3], &Options::new()).unwrap();
                let chosen = flags(n, found.row(0).iter().map(|&i| i as usize));
                let (most, fewest) = extremes(&real, &chosen, radius);
                assert!(most.at_most(found.tail_mass_upper[0]) && most.at_most(0.3));
                assert!(fewest.at_least(found.tail_mass_lower[0]));
                let size = 1 + random.below(n - 1);
                let kept = flags(n, ranked(&real).into_iter().take(size));
                let bytes: Vec<u8> = kept.iter().map(|&kept| u8::from(kept)).collect();
                let keep = Keep::Mask { kept: &bytes, strides: &[] };
                let (most, fewest) = extremes(&real, &kept, radius);
                for independent in [false, true] {
                    let found = certify(
                        &scores,
                        &keep,
                        &CertifyOptions::new().eps(&[0.3]).independent(independent),
                    )
                    .unwrap();
                    let (lower, upper) = (found.tail_mass_lower[0], found.tail_mass_upper[0]);
                    assert!(most.at_most(upper) && fewest.at_least(lower), "{n} {radius}");
                    assert!(!found.holds.unwrap()[0] || most.at_most(0.3), "{n} {radius}");
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
        let none = Real::zero();
        for radius in [1e-9, 1e-3, 0.3] {
            let radii = [radius];
            let scores = Scores::new(&numbers, &[n]).unwrap().radius(&radii).unwrap();
            for size in [1, n / 2, n - 1] {
                let kept = flags(n, 0..size);
                let bytes: Vec<u8> = kept.iter().map(|&kept| u8::from(kept)).collect();
                let keep = Keep::Mask { kept: &bytes, strides: &[] };
                let found = output_error(&scores, &values, &keep, &OutputOptions::new()).unwrap();
                let bounds = [
                    ("exact", found.exact[0]),
                    ("diameter", found.diameter[0]),
                    ("ball", found.ball[0]),
                    ("spectral", found.spectral[0]),
                    ("variance", found.variance[0]),
                    ("best", found.best[0]),
                    ("norm", found.norm[0]),
                    ("chi_square", found.chi_square[0]),
                ];
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
                    let all = Average::of(&weights, &points, d, |_| true, &none);
                    let some = Average::of(&weights, &points, d, |i| kept[i], &none);
                    for (name, bound) in bounds {
                        let near = bound == f64::INFINITY || all.is_near(&some, bound);
                        assert!(near, "{name} {n} {d} {radius} {size} {axis} {ways}: {bound}");
                    }
                }
            }
        }
    }
}
