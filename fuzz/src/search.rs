//! Searches over indexes that are built, appended to and shared, against scores computed one by one.

use certk_rs::{Context, Error, IndexOptions, KeyIndex, Rule, SearchOptions, SearchResult, Status};

use super::heads::{Matrices, Sight, scored};
use super::select::{budget, same, set_level};
use super::tape::Tape;
use super::truth::Row;

pub(crate) struct Indexed {
    pub(crate) keys: Matrices,
    pub(crate) queries: Matrices,
    pub(crate) sight: Sight,
    pub(crate) scale: Option<f64>,
}

impl Indexed {
    pub(crate) fn new(tape: &mut Tape<'_>, longest: usize) -> Self {
        let flat = tape.rarely(2);
        let heads = if flat { 1 } else { 1 + tape.below(3) };
        let n = match tape.below(4) {
            0 => tape.below(20),
            1 => tape.below(70),
            2 => (tape.one_of(&[16, 64, 128, 256]) + tape.below(5)).saturating_sub(2),
            _ => tape.below(longest),
        };
        let dim = tape.one_of(&[1, 2, 3, 4, 8, 15, 16, 17, 24, 64]);
        let dtype = tape.one_of(&[0, 2, 3]);
        let keys = Matrices::new(tape, [heads, n, dim], dtype, flat);
        let groups = if flat { 1 } else { 1 + tape.below(2) };
        let most = if tape.rarely(4) { 20 } else { 4 };
        let m = 1 + tape.below(most);
        let dtype = if tape.rarely(4) { 1 } else { dtype };
        let queries = Matrices::new(tape, [heads * groups, m, dim], dtype, flat);
        let sight = Sight::new(tape, &queries, n);
        let scale = match tape.below(4) {
            0 => Some(tape.one_of(&[1.0, -0.5, 0.0, 1e-30, 4.0])),
            _ => None,
        };
        Indexed { keys, queries, sight, scale }
    }

    pub(crate) fn row(&self, row: usize) -> Row {
        let scale = self.scale.unwrap_or(1.0 / (self.keys.dim as f64).sqrt());
        let mut row = scored(&self.queries, &self.keys, &self.sight, scale, row);
        // A scale of its own is off by a rounding.
        row.blur *= 4.0;
        row
    }

    pub(crate) fn count(&self) -> usize {
        self.queries.heads * self.queries.rows
    }

    /// An index that is built of some keys and appended to, with snapshots on the way.
    pub(crate) fn index(&self, tape: &mut Tape<'_>) -> Result<KeyIndex<'static>, Error> {
        let options =
            IndexOptions::new().rotate(tape.one_of(&[None, Some(true), Some(false)])).threads(1);
        if tape.rarely(4) {
            return self.with_keys_taken_out(tape, &options);
        }
        let n = self.keys.rows;
        let first = if tape.rarely(2) { n } else { tape.below(n + 1) };
        let mut index = KeyIndex::build(&self.keys.part(0..first).vectors("keys"), &options)?;
        let (mut at, mut before) = (first, None);
        while at < n {
            let to = (at + 1 + tape.below(40)).min(n);
            if tape.rarely(3) {
                before = Some(index.snapshot());
            }
            let rest = self.keys.part(at..to);
            Context::new().threads(1 + at % 2).run(|| index.append(&rest.vectors("keys")))?;
            at = to;
        }
        if let Some(before) = before {
            let keys = self.keys.part(0..before.len());
            before.check(&keys.vectors("keys")).unwrap();
        }
        index.check(&self.keys.vectors("keys")).unwrap();
        Ok(index)
    }

    /// An index of more keys, of which some are taken out again.
    fn with_keys_taken_out(
        &self,
        tape: &mut Tape<'_>,
        options: &IndexOptions,
    ) -> Result<KeyIndex<'static>, Error> {
        let (more, gone) = self.keys.with_others(tape);
        let mut index = KeyIndex::build(&more.vectors("keys"), options)?;
        let before = index.snapshot();
        let from = gone.first().map_or(self.keys.rows, |first| *first as usize);
        let keys = more.vectors("keys");
        if from == self.keys.rows && tape.rarely(2) {
            index.truncate(from, &keys).unwrap();
        } else {
            index.evict(&[&gone], &keys).unwrap();
        }
        before.check(&keys).unwrap();
        index.check(&self.keys.vectors("keys")).unwrap();
        Ok(index)
    }
}

