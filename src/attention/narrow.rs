//! A few rows over all keys that they see, in f32, which is as fast as keys and values are read.

use half::{bf16, f16};

use super::average::by_portions;
use super::ball::norm_of_square;
use super::f32_error::{Measured, U, WEIGHT};
use super::few::{ALL, BLOCK, fewest, portions, side_by_side};
use super::job::{Answer, AttentionJob, MANY};
use super::pending::{PendingRow, grow};
use crate::error::Error;
use crate::index::{Coded, QueryScratch, RowVisibility, Rung, for_coded_dtype, matrix};
use crate::kernels::{FEW_KEYS, Keys, LANES, Scored, Weighed};
use crate::runtime::memory;
use crate::runtime::reused::{Reused, filled_again};
use crate::runtime::threads;
use crate::select::Selection;

/// Errors of scores, in nats, that are negligible: a share of the budget, or an error that panels have too.
pub(super) const FINE: f64 = 1.0 / 16.0;
const ALWAYS_FINE: f64 = 1e-4;
/// Relative error of a block's sum of weights, and of one of weighted values.
const SUMS: f64 = (FEW_KEYS as f64 + 4.0) * U;
/// A row that sees less than one key in so many has those scored by themselves.
const SEEN: usize = 4;

/// Appends a query in f32, in whole groups.
pub(super) fn append_narrow(to: &mut Vec<f32>, query: &[f64]) {
    let end = to.len() + query.len().next_multiple_of(LANES);
    to.extend(query.iter().map(|&entry| entry as f32));
    to.resize(end, 0.0);
}

/// Returns the depth of sums in lanes: a lane's fused terms, and a tree over lanes.
fn depth(dim: usize) -> usize {
    dim.div_ceil(LANES) + 4
}

/// Returns the largest of some numbers.
fn largest(scores: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let (groups, rest) = scores.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for group in groups {
        for (most, score) in most.iter_mut().zip(group) {
            *most = greater(*most, *score);
        }
    }
    most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, greater)
}

/// Queries in f32, in whole groups, their rows, and what they see.
struct Queries<'a> {
    entries: Reused<f32>,
    rows: [usize; MANY],
    width: usize,
    visibility: [RowVisibility<'a>; MANY],
}

