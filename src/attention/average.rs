//! Averages of values by the weights of exact scores.
//!
//! Sums consist of parts of fixed sizes: of consecutive keys, or of a list. Each part starts from zero, and parts are
//! added in order. So sums do not depend on the assignment of parts to threads.

use super::error_bound::sum_error;
use super::few::{BLOCK, PORTION, VAGUE};
use super::job::{Answer, AttentionJob, MANY};
use super::pending::{PendingRow, RowScratch, grow};
use super::pruned::Lists;
use super::stretches::{by_stretches, end_of_stretch};
use crate::error::Error;
use crate::kernels::{Element, Exp, Keys, LANES, Picked, Simd};
use crate::numerics::finite::all_finite;
use crate::numerics::log_mass::LogMass;
use crate::rows::for_dtype;
use crate::runtime::memory::filled;
use crate::runtime::reused::{Reused, filled_again};
use crate::runtime::threads;

/// Keys of a list that one thread sums at a time.
const LISTED: usize = 2048;
/// Relative error of the exponential in f64, generously.
const EXP: f64 = 1e-12;

/// Rows with their weights, and a head's values.
#[derive(Clone, Copy)]
struct Averaged<'a, E> {
    simd: Simd,
    values: Keys<'a, E>,
    rows: &'a [PendingRow],
}

fn add(to: &mut [f64], part: &[f64]) {
    to.iter_mut().zip(part).for_each(|(to, part)| *to += part);
}

/// Adds to the sums of rows those of portions of the keys, in order. Each begins with zeros and adds up blocks.
pub(super) fn by_portions(
    (threads, longest): (usize, usize),
    sums: &mut [Reused<f64>],
    block: impl Fn(usize, usize, &mut [Reused<f64>]) + Sync,
) -> Result<(), Error> {
    let (rows, width) = (sums.len(), sums.first().map_or(0, |sums| sums.len()));
    let part = |part: usize| {
        let mut sums: Reused<Reused<f64>> = Reused::with_hint(rows);
        for _ in 0..rows {
            sums.push(filled_again("v", width, 0.0)?);
        }
        let (first, end) = (part * PORTION, longest.min((part + 1) * PORTION));
        for from in (first..end).step_by(BLOCK) {
            block(from, end.min(from + BLOCK), &mut sums);
        }
        Ok(sums)
    };
    let mut join = |parts: Reused<Reused<f64>>| {
        sums.iter_mut().zip(&parts).for_each(|(sums, part)| add(sums, part));
    };
    let count = longest.div_ceil(PORTION);
    if threads == 1 || count < 2 {
        return (0..count).try_for_each(|at| part(at).map(&mut join));
    }
    threads::map(threads, 0..count, 1, part)?.into_iter().try_for_each(|part| part.map(&mut join))
}

