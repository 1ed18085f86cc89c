//! Tail masses from a few exact scores, drawn in proportion to what codes say: right with a stated probability only.

use super::codes::Codes;
use super::element::{Coded, for_coded_dtype, matrix};
use super::key_index::KeyIndex;
use super::query::Query;
use crate::error::{Error, Place};
use crate::kernels::{LANES, Picked, Simd};
use crate::montecarlo::{TailEstimate, TailOptions, tail_mass_of_drawn};
use crate::numerics::random::{GOLDEN, stirred};
use crate::numerics::scale::nearest_rsqrt;
use crate::rows::{Keep, PerRow, Scores, Vectors};
use crate::runtime::memory::{check_memory, check_memory_in_each, filled};
use crate::runtime::threads;
use half::{bf16, f16};

impl KeyIndex<'_> {
    /// Bounds the tail mass that a kept set drops from each row, scoring only kept keys and a few drawn ones.
    ///
    /// This is no certificate of the deterministic kind: each end of a row's interval is wrong with probability at most
    /// `options.delta` over the draws, provided that the kept set was fixed before. Draws are with replacement and in
    /// proportion to e^(upper bound of the score by the code). Rows have shape `(..., m)`, as queries without their last axis;
    /// the other arguments are those of [`KeyIndex::search`] and [`crate::montecarlo::tail_mass`].
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// # let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// use certk_rs::{Keep, montecarlo::TailOptions};
    /// let query = Vectors::new("q", &data[..4], &[1, 4])?;
    /// let keep = Keep::Indices { indptr: &[0, 3], indices: &[0, 7, 11] };
    /// let found = index.tail_mass(&query, &keys, &keep, None, &TailOptions::new(0.01, 64))?;
    /// assert!(found.lower[0] <= found.point[0] && found.point[0] <= found.upper[0]);
    /// assert!(found.draws[0] <= 64);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As those two.
    pub fn tail_mass(
        &self,
        queries: &Vectors<'_>,
        keys: &Vectors<'_>,
        keep: &Keep<'_>,
        scale: Option<f64>,
        options: &TailOptions,
    ) -> Result<TailEstimate, Error> {
        let _modes = threads::default_floats();
        check_memory("q", queries.heads(), size_of::<usize>())?;
        self.suits(queries, Some(keys))?;
        let rows = queries.heads().saturating_mul(queries.len());
        let scale = scale.unwrap_or_else(|| nearest_rsqrt(self.dim));
        if !scale.is_finite() {
            return Err(Error::Scale { value: scale });
        }
        let per_row = |eps| PerRow::new("eps", eps, rows, "pass one budget, or one per row");
        let budgets = options.eps.as_deref().map(per_row).transpose()?;
        let work = rows.saturating_mul(self.len()).saturating_mul(self.dim);
        let threads = threads::count(options.threads, work > 1 << 20)?;
        check_memory_in_each("keys", threads, (rows, self.len()), 40)?;
        let delta = if options.all_rows && rows > 1 {
            (options.delta / rows as f64).next_down()
        } else {
            options.delta
        };
        let served = self.served_by_each(queries).unwrap_or(1);
        let simd = Simd::current()?;
        let one = |row: usize| {
            let options = TailOptions {
                delta,
                all_rows: false,
                draws: options.draws,
                method: options.method,
                seed: seed_of(options.seed, row),
                eps: budgets.map(|eps| vec![eps.of(row)]),
                threads: Some(1),
            };
            let job = RowEstimate {
                index: self,
                queries,
                simd,
                scale,
                at: row,
                head: row / queries.len() / served,
            };
            for_coded_dtype!(keys, E => job.estimate::<E>(keys, keep, &options))
        };
        let mut result = TailEstimate::room(rows)?;
        threads::in_portions(threads, rows, (threads * 4, 1), one, |estimate| {
            result.lower.extend(estimate.lower);
            result.upper.extend(estimate.upper);
            result.point.extend(estimate.point);
            result.draws.extend(estimate.draws);
        })?;
        Ok(result)
    }
}

/// A seed for each row: the given one for the first.
fn seed_of(seed: u64, row: usize) -> u64 {
    if row == 0 { seed } else { stirred(seed ^ (row as u64).wrapping_mul(GOLDEN)) }
}

/// One row.
struct RowEstimate<'a> {
    index: &'a KeyIndex<'a>,
    queries: &'a Vectors<'a>,
    simd: Simd,
    scale: f64,
    at: usize,
    head: usize,
}

