//! Certificates of any sets: both ways contain the truth, and say nothing that is not so.

use certk_rs::{Certificate, CertifyOptions, Error, Keep, certify};

use super::rows::{Rows, strides};
use super::select::{budget, refused, same, set_level};
use super::tape::Tape;
use super::truth::Row;

/// An owned kept set.
#[derive(Debug)]
enum Given {
    Mask(Vec<u8>, Vec<usize>),
    Indices(Vec<i64>, Vec<i64>),
    Positions(Vec<i64>, Vec<u32>),
}

impl Given {
    fn new(tape: &mut Tape<'_>, rows: &Rows, known: &[Row]) -> Self {
        let way = tape.below(4);
        if way == 0 {
            let n = rows.shape[rows.shape.len() - 1];
            let (strides, mut need) = strides(tape, &rows.shape[..rows.shape.len() - 1], n);
            if rows.is_ragged() {
                need = rows.stored.data().len();
            }
            let (modulus, seed) = (1 + tape.below(9), tape.u8());
            let byte = |i: usize| {
                let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9 + 2 * u64::from(seed)) >> 9;
                if mixed % modulus as u64 == 0 { (mixed >> 8) as u8 | 1 } else { 0 }
            };
            return Given::Mask((0..need).map(byte).collect(), strides);
        }
        let (mut indptr, mut lists) = (vec![0i64], Vec::new());
        for row in known {
            let n = row.keys.len();
            let list: Vec<i64> = match tape.below(3) {
                // The best, but for a few.
                0 => {
                    let order = row.ranked(|_| false);
                    let k = tape.below(order.len() + 1);
                    let without = tape.below(4);
                    let best = order.into_iter().take(k).enumerate();
                    best.filter(|(rank, _)| without == 0 || rank % (without + 1) != without)
                        .map(|(_, j)| j as i64)
                        .collect()
                }
                1 => (0..n as i64).step_by(1 + tape.below(4)).collect(),
                _ => {
                    let k = tape.below(n.min(40) + 1);
                    let mut list: Vec<i64> = (0..k).map(|_| tape.below(n.max(1)) as i64).collect();
                    if !tape.rarely(8) {
                        list.sort_unstable();
                        list.dedup();
                        list.reverse();
                    }
                    list
                }
            };
            lists.extend(list);
            indptr.push(lists.len() as i64);
        }
        if tape.rarely(16) && !lists.is_empty() {
            let at = tape.below(lists.len());
            lists[at] = tape.u64().cast_signed();
        }
        if tape.rarely(16) {
            let at = tape.below(indptr.len());
            indptr[at] = tape.u64().cast_signed();
        }
        if way == 1 {
            Given::Indices(indptr, lists)
        } else {
            Given::Positions(indptr, lists.into_iter().map(|j| j as u32).collect())
        }
    }

    fn keep(&self) -> Keep<'_> {
        match self {
            Given::Mask(kept, strides) => Keep::Mask { kept, strides },
            Given::Indices(indptr, indices) => Keep::Indices { indptr, indices },
            Given::Positions(indptr, positions) => Keep::Positions { indptr, positions },
        }
    }

    /// A flag for each key of a row, or that there is no such set.
    fn of(&self, rows: &Rows, row: usize, n: usize) -> Option<Vec<bool>> {
        match self {
            Given::Mask(kept, strides) => {
                let batch = &rows.shape[..rows.shape.len() - 1];
                let (mut start, mut rest) = (0, row);
                for (axis, &len) in batch.iter().enumerate().rev() {
                    start += rest % len.max(1) * strides[axis];
                    rest /= len.max(1);
                }
                if let Some(stretch) = rows.stretch(row) {
                    start = stretch.start;
                }
                Some(kept[start..start + n].iter().map(|byte| *byte != 0).collect())
            }
            Given::Indices(indptr, indices) => {
                let list = indices.get(indptr[row] as usize..indptr[row + 1] as usize)?;
                laid(list.iter().copied(), n)
            }
            Given::Positions(indptr, positions) => {
                let list = positions.get(indptr[row] as usize..indptr[row + 1] as usize)?;
                laid(list.iter().map(|&j| j.into()), n)
            }
        }
    }

    /// Returns `true` if the bounds of the lists begin at 0, never fall and end at the number of entries. A mask has none.
    fn is_list(&self) -> bool {
        let (indptr, listed) = match self {
            Given::Mask(..) => return true,
            Given::Indices(indptr, list) => (indptr, list.len()),
            Given::Positions(indptr, list) => (indptr, list.len()),
        };
        indptr[0] == 0
            && indptr.windows(2).all(|pair| pair[0] <= pair[1])
            && indptr[indptr.len() - 1] == listed as i64
    }
}

