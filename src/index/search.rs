//! Searches over an index for batches of queries.

use super::best_first::BestFirst;
use super::cells::Cells;
use super::element::{Coded, for_coded_dtype, matrix};
use super::found::{Found, Rung};
use super::key_index::KeyIndex;
use super::options::{Over, Rule, SearchOptions};
use super::prepared::Prepared;
use super::query::{BLURRED, Query, RowVisibility};
use super::threshold_search::ThresholdSearch;
use super::threshold_state::QueryScratch;
use crate::certificate::Status;
use crate::error::Error;
use crate::kernels::{LANES, Simd};
use crate::memory::{self, check_memory, check_memory_in_each, list, room};
use crate::rows::{Data, PerRow, Vectors};
use crate::scale::nearest_rsqrt;
use crate::select::{Decision, Selection};
use crate::threads;
use half::{bf16, f16};

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
/// Bytes of a key that each query of a group may hold: an exact score, and a list of what is kept, which grows by doubling.
const SCORED: usize = 16;
/// Bytes of a key while a query is decided: selection from exact scores.
const DECIDED: usize = 32;
/// The same where bounds are put in order: units of keys, what they weigh from each on, and lists of those scored.
const EXPLORED: usize = 136;
/// Entries that a group counts at least: what is found waits for the rest of the portion.
const LEAST: usize = 1 << 12;

