//! A few rows over one head's keys and values.

use super::error_bound::sum_error;
use super::job::{Answer, AttentionJob, GROUP, MANY, RowBudget, Unit};
use super::options::AttentionOptions;
use super::stretches::by_stretches;
use crate::error::Error;
use crate::index::{
    Chosen, Coded, Codes, Prepared, Query, QueryScratch, RowVisibility, Rung, Step,
    ThresholdSearch, ThresholdState, for_coded_dtype, matrix,
};
use crate::kernels::{Element, Exp, Keys, LANES, PANEL_ROWS, Picked};
use crate::log_mass::LogMass;
use crate::memory::{self, filled};
use crate::recycled::held;
use crate::reused::{Reused, filled_again};
use crate::rows::{Data, Scores, for_dtype};
use crate::scratch::Lent;
use crate::select::Options;
use crate::workspace::Scratch;
use half::{bf16, f16};

/// Keys whose rows stay in a cache while a group uses them.
const BLOCK: usize = 64;
/// Many rows that keep a larger share of their keys are faster together, with all keys.
const SPARSE_ROWS: f64 = 0.045;
/// A row that keeps a larger share of its keys keeps all.
const ALL: f64 = 0.5;
/// A row whose scores are known no better than this, in nats, keeps all keys.
const VAGUE: f64 = 1.0;
/// Relative error of the exponential in f64, generously.
const EXP: f64 = 1e-12;

/// One row on its way.
struct PendingRow {
    number: usize,
    wide: Reused<f64>,
    query: Query,
    prepared: Option<Prepared>,
    prefix: usize,
    eps: f64,
    scratch: Lent<RowScratch>,
    /// What is kept, if not everything that is visible.
    kept: Option<Reused<u32>>,
    upper: f64,
    scored: usize,
    rung: Rung,
    /// Not answered yet.
    open: bool,
    /// Not answered because little can be dropped.
    flat: bool,
}

/// What a row needs room for.
#[derive(Default)]
struct RowScratch {
    query: QueryScratch,
    weights: Vec<f64>,
}

impl Scratch for RowScratch {
    fn bytes(&self) -> usize {
        self.query.bytes() + held(&self.weights)
    }
}

/// Of each of a few rows, ascending positions.
type Lists<'a> = [&'a [u32]; MANY];

/// Makes room for a number per key, in whole groups.
fn grow<T>(numbers: &mut Vec<T>, keys: usize) -> Result<(), Error> {
    let all = keys.saturating_add(LANES);
    memory::room("k", numbers, all.saturating_sub(numbers.len()))
}

/// Room for a row.
fn row_scratch() -> Lent<RowScratch> {
    let mut scratch = Lent::<RowScratch>::new();
    scratch.query.forget();
    scratch
}

