//! Searches over an index for batches of queries.

use std::ops::Range;

use super::best_first::BestFirst;
use super::element::{Coded, for_coded_dtype, matrix};
use super::found::{Found, Rung};
use super::key_index::KeyIndex;
use super::options::{Rule, SearchOptions};
use super::prepared::Prepared;
use super::query::{BLURRED, Query};
use super::threshold_search::ThresholdSearch;
use super::threshold_state::QueryScratch;
use super::visible::Visible;
use crate::certificate::Status;
use crate::error::Error;
use crate::kernels::{LANES, Simd};
use crate::numerics::scale::nearest_rsqrt;
use crate::rows::{PerRow, Vectors};
use crate::runtime::held::held;
use crate::runtime::memory::{self, check_memory, check_memory_in_each, room};
use crate::runtime::recycled::{self, recycled};
use crate::runtime::reused::Reused;
use crate::runtime::scratch::Lent;
use crate::runtime::threads;
use crate::select::{Decision, Selection};
use half::{bf16, f16};

/// The sets found, and how.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SearchResult {
    /// The kept sets with their certificates.
    pub selection: Selection,
    /// Number of keys scored exactly, per row.
    pub scored: Vec<i64>,
    /// Method by which each row was answered.
    pub rung: Vec<Rung>,
}

impl SearchResult {
    /// The positions kept of a row, ascending.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[u32] {
        self.selection.row(row)
    }
}

