//! Detects the CPU once, and is the only way into the passes.
//!
//! A [`Simd`] value can only be made for a level that this CPU runs, so holding one proves what the passes need.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use super::lanes::{Element, LANES, Level, Scalar};
use super::passes::{self, Given, Loaded, Output, PIVOTS, PivotSums, Positions, Sides, Weigh};
use super::portable::Portable;
use crate::error::Error;
use crate::mass::CHUNK;

/// An instruction-set level that this CPU is known to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Simd(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    PortableFma,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

const AUTOMATIC: u8 = 0;
static FORCED: AtomicU8 = AtomicU8::new(AUTOMATIC);

impl Simd {
    /// The level in force: the one set by [`Simd::force`], else `CERTK_LEVEL`, else the best this CPU has.
    ///
    /// # Errors
    /// [`Error::Level`] if `CERTK_LEVEL` names a level that is unknown or that this CPU lacks.
    pub(crate) fn current() -> Result<Simd, Error> {
        static CHOSEN: OnceLock<Result<Simd, Error>> = OnceLock::new();
        let forced = FORCED.load(Ordering::Relaxed);
        if forced != AUTOMATIC {
            return Ok(Self::all()[usize::from(forced) - 1].1);
        }
        let chosen = CHOSEN.get_or_init(|| match std::env::var("CERTK_LEVEL") {
            Ok(name) if !name.is_empty() => Self::named(&name),
            _ => Ok(Self::all()[0].1),
        });
        chosen.clone()
    }

    /// Forces a level by name for the whole process, or goes back to automatic choice.
    ///
    /// # Errors
    /// [`Error::Level`] if the level is unknown or this CPU lacks it.
    pub(crate) fn force(name: Option<&str>) -> Result<(), Error> {
        let code = match name {
            None => AUTOMATIC,
            Some(name) => {
                let level = Self::named(name)?;
                let at = Self::all().iter().position(|&(_, l)| l == level).unwrap_or(0);
                at as u8 + 1
            }
        };
        FORCED.store(code, Ordering::Relaxed);
        Ok(())
    }

    /// The name under which the level can be forced.
    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::PortableFma => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
        }
    }

    /// The levels that this CPU runs, best first. The portable code compiled without FMA comes last and is named
    /// "portable-nofma": `mul_add` is a library call there, so nothing chooses it unless nothing else is left.
    pub(crate) fn all() -> &'static [(&'static str, Simd)] {
        static LEVELS: OnceLock<Vec<(&'static str, Simd)>> = OnceLock::new();
        LEVELS.get_or_init(|| {
            let mut levels = Vec::new();
            #[cfg(target_arch = "x86_64")]
            {
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("popcnt")
                {
                    levels.push(("avx512", Simd(Kind::Avx512)));
                }
                if is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                {
                    levels.push(("avx2", Simd(Kind::Avx2)));
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    levels.push(("portable", Simd(Kind::PortableFma)));
                }
            }
            let plain = if levels.iter().any(|l| l.0 == "portable") {
                "portable-nofma"
            } else {
                "portable"
            };
            levels.push((plain, Simd(Kind::Portable)));
            levels
        })
    }

    fn named(name: &str) -> Result<Simd, Error> {
        let level = name.to_owned();
        match Self::all().iter().find(|l| l.0 == name) {
            Some(found) => Ok(found.1),
            None if ["avx2", "avx512", "neon"].contains(&name) => {
                Err(Error::Level { level, problem: "cannot run here" })
            }
            None => Err(Error::Level { level, problem: "is not known" }),
        }
    }
}

/// A pass that is written elsewhere, for any level.
pub(super) trait Pass {
    type Output;

    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn run<L: Level>(self) -> Self::Output;
}

