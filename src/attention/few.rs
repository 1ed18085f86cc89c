//! A few rows over one head's keys and values.

use super::ball::norm_of_square;
use super::job::{Answer, AttentionJob, MANY, RowBudget, Unit};
use super::pending::{PendingRow, grow};
use crate::error::Error;
use crate::index::{Query, QueryScratch, Rung};
use crate::kernels::{Element, FEW_KEYS, Keys, LANES, Picked};
use crate::rows::{Data, Scores, for_dtype};
use crate::runtime::memory;
use crate::runtime::reused::Reused;
use crate::runtime::threads;
use crate::select::{Options, Selection, Workspace};

/// Keys whose rows stay in a cache while a group uses them.
pub(super) const BLOCK: usize = FEW_KEYS;
/// Keys that one thread works on at a time, where several share a head: whole blocks.
pub(super) const PORTION: usize = 64 * BLOCK;
/// Largest share of its keys that a row keeps without keeping all.
pub(super) const ALL: f64 = 0.5;
/// A norm's square so small that squares of entries may be lost.
const TINY: f64 = 1e-200;
/// Uncertainty of scores, in nats, from which a row keeps all keys.
pub(super) const VAGUE: f64 = 1.0;

/// Runs code for rows that share reads, eight at a time if there are as many, then four, two and one.
macro_rules! side_by_side {
    ($rows:expr, $some:ident => $each:expr) => {{
        let (some, rest) = $rows.as_chunks_mut::<8>();
        for $some in some {
            $each;
        }
        let (some, rest) = rest.as_chunks_mut::<4>();
        for $some in some {
            $each;
        }
        let (some, rest) = rest.as_chunks_mut::<2>();
        for $some in some {
            $each;
        }
        let (some, _) = rest.as_chunks_mut::<1>();
        for $some in some {
            $each;
        }
    }};
}
pub(super) use side_by_side;

/// Splits numbers of rows by portions of keys, each with its first key.
pub(super) fn portions<T>(mut rows: [&mut [T]; MANY]) -> Vec<(usize, [&mut [T]; MANY])> {
    let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let portion = |from: usize| {
        let here = rows.each_mut().map(|rest| {
            let count = rest.len().min(PORTION);
            let (here, behind) = std::mem::take(rest).split_at_mut(count);
            *rest = behind;
            here
        });
        (from, here)
    };
    (0..longest).step_by(PORTION).map(portion).collect()
}

/// Returns the fewest keys whose scores, each off by at most `error`, leave out no more than `eps`, if these are less than
/// `most`.
pub(super) fn fewest<'a>(
    workspace: &mut Workspace,
    scores: impl Into<Data<'a>>,
    (eps, error, most): (f64, f64, f64),
) -> Result<Option<Selection>, Error> {
    let (data, error) = (scores.into(), [error]);
    let scores = Scores::new(data, &[data.len()])?.radius(&error)?;
    let found = workspace.select(&scores, &[eps], &Options::new())?;
    if (found.indices.len() as f64) < most {
        return Ok(Some(found));
    }
    found.recycle();
    Ok(None)
}

