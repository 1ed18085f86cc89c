//! One set for many rows: masses of the rows, and the size of the smallest set by trying all.

use certk_rs::{Kind, MaxKeep, Options, Scores, Status, keep_set};

use crate::exact::{Random, Real, Share, flags, reals, tail, weights};

/// The size of the smallest set that loses at most its budget in every row; which keys any row sees.
fn smallest(rows: &[Vec<Real>], eps: &[f64]) -> usize {
    let n = rows[0].len();
    let fits = |set: u32| {
        let share = |row: &Vec<Real>| tail(row, |i| set >> i & 1 == 1);
        rows.iter().zip(eps).all(|(row, &eps)| share(row).at_most(eps))
    };
    (0..1u32 << n).filter(|&set| fits(set)).map(u32::count_ones).min().unwrap() as usize
}

fn judge(scores: &Scores<'_>, rows: &[Vec<Real>], eps: &[f64], options: &Options) -> (usize, bool) {
    let set = keep_set(scores, eps, options).unwrap();
    let kept = flags(rows[0].len(), set.indices.iter().map(|&i| i as usize));
    for (row, weights) in rows.iter().enumerate() {
        let lost: Share = tail(weights, |i| kept[i]);
        let (lower, upper) = (set.tail_mass_lower[row], set.tail_mass_upper[row]);
        assert!(lost.at_most(upper) && lost.at_least(lower), "{lower} {upper} {}", lost.down());
        assert!(set.status != Status::Certified || upper <= eps[row]);
    }
    assert!(set.lower_bound <= set.indices.len());
    (set.lower_bound, set.status == Status::Certified)
}

/// Budgets at and around what a set of some size loses.
fn around(lost: &Share) -> [f64; 4] {
    [lost.up(), lost.down() * (1.0 - 1e-9), lost.up() * (1.0 + 1e-8), lost.up() * (1.0 + 1e-5)]
}

#[test]
fn no_set_is_smaller_than_the_lower_bound() {
    let mut random = Random::new(51);
    let mut tight = 0;
    for round in 0..150 {
        let (m, n) = (1 + random.below(3), 2 + random.below(7));
        let numbers: Vec<f64> = random.normals(m * n, 1.5);
        let single: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
        let (scores, real) = if round % 2 == 0 {
            (Scores::new(&single, &[m, n]).unwrap(), reals(&single))
        } else {
            (Scores::new(&numbers, &[m, n]).unwrap(), reals(&numbers))
        };
        let rows: Vec<Vec<Real>> = real.chunks(n).map(weights).collect();
        // A set at random, and budgets that it just meets, or just does not.
        let set = flags(n, (0..n).filter(|_| random.below(2) == 0));
        if !set.contains(&true) || !set.contains(&false) {
            continue;
        }
        let lost: Vec<Share> = rows.iter().map(|row| tail(row, |i| set[i])).collect();
        for which in 0..4 {
            let eps: Vec<f64> =
                lost.iter().map(|lost| around(lost)[which].min(1f64.next_down())).collect();
            let least = smallest(&rows, &eps);
            let (bound, certified) = judge(&scores, &rows, &eps, &Options::new());
            assert!(certified && bound <= least, "{m} {n} {eps:?}: {bound} > {least}");
            tight += usize::from(bound == least);
        }
    }
    assert!(tight > 100, "{tight}");
}

/// One row: the least size is that of the best keys, and rounding is all there is between it and the bound.
#[test]
fn the_lower_bound_of_one_row() {
    let mut random = Random::new(52);
    let mut tight = 0;
    for round in 0..60 {
        let n = [5, 40, 300, 900][round % 4];
        let numbers: Vec<f64> = random.normals(n, [0.01, 1.0, 3.0][round % 3]);
        let single: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
        let (scores, real) = if round % 2 == 0 {
            (Scores::new(&single, &[1, n]).unwrap(), reals(&single))
        } else {
            (Scores::new(&numbers, &[1, n]).unwrap(), reals(&numbers))
        };
        let weights = weights(&real);
        let k = 1 + random.below(n - 1);
        let lost = crate::exact::least_tail(&weights, k);
        for eps in around(&lost) {
            if eps >= 1.0 {
                continue;
            }
            let (bound, certified) =
                judge(&scores, std::slice::from_ref(&weights), &[eps], &Options::new());
            let least = if lost.at_most(eps) { k } else { k + 1 };
            assert!(certified && bound <= least, "{n} {k} {eps}: {bound} > {least}");
            tight += usize::from(bound == least);
        }
    }
    assert!(tight > 20, "{tight}");
}

/// With a limit on the size the bound is about what the set achieves; with a radius that is more than it loses, so that fewer
/// keys may do.
#[test]
fn lower_bounds_for_what_is_achieved() {
    let mut random = Random::new(53);
    let mut fewer = 0;
    for round in 0..60 {
        let (m, n) = (1 + random.below(3), 3 + random.below(6));
        let numbers: Vec<f32> = random.normals(m * n, 1.5).iter().map(|&x| x as f32).collect();
        let radii = [[0.0, 0.3, 1.5][round % 3]];
        let scores = Scores::new(&numbers, &[m, n]).unwrap().radius(&radii).unwrap();
        let rows: Vec<Vec<Real>> = numbers.chunks(n).map(|row| weights(&reals(row))).collect();
        let most = 1 + random.below(n - 1);
        let options = Options::new().max_keep(MaxKeep::Count(most));
        let eps = vec![0.05; m];
        let set = keep_set(&scores, &eps, &options).unwrap();
        judge(&scores, &rows, &eps, &options);
        let achieved: Vec<f64> = (set.tail_mass_upper.iter())
            .map(|&upper| upper.max(0.05).min(1f64.next_down()))
            .collect();
        assert!(set.indices.len() <= most);
        let least = smallest(&rows, &achieved);
        assert!(set.lower_bound <= least, "{} > {least}", set.lower_bound);
        fewer += usize::from(least < set.indices.len() && set.status == Status::OverBudget);
    }
    assert!(fewer > 5, "{fewer}");
}

/// Stored weights, masked keys, forced keys, rows that may lose nothing.
#[test]
fn masses_of_other_rows() {
    let mut random = Random::new(54);
    for round in 0..60 {
        let (m, n) = (1 + random.below(4), 3 + random.below(6));
        let numbers: Vec<f64> = random.normals(m * n, 2.0).iter().map(|x| x.exp()).collect();
        let seen: Vec<u8> = (0..m * n).map(|_| u8::from(random.below(4) > 0) * 131).collect();
        let scores = Scores::new(&numbers, &[m, n]).unwrap().kind(Kind::Probs).unwrap();
        let scores = scores.mask(certk_rs::Mask::Allowed(&seen), &[n]).unwrap();
        let visible: Vec<f64> =
            numbers.iter().zip(&seen).map(|(w, s)| if *s == 0 { 0.0 } else { *w }).collect();
        let rows: Vec<Vec<Real>> = visible.chunks(n).map(reals).collect();
        let mut eps = vec![0.3; m];
        if round % 3 == 0 {
            eps[0] = 0.0;
        }
        if rows.iter().any(|row| row.iter().all(|w| *w == Real::zero())) {
            continue;
        }
        let (bound, certified) = judge(&scores, &rows, &eps, &Options::new());
        assert!(certified && bound <= smallest(&rows, &eps));
        let forced = Options::new().keep_first(1).keep_last(1);
        assert!(judge(&scores, &rows, &eps, &forced).1);
    }
}
