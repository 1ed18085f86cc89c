//! Weights of scores, and their sums.
//!
//! A sum behind a final decision runs sixteen groups deep in the lanes' own precision, then goes to sixteen f64
//! accumulators, which are added in a fixed tree at the end of the pass.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use super::isa::{Element, LANES, Lanes, Level, Scalar};
use super::simd::{Pass, Simd};

/// Groups of sixteen that are summed before the lanes are emptied into f64.
pub(super) const DEPTH: usize = 16;
/// The same for rough sums.
pub(super) const LOOSE: usize = 64;

/// Rule that turns a score into a weight.
pub(crate) trait WeightFn<S: Scalar>: Copy + Send + Sync {
    /// # Safety
    /// The CPU must have the features of the lanes' level.
    unsafe fn weigh<V: Lanes<Scalar = S>>(self, scores: V) -> V;
}

/// `exp(score - shift)`, the shift being the largest score.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exp<S>(pub(crate) S);

/// `exp(scale * (score - shift))` with the argument formed in f64.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaledExp {
    pub(crate) shift: f64,
    pub(crate) scale: f64,
}

/// The score itself, and 0 for a masked one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity;

/// e^x for x <= 0, flushed to +0 below [`Scalar::CUT`]; also 0 for -inf.
#[inline(always)]
pub(super) unsafe fn exp<V: Lanes>(x: V) -> V {
    // 2^(t + 1) with t <= -1, where t less its floor is exact; the polynomial brings the 1.
    let t = x.mul_add(V::splat(V::Scalar::LOG2_E), V::splat(V::Scalar::nearest(-1.0)));
    let f = t.fraction();
    let c = V::Scalar::POLYNOMIAL;
    let mut p = V::splat(c[c.len() - 1]);
    for &coefficient in c[..c.len() - 1].iter().rev() {
        p = p.mul_add(f, V::splat(coefficient));
    }
    p.scale_by_floor(t, x.ge(V::splat(V::Scalar::CUT)))
}

impl<S: Scalar> WeightFn<S> for Exp<S> {
    #[inline(always)]
    unsafe fn weigh<V: Lanes<Scalar = S>>(self, scores: V) -> V {
        exp(scores.sub(V::splat(self.0)))
    }
}

impl<S: Scalar> WeightFn<S> for ScaledExp {
    #[inline(always)]
    unsafe fn weigh<V: Lanes<Scalar = S>>(self, scores: V) -> V {
        exp(scores.affine(self.shift, self.scale))
    }
}

impl<S: Scalar> WeightFn<S> for Identity {
    #[inline(always)]
    unsafe fn weigh<V: Lanes<Scalar = S>>(self, scores: V) -> V {
        scores.keep(scores.gt(V::splat(S::default())))
    }
}

/// Weight function of a row whose largest score is known.
pub(crate) trait WeightFnOf<S: Scalar>: Copy {
    type Weights: WeightFn<S>;
    fn of(self, largest: S) -> Self::Weights;
}

/// [`Exp`] by the largest score.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unscaled;

/// [`ScaledExp`] by the largest score.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaledBy(pub(crate) f64);

impl<S: Scalar> WeightFnOf<S> for Unscaled {
    type Weights = Exp<S>;
    #[inline(always)]
    fn of(self, largest: S) -> Exp<S> {
        Exp(largest)
    }
}

impl<S: Scalar> WeightFnOf<S> for ScaledBy {
    type Weights = ScaledExp;
    #[inline(always)]
    fn of(self, largest: S) -> ScaledExp {
        ScaledExp { shift: largest.into(), scale: self.0 }
    }
}

/// Running sum of lanes.
#[derive(Clone, Copy)]
pub(super) struct Sum<V: Lanes> {
    lanes: V,
    wide: V::Wide,
}

impl<V: Lanes> Sum<V> {
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Sum { lanes: V::splat(V::Scalar::default()), wide: V::Wide::splat(0.0) }
    }
    #[inline(always)]
    pub(super) unsafe fn add(&mut self, weights: V) {
        self.lanes = self.lanes.add(weights);
    }
    #[inline(always)]
    pub(super) unsafe fn add_where(&mut self, mask: V::Mask, weights: V) {
        self.lanes = self.lanes.add_where(mask, weights);
    }
    /// Flushes the lanes into f64; at most `DEPTH` additions lie between two calls.
    #[inline(always)]
    pub(super) unsafe fn flush(&mut self) {
        self.wide = self.lanes.widen_add(self.wide);
        self.lanes = V::splat(V::Scalar::default());
    }
    /// Returns the total, by a fixed tree over the lanes.
    #[inline(always)]
    pub(super) unsafe fn total(mut self) -> f64 {
        self.flush();
        self.wide.sum()
    }
}

struct Mass<'a, E, W> {
    scores: &'a [E],
    weight_fn: W,
}

impl<E: Element, W: WeightFn<E::Scalar>> Pass<f64> for Mass<'_, E, W> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let Mass { scores, weight_fn } = self;
        let mut sum = Sum::new();
        for block in scores.chunks(LANES * DEPTH) {
            for group in block.chunks_exact(LANES) {
                sum.add(weight_fn.weigh(E::load::<L>(group.as_ptr())));
            }
            sum.flush();
        }
        sum.total()
    }
}

struct Weights<'a, E: Element, W> {
    scores: &'a [E],
    weight_fn: W,
    to: &'a mut [E::Scalar],
}

impl<E: Element, W: WeightFn<E::Scalar>> Pass<f64> for Weights<'_, E, W> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let Weights { scores, weight_fn, to } = self;
        let mut sum = Sum::new();
        for (block, out) in scores.chunks(LANES * DEPTH).zip(to.chunks_mut(LANES * DEPTH)) {
            for (group, out) in block.chunks_exact(LANES).zip(out.chunks_exact_mut(LANES)) {
                let weights = weight_fn.weigh(E::load::<L>(group.as_ptr()));
                weights.store(out.as_mut_ptr());
                sum.add(weights);
            }
            sum.flush();
        }
        sum.total()
    }
}

struct Squares<'a, S>(&'a [S]);

impl<S: Scalar> Pass<f64> for Squares<'_, S> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let Squares(weights) = self;
        let mut total = 0.0;
        for weights in weights.chunks(LANES * LOOSE) {
            let mut sum = S::Lanes::<L>::splat(S::default());
            for group in weights.chunks_exact(LANES) {
                let weights = S::Lanes::<L>::load(group.as_ptr());
                sum = weights.mul_add(weights, sum);
            }
            total += sum.sum().into();
        }
        total
    }
}

impl Simd {
    /// Returns the sum of all weights of whole groups of scores.
    pub(crate) fn mass<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        weight_fn: W,
    ) -> f64 {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(Mass { scores, weight_fn })
    }

    /// Writes the weights of whole groups of scores, in the precision computed in, and returns their sum.
    pub(crate) fn weights<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        weight_fn: W,
        to: &mut [E::Scalar],
    ) -> f64 {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == to.len());
        self.run(Weights { scores, weight_fn, to })
    }

    /// Returns the rough sum of the squares of whole groups of weights, which decides nothing.
    pub(crate) fn squares<S: Scalar>(self, weights: &[S]) -> f64 {
        assert!(weights.len().is_multiple_of(LANES));
        self.run(Squares(weights))
    }
}
