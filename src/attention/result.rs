//! What attention returns, a row for each query.

use crate::index::Rung;
use crate::log_mass::LogMass;

/// Attention's output, a row for each query, and what is proven of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Attention {
    /// Weighted averages of values, one vector after another, rounded to the precision asked for.
    pub out: Vec<f64>,
    /// The real tail mass of a row is at most this.
    pub tail_mass_upper: Vec<f64>,
    /// Keys that went into each average.
    pub k: Vec<i64>,
    /// Keys that were scored exactly.
    pub scored: Vec<i64>,
    /// Which way each row was answered.
    pub rung: Vec<Rung>,
    /// A bound of the relative error of the weights of each row's average, but for a factor that they have in common.
    pub weight_error: Vec<f64>,
    /// A bound of what summing weighted values may move each row's average, relative to the mean length of those values.
    pub sum_error: Vec<f64>,
    /// How far rounding to the precision asked for moved each row.
    pub rounding: Vec<f64>,
    /// What the keys that went into each average weigh, and its sink if it has one.
    pub log_mass: Vec<LogMass>,
    /// With a budget on the output: the bound of each row's error that was held against it, as [`Attention::error_bound`] has it.
    pub within: Option<Vec<f64>>,
}

impl Attention {
    pub(super) fn empty(rows: usize, dim: usize) -> Self {
        Attention {
            out: vec![0.0; rows * dim],
            tail_mass_upper: vec![0.0; rows],
            k: vec![0; rows],
            scored: vec![0; rows],
            rung: vec![Rung::Dense; rows],
            weight_error: vec![0.0; rows],
            sum_error: vec![0.0; rows],
            rounding: vec![0.0; rows],
            log_mass: vec![LogMass::NONE; rows],
            within: None,
        }
    }
}
