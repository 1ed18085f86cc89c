//! Queries that share their keys, and their products in f32 and f64 with error bounds.
//!
//! Let u = 2^-53, v = 2^-24 and R = |q| max |k| over the keys that a query of the family sees. Stored numbers are exact in f32. A
//! product in f32 is a chain of d fused steps, none of which overflows where R <= 2^100, so it is off by at most
//! `d v / (1 - d v) R`, and by `d 2^-126` for what may underflow, even where the processor flushes it. With d <= 4096 that is
//! below `d v (1 + 2^-11) R + d 2^-126`. A product in f64 is off by at most `d u / (1 - d u) R`; nothing over- or underflows.
//! The caller's own arithmetic adds to both: [`Family::radius`].

use super::block::{Block, Rounding};
use crate::error::Error;
use crate::index::{for_coded_dtype, matrix};
use crate::kernels::{BESIDE, Simd};
use crate::runtime::memory::{filled, product};
use crate::runtime::threads;
use half::{bf16, f16};
use std::ops::Range;

/// Factor that makes a computed norm at least the real one. A sum of d <= 2^20 squares is off by less than a relative
/// 2^-32, its root by half of that.
const NORM: f64 = 1.0 + 1.0 / 2_147_483_648.0;
/// Vectors that products in f32 are made of have no more entries, and norms whose product is no more.
const NARROW: (usize, f64) = (4096, 1.267_650_600_228_229_4e30);
/// Beyond this, scores are so large that rounding in f64 leaves nothing to be said.
pub(super) const MOST_RADIUS: f64 = 100.0;

/// Rows that share the keys of one head.
pub(super) struct Family<'a> {
    pub(super) block: &'a Block<'a>,
    kv_head: usize,
    /// Number of the first row.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) dim: usize,
    /// Number of keys, from the first, that a query sees.
    pub(super) len: usize,
    /// Upper bound on the largest norm of these keys.
    longest: f64,
    causal_offset: Option<i64>,
}

/// Keys in panels, in f32.
#[derive(Clone)]
pub(super) struct Laid(Vec<f32>);

impl Laid {
    /// Returns some of the keys in panels of their own.
    pub(super) fn pick(&self, keys: &[u32], dim: usize) -> Laid {
        let mut to = vec![0.0; keys.len().div_ceil(BESIDE) * BESIDE * dim];
        for (panel, keys) in to.chunks_exact_mut(BESIDE * dim).zip(keys.chunks(BESIDE)) {
            for (place, &key) in keys.iter().enumerate() {
                let (p, from) = (key as usize / BESIDE, key as usize % BESIDE);
                let entries = self.0[p * BESIDE * dim..][..BESIDE * dim].iter();
                let entries = entries.skip(from).step_by(BESIDE);
                for (to, entry) in panel[place..].iter_mut().step_by(BESIDE).zip(entries) {
                    *to = *entry;
                }
            }
        }
        Laid(to)
    }
}

impl<'a> Family<'a> {
    /// Also lays out the keys, because their norms are found on the way.
    ///
    /// # Errors
    /// [`Error::KeyNotFinite`], [`Error::NoMemory`], [`Error::Shape`].
    pub(super) fn new(
        block: &'a Block<'a>,
        (kv_head, first): (usize, usize),
        causal_offset: Option<i64>,
        (simd, threads): (Simd, usize),
    ) -> Result<(Self, Laid), Error> {
        let (m, keys) = (block.queries.len(), &block.keys);
        let mut family = Family {
            block,
            kv_head,
            first,
            rows: block.queries.heads() / keys.heads() * m,
            dim: keys.dim(),
            len: 0,
            longest: 0.0,
            causal_offset,
        };
        family.len = if m > 0 { family.sees(m - 1) } else { 0 };
        let (laid, squares) = family.lay(simd, threads)?;
        if let Some(key) = squares.iter().position(|square| !square.is_finite()) {
            keys.finite(kv_head, key, &mut Vec::new())?;
            return Err(keys.misfit("norms are too large to be computed".into()));
        }
        family.longest = squares.iter().copied().fold(0.0, f64::max).sqrt() * NORM;
        Ok((family, laid))
    }

    /// Returns the number of keys that a row sees.
    pub(super) fn sees(&self, row: usize) -> usize {
        let n = self.block.keys.len();
        let Some(offset) = self.causal_offset else { return n };
        let query = (row % self.block.queries.len()) as i64;
        let seen = query.saturating_add(offset).saturating_add(1).max(0);
        usize::try_from(seen).map_or(n, |seen| seen.min(n))
    }

    /// Writes a query's entries, which must be finite.
    ///
    /// # Errors
    /// [`Error::KeyNotFinite`].
    pub(super) fn query(&self, row: usize, to: &mut Vec<f64>) -> Result<(), Error> {
        let m = self.block.queries.len();
        let group = self.rows / m;
        self.block.queries.finite(self.kv_head * group + row / m, row % m, to)
    }

