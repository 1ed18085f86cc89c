//! Keys that are not here: what they weigh by their codes, and which of them a row must have back.
//!
//! A softmax is over keys that are kept elsewhere, whose mass is known to within an interval, and over those of an index, of
//! which there are codes alone. With `U` an upper bound of what the index's keys weigh and `L` a lower bound of what is kept,
//! the row's tail mass is at most `U / (U + L)`. Where that exceeds a budget, the keys with the largest scores by code are
//! named until what codes prove of the others is within it: then these are to be fetched, and no other.

use std::ops::Range;

use super::found::Found;
use super::gram::Sums;
use super::key_index::KeyIndex;
use super::options::RecallOptions;
use super::parts::mass_upper_in_parts;
use super::prepared::Prepared;
use super::query::{BLURRED, Query, RowVisibility};
use super::search::{GROUP, UnitScratch};
use super::threshold_search::ThresholdSearch;
use super::threshold_state::{QueryScratch, Step};
use super::visible::Visible;
use crate::error::Error;
use crate::kernels::{LANES, Simd};
use crate::numerics::certified_sums::SplitSums;
use crate::numerics::log_mass::LogMass;
use crate::numerics::scale::nearest_rsqrt;
use crate::rows::{PerRow, Vectors};
use crate::runtime::memory::{self, check_memory, check_memory_in_each, room};
use crate::runtime::recycled::{self, recycled};
use crate::runtime::reused::Reused;
use crate::runtime::scratch::Lent;
use crate::runtime::threads;

/// Masses of the keys of an index beside those kept elsewhere, a row for each query.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Recall {
    /// Mass of all visible keys of the index.
    pub log_mass: Vec<LogMass>,
    /// The share of the whole softmax that all these keys have, at most: what a row loses that has none of them back.
    pub lost_upper: Vec<f64>,
    /// Offsets into `indices`: the start of each row's part, and the end of the last.
    pub indptr: Vec<i64>,
    /// Positions of the keys that are to be fetched, ascending in each row.
    pub indices: Vec<u32>,
    /// The share of the whole softmax that the other keys of the index have, at most: it is within the budget.
    pub tail_mass_upper: Vec<f64>,
    /// At least.
    pub tail_mass_lower: Vec<f64>,
}

impl Recall {
    /// The positions of a row's keys that are to be fetched, ascending.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[u32] {
        let at = |row: usize| self.indptr[row].unsigned_abs() as usize;
        &self.indices[at(row)..at(row + 1)]
    }
}

/// Relative error of sums and products of few terms in f64, generously.
const SUM_ROUNDING: f64 = 1e-11;

/// Result for a row.
struct Recalled {
    log_mass: LogMass,
    lost: f64,
    indices: Reused<u32>,
    upper: f64,
    lower: f64,
}

/// Results for the rows of a unit.
type FewRecalled = [Option<Recalled>; GROUP];

struct RecallJob<'a> {
    index: &'a KeyIndex<'a>,
    queries: &'a Vectors<'a>,
    beside: Option<PerRow<'a, LogMass>>,
    eps: Option<PerRow<'a, f64>>,
    visible: Visible<'a>,
    scale: f64,
    simd: Simd,
}

