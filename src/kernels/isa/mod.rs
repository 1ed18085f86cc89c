//! Instruction sets: sixteen virtual lanes, the portable code that defines them, and each CPU's implementation.
//!
//! SAFETY: methods are `unsafe` as the traits have it, in `lanes.rs`.

/// Methods that are one intrinsic in each register, over a type's `zip`.
#[cfg(target_arch = "x86_64")]
macro_rules! lanewise {
    ($($method:ident: $intrinsic:ident),* $(,)?) => {$(
        #[inline(always)]
        unsafe fn $method(self, other: Self) -> Self {
            self.zip(other, |a, b| $intrinsic(a, b))
        }
    )*};
}

/// The comparisons, over a type's `test`; all but the last are false for a NaN.
#[cfg(target_arch = "x86_64")]
macro_rules! compare {
    ($intrinsic:ident) => {
        compare!($intrinsic, lt: _CMP_LT_OQ, ge: _CMP_GE_OQ, gt: _CMP_GT_OQ, eq: _CMP_EQ_OQ);
        compare!($intrinsic, unordered: _CMP_UNORD_Q);
    };
    ($intrinsic:ident, $($method:ident: $predicate:ident),*) => {$(
        #[inline(always)]
        unsafe fn $method(self, other: Self) -> Self::Mask {
            self.test(other, |a, b| $intrinsic::<$predicate>(a, b))
        }
    )*};
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod bytes;
mod doubled;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_bytes;
mod portable;
mod tiles;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(super) use amx::{Amx, granted};
#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
#[cfg(target_arch = "x86_64")]
pub(super) use bytes::Vnni;
pub(super) use bytes::{ByteDots, ask_for};
pub(crate) use bytes::{LINE, STEP, Step, Steps};
#[cfg(test)]
pub(crate) use doubled::Doubled;
pub(crate) use doubled::InDouble;
pub(super) use lanes::{BESIDE, Lanes, LanesOf, Level, Single};
pub(crate) use lanes::{Element, LANES, Scalar};
#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
#[cfg(target_arch = "aarch64")]
pub(super) use neon_bytes::Dots;
pub(super) use portable::Portable;
pub(super) use tiles::{DEEP, Line, TILE, Tiles};