impl RowEstimate<'_> {
    fn estimate<E: Coded>(
        &self,
        keys: &Vectors<'_>,
        keep: &Keep<'_>,
        options: &TailOptions,
    ) -> Result<TailEstimate, Error> {
        let codes = &self.index.heads[self.head];
        let mut wide = Vec::new();
        let query = self.index.query(self.queries, self.at, self.head, self.scale, &mut wide)?;
        KeyIndex::distinct(self.queries, self.at, &query)?;
        let prepared = codes.prepare(self.simd, &wide, self.scale);
        let matrix = matrix::<E>(keys, self.head);
        // Bounds of all keys, those of them that are known, and the kept ones, lists that grow by doubling.
        check_memory("keys", codes.len(), 40)?;
        let mut coarse = filled("keys", codes.len().next_multiple_of(LANES), 0.0)?;
        codes.scan(self.simd, [&prepared], [&mut coarse], 1)?;
        let score = |query: &Query, listed: &[u32]| {
            let mut to = vec![0.0; listed.len()];
            query.score(self.simd, matrix, Picked::Listed(listed), prepared.offset, &mut to);
            to
        };
        let (bounds, certain) = bounds(codes, &prepared.code_error, &coarse, &query);
        let mut bounds = bounds;
        for (&key, exact) in certain.iter().zip(score(&query, &certain)) {
            bounds[key as usize] = exact + 1.25 * query.error;
        }
        let kept = self.kept(keep, codes.len())?;
        let keep = Keep::Indices { indptr: &[0, kept.len() as i64], indices: &kept };
        let rows = Scores::new(&bounds[..], &[codes.len()])?;
        let fetch = &mut |positions: &[usize]| -> Result<Vec<f64>, Error> {
            let listed: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
            Ok(score(&query, &listed))
        };
        let mut found = tail_mass_of_drawn(&rows, &keep, fetch, options).map_err(|error| {
            // The bounds are not the caller's.
            let Error::Option { argument: "upper_bounds", .. } = error else { return error };
            KeyIndex::blurred(self.queries, self.at, &query)
        })?;
        // Scores were taken for exact; each may be off by the query's error, so that odds may be off by twice that.
        let factor = (2.0 * query.error).exp() * (1.0 + 1e-12);
        for upper in found.upper.iter_mut().filter(|upper| **upper > 0.0) {
            *upper = moved(*upper, factor).next_up().min(1.0);
        }
        for lower in found.lower.iter_mut().filter(|lower| **lower < 1.0) {
            *lower = moved(*lower, 1.0 / factor).next_down().max(0.0);
        }
        Ok(found)
    }

    /// The row's kept positions.
    fn kept(&self, keep: &Keep<'_>, n: usize) -> Result<Vec<i64>, Error> {
        let shape = self.queries.shape();
        let (batch, rows) = (&shape[..shape.len() - 1], self.queries.heads() * self.queries.len());
        let place = Place::unravel(batch, self.at);
        let remedy = "one list of positions, or one mask of all keys, per row";
        match *keep {
            Keep::Mask { kept, strides } => {
                let start: usize = place.0.iter().zip(strides).map(|(i, stride)| i * stride).sum();
                let Some(kept) = kept.get(start..start + n) else {
                    let (got, expected) = (kept.len(), start + n);
                    return Err(Error::Length { argument: "keep", got, expected, remedy });
                };
                Ok((0..n).filter(|&i| kept[i] != 0).map(|i| i as i64).collect())
            }
            Keep::Indices { indptr, .. } | Keep::Positions { indptr, .. } => {
                let at = |i: usize| indptr.get(i).and_then(|&at| usize::try_from(at).ok());
                let ends = at(self.at).zip(at(self.at + 1)).filter(|_| indptr.len() == rows + 1);
                let listed = ends.and_then(|(from, to)| match *keep {
                    Keep::Indices { indices, .. } => Some(indices.get(from..to)?.to_vec()),
                    Keep::Positions { positions, .. } => {
                        Some(positions.get(from..to)?.iter().copied().map(i64::from).collect())
                    }
                    Keep::Mask { .. } => None,
                });
                let Some(kept) = listed else {
                    let (got, expected) = (indptr.len().saturating_sub(1), rows);
                    return Err(Error::Length { argument: "keep", got, expected, remedy });
                };
                let outside = |value: &&i64| usize::try_from(**value).map_or(true, |at| at >= n);
                match kept.iter().find(outside) {
                    Some(&value) => Err(Error::KeepRange { place, value, n }),
                    None => Ok(kept),
                }
            }
        }
    }
}

/// A bound that is off by more nats is none: its key would be drawn again and again, for nothing.
const USELESS: f64 = 40.0;

/// Upper bounds of all exact scores as they are computed, and the keys that have none.
fn bounds(
    codes: &Codes,
    code_error: &super::gram::CodeError,
    coarse: &[f32],
    query: &Query,
) -> (Vec<f64>, Vec<u32>) {
    let mut certain = Vec::new();
    let bound = |((key, score), radius): ((usize, &f32), f64)| {
        let reach = code_error.reach_of(radius);
        let bound = f64::from(*score) + reach + 2.5 * query.error;
        if !(score.is_finite() && reach <= USELESS) {
            certain.push(key as u32);
        }
        bound.next_up()
    };
    let bounds = coarse[..codes.len()].iter().enumerate().zip(codes.radii()).map(bound).collect();
    (bounds, certain)
}

/// A tail mass when its odds are multiplied.
fn moved(mass: f64, factor: f64) -> f64 {
    let odds = mass * factor;
    odds / ((1.0 - mass) + odds)
}
