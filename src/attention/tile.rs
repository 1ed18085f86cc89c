//! Many rows that keep everything, in f32.

use half::{bf16, f16};

use super::job::{Answer, AttentionJob};
use super::sink::Sunk;
use crate::error::Error;
use crate::index::{RowVisibility, Rung, for_coded_dtype, matrix};
use crate::kernels::{
    BlockMask, Element, Keys, LANES, PANEL_KEYS, PANEL_ROWS, PANEL_RUN, PanelRows,
};
use crate::rows::Stored;
use crate::runtime::ambient::asked_each;
use crate::runtime::reused::Reused;

/// One rounding of f32.
pub(super) const U: f64 = 1.0 / 16_777_216.0;
/// Sizes of products and scales up to which nothing overflows in f32.
const SAFE: f64 = 1e36;
/// Relative error of a weight of a given score, the difference from the largest included (`mass` has less).
pub(super) const WEIGHT: f64 = 216.0 * U;
/// Relative error of a block's sum of weights, and of one of weighted values.
const SUMS: f64 = 2.0 * (PANEL_KEYS as f64 + 2.0) * U;

impl AttentionJob<'_> {
    /// Returns `true` if rows of this call can be answered together at all.
    pub(super) fn fit_together(&self) -> bool {
        let wide = |data: &Stored<'_>| matches!(data, Stored::F64(_));
        !wide(&self.keys.data) && !wide(&self.values.data)
    }

    /// Answers rows in f32 over all that they see; `None` if f32 cannot hold the stored numbers.
    pub(super) fn attend_tile(
        &self,
        head: usize,
        rows: &[usize],
    ) -> Result<Option<Reused<Answer>>, Error> {
        if !self.fit_together() {
            return Ok(None);
        }
        let queries = rows.iter().map(|&row| self.query(row)).collect::<Result<Reused<_>, _>>()?;
        let norm = self.norm(head)?;
        let mut errors: Reused<f64> = Reused::with_hint(rows.len());
        for query in &queries {
            // A run of fused terms, and the sums of runs.
            let deep = PANEL_RUN + query.len() / PANEL_RUN;
            let Some(error) = self.narrow_error(query, norm, deep) else { return Ok(None) };
            errors.push(error);
        }
        let dim = self.values.dim();
        let shape = (self.keys.dim(), dim.next_multiple_of(LANES));
        let entries = queries.iter().map(|query| query.as_slice());
        let mut panel = PanelRows::new(entries, shape, self.scale as f32);
        let mut visibility = [RowVisibility { prefix: 0, allowed: None }; PANEL_ROWS];
        for (to, &row) in visibility.iter_mut().zip(rows) {
            *to = self.query_rows.row_visibility(row);
        }
        let visibility = &visibility[..rows.len()];
        for_coded_dtype!(self.keys, K => {
            let keys = matrix::<K>(self.keys, head);
            for_coded_dtype!(self.values, V => {
                self.over(keys, matrix::<V>(self.values, head), visibility, &mut panel);
                Ok(())
            })
        })?;
        let answer = |(at, error): (usize, f64)| {
            let (top, total, sums) = panel.row(at);
            let sunk = self.with_sink(rows[at], total, (top, 0.0), (error, 0.0));
            let Sunk { total, slip, .. } = sunk;
            let error = error + slip;
            let mut out: Reused<f64> = sums.iter().copied().collect();
            if total > 0.0 {
                let share = 1.0 / total;
                for entry in &mut out {
                    *entry *= share;
                }
            }
            // Values that are not finite, or that f32 cannot add, are for more careful hands.
            if out[..dim].iter().any(|entry| !entry.is_finite()) {
                return None;
            }
            let seen = visibility[at].count();
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
                coded_error: 0.0,
                log_mass: sunk.log_mass(SUMS + WEIGHT, top, error),
            })
        };
        Ok(errors.iter().copied().enumerate().map(answer).collect())
    }

    /// Returns a bound on the error of a query's f32 scores beside keys of at most `norm`, for sums `deep` terms deep.
    /// `None` where f32 cannot hold the stored numbers, or may overflow.
    pub(super) fn narrow_error(&self, query: &[f64], norm: f64, deep: usize) -> Option<f64> {
        let scale = self.scale.abs();
        let own = length(query);
        // What a sum of products can be at most, whichever of its terms are added (Cauchy, Schwarz).
        let most = own * norm * (1.0 + 1e-12);
        let exact = !matches!(self.queries.data, Stored::F64(_))
            || query.iter().all(|&entry| f64::from(entry as f32) == entry);
        let scale_fits = scale == 0.0 || (1.0 / SAFE..SAFE).contains(&scale);
        if !(exact && scale_fits && most < SAFE && most * scale < SAFE) {
            return None;
        }
        // The scale's rounding, and the product's.
        let roundings = (deep + 4) as f64 * U;
        let roundings = roundings / (1.0 - roundings).max(0.0) * 1.001;
        // Terms that are subnormal.
        let flushed = query.len() as f64 * 2f64.powi(-148) * scale + 2f64.powi(-148);
        Some(scale * most * roundings + flushed)
    }

    /// Takes rows over the keys that they see, block by block.
    fn over<K: Element<Scalar = f32>, V: Element<Scalar = f32>>(
        &self,
        keys: Keys<'_, K>,
        values: Keys<'_, V>,
        visibility: &[RowVisibility<'_>],
        panel: &mut PanelRows,
    ) {
        let longest =
            visibility.iter().map(|row_visibility| row_visibility.prefix).max().unwrap_or(0);
        let (mut of_keys, mut of_values) = (Reused::new(), Reused::new());
        let mut limits = [0.0f32; PANEL_ROWS];
        let mut each = Reused::new();
        for from in asked_each((0..longest).step_by(PANEL_KEYS)) {
            let block = (from, PANEL_KEYS.min(longest - from));
            let sees = match masked(visibility, block, &mut each) {
                // What nobody sees is not touched.
                Masked::All => continue,
                Masked::Some => BlockMask::Each(&each),
                Masked::None => {
                    for (limit, row_visibility) in limits.iter_mut().zip(visibility) {
                        *limit = row_visibility.prefix.saturating_sub(from).min(PANEL_KEYS) as f32;
                    }
                    BlockMask::First(&limits)
                }
            };
            let width = |dim: usize| dim.next_multiple_of(LANES);
            let keys = self.simd.lend(keys, block, width(keys.dim()), &mut of_keys);
            let values = self.simd.lend(values, block, width(values.dim()), &mut of_values);
            self.simd.attend(panel, keys, values, block.1, sees);
        }
    }

    /// Returns the largest norm of a head's keys that some row of the head sees.
    pub(super) fn norm(&self, head: usize) -> Result<f64, Error> {
        if let Some(&norm) = self.norms[head].get() {
            return Ok(norm);
        }
        let norm = for_coded_dtype!(self.keys, K => {
            let keys = matrix::<K>(self.keys, head);
            let centre: Reused<f64> = std::iter::repeat_n(0.0, keys.dim().next_multiple_of(LANES)).collect();
            let mut most = 0.0f64;
            for seen in &self.query_rows.seen_by_any(head) {
                let square = self.simd.farthest(keys.behind(seen.start), seen.len(), &centre);
                if !square.is_finite() {
                    let finite = |entry: &K| Into::<f64>::into(entry.widen()).is_finite();
                    let bad = |&key: &usize| !keys.row(key).iter().all(finite);
                    let key = seen.clone().find(bad).unwrap_or(seen.start);
                    return Err(self.bad_key(head, key, square));
                }
                most = most.max(square);
            }
            Ok(most.sqrt() * (1.0 + 1e-12))
        })?;
        Ok(*self.norms[head].get_or_init(|| norm))
    }
}

