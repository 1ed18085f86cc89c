//! Selections: certificates are true, sets as small as claimed, and what is refused is refused for a reason.

use certk_rs::{
    CertifyOptions, Error, Keep, Kind, MaxKeep, Options, Scores, Selection, Status, certify, select,
};

use super::rows::Rows;
use super::tape::Tape;
use super::truth::Row;

/// Options of a selection beside its budget, as plain values.
#[derive(Debug, Clone, Copy)]
struct Asked {
    min_keep: usize,
    max_keep: Option<MaxKeep>,
    first: usize,
    last: usize,
    block: usize,
    prove: bool,
}

impl Asked {
    fn new(tape: &mut Tape<'_>) -> Self {
        let mut asked =
            Asked { min_keep: 1, max_keep: None, first: 0, last: 0, block: 1, prove: false };
        for _ in 0..tape.below(4) {
            match tape.below(7) {
                0 => asked.min_keep = tape.below(40),
                1 => asked.max_keep = Some(MaxKeep::Count(tape.below(40))),
                2 => asked.max_keep = Some(MaxKeep::Fraction(tape.f64())),
                3 => asked.max_keep = Some(MaxKeep::Fraction(f64::from(tape.u8()) / 255.0)),
                4 => (asked.first, asked.last) = (tape.below(9), tape.below(9)),
                5 => asked.block = tape.below(20),
                _ => asked.prove = true,
            }
        }
        asked
    }

    fn options(&self, threads: usize) -> Options {
        Options::new()
            .min_keep(self.min_keep)
            .max_keep(self.max_keep)
            .keep_first(self.first)
            .keep_last(self.last)
            .block_size(self.block)
            .prove_minimal(self.prove)
            .threads(threads)
    }

    fn are_wrong(&self) -> bool {
        self.block == 0
            || match self.max_keep {
                Some(MaxKeep::Count(most)) => most == 0 || most < self.min_keep,
                Some(MaxKeep::Fraction(share)) => !(share > 0.0 && share <= 1.0),
                Some(other) => panic!("{other:?} is not asked for"),
                None => false,
            }
    }

    /// The most keys of so many.
    fn most(&self, visible: usize) -> usize {
        match self.max_keep {
            None => usize::MAX,
            Some(MaxKeep::Count(most)) => most,
            Some(MaxKeep::Fraction(share)) => ((visible as f64 * share) as usize).max(1),
            Some(other) => panic!("{other:?} is not asked for"),
        }
    }

    /// Returns a flag for each key: `true` if it is kept in any case, as one of the first or last visible ones.
    fn forced(&self, row: &Row) -> Vec<bool> {
        let seen: Vec<usize> = (0..row.keys.len()).filter(|&j| row.visible[j]).collect();
        let mut forced = vec![false; row.keys.len()];
        let ends = seen.iter().take(self.first).chain(seen.iter().rev().take(self.last));
        ends.for_each(|&j| forced[j] = true);
        forced
    }
}

/// A budget: a round one, any, or one beside what some set of the first row loses.
pub(crate) fn budget(tape: &mut Tape<'_>, row: Option<&Row>) -> f64 {
    let usual = [0.1, 0.01, 0.5, 1e-3, 1e-6, 0.0, 0.99, 1e-12, 1e-40, 1e-300];
    match tape.below(4) {
        0 => tape.one_of(&usual),
        1 => {
            let eps = tape.f64();
            if (0.0..1.0).contains(&eps) || tape.rarely(4) { eps } else { eps.abs().fract() }
        }
        _ => {
            let Some(row) = row.filter(|row| row.count() > 0 && !row.bad) else { return 0.05 };
            let order = row.ranked(|_| false);
            let mut best = vec![false; row.keys.len()];
            order.iter().take(1 + tape.below(order.len())).for_each(|&j| best[j] = true);
            let lost = row.lost(|j| best[j]).most;
            let off = [0.0, 1e-16, -1e-16, 1e-10, -1e-10, 2e-5, -2e-5, 1e-3, -1e-3, -4e-5];
            let eps = lost * (1.0 + tape.one_of(&off));
            if (0.0..1.0).contains(&eps) { eps } else { 0.05 }
        }
    }
}

/// Levels of instructions, as many as this CPU has.
pub(crate) fn set_level(tape: &mut Tape<'_>) {
    let level =
        tape.one_of(&[None, None, Some("avx2"), Some("portable"), Some("avx512"), Some("neon")]);
    if certk_rs::force_simd_level(level).is_err() {
        certk_rs::force_simd_level(None).unwrap();
    }
}

/// Returns `true` if two answers are the same. Errors are compared as text, since they may hold a NaN.
pub(crate) fn same<T: PartialEq>(a: &Result<T, Error>, b: &Result<T, Error>) -> bool {
    match (a, b) {
        (Err(a), Err(b)) => a.to_string() == b.to_string(),
        _ => a == b,
    }
}