impl AttentionJob<'_> {
    /// Answers a few rows that share reads.
    pub(super) fn attend_few(
        &self,
        unit: &Unit<'_>,
        budget: RowBudget<'_>,
    ) -> Result<Reused<Answer>, Error> {
        let &Unit { head, rows: list, threads } = unit;
        let mut rows = self.rows(head, list, budget)?;
        // Codes alone say little of scores that are changed.
        if !self.changes_scores() {
            self.prune_by_codes(head, &mut rows, threads)?;
        }
        let mut answers: Reused<(usize, Answer)> = Reused::with_hint(rows.len());
        if !budget.careful && !self.query_rows.options.even_if_slower {
            let narrow = rows.extract_if(.., |row| self.fits_narrow(row)).collect();
            self.attend_narrow(head, narrow, (&mut answers, &mut rows), threads)?;
        }
        for_dtype!(self.keys.data, stored => self.dense(head, stored.matrix(head), &mut rows, threads))?;
        let mut found = self.average(head, &mut rows, threads)?;
        answers.extend(rows.iter().map(|row| row.number).zip(found.drain(..)));
        answers.sort_unstable_by_key(|(row, _)| *row);
        Ok(answers.drain(..).map(|(_, answer)| answer).collect())
    }

    /// Scores everything that open rows see, in f64, and drops what the budget allows if that is much.
    fn dense<E: Element>(
        &self,
        head: usize,
        keys: Keys<'_, E>,
        rows: &mut [PendingRow],
        threads: usize,
    ) -> Result<(), Error> {
        let (simd, measured) = (self.simd, self.index.is_none());
        let origin: Reused<f64> =
            std::iter::repeat_n(0.0, keys.dim().next_multiple_of(LANES)).collect();
        // The square of the largest norm.
        let mut square = 0.0f64;
        let mut queries: [Option<&Query>; MANY] = [None; MANY];
        let mut to: [&mut [f64]; MANY] = std::array::from_fn(|_| &mut [][..]);
        let places = queries.iter_mut().zip(&mut to);
        for (row, (a_query, to)) in rows.iter_mut().filter(|row| row.open).zip(places) {
            let visibility = self.query_rows.row_visibility(row.number);
            let seen = visibility.count();
            (row.scored, row.rung) = (seen, Rung::Dense);
            let PendingRow { query, scratch, kept, prefix, .. } = row;
            let exact = &mut scratch.query.exact;
            grow(exact, seen)?;
            exact.resize(seen, 0.0);
            if visibility.allowed.is_some() {
                // Masked keys may be anything: they are not touched.
                let mut list: Reused<u32> = Reused::with_hint(seen);
                memory::room("k", &mut list, seen)?;
                list.extend((0..*prefix as u32).filter(|&key| visibility.sees(key as usize)));
                query.score(simd, keys, Picked::Listed(&list), 0.0, exact);
                for &key in &list {
                    square = square.max(simd.farthest(keys.behind(key as usize), 1, &origin));
                }
                *kept = Some(list);
            } else {
                (*a_query, *to) = (Some(&*query), exact);
            }
        }
        let score = |(first, mut to): (usize, [&mut [f64]; MANY])| {
            let longest = to.iter().map(|to| to.len()).max().unwrap_or(0);
            let mut square = 0.0f64;
            for from in (0..longest).step_by(BLOCK) {
                let end = longest.min(from + BLOCK);
                if measured {
                    let keys = keys.behind(first + from);
                    square = square.max(simd.farthest(keys, end - from, &origin));
                }
                for (query, to) in queries.iter().zip(&mut to) {
                    if let (Some(query), true) = (query, from < to.len()) {
                        let end = end.min(to.len());
                        let picked = Picked::From(first + from);
                        query.score(simd, keys, picked, 0.0, &mut to[from..end]);
                    }
                }
            }
            square
        };
        if threads == 1 {
            square = square.max(score((0, to)));
        } else {
            let found = threads::map(threads, portions(to), 1, score)?;
            square = found.into_iter().fold(square, f64::max);
        }
        let mut most = norm_of_square(square, keys.dim());
        if measured && square < TINY {
            most = 0.0;
            for row in rows.iter().filter(|row| row.open) {
                let sees = self.query_rows.row_visibility(row.number);
                for key in (0..sees.prefix).filter(|&key| sees.sees(key)) {
                    let entries = keys.row(key).iter().map(|entry| entry.widen().into().abs());
                    most = entries.fold(most, f64::max);
                }
            }
        }
        for row in rows.iter_mut().filter(|row| row.open) {
            if measured {
                row.query = Query::new(&row.wide, self.scale, most);
            }
            let QueryScratch { exact, workspace, .. } = &mut row.scratch.query;
            // A key that is not finite scores what is no score.
            if let Some(bad) = exact.iter().position(|score| !score.is_finite()) {
                let score = exact[bad];
                let bad = row.kept.as_ref().map_or(bad, |list| list[bad] as usize);
                return Err(self.bad_key(head, bad, score));
            }
            let list = row.kept.as_ref().map_or(Picked::From(0), |list| Picked::Listed(list));
            row.query.error += self.change_exact(row.number, list, exact)?;
            let always = self.query_rows.options.even_if_slower;
            let tried = row.scored > 0 && (always || !row.flat);
            let most = if always { 1.0 } else { ALL } * row.scored as f64;
            if row.eps > 0.0
                && tried
                && row.query.error < VAGUE
                && let Some(found) =
                    fewest(workspace, &exact[..], (row.eps, row.query.error, most))?
            {
                for (at, &key) in found.indices.iter().enumerate() {
                    exact[at] = exact[key as usize];
                }
                row.upper = found.tail_mass_upper[0];
                exact.truncate(found.indices.len());
                let list = row.kept.take();
                let key = |&at: &u32| list.as_ref().map_or(at, |list| list[at as usize]);
                row.kept = Some(found.indices.iter().map(key).collect());
                found.recycle();
            }
        }
        Ok(())
    }

    /// Returns the error for a key, or a score, that is not finite.
    pub(super) fn bad_key(&self, head: usize, key: usize, score: f64) -> Error {
        if let Err(error) = self.keys.finite(head, key, &mut Vec::new()) {
            return error;
        }
        let mut place = self.keys.place(head, key, 0);
        place.0.pop();
        let problem = "q.k times scale overflows float64; pass smaller vectors or a smaller scale";
        Error::Number { argument: "a score of k", place, value: score, problem }
    }
}
