//! Rows of given scores.

use super::source::{Limits, Seen, Source};
use crate::certificate::Certificate;
use crate::error::Error;
use crate::rows::{Keep, PerRow, Scores};
use crate::runtime::interrupt;
use crate::runtime::memory::check_memory;
use crate::runtime::threads;
use crate::select::{self, RowWeights, certify_listed};

/// Scores weighed between two checks for an interrupt.
const PORTION: usize = 1 << 24;
/// Rows judged per task.
const PART: usize = 64;

/// Scores with the budgets of their rows.
pub(super) struct Scored<'a> {
    pub(super) scores: &'a Scores<'a>,
    pub(super) eps: PerRow<'a, f64>,
    /// The budgets row by row.
    pub(super) budgets: &'a [f64],
    pub(super) threads: usize,
}

impl Source for Scored<'_> {
    const LIMITS: Limits = Limits { few: 256, first: 128, stored: false };

    fn rows(&self) -> usize {
        self.scores.rows()
    }

    fn eps(&self, row: usize) -> f64 {
        self.eps.of(row)
    }

    fn weigh(
        &self,
        listed: &[usize],
        stride: usize,
        to: &mut [f32],
    ) -> Result<Vec<RowWeights>, Error> {
        let mut all = Vec::with_capacity(listed.len());
        let portion = (PORTION / stride).max(1);
        for (slots, rows) in to.chunks_mut(portion * stride).zip(listed.chunks(portion)) {
            let work =
                |(slot, row): (&mut [f32], &usize)| select::weigh_row(self.scores, *row, slot);
            let slots: Vec<_> = slots.chunks_mut(stride).zip(rows).collect();
            for weights in threads::map(self.threads, slots, 1, work)? {
                all.push(weights?);
            }
            interrupt::check()?;
        }
        Ok(all)
    }

    fn judge(&self, kept: &[bool], listed: &[usize]) -> Result<Certificate, Error> {
        let one: Vec<u8> = kept.iter().map(|&kept| u8::from(kept)).collect();
        let strides = vec![0; self.scores.batch_shape().len()];
        let keep = Keep::Mask { kept: &one, strides: &strides };
        certify_listed(self.scores, &keep, Some(self.budgets), listed, self.threads)
    }
}

impl Scored<'_> {
    /// Marks the columns that rows see.
    pub(super) fn seen(&self) -> Result<Seen, Error> {
        let (rows, n) = (self.scores.rows(), self.scores.longest());
        check_memory("scores", n, 2)?;
        let mut all = Seen { visible: vec![false; n], lossless: vec![false; n] };
        let portion = (PORTION / n.max(1)).max(1);
        for start in (0..rows).step_by(portion) {
            let some = start..(start + portion).min(rows);
            let parts = some.len().div_ceil(PART);
            check_memory("scores", parts, n.saturating_mul(2))?;
            let work = |part: usize| {
                let mut own = Seen { visible: vec![false; n], lossless: vec![false; n] };
                let from = some.start + part * PART;
                for row in from..(from + PART).min(some.end) {
                    let whole = select::see_row(self.scores, row, &mut own.visible)?;
                    if self.eps(row) == 0.0 {
                        if whole {
                            own.lossless.fill(true);
                        } else {
                            select::see_row(self.scores, row, &mut own.lossless)?;
                        }
                    }
                }
                Ok::<_, Error>(own)
            };
            for part in threads::map(self.threads, 0..parts, 1, work)? {
                let part = part?;
                for (all, own) in all.visible.iter_mut().zip(part.visible) {
                    *all |= own;
                }
                for (all, own) in all.lossless.iter_mut().zip(part.lossless) {
                    *all |= own;
                }
            }
            interrupt::check()?;
        }
        Ok(all)
    }
}