impl AttentionJob<'_> {
    pub(super) fn unit(&self, unit: &Unit, budget: RowBudget<'_>) -> Result<Reused<Answer>, Error> {
        // One by one, so that an option that is added does not compile before all ways of answering rows (by codes, a few at
        // a time, many together) have decided what they do about it.
        let &AttentionOptions {
            even_if_slower,
            // Where something is chosen: `ask_for`.
            mapped: _,
            // What a row sees: `QueryRows`. Its scores: `AttentionJob::scale`. All ways ask for its sink where its weights are summed.
            scale: _,
            causal: _,
            lengths: _,
            mask: _,
            sinks: _,
            // Of outputs, whichever way they were computed.
            precision: _,
            ball: _,
            threads: _,
        } = &self.query_rows.options;
        if unit.rows.len() < MANY {
            return self.attend_few(unit.head, unit.rows, budget);
        }
        let mut answers: Reused<Option<Answer>> = unit.rows.iter().map(|_| None).collect();
        if self.index.is_some() {
            // A few rows show whether to look at the codes at all.
            let step = unit.rows.len() / GROUP;
            let shown: [usize; GROUP] = std::array::from_fn(|i| i * step);
            let pruned = self.attend_pruned(unit, &shown, budget, &mut answers)?;
            let (kept, seen) = shown.iter().fold((0, 0), |(kept, seen), &at| {
                let here = answers[at].as_ref().map_or(0, |answer| answer.kept);
                (kept + here, seen + self.query_rows.row_visibility(unit.rows[at]).count())
            });
            let together = !budget.careful && !even_if_slower && self.fit_together();
            let sparse = kept as f64 <= SPARSE_ROWS * seen as f64;
            if pruned && (sparse || !together) {
                let rest: Reused<usize> =
                    (0..unit.rows.len()).filter(|at| !shown.contains(at)).collect();
                for four in rest.chunks(GROUP) {
                    self.attend_pruned(unit, four, budget, &mut answers)?;
                }
            }
        }
        let open: Reused<usize> = (0..answers.len()).filter(|&at| answers[at].is_none()).collect();
        let rows: Reused<usize> = open.iter().map(|&at| unit.rows[at]).collect();
        for (at, rows) in open.chunks(PANEL_ROWS).zip(rows.chunks(PANEL_ROWS)) {
            // Rows that may drop nothing lose nothing by it.
            let each = even_if_slower && budget.eps.any(|eps| eps > 0.0);
            let together =
                if budget.careful || each { None } else { self.attend_tile(unit.head, rows)? };
            if let Some(mut found) = together {
                for (&at, found) in at.iter().zip(found.drain(..)) {
                    answers[at] = Some(found);
                }
                continue;
            }
            for (at, rows) in at.chunks(GROUP).zip(rows.chunks(GROUP)) {
                let mut found = self.attend_few(unit.head, rows, budget)?;
                for (&at, found) in at.iter().zip(found.drain(..)) {
                    answers[at] = Some(found);
                }
            }
        }
        Ok(answers.drain(..).flatten().collect())
    }

    /// Answers those of some rows that can be thinned; whether there are any.
    fn attend_pruned(
        &self,
        unit: &Unit,
        places: &[usize],
        budget: RowBudget<'_>,
        answers: &mut [Option<Answer>],
    ) -> Result<bool, Error> {
        let list: Reused<usize> = places.iter().map(|&at| unit.rows[at]).collect();
        let mut rows = self.rows(unit.head, &list, budget)?;
        self.prune_by_codes(unit.head, &mut rows)?;
        let mut open = rows.iter().map(|row| row.open);
        let places: Reused<usize> =
            places.iter().copied().filter(|_| open.next() == Some(false)).collect();
        rows.retain(|row| !row.open);
        for (&at, found) in places.iter().zip(self.average(unit.head, &mut rows)?.drain(..)) {
            answers[at] = Some(found);
        }
        Ok(!places.is_empty())
    }

    /// A few rows that share what is read.
    fn attend_few(
        &self,
        head: usize,
        list: &[usize],
        budget: RowBudget<'_>,
    ) -> Result<Reused<Answer>, Error> {
        let mut rows = self.rows(head, list, budget)?;
        self.prune_by_codes(head, &mut rows)?;
        for_dtype!(self.keys.data, data => self.dense(head, data, &mut rows))?;
        self.average(head, &mut rows)
    }

    /// A query in f64.
    ///
    /// # Errors
    /// [`Error::KeyNotFinite`].
    pub(super) fn query(&self, row: usize) -> Result<Reused<f64>, Error> {
        let m = self.queries.len();
        let mut wide = Reused::with_hint(self.queries.dim());
        self.queries.finite(row / m, row % m, &mut wide)?;
        Ok(wide)
    }

    /// Rows of which nothing is known yet.
    fn rows(
        &self,
        head: usize,
        list: &[usize],
        budget: RowBudget<'_>,
    ) -> Result<Reused<PendingRow>, Error> {
        let codes = self.index.map(|index| index.head(head));
        // Without an index the size of keys is found when they are read.
        let largest = codes.map_or(0.0, |codes| f64::from(codes.largest()));
        let row = |&row: &usize| {
            let wide = self.query(row)?;
            let eps = budget.eps.of(row);
            Ok(PendingRow {
                number: row,
                query: Query::new(&wide, self.scale, largest),
                prepared: codes.filter(|_| eps > 0.0).map(|codes| codes.prepare(&wide, self.scale)),
                wide,
                prefix: self.query_rows.row_visibility(row).prefix,
                eps,
                scratch: row_scratch(),
                kept: None,
                upper: 0.0,
                scored: 0,
                rung: Rung::Dense,
                open: true,
                flat: false,
            })
        };
        list.iter().map(row).collect()
    }

    /// Answers what codes and a few exact scores can answer, and closes those rows.
    fn prune_by_codes(&self, head: usize, rows: &mut [PendingRow]) -> Result<(), Error> {
        let Some(codes) = self.index.map(|index| index.head(head)) else { return Ok(()) };
        let padded = codes.len().next_multiple_of(LANES);
        for row in rows.iter_mut() {
            grow(&mut row.scratch.query.scores, padded)?;
            row.scratch.query.scores.resize(padded, 0.0);
        }
        let mut left = rows
            .iter_mut()
            .filter_map(|row| Some((row.prepared.as_ref()?, &mut row.scratch.query.scores[..])));
        loop {
            let mut few: [Option<(&Prepared, &mut [f32])>; GROUP] =
                std::array::from_fn(|_| left.next());
            if let [Some((a, ra)), Some((b, rb)), Some((c, rc)), Some((d, rd))] = &mut few {
                codes.scan(self.simd, [*a, *b, *c, *d], [ra, rb, rc, rd].map(|to| &mut **to));
                continue;
            }
            for (prepared, to) in few.into_iter().flatten() {
                codes.scan(self.simd, [prepared], [to]);
            }
            break;
        }
        for_coded_dtype!(self.keys, E => self.rescore(head, matrix::<E>(self.keys, head), rows))
    }

    /// From scores by codes to answers.
    fn rescore<E: Coded>(
        &self,
        head: usize,
        keys: Keys<'_, E>,
        rows: &mut [PendingRow],
    ) -> Result<(), Error> {
        let Some(codes) = self.index.map(|index| index.head(head)) else { return Ok(()) };
        let simd = self.simd;
        let sees = |row: usize| self.query_rows.row_visibility(row);
        // These are always read.
        let uncoded: Reused<u32> = codes.uncoded().collect();
        self.ask_for(head, &[&uncoded]);
        let mut states: Reused<Option<ThresholdState>> = rows.iter().map(|_| None).collect();
        let mut active: Reused<bool> = rows.iter().map(|row| row.prepared.is_some()).collect();
        while active.contains(&true) {
            let mut chosen: Reused<Option<Chosen>> = rows.iter().map(|_| None).collect();
            for (at, row) in rows.iter_mut().enumerate() {
                if !active[at] {
                    continue;
                }
                let Some((search, scratch)) = row.search(sees(row.number), codes, keys, simd)
                else {
                    continue;
                };
                match search.choose(scratch, &mut states[at])? {
                    Step::Done(found) => {
                        (row.upper, row.scored, row.rung) = (found.upper, found.scored, found.rung);
                        (row.kept, row.open) = (Some(found.kept), false);
                        active[at] = false;
                    }
                    Step::Dense { flat } => (row.flat, active[at]) = (flat, false),
                    Step::Score(list) => {
                        ThresholdSearch::<E>::make_room(scratch, &list)?;
                        chosen[at] = Some(list);
                    }
                }
            }
            let mut lists: Lists<'_> = [&[]; MANY];
            for (list, chosen) in lists.iter_mut().zip(&chosen) {
                *list = chosen.as_ref().map_or(&[], |chosen| &chosen.kept);
            }
            let lists = &lists[..rows.len()];
            self.ask_for(head, lists);
            score_chosen(keys, rows, lists, simd);
            for (at, (row, chosen)) in rows.iter_mut().zip(chosen.drain(..)).enumerate() {
                let Some(chosen) = chosen else { continue };
                let Some((search, scratch)) = row.search(sees(row.number), codes, keys, simd)
                else {
                    continue;
                };
                if let Some(found) = search.judge(scratch, &mut states[at], chosen)? {
                    (row.upper, row.scored, row.rung) = (found.upper, found.scored, found.rung);
                    (row.kept, row.open) = (Some(found.kept), false);
                    active[at] = false;
                }
            }
        }
        Ok(())
    }

    /// Scores everything that is visible to rows that are open, and drops what the budget allows if that is much.
    fn dense<E: Element>(
        &self,
        head: usize,
        data: &[E],
        rows: &mut [PendingRow],
    ) -> Result<(), Error> {
        let (start, stride) = self.keys.matrix(head);
        let keys = Keys::new(data.get(start..).unwrap_or(&[]), stride, self.keys.dim());
        let open: Reused<usize> = (0..rows.len()).filter(|&at| rows[at].open).collect();
        let mut largest = 0.0f64;
        for &at in &open {
            let row = &mut rows[at];
            let visibility = self.query_rows.row_visibility(row.number);
            let RowVisibility { prefix, allowed } = visibility;
            let mut seen = prefix;
            if let Some(allowed) = allowed {
                // Masked keys may be anything: they are not touched.
                let sees = |key: &u32| allowed[*key as usize] != 0;
                let mut list: Reused<u32> = Reused::with_hint(visibility.count());
                memory::room("k", &mut list, visibility.count())?;
                list.extend((0..prefix as u32).filter(sees));
                let exact = &mut row.scratch.query.exact;
                grow(exact, list.len())?;
                exact.resize(list.len(), 0.0);
                row.query.score(self.simd, keys, Picked::Listed(&list), 0.0, exact);
                largest = largest.max(self.simd.largest(keys, Picked::Listed(&list), list.len()));
                seen = list.len();
                row.kept = Some(list);
            } else {
                grow(&mut row.scratch.query.exact, prefix)?;
                row.scratch.query.exact.resize(prefix, 0.0);
            }
            (row.scored, row.rung) = (seen, Rung::Dense);
        }
        let plain = |row: &PendingRow| if row.kept.is_none() { row.prefix } else { 0 };
        let longest = open.iter().map(|&at| plain(&rows[at])).max().unwrap_or(0);
        for from in (0..longest).step_by(BLOCK) {
            let end = longest.min(from + BLOCK);
            if self.index.is_none() {
                largest = largest.max(self.simd.largest(keys, Picked::From(from), end - from));
            }
            if let [a, b, c, d] = open[..]
                && open.iter().all(|&at| plain(&rows[at]) >= end)
                && let Ok(four) = rows.get_disjoint_mut([a, b, c, d])
            {
                let four = four.map(|row| {
                    let PendingRow { query, scratch, .. } = row;
                    (&*query, &mut scratch.query.exact[from..end])
                });
                Query::score_shared(self.simd, keys, from, four);
                continue;
            }
            for &at in &open {
                let row = &mut rows[at];
                let end = plain(row).min(end);
                if from < end {
                    let to = &mut row.scratch.query.exact[from..end];
                    row.query.score(self.simd, keys, Picked::From(from), 0.0, to);
                }
            }
        }
        for &at in &open {
            let row = &mut rows[at];
            if self.index.is_none() {
                row.query = Query::new(&row.wide, self.scale, largest);
            }
            let QueryScratch { exact, workspace, .. } = &mut row.scratch.query;
            // A key that is not finite scores what is no score.
            if let Some(bad) = exact.iter().position(|score| !score.is_finite()) {
                let score = exact[bad];
                let bad = row.kept.as_ref().map_or(bad, |list| list[bad] as usize);
                return Err(self.bad_key(head, bad, score));
            }
            let always = self.query_rows.options.even_if_slower;
            let tried = always || !row.flat;
            if row.eps > 0.0 && tried && row.scored > 0 && row.query.error < VAGUE {
                let error = [row.query.error];
                let scores = Scores::new(&exact[..], &[row.scored])?.radius(&error)?;
                let options = Options::new();
                let found = workspace.select(&scores, &[row.eps], &options)?;
                let most = if always { 1.0 } else { ALL };
                if (found.indices.len() as f64) < most * row.scored as f64 {
                    for (at, &key) in found.indices.iter().enumerate() {
                        exact[at] = exact[key as usize];
                    }
                    row.upper = found.tail_mass_upper[0];
                    exact.truncate(found.indices.len());
                    let list = row.kept.take();
                    let key = |&at: &u32| list.as_ref().map_or(at, |list| list[at as usize]);
                    row.kept = Some(found.indices.iter().map(key).collect());
                }
                found.recycle();
            }
        }
        Ok(())
    }

    /// That a key, or its score, is not finite.
    pub(super) fn bad_key(&self, head: usize, key: usize, score: f64) -> Error {
        if let Err(error) = self.keys.finite(head, key, &mut Vec::new()) {
            return error;
        }
        let mut place = self.keys.place(head, key, 0);
        place.0.pop();
        let problem = "q.k times scale overflows float64; pass smaller vectors or a smaller scale";
        Error::Number { argument: "a score of k", place, value: score, problem }
    }

    fn average(&self, head: usize, rows: &mut [PendingRow]) -> Result<Reused<Answer>, Error> {
        for_dtype!(self.values.data, data => self.averages(head, data, rows))
    }

    /// Averages values by the weights of exact scores.
    fn averages<E: Element>(
        &self,
        head: usize,
        data: &[E],
        rows: &mut [PendingRow],
    ) -> Result<Reused<Answer>, Error> {
        let (start, stride) = self.values.matrix(head);
        let dim = self.values.dim();
        let values = Keys::new(data.get(start..).unwrap_or(&[]), stride, dim);
        let width = dim.next_multiple_of(LANES);
        let mut sums: Reused<Reused<f64>> = Reused::with_hint(rows.len());
        let mut totals: Reused<f64> = Reused::with_hint(rows.len());
        let mut masses: Reused<LogMass> = Reused::with_hint(rows.len());
        for row in rows.iter_mut() {
            let count = row.kept.as_ref().map_or(row.prefix, |kept| kept.len());
            let RowScratch { query, weights } = &mut *row.scratch;
            let exact = &mut query.exact;
            exact.truncate(count);
            let top = exact.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            grow(exact, count)?;
            exact.resize(count.next_multiple_of(LANES), f64::NEG_INFINITY);
            grow(weights, exact.len())?;
            weights.resize(exact.len(), 0.0);
            let total = if top > f64::NEG_INFINITY {
                self.simd.weights(&exact[..], Exp(top), weights)
            } else {
                0.0
            };
            // Rows that codes have not answered were scored with no offset.
            let offset = row.prepared.as_ref().filter(|_| !row.open).map_or(0.0, |p| p.offset);
            let with_sink =
                self.with_sink(row.number, total, (top, offset), (row.query.error, row.upper));
            row.upper = with_sink.of_whole(row.upper);
            row.query.error += with_sink.slip;
            totals.push(with_sink.total);
            // Of scores that say nothing, neither does what they weigh.
            let known = row.query.error <= VAGUE || count == 0;
            let rounding = EXP + count as f64 * f64::EPSILON;
            let found = LogMass::summed(with_sink.total, rounding, top + offset, row.query.error);
            masses.push(if known { found } else { LogMass::UNKNOWN });
            weights.truncate(count);
            sums.push(filled_again("v", width, 0.0)?);
        }
        // Where everything is visible the rows of a group share what is read.
        let plain = |row: &PendingRow| if row.kept.is_none() { row.prefix } else { 0 };
        let longest = rows.iter().map(plain).max().unwrap_or(0);
        for from in (0..longest).step_by(BLOCK) {
            let end = longest.min(from + BLOCK);
            if let ([a, b, c, d], [sa, sb, sc, sd]) = (&*rows, &mut sums[..])
                && [a, b, c, d].iter().all(|row| plain(row) >= end)
            {
                let weights = [a, b, c, d].map(|row| &row.scratch.weights[from..end]);
                let to = [sa, sb, sc, sd].map(|sums| &mut sums[..]);
                self.simd.shared_average(values, from, weights, to);
                continue;
            }
            for (row, sums) in rows.iter().zip(&mut sums) {
                let end = plain(row).min(end);
                if from < end {
                    let weights = &row.scratch.weights[from..end];
                    self.simd.average(values, Picked::From(from), weights, sums);
                }
            }
        }
        let mut lists: Lists<'_> = [&[]; MANY];
        for (list, row) in lists.iter_mut().zip(rows.iter()) {
            *list = row.kept.as_ref().map_or(&[], |kept| kept);
        }
        by_stretches(&lists[..rows.len()], |row, list, (from, end)| {
            let weights = &rows[row].scratch.weights[from..end];
            self.simd.average(values, Picked::Listed(&list[from..]), weights, &mut sums[row]);
        });
        let sum_error = sum_error(&self.values.data);
        let parts = rows.iter().zip(sums.drain(..).zip(totals.iter().zip(&masses)));
        parts
            .map(|(row, (mut out, (&total, &log_mass)))| {
                if total > 0.0 {
                    for entry in &mut out {
                        *entry /= total;
                    }
                }
                if out.iter().any(|entry| !entry.is_finite()) {
                    out = self.average_f64(head, row, total)?;
                }
                // The exponential in f64, and subtracting the largest score; rounding weights counts with the sums.
                let weight_error = row.query.error.exp_m1() + EXP;
                let PendingRow { upper, scored, rung, .. } = *row;
                let kept = row.kept.as_ref().map_or(scored, |kept| kept.len());
                Ok(Answer { out, upper, kept, scored, rung, weight_error, sum_error, log_mass })
            })
            .collect()
    }

    /// A row's average in f64 of what it sees alone, for values that f32 cannot add.
    fn average_f64(&self, head: usize, row: &PendingRow, total: f64) -> Result<Reused<f64>, Error> {
        let dim = self.values.dim();
        let mut out: Reused<f64> =
            filled("v", dim.next_multiple_of(LANES), 0.0)?.into_iter().collect();
        let (mut wide, mut sums) = (Vec::new(), filled("v", dim, 0.0)?);
        for (block, weights) in row.scratch.weights.chunks(BLOCK).enumerate() {
            sums.fill(0.0);
            for (at, weight) in weights.iter().enumerate() {
                let at = block * BLOCK + at;
                let key = row.kept.as_ref().map_or(at, |kept| kept[at] as usize);
                self.values.finite(head, key, &mut wide)?;
                let weight = weight / total;
                sums.iter_mut().zip(&wide).for_each(|(sum, value)| *sum += weight * value);
            }
            out.iter_mut().zip(&sums).for_each(|(out, sum)| *out += sum);
        }
        let largest = match out.iter().position(|entry| !entry.is_finite()) {
            None => return Ok(out),
            Some(entry) => out[entry],
        };
        let mut place = self.values.place(head, 0, 0);
        place.0.truncate(place.0.len() - 2);
        let problem = "an average of these values overflows float64; divide them by a constant";
        Err(Error::Number { argument: "v", place, value: largest, problem })
    }
}

