//! Detection of the CPU's instruction sets, and the only entry to the passes.
//!
//! A pass is a struct of its arguments, written once for all levels beside a method of [`Simd`] that checks them and
//! runs it.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's features. A [`Simd`] can only be made for a level that
//! this CPU runs, so holding one proves it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::isa::{Amx, granted};
#[cfg(target_arch = "x86_64")]
use super::isa::{Avx2, Avx512, Vnni};
use super::isa::{ByteDots, Level, Portable, Tiles};
#[cfg(target_arch = "aarch64")]
use super::isa::{Dots, Neon};
use crate::error::Error;

/// An instruction-set level that this CPU is known to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Simd(LevelKind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LevelKind {
    Portable,
    #[cfg(all(target_arch = "x86_64", feature = "portable-fma"))]
    PortableFma,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512, and products of matrices by AMX.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

const AUTOMATIC: u8 = 0;
static FORCED: AtomicU8 = AtomicU8::new(AUTOMATIC);

impl Simd {
    /// Returns the level in force: the one set by [`Simd::force`], else `CERTK_LEVEL`, else the best of this CPU.
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

    /// Forces a level by name for the whole process, or returns to automatic choice.
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

    /// Returns the name by which the level can be forced.
    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            LevelKind::Portable => "portable",
            #[cfg(all(target_arch = "x86_64", feature = "portable-fma"))]
            LevelKind::PortableFma => "portable",
            #[cfg(target_arch = "x86_64")]
            LevelKind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            LevelKind::Avx512 => "avx512",
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            LevelKind::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            LevelKind::Neon => "neon",
        }
    }

    /// Returns the levels that this CPU runs, best first. Portable code compiled without FMA is last, because `mul_add`
    /// is a library call there. If it is also compiled with FMA, it is named "portable-nofma". That is for tests: a
    /// feature, since it is a tenth of the crate's code.
    pub(crate) fn all() -> &'static [(&'static str, Simd)] {
        static LEVELS: OnceLock<Vec<(&'static str, Simd)>> = OnceLock::new();
        LEVELS.get_or_init(|| {
            let mut levels: Vec<(&str, Simd)> = Vec::new();
            #[cfg(target_arch = "x86_64")]
            {
                let basic = is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("popcnt")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("bmi2");
                if basic
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                {
                    #[cfg(target_os = "linux")]
                    if granted() {
                        levels.push(("amx", Simd(LevelKind::Amx)));
                    }
                    levels.push(("avx512", Simd(LevelKind::Avx512)));
                }
                if basic && is_x86_feature_detected!("f16c") {
                    levels.push(("avx2", Simd(LevelKind::Avx2)));
                }
                #[cfg(feature = "portable-fma")]
                if basic {
                    levels.push(("portable", Simd(LevelKind::PortableFma)));
                }
            }
            #[cfg(target_arch = "aarch64")]
            if std::arch::is_aarch64_feature_detected!("neon") {
                levels.push(("neon", Simd(LevelKind::Neon)));
            }
            let plain = if levels.iter().any(|l| l.0 == "portable") {
                "portable-nofma"
            } else {
                "portable"
            };
            levels.push((plain, Simd(LevelKind::Portable)));
            levels
        })
    }

    fn named(name: &str) -> Result<Simd, Error> {
        let level = name.to_owned();
        match Self::all().iter().find(|l| l.0 == name) {
            Some(found) => Ok(found.1),
            None if ["amx", "avx2", "avx512", "neon"].contains(&name) => {
                Err(Error::Level { level, problem: "cannot run here" })
            }
            None => Err(Error::Level { level, problem: "is not known" }),
        }
    }
}

/// Computation that is written once for all levels.
pub(super) trait Pass<Output = ()> {
    /// # Safety
    /// The CPU must have the level's features. Implementations are `inline(always)`, to be compiled with them; what
    /// else they need, the method of [`Simd`] that builds the pass has checked.
    unsafe fn run<L: Level>(self) -> Output;
}

/// The same over bytes, for any multiplication of bytes.
pub(super) trait BytePass<Output = ()> {
    /// # Safety
    /// The CPU must have the features of `B`.
    unsafe fn run<B: ByteDots>(self) -> Output;
}

/// The same over tiles, for any unit that multiplies them.
pub(super) trait TilePass<Output = ()> {
    /// # Safety
    /// The CPU must have the unit of `T`.
    unsafe fn run<T: Tiles>(self) -> Output;
}

