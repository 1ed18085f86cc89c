//! Sums of outer products of what codes stand for: what a query in few bits leaves out moves all scores together by no more than
//! the root of their form along it (`gram` has the roundings).

use super::gram::{GRAM_ROUNDING, form, norm, up};
use crate::error::Error;
use crate::kernels::{PANEL, Packed, Simd};
use crate::runtime::memory::check_memory;
use crate::runtime::reused::{Reused, filled_again};

/// The sums of one head's codes.
pub(crate) struct Moments {
    sums: Reused<f64>,
    /// Sum of squares of what the sums leave out, rounded up.
    lost: f64,
    /// The largest norm of what a code stands for, rounded up.
    largest: f64,
    /// Number of additions to the sums.
    additions: usize,
}

impl Moments {
    /// Of nothing, for codes of so many entries in whole groups, none of which stands for more than a norm.
    ///
    /// # Errors
    /// [`Error::NoMemory`], or what stops the call.
    pub(super) fn new(width: usize, largest: f64) -> Result<Self, Error> {
        check_memory("keys", width.saturating_mul(width + 2 * PANEL), size_of::<f64>())?;
        let sums = filled_again("keys", width * width, 0.0)?;
        Ok(Moments { sums, lost: 0.0, largest: largest * (1.0 + GRAM_ROUNDING), additions: 0 })
    }

    /// Adds rows, at most a panel of them, no absolute entry of which is above `entry`.
    pub(super) fn add(&mut self, simd: Simd, rows: &[f32], entry: f32, packed: &mut Packed) {
        if entry == 0.0 {
            return;
        }
        let width = self.sums.len().isqrt();
        let unit = entry * (1.004 / 127.0);
        let left = simd.outer(rows, width, unit, packed, &mut self.sums);
        let (count, entries) = ((rows.len() / width) as f64, width as f64);
        self.lost = (self.lost + up(left, count, entries) * (1.0 + GRAM_ROUNDING)).next_up();
        self.additions += 1;
    }

    /// Returns bounds on the products of a vector with all decoded keys, times a factor: their Euclidean norm, and the
    /// largest.
    pub(super) fn along(&self, simd: Simd, vector: &[f64], factor: f64) -> (f64, f64) {
        let norm = norm(vector);
        self.off((form(simd, self.sums(), (vector, norm)), norm), factor)
    }

    /// The same, given an upper bound of the form of the vector and its norm.
    pub(super) fn off(&self, (form, norm): (f64, f64), factor: f64) -> (f64, f64) {
        let factor = factor.abs() * (1.0 + GRAM_ROUNDING);
        let total = factor * (form.sqrt() + norm * self.lost.sqrt()) * (1.0 + GRAM_ROUNDING);
        (total, factor * norm * self.largest * (1.0 + GRAM_ROUNDING))
    }

    /// The sums, and how many times something was added to them.
    pub(super) fn sums(&self) -> (&[f64], usize) {
        (&self.sums, self.additions)
    }
}
