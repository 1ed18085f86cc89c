//! A few rows that keep all keys before a position, scored in f32, which is as fast as keys are read.

use half::{bf16, f16};

use super::few::{BLOCK, Side, portions, reaching, side_by_side};
use super::job::{AttentionJob, MANY};
use super::pending::{PendingRow, grow};
use crate::error::Error;
use crate::index::{Coded, Rung, for_coded_dtype, matrix};
use crate::kernels::{Keys, LANES};
use crate::runtime::reused::Reused;
use crate::runtime::threads;

/// Errors of scores, in nats, that are negligible: a share of the budget, or an error that panels have too.
pub(super) const FINE: f64 = 1.0 / 16.0;
const ALWAYS_FINE: f64 = 1e-4;

/// Appends a query in f32, in whole groups.
pub(super) fn append_narrow(to: &mut Vec<f32>, query: &[f64]) {
    let end = to.len() + query.len().next_multiple_of(LANES);
    to.extend(query.iter().map(|&entry| entry as f32));
    to.resize(end, 0.0);
}

impl AttentionJob<'_> {
    /// Returns a bound on the error of a query's f32 scores that are summed in lanes, as [`AttentionJob::narrow_error`]
    /// does.
    pub(super) fn error_in_lanes(&self, query: &[f64], norm: f64) -> Option<f64> {
        // A lane's fused terms, and a tree over lanes.
        self.narrow_error(query, norm, query.len().div_ceil(LANES) + 4)
    }

    /// Scores all keys that rows see in f32. Returns `false` if f32 does not suffice.
    pub(super) fn score_narrow(
        &self,
        head: usize,
        rows: &mut [PendingRow],
        threads: usize,
    ) -> Result<bool, Error> {
        let sees = |row: &PendingRow| self.query_rows.row_visibility(row.number);
        if !self.fit_together() || rows.iter().any(|row| sees(row).allowed.is_some()) {
            return Ok(false);
        }
        let width = self.keys.dim().next_multiple_of(LANES);
        let norm = self.norm(head)?;
        let mut queries: Reused<f32> = Reused::with_hint(rows.len() * width);
        for row in rows.iter_mut() {
            let Some(error) = self.error_in_lanes(&row.wide, norm) else { return Ok(false) };
            if error > (row.eps * FINE).max(ALWAYS_FINE) {
                return Ok(false);
            }
            row.query.error = error;
            append_narrow(&mut queries, &row.wide);
        }
        let mut side: Side<'_, [f32]> = [const { None }; MANY];
        for ((to, row), query) in side.iter_mut().zip(rows.iter_mut()).zip(queries.chunks(width)) {
            let exact = &mut row.scratch.query.exact;
            grow(exact, row.prefix)?;
            exact.resize(row.prefix, 0.0);
            (row.scored, row.rung) = (row.prefix, Rung::Dense);
            *to = Some((query, exact));
        }
        for_coded_dtype!(self.keys, K => {
            let keys = matrix::<K>(self.keys, head);
            let score = |(from, side): (usize, Side<'_, [f32]>)| self.score_side(keys, from, side);
            threads::map(threads, portions(side), 1, score)?;
            Ok(())
        })?;
        Ok(true)
    }

    /// Scores keys from `first` on.
    fn score_side<K: Coded>(&self, keys: Keys<'_, K>, first: usize, mut side: Side<'_, [f32]>) {
        let (simd, scale) = (self.simd, self.scale as f32);
        let longest = side.iter().flatten().map(|(_, to)| to.len()).max().unwrap_or(0);
        for from in (0..longest).step_by(BLOCK) {
            let end = longest.min(from + BLOCK);
            let alone = |query: &[f32], to: &mut [f64]| {
                simd.scores_shared(keys, first + from, ([query], scale), [to]);
            };
            let Some((mut whole, count)) = reaching(&mut side, from..end, alone) else { break };
            side_by_side!(whole[..count], some => {
                let queries = some.each_ref().map(|(query, _)| *query);
                let to = some.each_mut().map(|(_, to)| &mut **to);
                simd.scores_shared(keys, first + from, (queries, scale), to);
            });
        }
    }
}