impl KeyIndex<'_> {
    /// Bounds the joint mass of the visible keys by their codes alone, an interval for each query. It holds for the
    /// real numbers `scale * q.k` of exactly the stored queries and of the keys that the index was built of. Axes as in
    /// [`KeyIndex::search`].
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// # let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// let query = Vectors::new("q", &data[..4], &[1, 4])?;
    /// let found = index.log_mass(&query, &certk_rs::RecallOptions::new().scale(0.5))?;
    /// let product = |key: &[f32]| key.iter().zip(&data).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    /// let real = data.chunks(4).map(|key| (0.5 * product(key)).exp()).sum::<f64>().ln();
    /// assert!(found[0].lower <= real && real <= found[0].upper);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] where queries do not fit, [`Error::Scale`], [`Error::Length`], [`Error::RowLength`],
    /// [`Error::KeyNotFinite`] for a query.
    pub fn log_mass(
        &self,
        queries: &Vectors<'_>,
        options: &RecallOptions<'_>,
    ) -> Result<Vec<LogMass>, Error> {
        let mut all = self.recalled(queries, None, None, options)?;
        let log_mass = std::mem::take(&mut all.log_mass);
        all.recycle();
        Ok(log_mass)
    }

    /// Names, for each query, keys without which codes prove the share of all others in the whole softmax to be at most `eps`,
    /// where `beside` is what the keys weigh that are kept elsewhere (one for all rows, or one per row): none if they do not
    /// matter. No key is scored; those without a code are fetched whenever any is. With a budget of 0 all are.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// # let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// use certk_rs::{LogMass, RecallOptions};
    /// let query = Vectors::new("q", &data[..4], &[1, 4])?;
    /// let heavy = LogMass::new(90.0, 90.0);
    /// let found = index.recall(&query, &[heavy], &[0.01], &RecallOptions::new())?;
    /// assert!(found.indices.is_empty() && found.lost_upper[0] <= 0.01);
    /// let found = index.recall(&query, &[LogMass::NONE], &[0.01], &RecallOptions::new())?;
    /// assert!(!found.indices.is_empty() && found.tail_mass_upper[0] <= 0.01);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::log_mass`], and [`Error::Eps`].
    pub fn recall(
        &self,
        queries: &Vectors<'_>,
        beside: &[LogMass],
        eps: &[f64],
        options: &RecallOptions<'_>,
    ) -> Result<Recall, Error> {
        self.recalled(queries, Some(beside), Some(eps), options)
    }

    fn recalled(
        &self,
        queries: &Vectors<'_>,
        beside: Option<&[LogMass]>,
        eps: Option<&[f64]>,
        options: &RecallOptions<'_>,
    ) -> Result<Recall, Error> {
        let _modes = threads::default_floats();
        let rows = queries.heads().saturating_mul(queries.len());
        check_memory("q", rows.max(queries.heads()), size_of::<Option<Recalled>>() + 64)?;
        self.suits(queries, None)?;
        let shape = &queries.shape()[..queries.shape().len() - 1];
        let &RecallOptions { scale, lengths, mask, threads } = options;
        let scale = scale.unwrap_or_else(|| nearest_rsqrt(self.dim));
        if !scale.is_finite() {
            return Err(Error::Scale { value: scale });
        }
        let remedy = "pass one, or one per row";
        let beside = beside.map(|each| PerRow::new("beside", each, rows, remedy)).transpose()?;
        let eps =
            eps.map(|each| PerRow::new("eps", each, rows, remedy)?.budgets(shape)).transpose()?;
        let visible = Visible::new(shape, self.len(), false, lengths, mask)?;
        let simd = Simd::current()?;
        let work = rows.saturating_mul(self.len()).saturating_mul(self.dim);
        let threads = threads::count(threads, work > 1 << 21)?;
        check_memory_in_each("keys", threads, (rows, self.len()), 2 * size_of::<f32>())?;
        let job = RecallJob { index: self, queries, beside, eps, visible, scale, simd };
        let units = self.units(queries);
        let mut all: Recall = recycled::empty();
        all.indptr.push(0);
        let portion = (1 << 28)
            / GROUP.saturating_mul(self.len()).saturating_mul(self.dim).max(1 << 12)
            + threads;
        let one = |unit: usize, threads: usize| job.unit(units.at(unit), threads);
        let mut full = Ok(());
        threads::in_shared_portions(threads, units.count(), portion, one, |found| {
            for recalled in found.into_iter().flatten() {
                if full.is_ok() {
                    full = all.push(&recalled);
                }
            }
        })?;
        full.map(|()| all)
    }
}

impl Recall {
    /// # Errors
    /// [`Error::NoMemory`].
    fn push(&mut self, recalled: &Recalled) -> Result<(), Error> {
        let &Recalled { log_mass, lost, ref indices, upper, lower } = recalled;
        room("q", &mut self.indices, indices.len())?;
        self.log_mass.push(log_mass);
        self.lost_upper.push(lost);
        self.indices.extend_from_slice(indices);
        self.indptr.push(self.indices.len() as i64);
        self.tail_mass_upper.push(upper);
        self.tail_mass_lower.push(lower);
        Ok(())
    }

    /// Gives its memory to a later call of this kind on this thread, or under this [`Context`](crate::Context): calls on one thread
    /// then ask for none.
    pub fn recycle(self) {
        recycled::recycle(self);
    }
}

recycled!(Recall { log_mass, lost_upper, indptr, indices, tail_mass_upper, tail_mass_lower });

