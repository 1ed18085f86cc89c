//! Searches over an index for batches of queries.

use super::codes::Prepared;
use super::index::{Coded, KeyIndex, by_type, matrix};
use super::mass::{Found, Query, Room, Rung, Search, Sight};
use crate::certificate::Status;
use crate::error::{Error, Place};
use crate::kernels::{LANES, Simd};
use crate::scores::{Data, Vectors};
use crate::select::{Decision, Selection};
use crate::threads::{self, Hook};
use half::{bf16, f16};

/// What is asked of a search.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SearchOptions {
    /// What products are multiplied by to be scores; `None` for `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// How many threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

/// The sets found, and how.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SearchResult {
    /// The kept sets with their certificates.
    pub selection: Selection,
    /// How many keys of each row were scored exactly.
    pub scored: Vec<i64>,
    /// Which way each row was answered.
    pub rung: Vec<Rung>,
}

/// Queries that share a scan.
const GROUP: usize = 4;

impl KeyIndex {
    /// Searches, for each query, the fewest keys whose dropped softmax mass is proven to be at most `eps`, scoring few of
    /// them (arXiv 2512.07647, "MC-Search", with codes in place of cells and the Gram certificate over them).
    ///
    /// Queries have shape `(..., m, d)`; with an index of `(n, d)` any axes may stand before, else as many as the index has
    /// before its keys, each of the same length or, the last, a multiple (grouped heads). `eps` holds one budget for all rows
    /// or one per row. The certificate is about the real numbers `scale * q.k` of exactly the stored queries and keys.
    ///
    /// # Errors
    /// [`Error::Shape`] where queries or keys do not fit, [`Error::Eps`], [`Error::Scale`], [`Error::KeyNotFinite`],
    /// [`Error::KeysNeeded`] if the codes alone do not decide a row and `keys` is `None`.
    pub fn search(
        &self,
        queries: &Vectors<'_>,
        keys: Option<&Vectors<'_>>,
        eps: &[f64],
        options: &SearchOptions,
    ) -> Result<SearchResult, Error> {
        self.search_with(queries, keys, eps, options, &mut || Ok(()))
    }

    pub(crate) fn search_with(
        &self,
        queries: &Vectors<'_>,
        keys: Option<&Vectors<'_>>,
        eps: &[f64],
        options: &SearchOptions,
        hook: Hook<'_>,
    ) -> Result<SearchResult, Error> {
        let rows = queries.heads() * queries.len();
        self.check(queries, keys)?;
        check_eps(queries, eps)?;
        let scale = options.scale.unwrap_or(1.0 / (self.dim as f64).sqrt());
        if !scale.is_finite() {
            return Err(Error::Scale { value: scale });
        }
        let simd = Simd::current()?;
        let work = rows.saturating_mul(self.len()).saturating_mul(self.dim);
        let threads = threads::count(options.threads, work > 1 << 20)?;
        let job = Job { index: self, queries, eps, scale, simd };
        let units = self.units(queries);
        let mut found: Vec<Option<Found>> = Vec::new();
        found.resize_with(rows, || None);
        let portion = (1 << 28) / (GROUP * self.len() * self.dim).max(1) + threads;
        let mut at = 0;
        let one = |unit: usize| -> Result<Vec<Found>, Error> {
            let (head, rows) = &units[unit];
            match keys {
                Some(keys) => by_type!(keys, E => job.unit::<E>(*head, rows, Some(keys))),
                None => job.unit::<f32>(*head, rows, None),
            }
        };
        threads::in_portions(threads, units.len(), (portion, 1), hook, one, |answers| {
            for (row, answer) in units[at].1.iter().zip(answers) {
                found[*row] = Some(answer);
            }
            at += 1;
        })?;
        let mut result = SearchResult::default();
        result.selection.indptr.push(0);
        for (row, found) in found.into_iter().flatten().enumerate() {
            let eps = eps[if eps.len() == 1 { 0 } else { row }];
            result.push(found, eps);
        }
        Ok(result)
    }

    /// Judges shapes.
    fn check(&self, queries: &Vectors<'_>, keys: Option<&Vectors<'_>>) -> Result<(), Error> {
        if queries.dim() != self.dim {
            return Err(queries.misfit(format!("the index holds keys of {} entries", self.dim)));
        }
        let (have, need) = (queries.batch(), &self.batch);
        let last = need.len().wrapping_sub(1);
        let fits = need.is_empty()
            || have.len() == need.len()
                && have.iter().zip(need).enumerate().all(|(axis, (&have, &need))| {
                    have == need || axis == last && need > 0 && have % need == 0
                });
        if !fits {
            return Err(queries.misfit(format!(
                "the axes before the last two must be those of the index, {need:?}, of which the last may be a multiple"
            )));
        }
        let Some(keys) = keys else { return Ok(()) };
        if keys.batch() != self.batch || keys.len() != self.len() || keys.dim() != self.dim {
            let mut shape = self.batch.clone();
            shape.extend([self.len(), self.dim]);
            return Err(keys.misfit(format!("the index was built of keys of shape {shape:?}")));
        }
        Ok(())
    }