impl<E: Element> Averaged<'_, E> {
    fn width(&self) -> usize {
        self.values.dim().next_multiple_of(LANES)
    }

    /// Adds the sums of rows that keep all keys before a position.
    fn plain(&self, threads: usize, sums: &mut [Reused<f64>]) -> Result<(), Error> {
        let plain = |row: &PendingRow| if row.kept.is_none() { row.prefix } else { 0 };
        let longest = self.rows.iter().map(plain).max().unwrap_or(0);
        by_portions((threads, longest), sums, |from, end, sums| {
            for (row, sums) in self.rows.iter().zip(sums).filter(|(row, _)| from < plain(row)) {
                let weights = &row.scratch.weights[from..end.min(plain(row))];
                self.simd.average(self.values, Picked::From(from), weights, sums);
            }
        })
    }

    /// Adds the sums of rows with lists of keys.
    fn listed(&self, threads: usize, sums: &mut [Reused<f64>]) -> Result<(), Error> {
        let mut lists: Lists<'_> = [&[]; MANY];
        for (list, row) in lists.iter_mut().zip(self.rows) {
            *list = row.kept.as_ref().map_or(&[], |kept| kept);
        }
        let lists = &lists[..self.rows.len()];
        // Row, and part of its list.
        let mut parts: Reused<(usize, usize)> = Reused::with_hint(lists.len());
        let mut begins = [0; MANY];
        for (row, (list, begin)) in lists.iter().zip(&mut begins).enumerate() {
            *begin = parts.len();
            parts.extend((0..list.len().div_ceil(LISTED)).map(|part| (row, part)));
        }
        let mut found: Reused<Reused<f64>> = Reused::with_hint(parts.len());
        let sum = |row: usize, (from, end): (usize, usize), to: &mut [f64]| {
            let weights = &self.rows[row].scratch.weights[from..end];
            self.simd.average(self.values, Picked::Listed(&lists[row][from..]), weights, to);
        };
        if threads == 1 || parts.len() < 2 {
            for _ in &parts {
                found.push(filled_again("v", self.width(), 0.0)?);
            }
            by_stretches(lists, |row, _, (mut from, end)| {
                while from < end {
                    let part = from / LISTED;
                    let until = end.min((part + 1) * LISTED);
                    sum(row, (from, until), &mut found[begins[row] + part]);
                    from = until;
                }
            });
        } else {
            let one = |&(row, part): &(usize, usize)| {
                let mut to = filled_again("v", self.width(), 0.0)?;
                let (mut from, end) = (part * LISTED, lists[row].len().min((part + 1) * LISTED));
                while from < end {
                    let until = end.min(end_of_stretch(lists, row, from));
                    sum(row, (from, until), &mut to);
                    from = until;
                }
                Ok(to)
            };
            for part in threads::map(threads, parts.iter(), 1, one)? {
                found.push(part?);
            }
        }
        for (&(row, _), part) in parts.iter().zip(&found) {
            add(&mut sums[row], part);
        }
        Ok(())
    }
}

impl AttentionJob<'_> {
    /// Averages values by the weights of exact scores.
    pub(super) fn average(
        &self,
        head: usize,
        rows: &mut [PendingRow],
        threads: usize,
    ) -> Result<Reused<Answer>, Error> {
        for_dtype!(self.values.data, stored => self.averages(head, stored.matrix(head), rows, threads))
    }

    /// Averages values by the weights of exact scores.
    fn averages<E: Element>(
        &self,
        head: usize,
        values: Keys<'_, E>,
        rows: &mut [PendingRow],
        threads: usize,
    ) -> Result<Reused<Answer>, Error> {
        let width = values.dim().next_multiple_of(LANES);
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
            let found = with_sink.log_mass(rounding, top + offset, row.query.error);
            masses.push(if known { found } else { LogMass::UNKNOWN });
            weights.truncate(count);
            sums.push(filled_again("v", width, 0.0)?);
        }
        let values = Averaged { simd: self.simd, values, rows };
        values.plain(threads, &mut sums)?;
        values.listed(threads, &mut sums)?;
        let sum_error = sum_error(&self.values.data);
        let parts = rows.iter().zip(sums.drain(..).zip(totals.iter().zip(&masses)));
        parts
            .map(|(row, (mut out, (&total, &log_mass)))| {
                if total > 0.0 {
                    for entry in &mut out {
                        *entry /= total;
                    }
                }
                if !all_finite(&out) {
                    out = self.average_f64(head, row, total)?;
                }
                // The exponential in f64, and subtracting the largest score; rounding weights counts with the sums.
                let weight_error = row.query.error.exp_m1() + EXP;
                let PendingRow { upper, scored, rung, .. } = *row;
                let kept = row.kept.as_ref().map_or(scored, |kept| kept.len());
                let coded_error = 0.0;
                Ok(Answer {
                    out,
                    upper,
                    kept,
                    scored,
                    rung,
                    weight_error,
                    sum_error,
                    coded_error,
                    log_mass,
                })
            })
            .collect()
    }

    /// Averages the values of one row in f64, for values that f32 cannot add.
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