/// Returns the Euclidean norm of a vector, in several sums.
pub(super) fn length(vector: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (eights, rest) = vector.as_chunks::<8>();
    for eight in eights {
        for (sum, entry) in sums.iter_mut().zip(eight) {
            *sum += entry * entry;
        }
    }
    let rest: f64 = rest.iter().map(|entry| entry * entry).sum();
    (sums.iter().sum::<f64>() + rest).sqrt()
}

/// Extent of the mask in a block of keys, for rows that would see all of it.
enum Masked {
    None,
    Some,
    All,
}

/// Checks the masks of rows over a block. For `Some`, writes per key a number for each row, positive if it sees the
/// key.
fn masked(
    visibility: &[RowVisibility<'_>],
    (from, count): (usize, usize),
    each: &mut Vec<f32>,
) -> Masked {
    let part = |&RowVisibility { prefix, allowed }: &RowVisibility<'_>| -> (usize, usize) {
        let Some(allowed) = allowed else { return (1, 0) };
        let of = allowed.get(from..prefix.min(from + count)).unwrap_or(&[]);
        (of.iter().map(|&byte| usize::from(byte != 0)).sum(), of.len())
    };
    let (mut none, mut all) = (true, true);
    for (seen, of) in visibility.iter().map(part) {
        none &= seen == 0;
        all &= seen >= of;
    }
    if none {
        return Masked::All;
    }
    if all {
        return Masked::None;
    }
    each.clear();
    each.resize(count * PANEL_ROWS, 0.0);
    for (row, row_visibility) in visibility.iter().enumerate() {
        let &RowVisibility { prefix, allowed } = row_visibility;
        let end = prefix.min(from + count);
        let allowed = allowed.and_then(|allowed| allowed.get(from..end)).unwrap_or(&[]);
        for (to, &byte) in each.iter_mut().skip(row).step_by(PANEL_ROWS).zip(allowed) {
            *to = f32::from(u8::from(byte != 0));
        }
    }
    Masked::Some
}
