//! Weight functions of scores, and their inverses.

use crate::kernels::{Exp, Identity, Scalar, ScaledExp, WeightFn, WeightFnOf};

/// Scores that are so large, scaled, are not weighed roughly.
pub(super) const FAR: f64 = 1e5;

/// Scales that f32 can multiply by what makes an exponent of a float.
pub(super) const STEEP: f64 = 1e30;

/// Weight function with an inverse: the score at a depth below the largest weight.
pub(super) trait InvertibleWeightFn<S: Scalar>: WeightFn<S> {
    /// `true` if scores are weights, whose sums can be compared exactly.
    const EXACT: bool = false;
    /// Returns the score whose weight is `e^-depth` times the largest.
    fn score_at(&self, largest: S, depth: f64) -> S;
    /// Returns the factor of an exponential weight, if scores are near enough to 0 for a rough mass.
    fn scale(&self) -> Option<f64>;
    /// The same weight function over the same scores in f64.
    type Double: InvertibleWeightFn<f64>;
    fn double(self) -> Self::Double;
}

/// Weight functions of a call, one for each largest score of a row.
pub(super) trait WeightFns<S: Scalar>:
    WeightFnOf<S, Weights: InvertibleWeightFn<S>>
{
}

impl<S: Scalar, M: WeightFnOf<S, Weights: InvertibleWeightFn<S>>> WeightFns<S> for M {}

/// Runs `$work` with the weight function `exp(scale * score)` of a row. A scale of 1 has code of its own.
macro_rules! for_scale {
    ($scale:expr, $largest:expr, $weight_fn:ident => $work:expr) => {
        match ($scale, $largest) {
            (1.0, largest) => {
                let $weight_fn = $crate::kernels::Exp(largest);
                $work
            }
            (scale, largest) => {
                let $weight_fn = $crate::kernels::ScaledExp { shift: largest.into(), scale };
                $work
            }
        }
    };
}
pub(super) use for_scale;

/// Runs `$work` with the weight function of a row in f64. Each function has code of its own.
macro_rules! for_weights {
    ($weights:expr, $largest:expr, $weight_fn:ident => $work:expr) => {
        match $weights {
            $crate::rows::WeightKind::Weight => {
                let $weight_fn = $crate::kernels::Identity;
                $work
            }
            $crate::rows::WeightKind::Exp { scale } => {
                $crate::select::weight_fn::for_scale!(scale, $largest, $weight_fn => $work)
            }
        }
    };
}
pub(super) use for_weights;

/// Returns `true` if scores near this finite one can be weighed roughly.
pub(super) fn is_near(score: f64, scale: f64) -> bool {
    (score * scale).abs() < FAR && scale < STEEP
}

impl<S: Scalar> InvertibleWeightFn<S> for Exp<S> {
    fn score_at(&self, _largest: S, depth: f64) -> S {
        S::nearest(self.0.into() - depth)
    }
    fn scale(&self) -> Option<f64> {
        is_near(self.0.into(), 1.0).then_some(1.0)
    }
    type Double = Exp<f64>;
    fn double(self) -> Exp<f64> {
        Exp(self.0.into())
    }
}

impl<S: Scalar> InvertibleWeightFn<S> for ScaledExp {
    fn score_at(&self, _largest: S, depth: f64) -> S {
        S::nearest(self.shift - depth / self.scale)
    }
    fn scale(&self) -> Option<f64> {
        is_near(self.shift, self.scale).then_some(self.scale)
    }
    type Double = Self;
    fn double(self) -> Self {
        self
    }
}

impl<S: Scalar> InvertibleWeightFn<S> for Identity {
    const EXACT: bool = true;
    fn score_at(&self, largest: S, depth: f64) -> S {
        S::nearest(largest.into() * (-depth).exp())
    }
    fn scale(&self) -> Option<f64> {
        None
    }
    type Double = Self;
    fn double(self) -> Self {
        self
    }
}