/// Judges that rows were refused for what they are.
pub(crate) fn refused(error: &Error, rows: &Rows, known: &[Row]) -> bool {
    assert!(!error.to_string().contains('\n'));
    let any_bad = known.iter().any(|row| row.bad);
    match error {
        Error::ScoreNan { .. } | Error::ScoreInfinite { .. } | Error::MaskValue { .. } => {
            any_bad && rows.kind != Kind::Probs
        }
        Error::Probability { .. } => any_bad && rows.kind == Kind::Probs,
        Error::ProbabilityTotal { .. } => {
            let total = |row: &Row| row.keys.iter().map(|key| key.number / 8.0).sum::<f64>();
            known.iter().any(|row| total(row) > f64::MAX / 64.0)
        }
        Error::MaskedScore { .. } => {
            let large = |row: &Row| row.size > 1e17 || !row.size.is_finite() || !row.is_known();
            rows.is_biased() && known.iter().any(large)
        }
        _ => false,
    }
}

pub fn run(input: &[u8]) {
    let mut tape = Tape::new(input);
    set_level(&mut tape);
    let asked = Asked::new(&mut tape);
    let rows = Rows::new(&mut tape);
    let wide = rows.stored.wide();
    let known: Vec<Row> = (0..rows.count()).map(|row| rows.row(row, &wide)).collect();
    let each = tape.rarely(4);
    let count = if each { known.len() } else { 1 };
    let budgets: Vec<f64> = (0..count).map(|row| budget(&mut tape, known.get(row))).collect();
    let scores = rows.scores();
    let found = select(&scores, &budgets, &asked.options(1));
    let again = select(&scores, &budgets, &asked.options(3));
    assert!(same(&found, &again), "threads change the answer");
    let fits = budgets.len() == 1 || budgets.len() == known.len();
    match found {
        Err(error) => {
            let reason = match error {
                Error::Eps { .. } => budgets.iter().any(|eps| !(0.0..1.0).contains(eps)),
                Error::Length { argument: "eps", .. } => !fits,
                Error::Option { .. } => asked.are_wrong(),
                Error::Conflict { first: "block_size", second: "indptr", .. } => {
                    rows.is_ragged() && asked.block != 1
                }
                Error::ForcedOverMax { forced, max_keep, .. } => {
                    // Whole blocks are forced.
                    forced > max_keep && forced <= (asked.first + asked.last) * asked.block
                }
                Error::MinOverMax { min_keep, most, .. } => min_keep > most,
                Error::BlockOverMax { max_keep, .. } => {
                    asked.max_keep.is_some() && max_keep < asked.block
                }
                _ => refused(&error, &rows, &known),
            };
            assert!(reason, "{error:?}");
        }
        Ok(found) => {
            assert!(fits && !asked.are_wrong());
            assert_eq!(found.k.len(), known.len());
            assert_eq!(found.indptr.len(), known.len() + 1);
            assert_eq!(found.indptr.last(), Some(&(found.indices.len() as i64)));
            for (i, row) in known.iter().enumerate() {
                let eps = budgets[if each { i } else { 0 }];
                assert!(!row.bad, "a row was taken that holds what is no score");
                judge(&rows, row, &found, i, eps, asked);
            }
            certified(&scores, &found, &budgets, asked);
        }
    }
}