/// Queries that share a scan.
pub(super) const GROUP: usize = 4;
/// Bytes of a key that each query of a group may hold: an exact score, and a list of what is kept, which grows by doubling.
const SCORED: usize = 16;
/// Bytes of a key while a query is decided: selection from exact scores.
const DECIDED: usize = 32;
/// The same where bounds are put in order: units of keys, what they weigh from each on, and lists of those scored.
const EXPLORED: usize = 136;
/// Entries that a group counts at least: what is found waits for the rest of the portion.
const LEAST: usize = 1 << 12;
/// Fewer products by codes are computed before another thread has woken up.
const WORTH: usize = 1 << 21;

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
    /// With lengths, a causal limit or a mask a row's softmax is over the keys that it sees, and so is its certificate; a row that
    /// sees none keeps none, and its status is empty.
    ///
    /// ```
    /// use certk_rs::{IndexOptions, KeyIndex, SearchOptions, Vectors};
    /// let data: Vec<f32> = (0..40 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let keys = Vectors::new("keys", &data[..], &[40, 4])?;
    /// let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// let queries = Vectors::new("q", &data[..8], &[2, 4])?;
    /// // The last query sees all keys, the one before it all but one.
    /// let found = index.search(&queries, Some(&keys), &[0.1], &SearchOptions::new().causal(true))?;
    /// assert!(found.selection.tail_mass_upper.iter().all(|&lost| lost <= 0.1));
    /// assert!(found.selection.row(0).iter().all(|&key| key < 39));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] where queries or keys do not fit, [`Error::OtherKeys`] for keys of another type, [`Error::Eps`],
    /// [`Error::Scale`], [`Error::Length`], [`Error::RowLength`], [`Error::KeyNotFinite`], [`Error::Number`] for products too large for f64 to tell scores apart (by
    /// mass over codes all keys are then kept), [`Error::Option`] for k, [`Error::KeysNeeded`] if `keys` is `None` and codes alone do not decide a row by mass.
    pub fn search(
        &self,
        queries: &Vectors<'_>,
        keys: Option<&Vectors<'_>>,
        eps: &[f64],
        options: &SearchOptions<'_>,
    ) -> Result<SearchResult, Error> {
        let _modes = threads::default_floats();
        let rows = queries.heads().saturating_mul(queries.len());
        // Of each row what is found, in the meantime and in the end, and its place in a group.
        let each = 2 * size_of::<Option<(Found, bool)>>() + Selection::ROW + 96;
        check_memory("q", rows.max(queries.heads()), each)?;
        self.suits(queries, keys)?;
        let remedy = "pass one budget, or one per row";
        let shape = &queries.shape()[..queries.shape().len() - 1];
        let eps = if eps.is_empty() && matches!(options.rule, Rule::TopK(_)) {
            PerRow::new("eps", &[1.0], rows, remedy)?
        } else {
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
        let SearchOptions { lengths, causal, mask, .. } = *options;
        let visible = Visible::new(shape, self.len(), causal, lengths, mask)?;
        let simd = Simd::current()?;
        let work = rows.saturating_mul(self.len()).saturating_mul(self.dim);
        let threads = threads::count(options.threads, work > WORTH)?;
        check_memory_in_each("keys", threads, (rows, self.len()), size_of::<f32>())?;
        let job = SearchJob { index: self, queries, eps, visible, scale, simd, options };
        let units = self.units(queries);
        let mut result: SearchResult = recycled::empty();
        result.selection.indptr.push(0);
        let portion = (1 << 28)
            / GROUP.saturating_mul(self.len()).saturating_mul(self.dim).max(LEAST)
            + threads;
        let one = |unit: usize, threads: usize| -> Result<FewFound, Error> {
            let at = units.at(unit);
            match keys {
                Some(keys) => for_coded_dtype!(keys, E => job.unit::<E>(at, Some(keys), threads)),
                None => job.unit::<f32>(at, None, threads),
            }
        };
        let mut full = Ok(());
        threads::in_shared_portions(threads, units.count(), portion, one, |found| {
            for (found, met) in found.into_iter().flatten() {
                let row = result.scored.len();
                if full.is_ok() {
                    full = result.push(&found, eps.of(row), met);
                }
            }
        })?;
        full.map(|()| result)
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
        if self.served_by_each(queries).is_none() {
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

    /// Returns the number of consecutive matrices of queries that each head of keys serves. A single head without batch
    /// axes serves all.
    pub(super) fn served_by_each(&self, queries: &Vectors<'_>) -> Option<usize> {
        if self.batch.is_empty() {
            return Some(queries.heads().max(1));
        }
        queries.heads_for_each(&self.batch)
    }

    /// Rows that share a head's codes, a few at a time.
    pub(super) fn units(&self, queries: &Vectors<'_>) -> Units {
        let rows = self.served_by_each(queries).unwrap_or(0) * queries.len();
        Units { heads: self.heads.len(), rows }
    }
}

/// A head's rows, one behind another, a few at a time.
pub(super) struct Units {
    heads: usize,
    /// Of each head.
    rows: usize,
}

impl Units {
    fn of_head(&self) -> usize {
        self.rows.div_ceil(GROUP)
    }

    pub(super) fn count(&self) -> usize {
        self.heads * self.of_head()
    }

    /// A head, and rows of it.
    pub(super) fn at(&self, unit: usize) -> (usize, Range<usize>) {
        let (head, part) = (unit / self.of_head(), unit % self.of_head());
        let end = self.rows.min((part + 1) * GROUP);
        (head, head * self.rows + part * GROUP..head * self.rows + end)
    }
}

/// Results for the rows of a unit, and `true` if the rule has been met.
type FewFound = [Option<(Found, bool)>; GROUP];

/// Scratch of the rows of a unit.
#[derive(Default)]
pub(super) struct UnitScratch {
    pub(super) rows: [QueryScratch; GROUP],
    pub(super) wide: Vec<f64>,
}

held!(UnitScratch { rows, wide });

struct SearchJob<'a> {
    index: &'a KeyIndex<'a>,
    queries: &'a Vectors<'a>,
    eps: PerRow<'a, f64>,
    visible: Visible<'a>,
    scale: f64,
    simd: Simd,
    options: &'a SearchOptions<'a>,
}

impl SearchJob<'_> {
    /// A few rows over one head's keys.
    fn unit<E: Coded>(
        &self,
        (head, rows): (usize, Range<usize>),
        keys: Option<&Vectors<'_>>,
        threads: usize,
    ) -> Result<FewFound, Error> {
        let codes = &self.index.heads[head];
        let keys = keys.map(|keys| matrix::<E>(keys, head));
        let mut scratch = Lent::<UnitScratch>::new();
        let UnitScratch { rows: rooms, wide } = &mut *scratch;
        let mut queries: Reused<(Query, Prepared)> = Reused::with_hint(rows.len());
        for row in rows.clone() {
            let query = self.index.query(self.queries, row, head, self.scale, wide)?;
            queries.push((query, codes.prepare(self.simd, wide, self.scale)));
        }
        let padded = codes.len().next_multiple_of(LANES);
        let SearchOptions { rule, max_scored, .. } = *self.options;
        let explores = rule != Rule::Mass || max_scored.is_some();
        let each = rows.len() * SCORED + if explores { EXPLORED } else { DECIDED };
        check_memory("keys", padded, each)?;
        let rooms = &mut rooms[..rows.len()];
        for scratch in &mut *rooms {
            scratch.forget();
            let more = padded.saturating_sub(scratch.scores.len());
            memory::room("keys", &mut scratch.scores, more)?;
            scratch.scores.resize(padded, 0.0);
        }
        match (&queries[..], &mut *rooms) {
            ([(_, a), (_, b), (_, c), (_, d)], [ra, rb, rc, rd]) => {
                let to = [&mut ra.scores[..], &mut rb.scores, &mut rc.scores, &mut rd.scores];
                codes.scan(self.simd, [a, b, c, d].map(Prepared::coarse), to, threads)?;
            }
            (queries, rooms) => {
                for ((_, prepared), scratch) in queries.iter().zip(rooms) {
                    codes.scan(self.simd, [prepared.coarse()], [&mut scratch.scores], threads)?;
                }
            }
        }
        // One by one, so that an option that is added does not compile before both ways below have decided: the fast one, and
        // the search that every other option takes. Scale, what is seen and threads were judged before.
        let SearchOptions {
            scale: _,
            rule,
            max_scored,
            causal: _,
            lengths: _,
            mask: _,
            threads: _,
        } = *self.options;
        let mut all = FewFound::default();
        for (to, (row, ((query, prepared), scratch))) in
            all.iter_mut().zip(rows.zip(queries.iter().zip(rooms)))
        {
            let mut one = || {
                let eps = self.eps.of(row);
                let row_visibility = self.visible.row(row);
                let simd = self.simd;
                if let (Rule::Mass, None) = (rule, max_scored) {
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
                    return Ok((search.run(scratch, threads)?, true));
                }
                let Some(keys) = keys else { return Err(Error::KeysNeeded) };
                let seen = row_visibility.count();
                KeyIndex::distinct(self.queries, row, query)?;
                let most = max_scored.unwrap_or(usize::MAX);
                let explore = BestFirst {
                    simd,
                    codes,
                    keys,
                    query,
                    prepared,
                    row_visibility,
                    seen,
                    rule,
                    eps,
                    most,
                };
                explore.run(&mut scratch.scores)
            };
            *to = Some(one()?);
        }
        Ok(all)
    }
}

impl SearchResult {
    /// # Errors
    /// [`Error::NoMemory`].
    fn push(&mut self, found: &Found, eps: f64, met: bool) -> Result<(), Error> {
        room("q", &mut self.selection.indices, found.kept.len())?;
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
        Ok(())
    }

    /// Gives its memory to a later call of this kind on this thread, or under this [`Context`](crate::Context): calls on one thread
    /// then ask for none.
    pub fn recycle(self) {
        recycled::recycle(self);
    }
}

recycled!(SearchResult { selection, scored, rung });