/// Declares the passes at one level, compiled with its features.
macro_rules! level {
    ($module:ident, $level:ty $(, $features:literal)?) => {
        mod $module {
            #[allow(clippy::wildcard_imports)] // everything that signatures name
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn load<E: Element>(
                from: &[E], allowed: Option<&[u8]>, negate: bool, to: &mut [E],
            ) -> Loaded<E::Scalar> {
                // SAFETY: this function is entered only with proof that the CPU has its features.
                unsafe { passes::load::<$level, E>(from, allowed, negate, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn mass<E: Element, W: Weigh<E::Scalar>>(keys: &[E], law: W) -> f64 {
                // SAFETY: as above.
                unsafe { passes::mass::<$level, E, W>(keys, law) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn weights<E: Element, W: Weigh<E::Scalar>>(
                keys: &[E], law: W, to: &mut [E::Scalar],
            ) {
                // SAFETY: as above.
                unsafe { passes::weights::<$level, E, W>(keys, law, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn pivot_sums<E: Element, W: Weigh<E::Scalar>>(
                keys: &[E], law: W, pivots: &[E::Scalar; PIVOTS],
            ) -> PivotSums {
                // SAFETY: as above.
                unsafe { passes::pivot_sums::<$level, E, W>(keys, law, pivots) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn split<E: Element, W: Weigh<E::Scalar>>(
                keys: *const E, len: usize, positions: Positions, law: W,
                bracket: (E::Scalar, E::Scalar), to: Output<E::Scalar>,
            ) -> Sides {
                // SAFETY: as above; the caller vouches for the pointers.
                unsafe { passes::split::<$level, E, W>(keys, len, positions, law, bracket, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn given<E: Element, W: Weigh<E::Scalar>>(
                keys: &[E], keep: &[u8], law: W,
            ) -> Given<E::Scalar> {
                // SAFETY: as above.
                unsafe { passes::given::<$level, E, W>(keys, keep, law) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn emit<E: Element>(
                keys: &[E], first: u32, boundary: (E::Scalar, u32), to: *mut u32,
            ) -> usize {
                // SAFETY: as above; the caller vouches for the pointer.
                unsafe { passes::emit::<$level, E>(keys, first, boundary, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn run<P: Pass>(pass: P) -> P::Output {
                // SAFETY: as above.
                unsafe { pass.run::<$level>() }
            }
        }
    };
}

level!(portable, Portable);
#[cfg(target_arch = "x86_64")]
level!(portable_fma, Portable, "avx2,fma");
#[cfg(target_arch = "x86_64")]
level!(avx2, super::super::avx2::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
level!(avx512, super::super::avx512::Avx512, "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt");

/// Calls a pass at the level that is held.
macro_rules! at_level {
    ($simd:expr, $pass:ident($($argument:expr),*)) => {
        match $simd.0 {
            // SAFETY: a `Simd` exists only for levels that this CPU runs; pointers are vouched for by the caller.
            Kind::Portable => unsafe { portable::$pass($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::PortableFma => unsafe { portable_fma::$pass($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx2 => unsafe { avx2::$pass($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512 => unsafe { avx512::$pass($($argument),*) },
        }
    };
}

/// A growing list of keys and their positions, padded so that whole groups can be read and written.
#[derive(Debug, Default)]
pub(crate) struct Bracket<S> {
    keys: Vec<S>,
    positions: Vec<u32>,
    len: usize,
}

impl<S: Scalar> Bracket<S> {
    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Makes room for that many more entries, and for a group beyond them.
    pub(crate) fn reserve(&mut self, more: usize) {
        let room = (self.len + more).next_multiple_of(LANES) + 2 * LANES;
        if self.keys.len() < room {
            self.keys.resize(room.max(2 * self.keys.len()), S::NEG_INFINITY);
            self.positions.resize(self.keys.len(), 0);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn keys(&self) -> &[S] {
        &self.keys[..self.len]
    }

    pub(crate) fn positions(&self) -> &[u32] {
        &self.positions[..self.len]
    }

    /// Appends another list.
    pub(crate) fn append(&mut self, other: &Bracket<S>) {
        self.reserve(other.len);
        let end = self.len + other.len;
        self.keys[self.len..end].copy_from_slice(other.keys());
        self.positions[self.len..end].copy_from_slice(other.positions());
        self.len = end;
    }

    /// The keys in whole groups, the last one filled up with masked entries.
    pub(crate) fn padded(&mut self) -> &[S] {
        self.reserve(0);
        let end = self.len.next_multiple_of(LANES);
        self.keys[self.len..end].fill(S::NEG_INFINITY);
        &self.keys[..end]
    }
}

impl Simd {
    /// Runs a pass that is written elsewhere.
    pub(super) fn run<P: Pass>(self, pass: P) -> P::Output {
        at_level!(self, run(pass))
    }

    /// Copies a row into padded scratch (whole groups, at least as long), masking and negating on the way.
    pub(crate) fn load<E: Element>(
        self,
        from: &[E],
        allowed: Option<&[u8]>,
        negate: bool,
        to: &mut [E],
    ) -> Loaded<E::Scalar> {
        assert!(to.len().is_multiple_of(LANES) && to.len() >= from.len());
        at_level!(self, load(from, allowed, negate, to))
    }

    /// The sum of all weights of whole groups of keys.
    pub(crate) fn mass<E: Element, W: Weigh<E::Scalar>>(self, keys: &[E], law: W) -> f64 {
        assert!(keys.len().is_multiple_of(LANES));
        at_level!(self, mass(keys, law))
    }

    /// The weights of whole groups of keys.
    pub(crate) fn weights<E: Element, W: Weigh<E::Scalar>>(
        self,
        keys: &[E],
        law: W,
        to: &mut [E::Scalar],
    ) {
        assert!(keys.len().is_multiple_of(LANES));
        at_level!(self, weights(keys, law, to));
    }

    /// Sums strictly below, and counts from, each of eight pivots, over whole groups of keys.
    pub(crate) fn pivot_sums<E: Element, W: Weigh<E::Scalar>>(
        self,
        keys: &[E],
        law: W,
        pivots: &[E::Scalar; PIVOTS],
    ) -> PivotSums {
        assert!(keys.len().is_multiple_of(LANES));
        at_level!(self, pivot_sums(keys, law, pivots))
    }

    /// Sums both sides of `[lo, hi)` over whole groups of keys and appends what lies inside to `to`, in order.
    /// The positions written count from `first`. `to` must have room for `keys.len()` more entries.
    pub(crate) fn split<E: Element, W: Weigh<E::Scalar>>(
        self,
        keys: &[E],
        first: u32,
        law: W,
        bracket: (E::Scalar, E::Scalar),
        to: &mut Bracket<E::Scalar>,
    ) -> Sides {
        assert!(keys.len().is_multiple_of(LANES));
        assert!(to.keys.len() >= to.len + keys.len() + LANES);
        assert!(to.positions.len() >= to.len + keys.len() + LANES);
        let at = to.len;
        let output =
            Output { keys: to.keys[at..].as_mut_ptr(), positions: to.positions[at..].as_mut_ptr() };
        let from = Positions::From(first);
        // The room asserted above is what the pass needs: everything inside, and one group more.
        let sides = at_level!(self, split(keys.as_ptr(), keys.len(), from, law, bracket, output));
        to.len += sides.inside;
        sides
    }

    /// Narrows a bracket in place to `[lo, hi)` and sums what falls off on either side.
    pub(crate) fn narrow<S: Scalar + Element<Scalar = S>, W: Weigh<S>>(
        self,
        within: &mut Bracket<S>,
        law: W,
        bracket: (S, S),
    ) -> Sides {
        let len = within.padded().len();
        assert!(within.keys.len() >= len + LANES && within.positions.len() >= len + LANES);
        let keys = within.keys.as_mut_ptr();
        let positions = within.positions.as_mut_ptr();
        let mut sides = Sides::default();
        // In chunks, like every pass whose sums end in a certificate: their f64 sums meet in order.
        for at in (0..len).step_by(CHUNK) {
            let here = CHUNK.min(len - at);
            // Both lists hold `len` entries and a group more, and what is written never overtakes what is read.
            let from = Positions::Listed(positions.wrapping_add(at).cast_const());
            let output = Output {
                keys: keys.wrapping_add(sides.inside),
                positions: positions.wrapping_add(sides.inside),
            };
            let read = keys.wrapping_add(at).cast_const();
            let part = at_level!(self, split(read, here, from, law, bracket, output));
            sides.below += part.below;
            sides.above += part.above;
            sides.count_above += part.count_above;
            sides.inside += part.inside;
        }
        within.len = sides.inside;
        sides
    }

    /// Sums a kept set, given as one byte per key, and its tail, over whole groups.
    pub(crate) fn given<E: Element, W: Weigh<E::Scalar>>(
        self,
        keys: &[E],
        keep: &[u8],
        law: W,
    ) -> Given<E::Scalar> {
        assert!(keys.len().is_multiple_of(LANES) && keep.len() == keys.len());
        at_level!(self, given(keys, keep, law))
    }

    /// Appends, in order, the positions (counted from `first`) of the keys kept down to a boundary, over whole
    /// groups.
    pub(crate) fn emit<E: Element>(
        self,
        keys: &[E],
        first: u32,
        boundary: (E::Scalar, u32),
        to: &mut Vec<u32>,
    ) {
        assert!(keys.len().is_multiple_of(LANES));
        for (c, chunk) in keys.chunks(EMIT).enumerate() {
            let start = to.len();
            // Room for every key of the chunk, and for the group that the last store writes whole.
            to.resize(start + chunk.len() + LANES, 0);
            let at = first.wrapping_add((c * EMIT) as u32);
            let out = to[start..].as_mut_ptr();
            let written = at_level!(self, emit(chunk, at, boundary, out));
            to.truncate(start + written);
        }
    }
}

/// Keys per call of the emitting pass.
const EMIT: usize = 4096;
