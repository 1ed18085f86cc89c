//! Products of all queries with all keys, in f64.

use super::element::{Coded, for_coded_dtype, matrix};
use crate::error::Error;
use crate::kernels::{BESIDE, Keys, Simd};
use crate::rows::Vectors;
use crate::runtime::interrupt;
use crate::runtime::memory::{check_memory, filled, list, product};
use crate::runtime::threads;
use half::{bf16, f16};

/// Panels of a task: they stay in a second-level cache.
const PANELS: usize = 8;
/// Keys of a task.
const BLOCK: usize = PANELS * BESIDE;
/// Queries that go over a task's panels together: few, so that what is written to a row lies beside what has just been.
const TOGETHER: usize = 8;
/// Terms that a thread adds up between two checks for an interrupt: well under a second.
const PORTION: usize = 1 << 28;
/// Terms up to which one thread is as fast as several: about half a millisecond.
const WORTH_SHARING: usize = 1 << 23;
/// Factor that makes a computed norm at least the real one. A sum of d <= 2^20 squares is off by less than a relative
/// 2^-32, its root by half of that.
const NORM: f64 = 1.0 + 1.0 / 2_147_483_648.0;

/// Writes the products of queries (heads, m, d) with keys (`kv_heads`, n, d), heads a multiple of `kv_heads`, to (heads, m, n), and
/// returns, for each query, the product of its norm and the largest norm of the keys, rounded up.
///
/// With a causal offset, query i has products with the keys up to i + offset; what is written beyond is left open, and keys
/// that no query sees are not looked at. Entries are finite. No term of a product goes through more than
/// d roundings, so it is off by at most `d u / (1 - d u)` times the product of the norms (u = 2^-53; products of numbers of float32
/// and less neither overflow nor underflow). It has the same bits for any number of threads and on every level.
///
/// # Errors
/// [`Error::Shape`] where shapes do not fit or keys are float64, [`Error::Option`] for the threads of the context.
pub fn products(
    queries: &Vectors<'_>,
    keys: &Vectors<'_>,
    causal_offset: Option<i64>,
    to: &mut [f64],
) -> Result<Vec<f64>, Error> {
    let (m, n, dim) = (queries.len(), keys.len(), keys.dim());
    let (heads, kv_heads) = (queries.heads(), keys.heads());
    if queries.dim() != dim || kv_heads == 0 || heads % kv_heads != 0 {
        let problem = "keys must have as many entries, and their heads divide those of the queries";
        return Err(queries.misfit(problem.into()));
    }
    let rows = product("q", &[heads / kv_heads, m])?;
    if to.len() != product("keys", &[kv_heads, rows, n])? {
        return Err(keys.misfit(format!("there are {} places for the products", to.len())));
    }
    let mut reach = filled("q", product("q", &[kv_heads, rows])?, 0.0)?;
    if to.is_empty() {
        return Ok(reach);
    }
    let work = rows.saturating_mul(n).saturating_mul(dim);
    let threads = threads::count(None, work > WORTH_SHARING)?;
    let _modes = threads::default_floats();
    let simd = Simd::current()?;
    // The queries of a head, and the places of each block.
    check_memory("q", rows, n.div_ceil(BLOCK).saturating_mul(size_of::<&mut [f64]>()))?;
    let (mut wide, mut query) = (list("q", product("q", &[rows, dim])?)?, Vec::new());
    for (head, (to, reach)) in to.chunks_mut(rows * n).zip(reach.chunks_mut(rows)).enumerate() {
        wide.clear();
        for row in head * rows..(head + 1) * rows {
            queries.widen(row / m, row % m, &mut query);
            wide.extend_from_slice(&query);
        }
        let all = All { simd, threads, queries: &wide, m, causal_offset };
        let longest = for_coded_dtype!(keys, E => all.products(matrix::<E>(keys, head), n, to))?;
        for (reach, query) in reach.iter_mut().zip(wide.chunks_exact(dim)) {
            let square: f64 = query.iter().map(|entry| entry * entry).sum();
            *reach = square.sqrt() * NORM * (longest.sqrt() * NORM);
        }
    }
    Ok(reach)
}

/// The queries of all heads that share their keys, over which they go.
struct All<'a> {
    simd: Simd,
    threads: usize,
    queries: &'a [f64],
    /// Queries of a head.
    m: usize,
    causal_offset: Option<i64>,
}

impl All<'_> {
    /// Writes the products, row after row; the largest sum of squares of a key that a query sees.
    fn products<E: Coded>(
        &self,
        keys: Keys<'_, E>,
        n: usize,
        to: &mut [f64],
    ) -> Result<f64, Error> {
        // The places of each block of keys, of all rows.
        let mut blocks: Vec<(usize, Vec<&mut [f64]>)> =
            (0..n).step_by(BLOCK).map(|at| (at, Vec::new())).collect();
        for row in to.chunks_exact_mut(n) {
            for ((_, block), places) in blocks.iter_mut().zip(row.chunks_mut(BLOCK)) {
                block.push(places);
            }
        }
        let work = |(at, to): &mut (usize, Vec<&mut [f64]>)| self.block(keys, *at, to);
        let portion = (PORTION / (self.queries.len() * BLOCK)).max(1) * self.threads;
        let mut largest = 0f64;
        for blocks in blocks.chunks_mut(portion) {
            let squares = threads::map(self.threads, blocks, 1, work)?;
            for square in squares {
                largest = largest.max(square?);
            }
            interrupt::check()?;
        }
        Ok(largest)
    }

    /// The products with the keys from one on, as many as there are places in a row.
    fn block<E: Coded>(
        &self,
        keys: Keys<'_, E>,
        from: usize,
        to: &mut [&mut [f64]],
    ) -> Result<f64, Error> {
        let (dim, len) = (keys.dim(), to[0].len());
        // Keys are seen by ever fewer queries.
        let seen = (0..len).take_while(|at| self.first(from + at) < self.m).count();
        let mut squares = vec![0.0; seen];
        let size = BESIDE * dim;
        let mut panels = filled("keys", product("keys", &[seen.div_ceil(BESIDE), size])?, 0.0)?;
        let parts = panels.chunks_exact_mut(size).zip(squares.chunks_mut(BESIDE));
        for (p, (panel, squares)) in parts.enumerate() {
            let some = (from + p * BESIDE, squares.len());
            self.simd.lay_narrow(keys, some, panel, squares);
        }
        let mut found = [0.0; TOGETHER * BESIDE];
        let heads = self.queries.chunks_exact(self.m * dim).zip(to.chunks_exact_mut(self.m));
        for (data, to) in heads {
            for row in (0..self.m).step_by(TOGETHER) {
                let end = self.m.min(row + TOGETHER);
                for (p, panel) in panels.chunks_exact(size).enumerate() {
                    let (at, behind) = (p * BESIDE, seen.min((p + 1) * BESIDE));
                    let row = self.first(from + at).clamp(row, end);
                    let queries = (&data[row * dim..end * dim], dim);
                    self.simd.multiply_wide(panel, queries, (&mut found, BESIDE), 0);
                    for (to, found) in to[row..end].iter_mut().zip(found.chunks_exact(BESIDE)) {
                        to[at..behind].copy_from_slice(&found[..behind - at]);
                    }
                }
            }
        }
        Ok(squares.into_iter().fold(0.0, f64::max))
    }

    /// The first query of a head that sees a key.
    fn first(&self, key: usize) -> usize {
        let Some(offset) = self.causal_offset else { return 0 };
        let first = (key as i64).saturating_sub(offset).max(0);
        usize::try_from(first).map_or(self.m, |first| first.min(self.m))
    }
}
