//! Results of attention, a row for each query.

use super::options::Precision;
use super::outputs::Outputs;
use crate::index::Rung;
use crate::numerics::log_mass::LogMass;
use crate::runtime::recycled::{self, recycled};

/// Output of attention, a row for each query, with its certificates.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Attention {
    /// Weighted averages of values, one vector of `d_v` entries after another, in the precision asked for.
    pub out: Outputs,
    /// Upper bound on the real tail mass of each row.
    pub tail_mass_upper: Vec<f64>,
    /// Number of keys in each average.
    pub k: Vec<i64>,
    /// Number of keys scored exactly, per row.
    pub scored: Vec<i64>,
    /// Method by which each row was answered.
    pub rung: Vec<Rung>,
    /// Bound on the relative error of the weights of each row's average, apart from a common factor.
    pub weight_error: Vec<f64>,
    /// Bound on the distance that summing weighted values may move each row's average, relative to the mean length of
    /// those values.
    pub sum_error: Vec<f64>,
    /// Bound on the distance of each row's average from the real one, where [`Rung::Coded`] says that weights came from
    /// codes; 0 elsewhere.
    pub coded_error: Vec<f64>,
    /// Bound on the distance that rounding to the chosen precision moved each row.
    pub rounding: Vec<f64>,
    /// Logarithm of the mass of the keys in each average, and of its sink if there is one.
    pub log_mass: Vec<LogMass>,
    /// Bound of each row's error that was compared with a budget on the output, as by [`Attention::error_bound`].
    pub within: Option<Vec<f64>>,
}

impl Attention {
    pub(super) fn empty(rows: usize, dim: usize, precision: Precision) -> Self {
        let mut all: Attention = recycled::empty();
        all.out.reset(precision, rows * dim);
        all.tail_mass_upper.resize(rows, 0.0);
        all.k.resize(rows, 0);
        all.scored.resize(rows, 0);
        all.rung.resize(rows, Rung::Dense);
        all.weight_error.resize(rows, 0.0);
        all.sum_error.resize(rows, 0.0);
        all.coded_error.resize(rows, 0.0);
        all.rounding.resize(rows, 0.0);
        all.log_mass.resize(rows, LogMass::NONE);
        all
    }

    /// Returns the output of a row, exactly. [`Outputs::as_slice`] returns all rows as stored.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn row(&self, row: usize) -> Vec<f64> {
        let dim = self.out.len() / self.k.len().max(1);
        assert!(row < self.k.len(), "row {row} of {}", self.k.len());
        let mut out = Vec::with_capacity(dim);
        self.out.widen(row * dim..(row + 1) * dim, &mut out);
        out
    }

    /// Returns the buffers to this thread, or to this [`Context`](crate::Context), for later calls of the same kind.
    /// Calls with a budget of tail mass and the same precision then allocate none.
    pub fn recycle(self) {
        recycled::recycle(self);
    }
}

recycled!(Attention {
    out, tail_mass_upper, k, scored, rung, weight_error, sum_error, coded_error, rounding, log_mass;
    within
});
