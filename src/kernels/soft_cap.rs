//! Soft caps: c tanh(x / c) for a score x.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions.

use super::isa::{LANES, Lanes, Level, Scalar};
use super::simd::{Pass, Simd};
use super::weights::exp;

/// A soft cap c, a number from 1e-30 to 1e30, in lanes of a type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SoftCap<S> {
    cap: S,
    /// -2 / c.
    exponent: S,
}

impl<S: Scalar> SoftCap<S> {
    pub(crate) fn new(cap: f64) -> Self {
        SoftCap { cap: S::nearest(cap), exponent: S::nearest(-2.0 / cap) }
    }

    /// Returns c tanh(x / c), off by at most 12 units of 2^-24 of c in f32, and 2^-46 of it in f64, as docs/soundness.md shows.
    /// Its size is (1 - e) / (1 + e), with e = exp(-2 |x| / c).
    #[inline(always)]
    pub(super) unsafe fn of<V: Lanes<Scalar = S>>(self, x: V) -> V {
        let (zero, one) = (V::splat(S::default()), V::splat(S::nearest(1.0)));
        let e = exp(x.max(zero.sub(x)).mul(V::splat(self.exponent)));
        let size = one.sub(e).div(one.add(e)).mul(V::splat(self.cap));
        size.select(x.ge(zero), zero.sub(size))
    }
}

struct Capped<'a, S> {
    scores: &'a mut [S],
    cap: SoftCap<S>,
}

impl<S: Scalar> Pass for Capped<'_, S> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let (groups, rest) = self.scores.as_chunks_mut::<LANES>();
        for group in groups {
            self.cap.of(S::Lanes::<L>::load(group.as_ptr())).store(group.as_mut_ptr());
        }
        let mut last = [S::default(); LANES];
        last[..rest.len()].copy_from_slice(rest);
        self.cap.of(S::Lanes::<L>::load(last.as_ptr())).store(last.as_mut_ptr());
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

impl Simd {
    /// Caps scores.
    pub(crate) fn cap<S: Scalar>(self, scores: &mut [S], cap: SoftCap<S>) {
        self.run(Capped { scores, cap });
    }
}