impl KeyIndex<'_> {
    /// Searches, for each query, the fewest keys whose dropped softmax mass is proven to be at most `eps`, scoring few of
    /// them (arXiv 2512.07647, "MC-Search", with codes in place of cells and the Gram certificate over them).
    ///
    /// Queries have shape `(..., m, d)`; with an index of `(n, d)` any axes may stand before, else as many as the index has
    /// before its keys, each of the same length or, the last, a multiple (grouped heads). `eps` holds one budget for all rows
    /// or one per row. The certificate is about the real numbers `scale * q.k` of exactly the stored queries and keys.
    ///
    /// With [`Rule::Gap`] a gap between two scores must prove the budget, which takes many more keys. With [`Rule::TopK`] the
    /// true k best keys are found, equal scores by position, whatever they lose; `eps` may then be empty. A row's status is
    /// certified if its tail mass is within its budget and, for the top k, the set is proven; over budget otherwise, which takes
    /// a given k or `max_scored`.
    ///
    /// # Errors
    /// [`Error::Shape`] where queries or keys do not fit, [`Error::OtherKeys`] for keys of another type, [`Error::Eps`],
    /// [`Error::Scale`], [`Error::KeyNotFinite`], [`Error::Number`] for products too large for f64 to tell scores apart (by
    /// mass over codes all keys are then kept), [`Error::Option`] for k, [`Error::KeysNeeded`] if `keys` is `None` and codes alone do not decide a row by mass.
    pub fn search(
        &self,
        queries: &Vectors<'_>,
        keys: Option<&Vectors<'_>>,
        eps: &[f64],
        options: &SearchOptions,
    ) -> Result<SearchResult, Error> {
        let _modes = threads::default_floats();
        let rows = queries.heads().saturating_mul(queries.len());
        // Of each row what is found, in the meantime and in the end, and its place in a group.
        let each = 2 * size_of::<Option<(Found, bool)>>() + Selection::ROW + 96;
        check_memory("q", rows.max(queries.heads()), each)?;
        self.suits(queries, keys)?;
        let remedy = "pass one budget, or one per row";
        let eps = if eps.is_empty() && matches!(options.rule, Rule::TopK(_)) {
            PerRow::new("eps", &[1.0], rows, remedy)?
        } else {
            let shape = &queries.shape()[..queries.shape().len() - 1];
            PerRow::new("eps", eps, rows, remedy)?.budgets(shape)?
        };
        if options.rule == Rule::TopK(0) {
            let problem = "the top k of a row has at least one key";
            return Err(Error::Option { argument: "k", value: "0".into(), problem });
        }
        let scale = options.scale.unwrap_or_else(|| nearest_rsqrt(self.dim));
        if !scale.is_finite() {
            return Err(Error::Scale { value: scale });
        }
        let simd = Simd::current()?;
        let work = rows.saturating_mul(self.len()).saturating_mul(self.dim);
        let threads = threads::count(options.threads, work > 1 << 20)?;
        check_memory_in_each("keys", threads, (rows, self.len()), size_of::<f32>())?;
        let cells = match (options.over, keys) {
            (Over::Codes, _) => None,
            (_, None) => return Err(Error::KeysNeeded),
            (_, Some(keys)) => Some(self.cells(keys, threads)?),
        };
        let job = SearchJob { index: self, queries, eps, scale, simd, options, cells };
        let units = self.units(queries);
        let mut found: Vec<Option<(Found, bool)>> = list("q", rows)?;
        found.resize_with(rows, || None);
        let portion = (1 << 28)
            / GROUP.saturating_mul(self.len()).saturating_mul(self.dim).max(LEAST)
            + threads;
        let mut at = 0;
        let one = |unit: usize| -> Result<Vec<(Found, bool)>, Error> {
            let (head, rows) = &units[unit];
            match keys {
                Some(keys) => for_coded_dtype!(keys, E => job.unit::<E>(*head, rows, Some(keys))),
                None => job.unit::<f32>(*head, rows, None),
            }
        };
        threads::in_portions(threads, units.len(), (portion, 1), one, |answers| {
            for (row, answer) in units[at].1.iter().zip(answers) {
                found[*row] = Some(answer);
            }
            at += 1;
        })?;
        let mut result = SearchResult::default();
        let kept = found.iter().flatten().map(|(found, _)| found.kept.len()).sum();
        room("q", &mut result.selection.indices, kept)?;
        result.selection.indptr.push(0);
        for (row, (found, met)) in found.into_iter().flatten().enumerate() {
            result.push(&found, eps.of(row), met);
        }
        Ok(result)
    }

    /// Judges shapes.
    pub(super) fn suits(
        &self,
        queries: &Vectors<'_>,
        keys: Option<&Vectors<'_>>,
    ) -> Result<(), Error> {
        if queries.dim() != self.dim {
            return Err(queries.misfit(format!("the index holds keys of {} entries", self.dim)));
        }
        let need = &self.batch;
        if self.heads_of(queries).is_none() {
            return Err(queries.misfit(format!(
                "the axes before the last two must be those of the index, {need:?}, of which the last may be a multiple"
            )));
        }
        let Some(keys) = keys else { return Ok(()) };
        self.fits(keys)
    }

    /// A row's query over the keys of a head; its entries are left in `wide`, too.
    pub(super) fn query(
        &self,
        queries: &Vectors<'_>,
        row: usize,
        head: usize,
        scale: f64,
        wide: &mut Vec<f64>,
    ) -> Result<Query, Error> {
        let m = queries.len();
        queries.finite(row / m, row % m, wide)?;
        Ok(Query::new(wide, scale, f64::from(self.heads[head].largest())))
    }

    /// That exact scores of a row's query say something.
    pub(super) fn distinct(queries: &Vectors<'_>, row: usize, query: &Query) -> Result<(), Error> {
        if query.error <= BLURRED {
            return Ok(());
        }
        Err(Self::blurred(queries, row, query))
    }

    /// That they do not.
    pub(super) fn blurred(queries: &Vectors<'_>, row: usize, query: &Query) -> Error {
        let (argument, m) = (queries.argument(), queries.len());
        let mut place = queries.place(row / m, row % m, 0);
        place.0.pop();
        let value = query.entries.iter().fold(0.0, |top: f64, entry| top.max(entry.abs()));
        let problem = "so large in size, with these keys and this scale, that f64 cannot tell scores apart; make them smaller";
        Error::Number { argument, place, value, problem }
    }

    /// The head of each matrix of queries; one head of keys without axes before it serves all.
    pub(super) fn heads_of(&self, queries: &Vectors<'_>) -> Option<Vec<usize>> {
        if self.batch.is_empty() {
            return Some(vec![0; queries.heads()]);
        }
        queries.heads_among(&self.batch)
    }

    /// Rows that share a head's codes, a few at a time.
    pub(super) fn units(&self, queries: &Vectors<'_>) -> Vec<(usize, Vec<usize>)> {
        let mut rows_of = vec![Vec::new(); self.heads.len()];
        let m = queries.len();
        for (matrix, head) in self.heads_of(queries).into_iter().flatten().enumerate() {
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

struct SearchJob<'a> {
    index: &'a KeyIndex<'a>,
    queries: &'a Vectors<'a>,
    eps: PerRow<'a, f64>,
    scale: f64,
    simd: Simd,
    options: &'a SearchOptions,
    cells: Option<&'a [Cells]>,
}

impl SearchJob<'_> {
    /// A few rows over one head's keys.
    fn unit<E: Coded>(
        &self,
        head: usize,
        rows: &[usize],
        keys: Option<&Vectors<'_>>,
    ) -> Result<Vec<(Found, bool)>, Error> {
        let codes = &self.index.heads[head];
        let keys = keys.map(|keys| matrix::<E>(keys, head));
        let over_codes = self.options.over != Over::Cells;
        let mut queries: Vec<(Query, Option<Prepared>)> = Vec::with_capacity(rows.len());
        let mut wide = Vec::new();
        for &row in rows {
            let query = self.index.query(self.queries, row, head, self.scale, &mut wide)?;
            let prepared = over_codes.then(|| codes.prepare(&wide, self.scale));
            queries.push((query, prepared));
        }
        let padded = codes.len().next_multiple_of(LANES);
        let SearchOptions { rule, max_scored, .. } = *self.options;
        let explores = rule != Rule::Mass || max_scored.is_some() || self.cells.is_some();
        let each = rows.len() * SCORED + if explores { EXPLORED } else { DECIDED };
        check_memory("keys", padded, each)?;
        let mut rooms: Vec<QueryScratch> = rows.iter().map(|_| QueryScratch::default()).collect();
        for scratch in rooms.iter_mut().filter(|_| over_codes) {
            memory::room("keys", &mut scratch.scores, padded)?;
            scratch.scores.resize(padded, 0.0);
        }
        match (&queries[..], &mut rooms[..]) {
            ([(_, Some(a)), (_, Some(b)), (_, Some(c)), (_, Some(d))], [ra, rb, rc, rd]) => {
                let to = [&mut ra.scores[..], &mut rb.scores, &mut rc.scores, &mut rd.scores];
                codes.scan(self.simd, [a, b, c, d], to);
            }
            (queries, rooms) => {
                for ((_, prepared), scratch) in queries.iter().zip(rooms) {
                    if let Some(prepared) = prepared {
                        codes.scan(self.simd, [prepared], [&mut scratch.scores]);
                    }
                }
            }
        }
        // One by one, so that an option that is added does not compile before both ways below have decided: the fast one, and
        // the search that every other option takes. Scale, what bounds scores and threads were seen to before.
        let SearchOptions { scale: _, rule, over: _, max_scored, threads: _ } = *self.options;
        let row_visibility = RowVisibility { prefix: codes.len(), allowed: None };
        rows.iter()
            .zip(queries.iter().zip(&mut rooms))
            .map(|(&row, ((query, prepared), scratch))| {
                let eps = self.eps.of(row);
                let (simd, cells) = (self.simd, self.cells.map(|cells| &cells[head]));
                if let (Rule::Mass, None, None, Some(prepared)) =
                    (rule, max_scored, cells, prepared)
                {
                    let trim = true;
                    let search = ThresholdSearch {
                        simd,
                        codes,
                        keys,
                        query,
                        prepared,
                        row_visibility,
                        eps,
                        trim,
                        beside: None,
                    };
                    return Ok((search.run(scratch)?, true));
                }
                let Some(keys) = keys else { return Err(Error::KeysNeeded) };
                KeyIndex::distinct(self.queries, row, query)?;
                let most = max_scored.unwrap_or(usize::MAX);
                let prepared = prepared.as_ref();
                let explore =
                    BestFirst { simd, codes, cells, keys, query, prepared, rule, eps, most };
                Ok(explore.run(&mut scratch.scores))
            })
            .collect()
    }
}

impl SearchResult {
    fn push(&mut self, found: &Found, eps: f64, met: bool) {
        self.selection.indices.extend_from_slice(&found.kept);
        let status = if found.visible == 0 {
            Status::Empty
        } else if found.upper <= eps && met {
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