    /// Returns an upper bound on the product of a query's norm and the largest norm of a key.
    pub(super) fn reach(&self, query: &[f64]) -> f64 {
        let square: f64 = query.iter().map(|entry| entry * entry).sum();
        square.sqrt() * NORM * self.longest
    }

    /// Returns the radius of scores from f64 products, the caller's roundings included.
    pub(super) fn radius(&self, reach: f64, rounding: &Rounding) -> f64 {
        const UNIT: f64 = f64::EPSILON / 2.0;
        let steps = 3.0 * self.dim as f64 + rounding.roundings;
        let margin = (1.0 + 2f64.powi(-19)) * (1.0 + 2f64.powi(-40));
        let scale = self.block.scale.abs();
        // Equal scores are ties only if all are 0; a tiny scale must not make them so by underflow.
        let least = if scale > 0.0 && reach > 0.0 { f64::MIN_POSITIVE } else { 0.0 };
        scale * (reach * (steps * UNIT * margin)) + least + rounding.slack
    }

    /// Returns the radius of scores from f32 products; `None` if it is too large to be useful.
    pub(super) fn narrow_radius(&self, reach: f64, rounding: &Rounding) -> Option<f64> {
        const UNIT: f64 = f32::EPSILON as f64 / 2.0;
        /// Largest useful radius: above it, hardly any row would be decided.
        const USELESS: f64 = 0.5;
        if self.dim > NARROW.0 || reach > NARROW.1 || reach.is_nan() {
            return None;
        }
        let d = self.dim as f64;
        let off = d * UNIT * (1.0 + 2f64.powi(-11)) * reach + d * f64::from(f32::MIN_POSITIVE);
        let radius =
            self.block.scale.abs() * off * (1.0 + 2f64.powi(-40)) + self.radius(reach, rounding);
        (radius <= USELESS).then_some(radius)
    }

    /// Lays out the keys in panels, and returns the sums of their squares.
    fn lay(&self, simd: Simd, threads: usize) -> Result<(Laid, Vec<f64>), Error> {
        /// Panels per task.
        const TASK: usize = 16;
        let panels = self.len.div_ceil(BESIDE);
        let mut laid = filled("keys", product("keys", &[panels, BESIDE, self.dim])?, 0.0)?;
        let mut squares = filled("keys", panels * BESIDE, 0.0)?;
        let keys = &self.block.keys;
        let tasks =
            laid.chunks_mut(TASK * BESIDE * self.dim).zip(squares.chunks_mut(TASK * BESIDE));
        let tasks: Vec<_> = tasks.enumerate().collect();
        let work = |(t, (laid, squares)): (usize, (&mut [f32], &mut [f64]))| {
            let parts = laid.chunks_exact_mut(BESIDE * self.dim).zip(squares.chunks_mut(BESIDE));
            for (p, (panel, squares)) in parts.enumerate() {
                let from = (t * TASK + p) * BESIDE;
                let count = BESIDE.min(self.len - from);
                for_coded_dtype!(keys, E => {
                    simd.lay_narrow(matrix::<E>(keys, self.kv_head), (from, count), panel, squares);
                    Ok(())
                })?;
            }
            Ok::<(), Error>(())
        };
        for done in threads::map(threads, tasks, 1, work)? {
            done?;
        }
        squares.truncate(self.len);
        Ok((Laid(laid), squares))
    }

    /// Lays out the keys again.
    pub(super) fn laid(&self, simd: Simd, threads: usize) -> Result<Laid, Error> {
        self.lay(simd, threads).map(|(laid, _)| laid)
    }

    /// Writes the f32 products of some queries with the keys of some panels. Rows of products are `stride` apart, at
    /// least the length of these panels.
    pub(super) fn narrow(
        &self,
        simd: Simd,
        laid: &Laid,
        queries: &[f32],
        panels: Range<usize>,
        (to, stride): (&mut [f32], usize),
    ) {
        let size = BESIDE * self.dim;
        let panels = laid.0[panels.start * size..panels.end * size].chunks_exact(size);
        for (p, panel) in panels.enumerate() {
            simd.multiply_narrow(panel, (queries, self.dim), (&mut *to, stride), p * BESIDE);
        }
    }

    /// Writes the f64 products of some queries with the first keys. Rows of products are `stride` apart, at least the
    /// length of whole panels.
    pub(super) fn wide(
        &self,
        simd: Simd,
        laid: &Laid,
        queries: &[f64],
        keys: usize,
        (to, stride): (&mut [f64], usize),
    ) {
        let panels = laid.0.chunks_exact(BESIDE * self.dim).take(keys.div_ceil(BESIDE));
        for (p, panel) in panels.enumerate() {
            simd.multiply_wide(panel, (queries, self.dim), (&mut *to, stride), p * BESIDE);
        }
    }
}
