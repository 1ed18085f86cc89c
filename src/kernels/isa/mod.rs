//! Instruction sets: sixteen virtual lanes, the portable code that defines them, and what each CPU has for them.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod bytes;
mod lanes;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use bytes::ByteDots;
#[cfg(target_arch = "x86_64")]
pub(super) use bytes::Vnni;
pub(crate) use bytes::{LINE, STEP, Step};
pub(crate) use lanes::{Element, LANES, Scalar};
pub(super) use lanes::{Lanes, LanesOf, Level, Single};
pub(super) use portable::Portable;
