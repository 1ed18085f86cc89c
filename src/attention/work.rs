//! A few rows over one head's keys and values.

use super::ball::stored;
use super::{GROUP, Job, Unit};
use crate::error::Error;
use crate::kernels::{Element, Keys, LANES, Picked, Shifted};
use crate::keys::{Coded, Codes, Prepared, Query, Room, Rung, Search, Sight, by_type, matrix};
use crate::scores::{Data, Scores};
use crate::select::Options;
use half::{bf16, f16};

/// Keys whose rows stay in a cache while a group uses them.
const BLOCK: usize = 64;
/// A row that keeps a larger share of its keys keeps all.
const ALL: f64 = 0.5;
/// Relative error of the exponential in f64, generously.
const EXP: f64 = 1e-12;
/// A row whose scores are known no better than this, in nats, keeps all keys.
const VAGUE: f64 = 1.0;

/// One row's answer.
pub(super) struct Answer {
    pub(super) out: Vec<f64>,
    pub(super) upper: f64,
    pub(super) kept: usize,
    pub(super) scored: usize,
    pub(super) rung: Rung,
    pub(super) weight_error: f64,
}

/// One row on its way.
struct Row<'a> {
    query: Query,
    prepared: Option<Prepared>,
    sight: Sight<'a>,
    eps: f64,
    room: Room,
    /// What is kept, if not everything that is visible.
    kept: Option<Vec<u32>>,
    weights: Vec<f64>,
    upper: f64,
    scored: usize,
    rung: Rung,
}