impl RecallJob<'_> {
    /// A few rows over one head's codes.
    fn unit(
        &self,
        (head, rows): (usize, Range<usize>),
        threads: usize,
    ) -> Result<FewRecalled, Error> {
        let codes = &self.index.heads[head];
        let mut scratch = Lent::<UnitScratch>::new();
        let UnitScratch { rows: rooms, wide } = &mut *scratch;
        let mut queries: Reused<(Query, Prepared)> = Reused::with_hint(rows.len());
        for row in rows.clone() {
            let query = self.index.query(self.queries, row, head, self.scale, wide)?;
            queries.push((query, codes.prepare(self.simd, wide, self.scale)));
        }
        let padded = codes.len().next_multiple_of(LANES);
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
        let mut all = FewRecalled::default();
        for (to, (row, ((query, prepared), scratch))) in
            all.iter_mut().zip(rows.zip(queries.iter().zip(rooms)))
        {
            *to = Some(self.row(head, row, query, prepared, scratch)?);
        }
        Ok(all)
    }

    fn row(
        &self,
        head: usize,
        row: usize,
        query: &Query,
        prepared: &Prepared,
        scratch: &mut QueryScratch,
    ) -> Result<Recalled, Error> {
        let codes = &self.index.heads[head];
        let sees = self.visible.row(row);
        let log_mass = self.weigh(head, &sees, query, prepared, scratch);
        let Some((beside, eps)) = self.beside.zip(self.eps) else {
            return Ok(Recalled {
                log_mass,
                lost: 1.0,
                indices: Reused::new(),
                upper: 1.0,
                lower: 0.0,
            });
        };
        let (beside, eps) = (beside.of(row), eps.of(row));
        let (upper, lower) = share(log_mass, beside);
        if upper <= eps {
            return Ok(Recalled { log_mass, lost: upper, indices: Reused::new(), upper, lower });
        }
        let lost = upper;
        let search = ThresholdSearch::<f32> {
            simd: self.simd,
            codes,
            keys: None,
            query,
            prepared,
            row_visibility: sees,
            eps,
            trim: true,
            beside: Some(beside),
        };
        let known = query.error <= BLURRED;
        match if known { search.choose(scratch, &mut None)? } else { Step::Dense { flat: false } } {
            Step::Done(Found { kept: indices, upper, lower, .. }) => {
                Ok(Recalled { log_mass, lost, indices, upper, lower })
            }
            Step::Dense { .. } | Step::Score(_) => {
                let all = (0..codes.len() as u32).filter(|&key| sees.sees(key as usize));
                Ok(Recalled { log_mass, lost, indices: all.collect(), upper: 0.0, lower: 0.0 })
            }
        }
    }

    /// Bounds the mass of the keys that a row sees by their codes; masks the scores of the others.
    fn weigh(
        &self,
        head: usize,
        sees: &RowVisibility<'_>,
        query: &Query,
        prepared: &Prepared,
        scratch: &mut QueryScratch,
    ) -> LogMass {
        let codes = &self.index.heads[head];
        scratch.scores[sees.prefix.min(codes.len())..].fill(f32::NEG_INFINITY);
        if let Some(allowed) = sees.allowed {
            for (score, &allowed) in scratch.scores.iter_mut().zip(allowed) {
                if allowed == 0 {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        let bare = codes.uncoded().filter(|&key| sees.sees(key as usize)).count();
        let (survey, _) = self.simd.scan(&scratch.scores, None);
        let error = &prepared.code_error;
        let known = error.says_something() && query.error <= BLURRED && !survey.nan;
        if !known || survey.largest == f32::INFINITY {
            return if sees.count() == 0 { LogMass::NONE } else { LogMass::UNKNOWN };
        }
        let coded = if survey.largest == f32::NEG_INFINITY {
            LogMass::NONE
        } else {
            let largest = survey.largest;
            let below = self.simd.whole(&scratch.scores, largest);
            let sums = Sums::computed(below.weights, below.squares, 1.0, below.count);
            let at = f64::from(largest) + prepared.offset;
            let low = error.mass_lower_of_few(&sums);
            let high = mass_upper_in_parts(self.simd, error, &scratch.scores, largest, &below);
            LogMass::of(low * (1.0 - SUM_ROUNDING), high * (1.0 + SUM_ROUNDING), at, query.error)
        };
        if bare == 0 {
            return coded;
        }
        // Of keys without a code no more is known than how large their entries are.
        let length: f64 = query.entries.iter().map(|entry| entry.abs()).sum();
        let most = length * f64::from(codes.largest()) * self.scale.abs() * (1.0 + SUM_ROUNDING);
        let bare = LogMass::of(0.0, bare as f64, most, query.error);
        coded.plus(bare)
    }
}

/// The share of a softmax that some keys have beside others, at most and at least.
fn share(tail: LogMass, head: LogMass) -> (f64, f64) {
    if tail == LogMass::NONE {
        return (0.0, 0.0);
    }
    let at = head.lower.max(tail.lower);
    let at = if at.is_finite() { at } else { 0.0 };
    let ((tail_low, tail_high), (head_low, head_high)) = (tail.weights(at), head.weights(at));
    let part = |tail, head| SplitSums { tail, dropped: 1, head, kept: 1 };
    let upper = part(tail_high, head_low).upper(SUM_ROUNDING, 0.0);
    (upper, part(tail_low, head_high).lower(SUM_ROUNDING, 0.0).min(upper))
}