/// Declares the entry of passes to a level: a function compiled with its features, into which they are inlined.
macro_rules! entry {
    ($name:ident, $kind:ident, $level:ty $(, $features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $name<T, P: $kind<T>>(pass: P) -> T {
            pass.run::<$level>()
        }
    };
}

entry!(portable, Pass, Portable);
entry!(portable_bytes, BytePass, Portable);
entry!(portable_tiles, TilePass, Portable);
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
entry!(amx_tiles, TilePass, Amx, "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt,bmi1,bmi2");
#[cfg(all(target_arch = "x86_64", feature = "portable-fma"))]
entry!(portable_fma, Pass, Portable, "avx2,fma,popcnt,bmi1,bmi2");
#[cfg(all(target_arch = "x86_64", feature = "portable-fma"))]
entry!(portable_fma_bytes, BytePass, Portable, "avx2,fma,popcnt,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
entry!(avx2, Pass, Avx2, "avx2,fma,f16c,popcnt,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
entry!(avx2_bytes, BytePass, Avx2, "avx2,fma,f16c,popcnt,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
entry!(avx512, Pass, Avx512, "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
entry!(
    avx512_bytes,
    BytePass,
    Avx512,
    "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt,bmi1,bmi2"
);
#[cfg(target_arch = "x86_64")]
entry!(
    vnni_bytes,
    BytePass,
    Vnni,
    "avx512vnni,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt,bmi1,bmi2"
);

#[cfg(target_arch = "aarch64")]
entry!(neon, Pass, Neon, "neon");
#[cfg(target_arch = "aarch64")]
entry!(neon_bytes, BytePass, Neon, "neon");
#[cfg(target_arch = "aarch64")]
entry!(dotprod_bytes, BytePass, Dots<false>, "neon,dotprod");
#[cfg(target_arch = "aarch64")]
entry!(i8mm_bytes, BytePass, Dots<true>, "neon,dotprod,i8mm");

impl Simd {
    /// Runs a pass.
    #[inline]
    pub(super) fn run<T, P: Pass<T>>(self, pass: P) -> T {
        // SAFETY: a `Simd` exists only for levels that this CPU runs.
        unsafe {
            match self.0 {
                LevelKind::Portable => portable(pass),
                #[cfg(all(target_arch = "x86_64", feature = "portable-fma"))]
                LevelKind::PortableFma => portable_fma(pass),
                #[cfg(target_arch = "x86_64")]
                LevelKind::Avx2 => avx2(pass),
                #[cfg(target_arch = "x86_64")]
                LevelKind::Avx512 => avx512(pass),
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                LevelKind::Amx => avx512(pass),
                #[cfg(target_arch = "aarch64")]
                LevelKind::Neon => neon(pass),
            }
        }
    }

    /// Returns `true` if the CPU multiplies tiles of bf16 faster than f32.
    pub(super) fn has_tiles(self) -> bool {
        self.name() == "amx"
    }

    /// Runs a pass over tiles.
    pub(super) fn run_tiles<T, P: TilePass<T>>(self, pass: P) -> T {
        // SAFETY: as above.
        unsafe {
            match self.0 {
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                LevelKind::Amx => amx_tiles(pass),
                _ => portable_tiles(pass),
            }
        }
    }

    /// Runs a pass over bytes.
    pub(super) fn run_bytes<T, P: BytePass<T>>(self, pass: P) -> T {
        // SAFETY: as above; what else is needed is asked for.
        unsafe {
            match self.0 {
                LevelKind::Portable => portable_bytes(pass),
                #[cfg(all(target_arch = "x86_64", feature = "portable-fma"))]
                LevelKind::PortableFma => portable_fma_bytes(pass),
                #[cfg(target_arch = "x86_64")]
                LevelKind::Avx2 => avx2_bytes(pass),
                #[cfg(target_arch = "x86_64")]
                LevelKind::Avx512 if is_x86_feature_detected!("avx512vnni") => vnni_bytes(pass),
                // Every CPU with AMX has it.
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                LevelKind::Amx => vnni_bytes(pass),
                #[cfg(target_arch = "x86_64")]
                LevelKind::Avx512 => avx512_bytes(pass),
                #[cfg(target_arch = "aarch64")]
                LevelKind::Neon if std::arch::is_aarch64_feature_detected!("i8mm") => {
                    i8mm_bytes(pass)
                }
                #[cfg(target_arch = "aarch64")]
                LevelKind::Neon if std::arch::is_aarch64_feature_detected!("dotprod") => {
                    dotprod_bytes(pass)
                }
                #[cfg(target_arch = "aarch64")]
                LevelKind::Neon => neon_bytes(pass),
            }
        }
    }
}