impl PendingRow {
    /// The search of a row that has a query for codes, and its scratch.
    fn search<'s, E: Coded>(
        &'s mut self,
        row_visibility: RowVisibility<'s>,
        codes: &'s Codes,
        keys: Keys<'s, E>,
        simd: crate::kernels::Simd,
    ) -> Option<(ThresholdSearch<'s, E>, &'s mut QueryScratch)> {
        let search = ThresholdSearch {
            simd,
            codes,
            keys: Some(keys),
            query: &self.query,
            prepared: self.prepared.as_ref()?,
            row_visibility,
            eps: self.eps,
            trim: false,
            beside: None,
        };
        Some((search, &mut self.scratch.query))
    }
}

/// Scores chosen keys, stretch by stretch for all rows, so that they share pages and what is in a cache.
fn score_chosen<E: Coded>(
    keys: Keys<'_, E>,
    rows: &mut [PendingRow],
    lists: &[&[u32]],
    simd: crate::kernels::Simd,
) {
    by_stretches(lists, |row, list, (from, end)| {
        let PendingRow { query, prepared, scratch, .. } = &mut rows[row];
        let offset = prepared.as_ref().map_or(0.0, |prepared| prepared.offset);
        let to = &mut scratch.query.exact[from..end];
        query.score(simd, keys, Picked::Listed(&list[from..]), offset, to);
    });
}