impl Job<'_> {
    pub(super) fn unit(&self, unit: &Unit) -> Result<Vec<Answer>, Error> {
        let m = self.queries.len();
        let codes = self.index.map(|index| index.head(unit.head));
        let largest = match codes {
            Some(codes) => f64::from(codes.largest()),
            None => self.largest(unit.head)?,
        };
        let mut rows = Vec::with_capacity(unit.rows.len());
        let mut wide = Vec::new();
        for (&row, &eps) in unit.rows.iter().zip(&unit.eps) {
            self.queries.widen(row / m, row % m, &mut wide);
            if let Some(entry) = wide.iter().position(|entry| !entry.is_finite()) {
                return Err(Error::KeyNotFinite {
                    argument: self.queries.argument(),
                    place: self.queries.place(row / m, row % m, entry),
                });
            }
            rows.push(Row {
                query: Query::new(&wide, self.scale, largest),
                prepared: codes.filter(|_| eps > 0.0).map(|codes| codes.prepare(&wide, self.scale)),
                sight: self.sights.sight(row),
                eps,
                room: Room::default(),
                kept: None,
                weights: Vec::new(),
                upper: 0.0,
                scored: 0,
                rung: Rung::Dense,
            });
        }
        let mut open = vec![true; rows.len()];
        if let Some(codes) = codes {
            by_type!(self.keys, E => self.thin::<E>(unit.head, codes, &mut rows, &mut open))?;
        }
        let mut full: Vec<&mut Row<'_>> =
            rows.iter_mut().zip(&open).filter(|(_, open)| **open).map(|(row, _)| row).collect();
        stored!(self.keys.data, data => self.full(unit.head, data, &mut full))?;
        stored!(self.values.data, data => self.average(unit.head, data, &mut rows))
    }

    /// The largest absolute entry of a head's keys.
    fn largest(&self, head: usize) -> Result<f64, Error> {
        stored!(self.keys.data, data => {
            let (start, stride) = self.keys.matrix(head);
            let keys = Keys::new(data.get(start..).unwrap_or(&[]), stride, self.keys.dim());
            let mut most = 0.0f64;
            for i in 0..self.keys.len() {
                for &entry in keys.row(i) {
                    let entry: f64 = entry.widen().into();
                    // A key that is not finite is an error where it is seen, and no matter elsewhere.
                    if entry.is_finite() {
                        most = most.max(entry.abs());
                    }
                }
            }
            Ok(most)
        })
    }

    /// Answers what codes and a few exact scores can answer, and closes those rows.
    fn thin<E: Coded>(
        &self,
        head: usize,
        codes: &Codes,
        rows: &mut [Row<'_>],
        open: &mut [bool],
    ) -> Result<(), Error> {
        let padded = codes.len().next_multiple_of(LANES);
        for row in rows.iter_mut() {
            row.room.scores.resize(padded, 0.0);
        }
        let mut asking: Vec<(&Prepared, &mut [f32])> = rows
            .iter_mut()
            .filter_map(|row| Some((row.prepared.as_ref()?, &mut row.room.scores[..])))
            .collect();
        let mut fours = asking.chunks_exact_mut(GROUP);
        for four in &mut fours {
            if let [(a, ra), (b, rb), (c, rc), (d, rd)] = four {
                codes.scan(self.simd, [*a, *b, *c, *d], [ra, rb, rc, rd].map(|to| &mut **to));
            }
        }
        for (prepared, to) in fours.into_remainder() {
            codes.scan(self.simd, [*prepared], [to]);
        }
        let keys = matrix::<E>(self.keys, head);
        for (row, open) in rows.iter_mut().zip(open) {
            let Row { query, prepared, sight, eps, room, .. } = row;
            let Some(prepared) = prepared else { continue };
            let search = Search {
                simd: self.simd,
                codes,
                keys: Some(keys),
                query,
                prepared,
                sight: *sight,
                eps: *eps,
                trim: false,
            };
            let Some(found) = search.thin(room)? else { continue };
            *open = false;
            (row.upper, row.scored, row.rung) = (found.upper, found.scored, found.rung);
            row.kept = Some(found.kept);
        }
        Ok(())
    }

    /// Scores everything that is visible for some rows, and drops what the budget allows if that is much.
    fn full<E: Element>(
        &self,
        head: usize,
        data: &[E],
        rows: &mut [&mut Row<'_>],
    ) -> Result<(), Error> {
        let (start, stride) = self.keys.matrix(head);
        let keys = Keys::new(data.get(start..).unwrap_or(&[]), stride, self.keys.dim());
        let longest = rows.iter().map(|row| row.sight.visible).max().unwrap_or(0);
        for row in rows.iter_mut() {
            row.room.exact.clear();
            row.room.exact.resize(row.sight.visible.next_multiple_of(LANES), f64::NEG_INFINITY);
        }
        for from in (0..longest).step_by(BLOCK) {
            for row in rows.iter_mut() {
                let end = row.sight.visible.min(from + BLOCK);
                if from < end {
                    let to = &mut row.room.exact[from..end];
                    row.query.score(self.simd, keys, Picked::From(from), 0.0, to);
                }
            }
        }
        for row in rows.iter_mut() {
            let visible = row.sight.visible;
            row.room.exact.truncate(visible);
            self.finite(head, row)?;
            let mut seen = visible;
            if let Some(allowed) = row.sight.allowed {
                for (score, &allowed) in row.room.exact.iter_mut().zip(allowed) {
                    if allowed == 0 {
                        *score = f64::NEG_INFINITY;
                        seen -= 1;
                    }
                }
            }
            row.scored = seen;
            row.rung = Rung::Dense;
            if row.eps > 0.0 && seen > 0 && row.query.error < VAGUE {
                let error = [row.query.error];
                let scores = Scores::new(&row.room.exact[..], &[visible])?.radius(&error)?;
                let found = row.room.workspace.select(&scores, &[row.eps], &Options::new())?;
                if (found.indices.len() as f64) < ALL * seen as f64 {
                    for (at, &key) in found.indices.iter().enumerate() {
                        row.room.exact[at] = row.room.exact[key as usize];
                    }
                    row.upper = found.tail_mass_upper[0];
                    row.room.exact.truncate(found.indices.len());
                    row.kept = Some(found.indices);
                }
            }
        }
        Ok(())
    }

    /// That what a row sees has scores.
    fn finite(&self, head: usize, row: &Row<'_>) -> Result<(), Error> {
        let scores = row.room.exact.iter().enumerate();
        let mut bad = scores.filter(|(key, score)| !score.is_finite() && row.sight.sees(*key));
        let Some((key, &score)) = bad.next() else { return Ok(()) };
        let mut wide = Vec::new();
        self.keys.widen(head, key, &mut wide);
        if let Some(entry) = wide.iter().position(|entry| !entry.is_finite()) {
            let place = self.keys.place(head, key, entry);
            return Err(Error::KeyNotFinite { argument: self.keys.argument(), place });
        }
        let mut place = self.keys.place(head, key, 0);
        place.0.pop();
        let problem = "q.k times scale overflows float64; pass smaller vectors or a smaller scale";
        Err(Error::Number { argument: "a score of k", place, value: score, problem })
    }

    /// A row's average in f64 of what it sees alone, for values that f32 cannot add, or next to masked ones that are not finite.
    fn carefully(&self, head: usize, row: &Row<'_>, total: f64) -> Result<Vec<f64>, Error> {
        let dim = self.values.dim();
        let mut out = vec![0.0; dim.next_multiple_of(LANES)];
        let (mut wide, mut sums) = (Vec::new(), vec![0.0; dim]);
        for (block, weights) in row.weights.chunks(BLOCK).enumerate() {
            sums.fill(0.0);
            for (at, weight) in weights.iter().enumerate() {
                let at = block * BLOCK + at;
                let key = row.kept.as_ref().map_or(at, |kept| kept[at] as usize);
                if row.kept.is_none() && !row.sight.sees(key) {
                    continue;
                }
                self.values.widen(head, key, &mut wide);
                if let Some(entry) = wide.iter().position(|entry| !entry.is_finite()) {
                    let place = self.values.place(head, key, entry);
                    return Err(Error::KeyNotFinite { argument: self.values.argument(), place });
                }
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

    /// Averages values by the weights of exact scores.
    fn average<E: Element>(
        &self,
        head: usize,
        data: &[E],
        rows: &mut [Row<'_>],
    ) -> Result<Vec<Answer>, Error> {
        let (start, stride) = self.values.matrix(head);
        let dim = self.values.dim();
        let values = Keys::new(data.get(start..).unwrap_or(&[]), stride, dim);
        let width = dim.next_multiple_of(LANES);
        let mut answers = Vec::with_capacity(rows.len());
        for row in rows.iter_mut() {
            let count = row.kept.as_ref().map_or(row.sight.visible, Vec::len);
            let exact = &mut row.room.exact;
            exact.truncate(count);
            let top = exact.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            exact.resize(count.next_multiple_of(LANES), f64::NEG_INFINITY);
            row.weights.resize(exact.len(), 0.0);
            let total = if top > f64::NEG_INFINITY {
                self.simd.weights(&exact[..], Shifted(top), &mut row.weights)
            } else {
                0.0
            };
            row.weights.truncate(count);
            let kept = match &row.kept {
                Some(kept) => kept.len(),
                None => row.scored,
            };
            answers.push((vec![0.0; width], total, kept));
        }
        let blocks = rows.iter().map(|row| row.weights.len()).max().unwrap_or(0);
        for from in (0..blocks).step_by(BLOCK) {
            for (row, (out, total, _)) in rows.iter().zip(&mut answers) {
                if *total == 0.0 {
                    continue;
                }
                let all = row.weights.len();
                match &row.kept {
                    // Where everything is visible the rows of a group share what is read.
                    None if from < all => {
                        let weights = &row.weights[from..all.min(from + BLOCK)];
                        self.simd.average(values, Picked::From(from), weights, out);
                    }
                    Some(kept) if from == 0 => {
                        self.simd.average(values, Picked::Listed(kept), &row.weights, out);
                    }
                    _ => {}
                }
            }
        }
        let parts = rows.iter().zip(answers);
        parts
            .map(|(row, (mut out, total, kept))| {
                if total > 0.0 {
                    out.iter_mut().for_each(|entry| *entry /= total);
                }
                if out.iter().any(|entry| !entry.is_finite()) {
                    out = self.carefully(head, row, total)?;
                }
                // The exponential in f64, and subtracting the largest score; rounding weights to f32 counts with the sums.
                let weight_error = row.query.error.exp_m1() + EXP;
                let Row { upper, scored, rung, .. } = *row;
                Ok(Answer { out, upper, kept, scored, rung, weight_error })
            })
            .collect()
    }
}