fn laid(list: impl Iterator<Item = i64>, n: usize) -> Option<Vec<bool>> {
    let mut kept = vec![false; n];
    for j in list {
        let flag = kept.get_mut(usize::try_from(j).ok()?)?;
        if std::mem::replace(flag, true) {
            return None;
        }
    }
    Some(kept)
}

pub fn run(input: &[u8]) {
    let mut tape = Tape::new(input);
    set_level(&mut tape);
    let rows = Rows::new(&mut tape);
    let wide = rows.stored.wide();
    let known: Vec<Row> = (0..rows.count()).map(|row| rows.row(row, &wide)).collect();
    let given = Given::new(&mut tape, &rows, &known);
    let eps = (!tape.rarely(5)).then(|| budget(&mut tape, known.first()));
    let budgets = eps.map(|eps| [eps]);
    let budgets = budgets.as_ref().map(|eps| &eps[..]);
    let scores = rows.scores();
    let ask = |independent, threads| {
        let mut options = CertifyOptions::new().independent(independent).threads(threads);
        options.eps = budgets;
        certify(&scores, &given.keep(), &options)
    };
    let (fast, slow) = (ask(false, 1), ask(true, 1));
    assert!(same(&fast, &ask(false, 3)), "threads change the answer");
    let sets: Option<Vec<Vec<bool>>> = if given.is_list() {
        known.iter().enumerate().map(|(i, row)| given.of(&rows, i, row.keys.len())).collect()
    } else {
        None
    };
    match (fast, slow) {
        (Ok(fast), Ok(slow)) => {
            let sets = sets.expect("a set was taken that is none");
            for (i, (row, kept)) in known.iter().zip(&sets).enumerate() {
                assert!(!row.bad, "a row was taken that holds what is no score");
                assert!(fast.tail_mass_lower[i] <= slow.tail_mass_upper[i]);
                assert!(slow.tail_mass_lower[i] <= fast.tail_mass_upper[i]);
                judge(row, kept, &fast, i, eps);
                judge(row, kept, &slow, i, eps);
            }
        }
        (Err(a), Err(b)) => {
            for error in [a, b] {
                let reason = match error {
                    Error::Eps { .. } => eps.is_some_and(|eps| !(0.0..1.0).contains(&eps)),
                    Error::Indptr { .. } => !given.is_list(),
                    Error::KeepRange { .. } | Error::KeepTwice { .. } => sets.is_none(),
                    Error::Length { argument: "keep", .. } => false,
                    _ => refused(&error, &rows, &known),
                };
                assert!(reason, "{error:?}");
            }
        }
        (a, b) => panic!("one way answers: {a:?} {b:?}"),
    }
}

fn judge(row: &Row, kept: &[bool], found: &Certificate, i: usize, eps: Option<f64>) {
    let count = (0..kept.len()).filter(|&j| kept[j] && row.visible[j]).count();
    assert_eq!(found.k[i], count as i64);
    let (lower, upper) = (found.tail_mass_lower[i], found.tail_mass_upper[i]);
    assert!((0.0..=1.0).contains(&lower) && lower <= upper && upper <= 1.0, "{lower} {upper}");
    assert_eq!(found.holds.is_some(), eps.is_some());
    if count == row.count() {
        assert_eq!(upper, 0.0);
    }
    if !row.is_known() || row.count() == 0 {
        return;
    }
    let lost = row.lost(|j| kept[j]);
    assert!(lost.least <= upper && lost.most >= lower, "{lower} {upper} {lost:?}");
    let Some(eps) = eps else { return };
    let holds = found.holds.as_ref().unwrap()[i];
    let minimal = found.minimal.as_ref().unwrap()[i];
    assert!(!holds || lost.least <= eps, "{lost:?} > {eps}");
    assert!(!minimal || holds);
    let fewer = |k: usize| {
        let order = row.ranked(|_| false);
        let mut best = vec![false; kept.len()];
        order.iter().take(k).for_each(|&j| best[j] = true);
        best
    };
    if minimal && count > 1 {
        let best = fewer(count - 1);
        let least = row.lost(|j| best[j]);
        assert!(least.most >= eps, "{} keys lose {least:?} <= {eps}", count - 1);
    }
    if let Some(exact) = row.exactly() {
        let lost = exact.lost(|j| kept[j]);
        assert!(lost.at_most(upper) && lost.at_least(lower), "{lower} {upper} {}", lost.down());
        assert!(!holds || lost.at_most(eps), "more than {eps} is lost");
        if minimal && count > 1 && eps > 1e-300 {
            assert!(!exact.least(count - 1).at_most(eps), "{} keys would do", count - 1);
        }
    }
}