fn judge(rows: &Rows, row: &Row, found: &Selection, i: usize, eps: f64, asked: Asked) {
    let list = found.row(i);
    let k = found.k[i] as usize;
    assert_eq!(list.len(), k);
    assert!(list.windows(2).all(|pair| pair[0] < pair[1]));
    let mut kept = vec![false; row.keys.len()];
    for &at in list {
        assert!(row.visible[at as usize], "what is hidden was kept");
        kept[at as usize] = true;
    }
    let visible = row.count();
    let (lower, upper) = (found.tail_mass_lower[i], found.tail_mass_upper[i]);
    assert!((0.0..=1.0).contains(&lower) && lower <= upper && upper <= 1.0, "{lower} {upper}");
    if visible == 0 {
        assert_eq!((k, found.status[i], upper), (0, Status::Empty, 0.0));
        return;
    }
    assert!(k >= 1);
    let forced = asked.forced(row);
    assert!((0..kept.len()).all(|j| kept[j] || !forced[j]), "what is forced is not kept");
    let most = asked.most(visible);
    assert!(k <= most && (k >= asked.min_keep.min(visible)));
    match found.status[i] {
        Status::Certified => assert!(upper <= eps),
        Status::OverBudget => assert!(upper > eps && asked.max_keep.is_some()),
        status => panic!("{status:?}, where keys are visible"),
    }
    if !row.is_known() {
        return;
    }
    let lost = row.lost(|j| kept[j]);
    assert!(lost.least <= upper, "{upper} is said, {} is lost", lost.least);
    assert!(lost.most >= lower, "{lower} is said, {} is lost", lost.most);
    if k == visible {
        assert_eq!(upper, 0.0);
    }
    let units = Units::new(row, &forced, asked.block);
    let held = units.kept(&kept);
    if found.minimal[i] && found.status[i] == Status::Certified {
        // A set with one unit less either holds too few keys or loses more.
        let fewer = units.best(held - 1);
        let count = (0..kept.len()).filter(|&j| fewer[j]).count();
        let enough = count >= asked.min_keep.min(visible) && held > units.forced;
        // With a least number of keys, other blocks than the heaviest may be needed.
        if enough && asked.min_keep <= 1 || asked.block == 1 && enough {
            let least = row.lost(|j| fewer[j]);
            assert!(
                least.most >= eps,
                "{} instead of {held} units lose {least:?} <= {eps}",
                held - 1
            );
        }
    }
    if let Some(exact) = row.exactly() {
        let lost = exact.lost(|j| kept[j]);
        assert!(lost.at_most(upper) && lost.at_least(lower), "{lower} {upper} {}", lost.down());
        let free = asked.block == 1 && units.forced == 0;
        if found.minimal[i] && free && k > asked.min_keep.max(1) && eps > 1e-300 {
            let certified = found.status[i] == Status::Certified;
            assert!(!certified || !exact.least(k - 1).at_most(eps), "{} keys would do", k - 1);
        }
    }
    // Not many more than are needed: as many as would do for a budget that is smaller by what arithmetic may lose.
    if asked.max_keep.is_none() && asked.block == 1 && rows.radius_of(i) == 0.0 && row.blur < 1e-8 {
        let slack = if rows.stored.is_f64() { 1e-9 } else { 2e-4 };
        let flushed = visible as f64 * if rows.stored.is_f64() { 1e-290 } else { 1e-36 };
        let order = row.ranked(|j| forced[j]);
        let budget = (eps * (1.0 - slack) - flushed) * (1.0 - eps).min(1.0);
        let budget = budget.min(eps * (1.0 - slack) - flushed);
        let mut tail = 0.0;
        let total: f64 = row.weights.iter().sum();
        let mut need = order.len();
        for &j in order.iter().rev() {
            tail += row.weights[j];
            if tail > budget * total || forced[j] {
                break;
            }
            need -= 1;
        }
        let need = need.max(asked.min_keep.min(visible)).max(1);
        assert!(k <= need, "{k} keys are kept, {need} do for {budget}");
        // The best keys beside what is forced.
        let better = |a: usize, b: usize| row.weights[a] > row.weights[b] * (1.0 + 1e-9) + 1e-300;
        let worst = order.iter().filter(|&&j| kept[j] && !forced[j]).next_back();
        let dropped = order.iter().find(|&&j| !kept[j]);
        if let (Some(&worst), Some(&dropped)) = (worst, dropped) {
            assert!(!better(dropped, worst), "{dropped} weighs more than {worst}");
        }
    }
}

/// Units that are kept as a whole: keys, or blocks of them.
struct Units<'a> {
    row: &'a Row,
    block: usize,
    /// Number of units that are kept in any case.
    forced: usize,
    order: Vec<usize>,
}

impl<'a> Units<'a> {
    fn new(row: &'a Row, forced: &[bool], block: usize) -> Self {
        let count = row.keys.len().div_ceil(block);
        let of = |unit: usize| unit * block..((unit + 1) * block).min(row.keys.len());
        let seen = |unit: &usize| of(*unit).any(|j| row.visible[j]);
        let mass: Vec<f64> = (0..count).map(|unit| row.weights[of(unit)].iter().sum()).collect();
        let held: Vec<bool> = (0..count).map(|unit| forced[of(unit)].contains(&true)).collect();
        let mut order: Vec<usize> = (0..count).filter(seen).collect();
        order.sort_by(|&a, &b| held[b].cmp(&held[a]).then(mass[b].total_cmp(&mass[a])));
        Units { row, block, forced: held.iter().filter(|held| **held).count(), order }
    }

    /// Returns the number of units that hold a kept key.
    fn kept(&self, kept: &[bool]) -> usize {
        kept.chunks(self.block).filter(|unit| unit.contains(&true)).count()
    }

    /// The heaviest, with what is forced, as keys.
    fn best(&self, count: usize) -> Vec<bool> {
        let mut keys = vec![false; self.row.keys.len()];
        for &unit in self.order.iter().take(count) {
            let of = unit * self.block..((unit + 1) * self.block).min(keys.len());
            keys[of.clone()].copy_from_slice(&self.row.visible[of]);
        }
        keys
    }
}

/// Whatever was selected is certified as a given set, too, in both ways.
fn certified(scores: &Scores<'_>, found: &Selection, budgets: &[f64], asked: Asked) {
    if scores.longest() > 10_000 {
        return;
    }
    for independent in [false, true] {
        let judged = certify(
            scores,
            &Keep::from(found),
            &CertifyOptions::new().eps(budgets).independent(independent).threads(1),
        )
        .unwrap();
        let holds = judged.holds.unwrap();
        for i in 0..found.k.len() {
            assert_eq!(judged.k[i], found.k[i]);
            let certified = found.status[i] != Status::OverBudget;
            // Also what is refuted by one is not certified by the other.
            assert!(!certified || holds[i], "{independent}: {asked:?} row {i} does not hold");
            assert!(judged.tail_mass_lower[i] <= found.tail_mass_upper[i]);
            assert!(found.tail_mass_lower[i] <= judged.tail_mass_upper[i]);
        }
    }
}
