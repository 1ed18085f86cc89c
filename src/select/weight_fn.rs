//! Weight functions of scores, and their inverses.

use crate::kernels::{Exp, Identity, Scalar, ScaledExp, WeightFn};

/// Scores that are so large, scaled, are not weighed roughly.
pub(super) const FAR: f64 = 1e5;

/// Scales that f32 can multiply by what makes an exponent of a float.
pub(super) const STEEP: f64 = 1e30;

/// Weight function with an inverse: the score at a depth below the largest weight.
pub(crate) trait InvertibleWeightFn<S: Scalar>: WeightFn<S> {
    /// Returns the score whose weight is `e^-depth` times the largest.
    fn score_at(&self, largest: S, depth: f64) -> S;
    /// Returns the factor of an exponential weight, if scores are near enough to 0 for a rough mass.
    fn scale(&self) -> Option<f64>;
    /// The same weight function over the same scores in f64.
    type Double: InvertibleWeightFn<f64>;
    fn double(self) -> Self::Double;
}

/// Returns `true` if scores near this finite one can be weighed roughly.
pub(crate) fn is_near(score: f64, scale: f64) -> bool {
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
