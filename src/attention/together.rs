//! Many rows that keep everything, in f32.

use half::{bf16, f16};

use super::work::Answer;
use super::{Job, MANY};
use crate::error::Error;
use crate::kernels::{Element, Keys, LANES, PANEL_KEYS, PANEL_ROWS, PANEL_RUN, PanelRows};
use crate::keys::{Rung, by_type, matrix};
use crate::scores::Data;

/// One rounding of f32.
const U: f64 = 1.0 / 16_777_216.0;
/// Sizes of products and scales up to which nothing overflows in f32.
const SAFE: f64 = 1e36;
/// Relative error of a weight of a given score, the difference from the largest included (`mass` has less).
const WEIGHT: f64 = 216.0 * U;
/// Relative error of a block's sum of weights, and of one of weighted values.
const SUMS: f64 = 2.0 * (PANEL_KEYS as f64 + 2.0) * U;

impl Job<'_> {
    /// Whether rows of this call can be answered together at all.
    pub(super) fn fit_together(&self) -> bool {
        let wide = |data: &Data<'_>| matches!(data, Data::F64(_));
        self.sights.options.mask.is_none() && !wide(&self.keys.data) && !wide(&self.values.data)
    }

    /// Answers rows in f32 over all that they see; `None` if they are too few, masked one by one, or if f32 cannot hold
    /// what is stored.
    pub(super) fn together(
        &self,
        head: usize,
        rows: &[usize],
    ) -> Result<Option<Vec<Answer>>, Error> {
        if rows.len() < MANY || !self.fit_together() {
            return Ok(None);
        }
        let queries = rows.iter().map(|&row| self.query(row)).collect::<Result<Vec<_>, _>>()?;
        let norm = self.norm(head)?;
        let scale = self.scale.abs();
        let mut errors = Vec::with_capacity(rows.len());
        for query in &queries {
            let own = query.iter().map(|entry| entry * entry).sum::<f64>().sqrt();
            // What a sum of products can be at most, whichever of its terms are added (Cauchy, Schwarz).
            let most = own * norm * (1.0 + 1e-12);
            let exact = query.iter().all(|&entry| f64::from(entry as f32) == entry);
            let scale_fits = scale == 0.0 || (1.0 / SAFE..SAFE).contains(&scale);
            if !(exact && scale_fits && most < SAFE && most * scale < SAFE) {
                return Ok(None);
            }
            // A run of fused terms, the sums of runs, the scale's rounding and the product's.
            let roundings = (PANEL_RUN + query.len() / PANEL_RUN + 4) as f64 * U;
            let roundings = roundings / (1.0 - roundings).max(0.0) * 1.001;
            // Terms that are subnormal.
            let flushed = query.len() as f64 * 2f64.powi(-148) * scale + 2f64.powi(-148);
            errors.push(scale * most * roundings + flushed);
        }
        let dim = self.values.dim();
        let shape = (self.keys.dim(), dim.next_multiple_of(LANES));
        let entries = queries.iter().map(Vec::as_slice);
        let mut panel = PanelRows::new(entries, shape, self.scale as f32);
        let visible: Vec<usize> = rows.iter().map(|&row| self.sights.sight(row).visible).collect();
        by_type!(self.keys, K => {
            let keys = matrix::<K>(self.keys, head);
            by_type!(self.values, V => {
                self.over(keys, matrix::<V>(self.values, head), &visible, &mut panel);
                Ok(())
            })
        })?;
        let answer = |(at, error): (usize, f64)| {
            let (total, sums) = panel.row(at);
            let mut out = sums.to_vec();
            if total > 0.0 {
                for entry in &mut out {
                    *entry /= total;
                }
            }
            // Values that are not finite, or that f32 cannot add, are for more careful hands.
            if out[..dim].iter().any(|entry| !entry.is_finite()) {
                return None;
            }
            let seen = visible[at];
            let (grown, rung) = (error.exp_m1(), Rung::Dense);
            let (weight_error, sum_error) = (grown + WEIGHT * (1.0 + grown), SUMS);
            Some(Answer {
                out,
                upper: 0.0,
                kept: seen,
                scored: seen,
                rung,
                weight_error,
                sum_error,
            })
        };
        Ok(errors.into_iter().enumerate().map(answer).collect())
    }

    /// Takes rows over the keys that they see, block by block.
    fn over<K: Element<Scalar = f32>, V: Element<Scalar = f32>>(
        &self,
        keys: Keys<'_, K>,
        values: Keys<'_, V>,
        visible: &[usize],
        panel: &mut PanelRows,
    ) {
        let longest = visible.iter().copied().max().unwrap_or(0);
        let (mut of_keys, mut of_values) = (Vec::new(), Vec::new());
        let mut limits = [0.0f32; PANEL_ROWS];
        for from in (0..longest).step_by(PANEL_KEYS) {
            let block = (from, PANEL_KEYS.min(longest - from));
            for (limit, &visible) in limits.iter_mut().zip(visible) {
                *limit = visible.saturating_sub(from).min(PANEL_KEYS) as f32;
            }
            let width = |dim: usize| dim.next_multiple_of(LANES);
            let keys = self.simd.lend(keys, block, width(keys.dim()), &mut of_keys);
            let values = self.simd.lend(values, block, width(values.dim()), &mut of_values);
            self.simd.attend(panel, keys, values, block.1, &limits);
        }
    }

    /// The largest norm of a head's keys that some row of the head sees.
    fn norm(&self, head: usize) -> Result<f64, Error> {
        if let Some(&norm) = self.norms[head].get() {
            return Ok(norm);
        }
        let rows = self.sights.rows_of(head);
        let longest = rows.map(|row| self.sights.sight(row).visible).max().unwrap_or(0);
        let norm = by_type!(self.keys, K => {
            let keys = matrix::<K>(self.keys, head);
            let centre = vec![0.0; keys.dim().next_multiple_of(LANES)];
            let square = self.simd.farthest(keys, longest, &centre);
            if square.is_finite() {
                Ok(square.sqrt() * (1.0 + 1e-12))
            } else {
                let finite = |entry: &K| Into::<f64>::into(entry.widen()).is_finite();
                let bad = |&key: &usize| !keys.row(key).iter().all(finite);
                let key = (0..longest).find(bad).unwrap_or(0);
                Err(self.bad_key(head, key, square))
            }
        })?;
        Ok(*self.norms[head].get_or_init(|| norm))
    }
}
