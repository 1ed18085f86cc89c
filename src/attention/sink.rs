//! Attention sinks: a score with a share of the softmax and no value.

use super::ball::UP;
use super::job::AttentionJob;
use crate::numerics::log_mass::LogMass;

/// The most that a sink is taken to weigh, so that what it leaves to others is not rounded to nothing.
const MOST: f64 = 1e200;
/// Sums of weights below this can be rounded up.
const HELD: f64 = 1e300;

/// Effect of a row's sink on its weights.
pub(super) struct Sunk {
    /// Sum of all weights, with that of the sink.
    pub(super) total: f64,
    /// Bound on the error of the sink's place among the scores, in nats.
    pub(super) slip: f64,
    /// The row's own weights, and the score of its sink.
    own: f64,
    sink: f64,
    /// Upper bound on the share of the row's own weights in the real softmax, for the given errors.
    share: f64,
}

impl Sunk {
    /// Returns the logarithm of the sum of all weights. They have this relative error, and are relative to a score of
    /// `at` that is off by `error` nats, as the sink is.
    pub(super) fn log_mass(&self, rounding: f64, at: f64, error: f64) -> LogMass {
        if self.total < HELD {
            return LogMass::summed(self.total, rounding, at, error);
        }
        // The sink outweighs the row by more than a float can say.
        let sink = LogMass { lower: self.sink, upper: self.sink };
        LogMass::summed(self.own, rounding, at, error).plus(sink)
    }

    /// Returns an upper bound on the loss as a share of the whole softmax, given the loss of the row's own.
    pub(super) fn of_whole(&self, upper: f64) -> f64 {
        if upper == 0.0 {
            return 0.0;
        }
        // A sink that outweighs the row by hundreds of nats makes the product underflow, but something was dropped.
        (upper * self.share).next_up().min(upper)
    }
}

impl AttentionJob<'_> {
    /// Returns the score of a row's sink, if it has one.
    pub(super) fn sink(&self, row: usize) -> Option<f64> {
        let sinks = self.query_rows.sinks?;
        let head = row / self.queries.len().max(1);
        let sink = sinks.of(head);
        (sink > f64::NEG_INFINITY).then_some(sink)
    }

    /// Returns the mass of a row that sees no key: its sink, if it has one.
    pub(super) fn sink_alone(&self, row: usize) -> LogMass {
        self.sink(row).map_or(LogMass::NONE, |sink| LogMass::summed(1.0, 0.0, sink, 0.0))
    }

    /// Adds a row's sink to weights that sum to `total`, where a score of `top + offset` weighs 1. These scores may be
    /// off by `error` nats, and lack `upper` of the mass.
    pub(super) fn with_sink(
        &self,
        row: usize,
        total: f64,
        (top, offset): (f64, f64),
        (error, upper): (f64, f64),
    ) -> Sunk {
        let Some(sink) = self.sink(row).filter(|_| total > 0.0) else {
            return Sunk { total, slip: 0.0, own: total, sink: f64::NEG_INFINITY, share: 1.0 };
        };
        let slip = 2.0 * f64::EPSILON * (sink.abs() + top.abs() + offset.abs());
        let weight = (sink - offset - top).exp();
        // What the real keys weigh at most, and the real sink at least.
        let most = total * (error + slip).exp() * (1.0 + 1e-8) / (1.0 - upper);
        let least = weight.min(MOST) * (1.0 - 1e-9);
        let share = (1.0 / (1.0 + least / most) * UP).min(1.0);
        Sunk { total: total + weight, slip, own: total, sink, share }
    }
}
