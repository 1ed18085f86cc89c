//! Stored f32, or a type that widens to it, computed in f64: the same stored scores in better arithmetic.
//!
//! SAFETY: as in `lanes.rs`. A slice is seen as another type only where both have one representation.

use half::{bf16, f16};

use super::lanes::{Element, Level};

/// A stored type, computed in f64.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Doubled<E>(pub(crate) E);

impl<E: Element<Scalar = f32>> Element for Doubled<E> {
    type Scalar = f64;
    const MASKED: Self = Doubled(E::MASKED);
    const PIECES: usize = E::PIECES;

    #[inline(always)]
    fn negated(self) -> Self {
        Doubled(self.0.negated())
    }
    #[inline(always)]
    fn widen(self) -> f64 {
        self.0.widen().into()
    }
    #[inline(always)]
    unsafe fn load<L: Level>(from: *const Self) -> L::F64 {
        L::double(E::load::<L>(from.cast()))
    }
    #[inline(always)]
    unsafe fn copy<L: Level>(from: *const Self, to: *mut Self) -> L::F64 {
        L::double(E::copy::<L>(from.cast(), to.cast()))
    }
    #[inline(always)]
    unsafe fn single<L: Level>(lanes: L::F64) -> L::F32 {
        L::single(lanes)
    }
    #[inline(always)]
    unsafe fn double<L: Level>(lanes: L::F64) -> L::F64 {
        lanes
    }
    #[inline(always)]
    fn scalars(_entries: &[Self]) -> Option<&[f64]> {
        None
    }
}

/// A stored type that can be read in place for computation in f64.
pub(crate) trait InDouble: Element {
    /// `true` if f64 is more precise than the type otherwise computed in.
    const SINGLE: bool;
    type Double: Element<Scalar = f64>;
    /// Returns the same entries, to be computed in f64.
    fn in_double(entries: &[Self]) -> &[Self::Double];
}

impl InDouble for f64 {
    const SINGLE: bool = false;
    type Double = f64;
    fn in_double(entries: &[f64]) -> &[f64] {
        entries
    }
}

macro_rules! doubled {
    ($($type:ty),*) => {$(
        impl InDouble for $type {
            const SINGLE: bool = true;
            type Double = Doubled<$type>;
            fn in_double(entries: &[$type]) -> &[Doubled<$type>] {
                // SAFETY: `Doubled` is transparent: the pointer, the length and what is read stay the same.
                unsafe { std::slice::from_raw_parts(entries.as_ptr().cast(), entries.len()) }
            }
        }
    )*};
}
doubled!(f32, f16, bf16);
