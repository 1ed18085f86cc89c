//! Sums of outer products of what codes stand for: what a query in few bits leaves out moves all scores together by no more than
//! the root of their form along it (`gram` has the roundings).

use super::gram::{GRAM_ROUNDING, form, norm, up};
use crate::error::Error;
use crate::kernels::{PANEL, Packed, Simd};
use crate::memory::check_memory;
use crate::reused::{Reused, filled_again};

/// The sums of one head's codes.
pub(crate) struct Moments {
    sums: Reused<f64>,
    /// Sum of squares of what the sums leave out, rounded up.
    lost: f64,
    /// The largest norm of what a code stands for, rounded up.
    largest: f64,
    /// How many times something was added to the sums.
    additions: usize,
}

impl Moments {
    /// Of nothing, for codes of so many entries in whole groups.
    ///
    /// # Errors
    /// [`Error::NoMemory`], or what stops the call.
    pub(super) fn new(width: usize) -> Result<Self, Error> {
        check_memory("keys", width.saturating_mul(width + 2 * PANEL), size_of::<f64>())?;
        let sums = filled_again("keys", width * width, 0.0)?;
        Ok(Moments { sums, lost: 0.0, largest: 0.0, additions: 0 })
    }

    /// Adds rows, at most a panel of them; `square` is the largest computed sum of squares of one, `entry` the largest absolute entry.
    pub(super) fn add(
        &mut self,
        simd: Simd,
        rows: &[f32],
        (square, entry): (f32, f32),
        packed: &mut Packed,
    ) {
        if entry == 0.0 {
            return;
        }
        let width = self.sums.len().isqrt();
        let unit = entry * (1.004 / 127.0);
        let left = simd.outer(rows, width, unit, packed, &mut self.sums);
        let (count, entries) = ((rows.len() / width) as f64, width as f64);
        self.lost = (self.lost + up(left, count, entries) * (1.0 + GRAM_ROUNDING)).next_up();
        let largest = up(f64::from(square), 1.0, entries).sqrt() * (1.0 + GRAM_ROUNDING);
        self.largest = self.largest.max(largest);
        self.additions += 1;
    }

    /// How far products of a vector with what all codes stand for may be from zero, times a factor: their Euclidean norm, and the largest.
    pub(super) fn along(&self, simd: Simd, vector: &[f64], factor: f64) -> (f64, f64) {
        let norm = norm(vector);
        let factor = factor.abs() * (1.0 + GRAM_ROUNDING);
        let form = form(simd, (&self.sums, self.additions), (vector, norm));
        let total = factor * (form.sqrt() + norm * self.lost.sqrt()) * (1.0 + GRAM_ROUNDING);
        (total, factor * norm * self.largest * (1.0 + GRAM_ROUNDING))
    }
}
