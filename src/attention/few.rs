//! A few rows over one head's keys and values.

use std::ops::Range;

use super::job::{Answer, AttentionJob, MANY, RowBudget, Unit};
use super::pending::{PendingRow, grow};
use crate::error::Error;
use crate::index::{Guess, Query, QueryScratch, RowVisibility, Rung};
use crate::kernels::{Element, Keys, Picked, Simd};
use crate::rows::{Scores, for_dtype};
use crate::runtime::memory;
use crate::runtime::reused::Reused;
use crate::runtime::threads;
use crate::select::Options;

/// Keys whose rows stay in a cache while a group uses them.
pub(super) const BLOCK: usize = 64;
/// Keys that one thread works on at a time, where several share a head: whole blocks.
pub(super) const PORTION: usize = 64 * BLOCK;
/// Least number of rows that are faster together, in f32, if none can drop anything.
const TOGETHER: usize = 2;
/// Largest share of its keys that a row keeps without keeping all.
const ALL: f64 = 0.5;
/// Uncertainty of scores, in nats, from which a row keeps all keys.
pub(super) const VAGUE: f64 = 1.0;
/// Per row its query and the place of its scores of consecutive keys.
pub(super) type Side<'a, Q> = [Option<(&'a Q, &'a mut [f64])>; MANY];

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

/// Splits the rows by portions of keys, each with its first key.
pub(super) fn portions<Q: ?Sized>(mut side: Side<'_, Q>) -> Vec<(usize, Side<'_, Q>)> {
    let longest = side.iter().flatten().map(|(_, to)| to.len()).max().unwrap_or(0);
    let portion = |from: usize| {
        let here = side.each_mut().map(|row| {
            let (query, rest) = row.as_mut()?;
            let count = rest.len().min(PORTION);
            let (here, behind) = std::mem::take(rest).split_at_mut(count);
            *rest = behind;
            Some((*query, here))
        });
        (from, here)
    };
    (0..longest).step_by(PORTION).map(portion).collect()
}

/// Queries and where their scores go, the first ones of them.
type Beside<'a, 's, Q> = [(&'a Q, &'s mut [f64]); MANY];

/// Returns the rows whose scores go to the end of a range, and their number; rows that end within it are scored alone.
/// `None` if there are no rows.
pub(super) fn reaching<'s, 'a, Q: ?Sized>(
    side: &'s mut Side<'a, Q>,
    range: Range<usize>,
    mut alone: impl FnMut(&'a Q, &mut [f64]),
) -> Option<(Beside<'a, 's, Q>, usize)> {
    let query = side.iter().flatten().next()?.0;
    // What is behind the last row that is there is not read.
    let mut whole: Beside<'_, '_, Q> = std::array::from_fn(|_| (query, &mut [][..]));
    let mut count = 0;
    for (query, to) in side.iter_mut().flatten() {
        let end = to.len().min(range.end);
        if end == range.end {
            whole[count] = (*query, &mut to[range.clone()]);
            count += 1;
        } else if range.start < end {
            alone(*query, &mut to[range.start..end]);
        }
    }
    Some((whole, count))
}

/// Scores consecutive keys for a few rows, and on request returns the largest entry of the keys.
fn score_plain<E: Element>(
    simd: Simd,
    keys: Keys<'_, E>,
    first: usize,
    mut side: Side<'_, Query>,
    measured: bool,
) -> f64 {
    let mut largest = 0.0f64;
    let longest = side.iter().flatten().map(|(_, to)| to.len()).max().unwrap_or(0);
    for from in (0..longest).step_by(BLOCK) {
        let end = longest.min(from + BLOCK);
        if measured {
            largest = largest.max(simd.largest(keys, Picked::From(first + from), end - from));
        }
        let alone = |query: &Query, to: &mut [f64]| {
            query.score(simd, keys, Picked::From(first + from), 0.0, to);
        };
        let Some((mut whole, count)) = reaching(&mut side, from..end, alone) else { break };
        side_by_side!(whole[..count], some => Query::score_shared(simd, keys, first + from, some));
    }
    largest
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
        self.prune_by_codes(head, &mut rows, &mut Guess::default(), threads)?;
        // Of rows that share what is read, and drop nothing, f32 is as fast as they can be read.
        let together = rows.len() >= TOGETHER && rows.iter().all(|row| row.open && row.flat);
        if together
            && !budget.careful
            && !self.query_rows.options.even_if_slower
            && self.score_narrow(head, &mut rows, threads)?
        {
            return self.average(head, &mut rows, threads);
        }
        for_dtype!(self.keys.data, stored => self.dense(head, stored.matrix(head), &mut rows, threads))?;
        self.average(head, &mut rows, threads)
    }

    /// Scores everything that open rows see, and drops what the budget allows if that is much.
    fn dense<E: Element>(
        &self,
        head: usize,
        keys: Keys<'_, E>,
        rows: &mut [PendingRow],
        threads: usize,
    ) -> Result<(), Error> {
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
        let mut side: Side<'_, Query> = [const { None }; MANY];
        for (to, row) in side.iter_mut().zip(rows.iter_mut().filter(|row| row.open)) {
            let plain = if row.kept.is_none() { row.prefix } else { 0 };
            *to = Some((&row.query, &mut row.scratch.query.exact[..plain]));
        }
        let measured = self.index.is_none();
        let score = |(from, side): (usize, Side<'_, Query>)| {
            score_plain(self.simd, keys, from, side, measured)
        };
        if threads == 1 {
            largest = largest.max(score((0, side)));
        } else {
            for found in threads::map(threads, portions(side), 1, score)? {
                largest = largest.max(found);
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