    /// Rows that share a head's codes, a few at a time.
    fn units(&self, queries: &Vectors<'_>) -> Vec<(usize, Vec<usize>)> {
        let mut rows_of = vec![Vec::new(); self.heads.len()];
        let m = queries.len();
        for matrix in 0..queries.heads() {
            let place = Place::unravel(queries.batch(), matrix).0;
            let mut head = 0;
            for (axis, &have) in self.batch.iter().enumerate() {
                head = head * have + place[axis] / (queries.batch()[axis] / have);
            }
            if let Some(rows) = rows_of.get_mut(head) {
                rows.extend(matrix * m..(matrix + 1) * m);
            }
        }
        let chunks = |(head, rows): (usize, Vec<usize>)| {
            rows.chunks(GROUP).map(|rows| (head, rows.to_vec())).collect::<Vec<_>>()
        };
        rows_of.into_iter().enumerate().flat_map(chunks).collect()
    }
}

fn check_eps(queries: &Vectors<'_>, eps: &[f64]) -> Result<(), Error> {
    let rows = queries.heads() * queries.len();
    if eps.len() != 1 && eps.len() != rows {
        let remedy = "pass one budget, or one per row";
        return Err(Error::Length { argument: "eps", expected: rows, got: eps.len(), remedy });
    }
    for (row, &value) in eps.iter().enumerate() {
        if !(0.0..1.0).contains(&value) {
            let shape = &queries.shape()[..queries.shape().len() - 1];
            let place = if eps.len() == 1 { Place(vec![]) } else { Place::unravel(shape, row) };
            return Err(Error::Eps { place, value });
        }
    }
    Ok(())
}

struct Job<'a> {
    index: &'a KeyIndex,
    queries: &'a Vectors<'a>,
    eps: &'a [f64],
    scale: f64,
    simd: Simd,
}

impl Job<'_> {
    /// A few rows over one head's keys.
    fn unit<E: Coded>(
        &self,
        head: usize,
        rows: &[usize],
        keys: Option<&Vectors<'_>>,
    ) -> Result<Vec<Found>, Error> {
        let codes = &self.index.heads[head];
        let keys = keys.map(|keys| matrix::<E>(keys, head));
        let m = self.queries.len();
        let mut queries: Vec<(Query, Prepared)> = Vec::with_capacity(rows.len());
        let mut wide = Vec::new();
        for &row in rows {
            self.queries.widen(row / m, row % m, &mut wide);
            if let Some(entry) = wide.iter().position(|entry| !entry.is_finite()) {
                return Err(Error::KeyNotFinite {
                    argument: self.queries.argument(),
                    place: self.queries.place(row / m, row % m, entry),
                });
            }
            let query = Query::new(&wide, self.scale, f64::from(codes.largest()));
            queries.push((query, codes.prepare(&wide, self.scale)));
        }
        let padded = codes.len().next_multiple_of(LANES);
        let mut rooms: Vec<Room> = rows.iter().map(|_| Room::default()).collect();
        for room in &mut rooms {
            room.scores.resize(padded, 0.0);
        }
        match (&queries[..], &mut rooms[..]) {
            ([a, b, c, d], [ra, rb, rc, rd]) => {
                let to = [&mut ra.scores[..], &mut rb.scores, &mut rc.scores, &mut rd.scores];
                codes.scan(self.simd, [&a.1, &b.1, &c.1, &d.1], to);
            }
            (queries, rooms) => {
                for (query, room) in queries.iter().zip(rooms) {
                    codes.scan(self.simd, [&query.1], [&mut room.scores]);
                }
            }
        }
        let sight = Sight { visible: codes.len(), allowed: None };
        rows.iter()
            .zip(queries.iter().zip(&mut rooms))
            .map(|(&row, ((query, prepared), room))| {
                let eps = self.eps[if self.eps.len() == 1 { 0 } else { row }];
                let search = Search {
                    simd: self.simd,
                    codes,
                    keys,
                    query,
                    prepared,
                    sight,
                    eps,
                    trim: true,
                };
                search.run(room)
            })
            .collect()
    }
}

impl SearchResult {
    fn push(&mut self, found: Found, eps: f64) {
        self.selection.indices.extend_from_slice(&found.kept);
        let status = if found.visible == 0 {
            Status::Empty
        } else if found.upper <= eps {
            Status::Certified
        } else {
            Status::OverBudget
        };
        self.selection.push(&Decision {
            kept: found.kept.len(),
            upper: found.upper,
            lower: found.lower,
            minimal: found.minimal,
            status,
        });
        self.scored.push(found.scored as i64);
        self.rung.push(found.rung);
    }
}