impl AttentionJob<'_> {
    /// Returns a bound on the error of a query's f32 scores that are summed in lanes, as [`AttentionJob::narrow_error`]
    /// does.
    pub(super) fn error_in_lanes(&self, query: &[f64], norm: f64) -> Option<f64> {
        self.narrow_error(Measured::of(query), norm, depth(query.len()))
    }

    /// Returns `true` if a row may be scored in f32 with all keys before a position.
    pub(super) fn fits_narrow(&self, row: &PendingRow) -> bool {
        let seen = || self.query_rows.row_visibility(row.number).count();
        row.open && self.fit_together() && self.keys.dim() > 0 && seen() >= row.prefix / SEEN
    }

    /// Answers open rows in f32, each with its number. The rest gets those that drop much, closed, with the scores of what
    /// they keep, and, still open, those for which f32 does not suffice.
    pub(super) fn attend_narrow(
        &self,
        head: usize,
        mut rows: Reused<PendingRow>,
        (answers, rest): (&mut Vec<(usize, Answer)>, &mut Vec<PendingRow>),
        threads: usize,
    ) -> Result<(), Error> {
        let Some(longest) = rows.iter().map(|row| row.prefix).max() else { return Ok(()) };
        let norm = self.score_narrow(head, (&mut rows, longest), threads)?;
        let mut fine: Reused<(PendingRow, Option<Selection>)> = Reused::with_hint(rows.len());
        let mut kept = 0;
        for mut row in rows.drain(..) {
            let (biases, most) = (self.biases(row.number)?, self.most(&row.wide, norm));
            let changes = self.change_error(biases, most, true);
            let error = self.error_in_lanes(&row.wide, norm).map(|error| error + changes);
            let Some(error) = error.filter(|&e| e <= (row.eps * FINE).max(ALWAYS_FINE)) else {
                rest.push(row);
                continue;
            };
            let seen = self.query_rows.row_visibility(row.number).count();
            (row.scored, row.rung, row.query.error) = (seen, Rung::Dense, error);
            let QueryScratch { scores, workspace, .. } = &mut row.scratch.query;
            let by = (row.eps, error, ALL * seen as f64);
            let tried = row.eps > 0.0 && !row.flat && seen > 0;
            let found = if tried { fewest(workspace, &scores[..row.prefix], by)? } else { None };
            kept += found.as_ref().map_or(seen, |found| found.indices.len());
            fine.push((row, found));
        }
        // Values that several rows keep are read once only where all values are read.
        let sparse = (kept as f64) < ALL * longest as f64;
        let mut whole: Reused<PendingRow> = Reused::with_hint(fine.len());
        for (mut row, found) in fine.drain(..) {
            let Some(found) = found else {
                whole.push(row);
                continue;
            };
            if sparse {
                close(&mut row, &found)?;
                rest.push(row);
            } else {
                whole.push(row);
            }
            found.recycle();
        }
        let width = self.values.dim().next_multiple_of(LANES);
        let mut sums: Reused<Reused<f64>> = Reused::with_hint(whole.len());
        let mut tops = [f32::NEG_INFINITY; MANY];
        for (row, top) in whole.iter().zip(&mut tops) {
            *top = largest(&row.scratch.query.scores);
            sums.push(filled_again("v", width + 1, 0.0)?);
        }
        for_coded_dtype!(self.values, V => {
            let values = matrix::<V>(self.values, head);
            by_portions((threads, longest), &mut sums, |from, end, sums| {
                let nobody = |_| Weighed { scores: &[], top: 0.0, sums: &mut [] };
                let mut side: [Weighed<'_>; MANY] = std::array::from_fn(nobody);
                let each = whole.iter().zip(tops).zip(sums);
                for (to, ((row, top), sums)) in side.iter_mut().zip(each) {
                    *to = Weighed { scores: &row.scratch.query.scores[from..end], top, sums };
                }
                let values = values.behind(from);
                side_by_side!(side[..whole.len()], some => self.simd.average_few(values, some));
            })
        })?;
        for ((row, mut sums), top) in whole.drain(..).zip(sums.drain(..)).zip(tops) {
            let sees = self.query_rows.row_visibility(row.number);
            let total = sums.pop().unwrap_or(0.0);
            let found = (f64::from(top), total, sums);
            let errors = ((row.query.error, 0.0), (WEIGHT, SUMS));
            match self.answer_together((row.number, sees), found, errors.0, errors.1) {
                Some(answer) => answers.push((row.number, answer)),
                None => rest.push(row),
            }
        }
        Ok(())
    }

    /// Scores keys in f32, those that a row does not see below all others. Returns a length that no key exceeds which some row
    /// sees.
    fn score_narrow(
        &self,
        head: usize,
        (rows, longest): (&mut [PendingRow], usize),
        threads: usize,
    ) -> Result<f64, Error> {
        let dim = self.keys.dim();
        let width = dim.next_multiple_of(LANES);
        let entries = Reused::with_hint(rows.len() * width);
        let visibility = [RowVisibility { prefix: 0, allowed: None }; MANY];
        let mut queries = Queries { entries, rows: [0; MANY], width, visibility };
        let mut to: [&mut [f32]; MANY] = std::array::from_fn(|_| &mut [][..]);
        let places = queries.rows.iter_mut().zip(&mut queries.visibility);
        for ((row, to), (number, sees)) in rows.iter_mut().zip(&mut to).zip(places) {
            *number = row.number;
            *sees = self.query_rows.row_visibility(row.number);
            append_narrow(&mut queries.entries, &row.wide);
            let scores = &mut row.scratch.query.scores;
            scores.clear();
            memory::fill("k", scores, longest, 0.0)?;
            *to = scores;
        }
        let square = for_coded_dtype!(self.keys, K => {
            let keys = matrix::<K>(self.keys, head);
            let score = |portion| self.score_portion(keys, &queries, portion);
            Ok(if threads == 1 {
                score((0, to))
            } else {
                threads::map(threads, portions(to), 1, score)?.into_iter().fold(0.0, f32::max)
            })
        })?;
        // Squares are rounded as products are, and may be subnormal.
        let deep = depth(dim);
        let lost = (deep + 1) as f64 * U;
        let square = f64::from(square) / (1.0 - lost).max(0.0) + dim as f64 * 2f64.powi(-148);
        Ok(norm_of_square(square, dim))
    }

    /// Scores the keys from a first one on, and returns the square of a length that none of them exceeds.
    fn score_portion<K: Coded>(
        &self,
        keys: Keys<'_, K>,
        queries: &Queries<'_>,
        (first, mut to): (usize, [&mut [f32]; MANY]),
    ) -> f32 {
        let (mut square, scale) = (0.0f32, self.scale as f32);
        let count = queries.entries.len() / queries.width;
        for from in (0..to[0].len()).step_by(BLOCK) {
            let end = to[0].len().min(from + BLOCK);
            let keys_here = first + from..first + end;
            let mut visible = queries.visibility[..count].iter();
            if visible.any(|sees| keys_here.clone().any(|key| sees.sees(key))) {
                let nobody = |_| Scored { query: &[], to: &mut [] };
                let mut side: [Scored<'_>; MANY] = std::array::from_fn(nobody);
                let each = queries.entries.chunks(queries.width).zip(&mut to);
                for (side, (query, to)) in side.iter_mut().zip(each) {
                    *side = Scored { query, to: &mut to[from..end] };
                }
                let keys = keys.behind(first + from);
                side_by_side!(side[..count], some => {
                    square = square.max(self.simd.score_few(keys, some, scale));
                });
            }
            for ((to, sees), row) in
                to.iter_mut().zip(&queries.visibility[..count]).zip(queries.rows)
            {
                self.change_single(row, first + from, &mut to[from..end]);
                if sees.allowed.is_none() && sees.prefix >= keys_here.end {
                    continue;
                }
                for (to, key) in to[from..end].iter_mut().zip(keys_here.clone()) {
                    *to = if sees.sees(key) { *to } else { f32::NEG_INFINITY };
                }
            }
        }
        square
    }
}

/// Closes a row that was scored in f32 and keeps what was selected.
fn close(row: &mut PendingRow, found: &Selection) -> Result<(), Error> {
    let QueryScratch { scores, exact, .. } = &mut row.scratch.query;
    exact.clear();
    grow(exact, found.indices.len())?;
    exact.extend(found.indices.iter().map(|&key| f64::from(scores[key as usize])));
    row.upper = found.tail_mass_upper[0];
    row.kept = Some(found.indices.iter().copied().collect());
    (row.open, row.prepared) = (false, None);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_score_is_found_wherever_it_is() {
        assert_eq!(largest(&[f32::NEG_INFINITY; 3]), f32::NEG_INFINITY);
        for count in 1..3 * LANES {
            for at in 0..count {
                let mut scores = vec![f32::NEG_INFINITY; count];
                scores[count / 2] = -3.0;
                scores[at] = -1.0;
                assert_eq!(largest(&scores), -1.0, "{count} {at}");
            }
        }
    }
}
