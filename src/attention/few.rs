//! A few rows over one head's keys and values.

use super::error_bound::sum_error;
use super::job::{Answer, AttentionJob};
use super::job::{MANY, RowBudget};
use super::pending::{PendingRow, RowScratch, grow};
use super::pruned::Lists;
use super::stretches::by_stretches;
use crate::error::Error;
use crate::index::{Guess, Query, QueryScratch, RowVisibility, Rung};
use crate::kernels::{Element, Exp, Keys, LANES, Picked};
use crate::log_mass::LogMass;
use crate::memory::{self, filled};
use crate::reused::{Reused, filled_again};
use crate::rows::{Scores, for_dtype};
use crate::select::Options;

/// Keys whose rows stay in a cache while a group uses them.
const BLOCK: usize = 64;
/// So many rows are faster together, in f32, where none can drop anything.
const TOGETHER: usize = 2;
/// A row that keeps a larger share of its keys keeps all.
const ALL: f64 = 0.5;
/// A row whose scores are known no better than this, in nats, keeps all keys.
const VAGUE: f64 = 1.0;
/// Relative error of the exponential in f64, generously.
const EXP: f64 = 1e-12;

impl AttentionJob<'_> {
    /// A few rows that share what is read.
    pub(super) fn attend_few(
        &self,
        head: usize,
        list: &[usize],
        budget: RowBudget<'_>,
    ) -> Result<Reused<Answer>, Error> {
        let mut rows = self.rows(head, list, budget, None)?;
        self.prune_by_codes(head, &mut rows, &mut Guess::default())?;
        // Of rows that share what is read, and drop nothing, f32 is as fast as they can be read.
        let together = rows.len() >= TOGETHER && rows.iter().all(|row| row.open && row.flat);
        if together
            && !budget.careful
            && !self.query_rows.options.even_if_slower
            && let Some(found) = self.attend_tile(head, list)?
        {
            return Ok(found);
        }
        for_dtype!(self.keys.data, data => self.dense(head, data, &mut rows))?;
        self.average(head, &mut rows)
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

    pub(super) fn average(
        &self,
        head: usize,
        rows: &mut [PendingRow],
    ) -> Result<Reused<Answer>, Error> {
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
