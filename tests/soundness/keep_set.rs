//! One set for many rows: masses of the rows, and the size of the smallest set by trying all.

use certk_rs::{Options, Scores, Status, keep_set};

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
