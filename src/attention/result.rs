//! Results of attention, a row for each query.

use super::options::Precision;
use super::outputs::Outputs;
use crate::index::Rung;
use crate::numerics::log_mass::LogMass;
use crate::runtime::recycled::{self, Recycled, held};

/// Attention's output, a row for each query, and what is proven of it.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Attention {
    /// Weighted averages of values, one vector of `d_v` entries after another, in the precision asked for.
    pub out: Outputs,
    /// The real tail mass of a row is at most this.
    pub tail_mass_upper: Vec<f64>,
    /// Keys that went into each average.
    pub k: Vec<i64>,
    /// Keys that were scored exactly.
    pub scored: Vec<i64>,
    /// The way in which each row was answered.
    pub rung: Vec<Rung>,
    /// A bound of the relative error of the weights of each row's average, but for a factor that they have in common.
    pub weight_error: Vec<f64>,
    /// A bound of what summing weighted values may move each row's average, relative to the mean length of those values.
    pub sum_error: Vec<f64>,
    /// The distance by which rounding to the precision asked for moved each row, at most.
    pub rounding: Vec<f64>,
    /// The mass of the keys that went into each average, and of its sink if it has one, as a logarithm.
    pub log_mass: Vec<LogMass>,
    /// With a budget on the output: the bound of each row's error that was held against it, as [`Attention::error_bound`] has it.
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
        all.rounding.resize(rows, 0.0);
        all.log_mass.resize(rows, LogMass::NONE);
        all
    }

    /// The output of a row, exactly. [`Outputs::as_slice`] has all rows as they are stored.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> Vec<f64> {
        let dim = self.out.len() / self.k.len().max(1);
        assert!(row < self.k.len(), "row {row} of {}", self.k.len());
        let mut out = Vec::with_capacity(dim);
        self.out.widen(row * dim..(row + 1) * dim, &mut out);
        out
    }

    /// Gives its memory to a later call of this kind on this thread, or under this [`Context`](crate::Context): calls on one thread
    /// with a budget of tail mass and one precision then ask for none.
    pub fn recycle(self) {
        recycled::recycle(self);
    }
}

impl Recycled for Attention {
    fn clear(&mut self) {
        let Attention {
            out,
            tail_mass_upper,
            k,
            scored,
            rung,
            weight_error,
            sum_error,
            rounding,
            log_mass,
            within,
        } = self;
        out.clear();
        tail_mass_upper.clear();
        k.clear();
        scored.clear();
        rung.clear();
        weight_error.clear();
        sum_error.clear();
        rounding.clear();
        log_mass.clear();
        *within = None;
    }

    fn bytes(&self) -> usize {
        let Attention {
            out,
            tail_mass_upper,
            k,
            scored,
            rung,
            weight_error,
            sum_error,
            rounding,
            log_mass,
            within: _,
        } = self;
        out.bytes()
            + held(tail_mass_upper)
            + held(k)
            + held(scored)
            + held(rung)
            + held(weight_error)
            + held(sum_error)
            + held(rounding)
            + held(log_mass)
    }
}