pub fn run(input: &[u8]) {
    let mut tape = Tape::new(input);
    set_level(&mut tape);
    let case = Indexed::new(&mut tape, 400);
    let index = case.index(&mut tape);
    let index = match index {
        Ok(index) => index,
        Err(error) => {
            assert!(matches!(error, Error::KeyNotFinite { .. }), "{error:?}");
            assert!(!case.keys.is_finite());
            return;
        }
    };
    assert!(case.keys.is_finite());
    let known: Vec<Row> = (0..case.count()).map(|row| case.row(row)).collect();
    let rule = match tape.below(4) {
        0 => Rule::TopK(tape.below(12)),
        1 => Rule::Gap,
        _ => Rule::Mass,
    };
    let eps = budget(&mut tape, known.first());
    let most = tape.rarely(4).then(|| tape.below(30));
    let Sight { causal, lengths, mask } = &case.sight;
    let options = |threads| {
        let mut options = SearchOptions::new()
            .rule(rule)
            .causal(*causal)
            .scale(case.scale)
            .max_scored(most)
            .lengths(lengths.as_deref())
            .threads(threads);
        if let Some((bytes, strides)) = mask {
            options = options.mask(bytes, strides);
        }
        options
    };
    let (queries, keys) = (case.queries.vectors("q"), case.keys.vectors("keys"));
    for keys in [Some(&keys), None] {
        let found = index.search(&queries, keys, &[eps], &options(1));
        assert!(same(&found, &index.search(&queries, keys, &[eps], &options(3))));
        match found {
            Ok(found) => judge(&case, &known, &found, eps, rule, most),
            Err(Error::KeysNeeded) => assert!(keys.is_none()),
            Err(Error::Eps { .. }) => assert!(!(0.0..1.0).contains(&eps)),
            Err(Error::Option { argument: "k", .. }) => assert!(rule == Rule::TopK(0)),
            Err(Error::KeyNotFinite { .. }) => assert!(!case.queries.is_finite()),
            // Products too large for f64 to tell apart, and more so when they are computed here.
            Err(Error::Number { .. }) => {
                let size = known.iter().map(|row| row.blur).fold(0.0, f64::max);
                let most = |list: Vec<f64>| list.iter().fold(0.0f64, |a, b| a.max(b.abs()));
                let largest = most(case.queries.stored.wide()) * most(case.keys.stored.wide());
                assert!(size > 1.0 || largest > 1e14);
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

fn judge(
    case: &Indexed,
    known: &[Row],
    found: &SearchResult,
    eps: f64,
    rule: Rule,
    most: Option<usize>,
) {
    let set = &found.selection;
    assert_eq!(set.k.len(), known.len());
    for (i, row) in known.iter().enumerate() {
        let (list, n) = (set.row(i), case.keys.rows);
        assert_eq!(list.len() as i64, set.k[i]);
        assert!(list.windows(2).all(|pair| pair[0] < pair[1]));
        let mut kept = vec![false; n];
        for &key in list {
            assert!(row.keys[key as usize].shown, "what is hidden was kept");
            kept[key as usize] = true;
        }
        let (lower, upper) = (set.tail_mass_lower[i], set.tail_mass_upper[i]);
        assert!((0.0..=1.0).contains(&lower) && lower <= upper && upper <= 1.0, "{lower} {upper}");
        assert!(found.scored[i] >= 0 && found.scored[i] <= n as i64);
        let shown = row.keys.iter().filter(|key| key.shown).count();
        if shown == 0 {
            assert_eq!(set.status[i], Status::Empty);
            continue;
        }
        let certified = set.status[i] == Status::Certified;
        assert!(!certified || upper <= eps);
        assert!(certified || most.is_some() || matches!(rule, Rule::TopK(_)));
        if row.bad || !row.is_known() {
            continue;
        }
        let lost = row.lost(|j| kept[j]);
        assert!(lost.least <= upper && lost.most >= lower, "{lower} {upper} {lost:?}");
        if set.minimal[i] && list.len() > 1 {
            let order = row.ranked(|_| false);
            let mut best = vec![false; n];
            order.iter().take(list.len() - 1).for_each(|&j| best[j] = true);
            let least = row.lost(|j| best[j]);
            assert!(least.most >= eps, "{} keys lose {least:?} <= {eps}", list.len() - 1);
        }
        if let Rule::TopK(k) = rule
            && certified
        {
            assert_eq!(list.len(), k.min(shown));
            let order = row.ranked(|_| false);
            let off = 1.0 + 4.0 * row.blur;
            let worst = order.iter().rev().find(|&&j| kept[j]).unwrap();
            let dropped = order.iter().find(|&&j| !kept[j]);
            assert!(dropped.is_none_or(|&j| row.weights[j] <= row.weights[*worst] * off + 1e-300));
        }
    }
}
