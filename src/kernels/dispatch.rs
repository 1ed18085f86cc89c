//! Detects the CPU once, and is the only way into the passes.
//!
//! A [`Simd`] value can only be made for a level that this CPU runs, so holding one proves what the passes need.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use super::bytes::ByteDots;
use super::lanes::{Element, LANES, Level, Scalar};
use super::passes::{
    self, Given, PIVOTS, PartitionSums, PivotSums, Positions, Prefetch, RANKED, Survey, WeightFn,
};
use super::portable::Portable;
use super::short::{
    self, BATCH, BatchScratch, Candidate, KeptSums, TailTarget, TieSums, WeightFnOf,
};
use crate::certified_sums::CHUNK;
use crate::error::Error;

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
                    levels.push(("avx512", Simd(Kind::Avx512)));
                }
                if basic && is_x86_feature_detected!("f16c") {
                    levels.push(("avx2", Simd(Kind::Avx2)));
                }
                if basic {
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

/// A pass over bytes, for any way to multiply them.
pub(super) trait BytePass {
    type Output;

    /// # Safety
    /// The CPU must have the features of `B`.
    unsafe fn run<B: ByteDots>(self) -> Self::Output;
}

/// Declares the passes at one level, compiled with its features.
macro_rules! level {
    ($module:ident, $level:ty $(, $features:literal)?) => {
        mod $module {
            #[allow(clippy::wildcard_imports)] // everything that signatures name
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn survey<E: Element>(
                from: Option<&[E]>, len: usize, to: &mut [E],
            ) -> Survey<E::Scalar> {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::survey::<$level, E>(from, len, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn scan<E: Element, const ROUGH: bool>(
                scores: &[E], shift: E::Scalar, scale: f64,
            ) -> (Survey<E::Scalar>, f64) {
                // SAFETY: entered only with proof that the CPU has the features.
                unsafe { passes::scan::<$level, E, ROUGH>(scores, shift, scale) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn rough<E: Element>(
                scores: &[E], largest: E::Scalar, scale: f64,
            ) -> f64 {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::rough::<$level, E>(scores, largest, scale) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn compact<E: Element>(
                from: &[E], allowed: &[u8], to: *mut E::Scalar, positions: *mut u32,
            ) -> usize {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::compact::<$level, E>(from, allowed, to, positions) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn count_visible<E: Element>(
                scores: &[E],
            ) -> usize {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::count_visible::<$level, E>(scores) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn extent<E: Element>(
                scores: &[E],
            ) -> (E::Scalar, E::Scalar) {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::extent::<$level, E>(scores) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn widen<E: Element>(
                scores: &[E], to: &mut [E::Scalar],
            ) {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::widen::<$level, E>(scores, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn mass<E: Element, W: WeightFn<E::Scalar>>(
                scores: &[E], weight_fn: W,
            ) -> f64 {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::mass::<$level, E, W>(scores, weight_fn) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn weights<E: Element, W: WeightFn<E::Scalar>>(
                scores: &[E], weight_fn: W, to: &mut [E::Scalar],
            ) -> f64 {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::weights::<$level, E, W>(scores, weight_fn, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn find_candidate<E: Element, M: WeightFnOf<E::Scalar>>(
                rows: &[&[E]], target: &TailTarget, weight_fn: M, room: &mut BatchScratch<'_, E>,
            ) -> [Candidate<E::Scalar>; BATCH]
            where
                E::Scalar: Element<Scalar = E::Scalar>,
            {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { short::find_candidate::<$level, E, M>(rows, target, weight_fn, room) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn sum_and_emit<E: Element>(
                scores: &[E], weights: &[E::Scalar], edge: E::Scalar, positions: Positions<'_>, to: *mut u32,
            ) -> KeptSums {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { short::sum_and_emit::<$level, E>(scores, weights, edge, positions, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn sum_around_ties<E: Element>(
                scores: &[E], weights: &[E::Scalar], score: E::Scalar,
            ) -> TieSums {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { short::sum_around_ties::<$level, E>(scores, weights, score) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn extent_within<E: Element>(
                scores: &[E], lo: E::Scalar, hi: E::Scalar,
            ) -> (E::Scalar, E::Scalar) {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::extent_within::<$level, E>(scores, lo, hi) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn squares<S: Scalar>(
                weights: &[S],
            ) -> f64 {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::squares::<$level, S>(weights) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn pivot_sums<S: Scalar, const COUNT: bool>(
                scores: &[S], weights: &[S], pivots: &[S; PIVOTS],
            ) -> PivotSums {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::pivot_sums::<$level, S, COUNT>(scores, weights, pivots) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn split<E: Element, W: WeightFn<E::Scalar>>(
                scores: &[E], weight_fn: W, bracket: (E::Scalar, E::Scalar), prefetch: Prefetch, to: *mut E::Scalar,
            ) -> PartitionSums {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::split::<$level, E, W>(scores, weight_fn, bracket, prefetch, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn narrow<S: Scalar>(
                scores: *const S, weights: *const S, len: usize, bracket: (S, S), to: *mut S, to_weights: *mut S,
            ) -> PartitionSums {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::narrow::<$level, S>(scores, weights, len, bracket, to, to_weights) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn candidate<S: Scalar>(
                scores: &[S], weights: &[S], visible: usize, room: S,
            ) -> S {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::candidate::<$level, S>(scores, weights, visible, room) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn given<E: Element, W: WeightFn<E::Scalar>>(
                scores: &[E], keep: &[u8], weight_fn: W,
            ) -> Given<E::Scalar> {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::given::<$level, E, W>(scores, keep, weight_fn) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn emit<E: Element>(
                scores: &[E], positions: Positions<'_>, edge: E::Scalar, inclusive: bool, to: *mut u32,
            ) -> usize {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::emit::<$level, E>(scores, positions, edge, inclusive, to) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn find_equal<E: Element>(
                scores: &[E], score: E::Scalar, nth: usize,
            ) -> Result<usize, usize> {
                // SAFETY: entered only with proof that the CPU has the features; the caller vouches for the pointers.
                unsafe { passes::find_equal::<$level, E>(scores, score, nth) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn run<P: Pass>(pass: P) -> P::Output {
                // SAFETY: as above.
                unsafe { pass.run::<$level>() }
            }
        }
    };
}

/// Declares the passes over bytes for one way to multiply them, compiled with its features.
macro_rules! bytes {
    ($function:ident, $bytes:ty $(, $features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $function<P: BytePass>(pass: P) -> P::Output {
            // SAFETY: entered only with proof that the CPU has the features.
            unsafe { pass.run::<$bytes>() }
        }
    };
}

bytes!(bytes_portable, Portable);
#[cfg(target_arch = "x86_64")]
bytes!(bytes_portable_fma, Portable, "avx2,fma,popcnt,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
bytes!(bytes_avx2, super::avx2::Avx2, "avx2,fma,f16c,popcnt,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
bytes!(
    bytes_avx512,
    super::avx512::Avx512,
    "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt,bmi1,bmi2"
);
#[cfg(target_arch = "x86_64")]
bytes!(
    bytes_vnni,
    super::bytes::Vnni,
    "avx512vnni,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt,bmi1,bmi2"
);

level!(portable, Portable);
#[cfg(target_arch = "x86_64")]
level!(portable_fma, Portable, "avx2,fma,popcnt,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
level!(avx2, super::super::avx2::Avx2, "avx2,fma,f16c,popcnt,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
level!(
    avx512,
    super::super::avx512::Avx512,
    "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt,bmi1,bmi2"
);

/// Calls a pass at the level that is held.
macro_rules! at_level {
    ($simd:expr, $pass:ident $(::<$($generic:tt),*>)? ($($argument:expr),*)) => {
        match $simd.0 {
            // SAFETY: a `Simd` exists only for levels that this CPU runs; pointers are vouched for by the caller.
            Kind::Portable => unsafe { portable::$pass $(::<$($generic),*>)? ($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::PortableFma => unsafe { portable_fma::$pass $(::<$($generic),*>)? ($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx2 => unsafe { avx2::$pass $(::<$($generic),*>)? ($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512 => unsafe { avx512::$pass $(::<$($generic),*>)? ($($argument),*) },
        }
    };
}

/// A growing list of scores and their weights, padded so that whole groups can be read and written.
#[derive(Debug, Default)]
pub(crate) struct Bracket<S> {
    scores: Vec<S>,
    weights: Vec<S>,
    len: usize,
}

impl<S: Scalar> Bracket<S> {
    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Makes room for that many more entries, and for a group beyond them.
    pub(crate) fn reserve(&mut self, more: usize) {
        let room = (self.len + more).next_multiple_of(LANES) + 2 * LANES;
        if self.scores.len() < room {
            self.scores.resize(room.max(2 * self.scores.len()), S::NEG_INFINITY);
            self.weights.resize(self.scores.len(), S::default());
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn scores(&self) -> &[S] {
        &self.scores[..self.len]
    }

    /// Appends another list's scores; weights are to be weighed anew.
    pub(crate) fn append(&mut self, other: &Bracket<S>) {
        self.reserve(other.len);
        let end = self.len + other.len;
        self.scores[self.len..end].copy_from_slice(other.scores());
        self.len = end;
    }

    /// Scores and weights in whole groups of `lanes`, filled up with masked entries.
    pub(crate) fn padded(&mut self, lanes: usize) -> (&[S], &[S]) {
        self.reserve(lanes);
        let end = self.len.next_multiple_of(lanes).max(lanes);
        self.scores[self.len..end].fill(S::NEG_INFINITY);
        self.weights[self.len..end].fill(S::default());
        (&self.scores[..end], &self.weights[..end])
    }
}

impl Simd {
    /// Runs a pass that is written elsewhere.
    pub(super) fn run<P: Pass>(self, pass: P) -> P::Output {
        at_level!(self, run(pass))
    }

    /// Runs a pass over bytes.
    pub(super) fn run_bytes<P: BytePass>(self, pass: P) -> P::Output {
        match self.0 {
            // SAFETY: a `Simd` exists only for levels that this CPU runs.
            Kind::Portable => unsafe { bytes_portable(pass) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::PortableFma => unsafe { bytes_portable_fma(pass) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx2 => unsafe { bytes_avx2(pass) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above, and the instruction is asked for.
            Kind::Avx512 if is_x86_feature_detected!("avx512vnni") => unsafe { bytes_vnni(pass) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512 => unsafe { bytes_avx512(pass) },
        }
    }

    /// Looks over a row of `len` entries in padded scratch (whole groups), after copying it there if it is given.
    pub(crate) fn survey<E: Element>(
        self,
        from: Option<&[E]>,
        len: usize,
        to: &mut [E],
    ) -> Survey<E::Scalar> {
        assert!(to.len().is_multiple_of(LANES) && to.len() >= len);
        assert!(from.is_none_or(|from| from.len() == len));
        at_level!(self, survey(from, len, to))
    }

    /// Looks over whole groups where they are; given a shift and a scale also the sum of `exp(scale * (score - shift))`, as
    /// roughly as [`Simd::rough`] has it, as long as no exponent is above 80.
    pub(crate) fn scan<E: Element>(
        self,
        scores: &[E],
        rough: Option<(E::Scalar, f64)>,
    ) -> (Survey<E::Scalar>, f64) {
        assert!(scores.len().is_multiple_of(LANES));
        match rough {
            Some((shift, scale)) => at_level!(self, scan::<E, true>(scores, shift, scale)),
            None => at_level!(self, scan::<E, false>(scores, E::Scalar::default(), 1.0)),
        }
    }

    /// What whole groups of scores weigh relative to the largest, to within a few per cent, for `|scale * largest|` up to
    /// about 1e5.
    pub(crate) fn rough<E: Element>(self, scores: &[E], largest: E::Scalar, scale: f64) -> f64 {
        assert!(scores.len().is_multiple_of(LANES));
        at_level!(self, rough(scores, largest, scale))
    }

    /// Appends the entries that are allowed and not masked, widened, and their positions.
    pub(crate) fn compact<E: Element>(
        self,
        from: &[E],
        allowed: &[u8],
        to: &mut Vec<E::Scalar>,
        positions: &mut Vec<u32>,
    ) {
        assert_eq!(from.len(), allowed.len());
        to.clear();
        positions.clear();
        to.reserve(from.len() + 2 * LANES);
        positions.reserve(from.len() + 2 * LANES);
        let (output, listed) = (to.as_mut_ptr(), positions.as_mut_ptr());
        let visible = at_level!(self, compact(from, allowed, output, listed));
        assert!(visible <= from.len());
        // SAFETY: the pass wrote `visible` entries from the start of each, within the room reserved.
        unsafe {
            to.set_len(visible);
            positions.set_len(visible);
        }
    }

    /// How many entries of whole groups are not masked.
    pub(crate) fn count_visible<E: Element>(self, scores: &[E]) -> usize {
        assert!(scores.len().is_multiple_of(LANES));
        at_level!(self, count_visible(scores))
    }

    /// The smallest score that is not masked and the largest of whole groups.
    pub(crate) fn extent<E: Element>(self, scores: &[E]) -> (E::Scalar, E::Scalar) {
        assert!(scores.len().is_multiple_of(LANES));
        at_level!(self, extent(scores))
    }

    /// The smallest and the largest score of `[lo, hi)` in whole groups; infinities if there is none.
    pub(crate) fn extent_within<E: Element>(
        self,
        scores: &[E],
        (lo, hi): (E::Scalar, E::Scalar),
    ) -> (E::Scalar, E::Scalar) {
        assert!(scores.len().is_multiple_of(LANES));
        at_level!(self, extent_within(scores, lo, hi))
    }

    /// Whole groups of scores in the type computed in.
    pub(crate) fn widen<E: Element>(self, scores: &[E], to: &mut [E::Scalar]) {
        assert!(scores.len().is_multiple_of(LANES));
        at_level!(self, widen(scores, to));
    }

    /// The sum of all weights of whole groups of scores.
    pub(crate) fn mass<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        weight_fn: W,
    ) -> f64 {
        assert!(scores.len().is_multiple_of(LANES));
        at_level!(self, mass(scores, weight_fn))
    }

    /// The weights of whole groups of scores, and their sum.
    pub(crate) fn weights<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        weight_fn: W,
        to: &mut [E::Scalar],
    ) -> f64 {
        assert!(scores.len().is_multiple_of(LANES));
        at_level!(self, weights(scores, weight_fn, to))
    }

    /// The sum of the squares of whole groups of weights, roughly.
    pub(crate) fn squares<S: Scalar>(self, weights: &[S]) -> f64 {
        assert!(weights.len().is_multiple_of(LANES));
        at_level!(self, squares(weights))
    }

    /// Weighs the scores of a bracket, and says what they weigh together.
    pub(crate) fn weigh<S: Scalar + Element<Scalar = S>, W: WeightFn<S>>(
        self,
        bracket: &mut Bracket<S>,
        weight_fn: W,
    ) -> f64 {
        let end = bracket.padded(LANES).0.len();
        let Bracket { scores, weights, .. } = bracket;
        let mut total = 0.0;
        // In chunks, like every pass whose sums end in a certificate: their f64 sums meet in order.
        for (scores, weights) in scores[..end].chunks(CHUNK).zip(weights[..end].chunks_mut(CHUNK)) {
            total += self.weights(scores, weight_fn, weights);
        }
        total
    }

    /// Sums strictly below each of eight pivots over whole groups of scores and their weights, and counts from each
    /// upward if asked to. Good enough to show the way.
    pub(crate) fn pivot_sums<S: Scalar>(
        self,
        scores: &[S],
        weights: &[S],
        pivots: &[S; PIVOTS],
        count: bool,
    ) -> PivotSums {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        if count {
            at_level!(self, pivot_sums::<S, true>(scores, weights, pivots))
        } else {
            at_level!(self, pivot_sums::<S, false>(scores, weights, pivots))
        }
    }

    /// Sums both sides of `[lo, hi)` over whole groups of scores and appends the scores inside to `to`, in order.
    /// `to` must have room for `scores.len()` more entries. What will be wanted soon is fetched meanwhile.
    pub(crate) fn split<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        weight_fn: W,
        bracket: (E::Scalar, E::Scalar),
        prefetch: Option<Prefetch>,
        to: &mut Bracket<E::Scalar>,
    ) -> PartitionSums {
        assert!(scores.len().is_multiple_of(LANES));
        let prefetch = prefetch.unwrap_or(Prefetch::new(scores.as_ptr(), scores.as_ptr().cast()));
        assert!(to.scores.len() >= to.len + scores.len() + LANES);
        let output = to.scores[to.len..].as_mut_ptr();
        // The room asserted above is what the pass needs: everything inside, and one group more.
        let sides = at_level!(self, split(scores, weight_fn, bracket, prefetch, output));
        to.len += sides.inside;
        sides
    }

    /// Sums both sides of `[lo, hi)` over whole groups of scores and weights and writes what lies inside to `to`.
    pub(crate) fn narrow_into<S: Scalar>(
        self,
        scores: &[S],
        weights: &[S],
        bracket: (S, S),
        to: &mut Bracket<S>,
    ) -> PartitionSums {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        to.clear();
        to.reserve(scores.len());
        let from = (scores.as_ptr(), weights.as_ptr(), scores.len());
        let out = (to.scores.as_mut_ptr(), to.weights.as_mut_ptr());
        let sides = self.narrow_between(from, bracket, out);
        to.len = sides.inside;
        sides
    }

    /// Narrows a bracket in place to `[lo, hi)` and sums what falls off on either side and what is left.
    pub(crate) fn narrow<S: Scalar>(
        self,
        within: &mut Bracket<S>,
        bracket: (S, S),
    ) -> PartitionSums {
        let len = within.padded(LANES).0.len();
        assert!(within.scores.len() >= len + LANES && within.weights.len() >= len + LANES);
        let out = (within.scores.as_mut_ptr(), within.weights.as_mut_ptr());
        // Both lists hold `len` entries and a group more, and what is written never overtakes what is read.
        let from = (out.0.cast_const(), out.1.cast_const(), len);
        let sides = self.narrow_between(from, bracket, out);
        within.len = sides.inside;
        sides
    }

    /// The pass in chunks. The caller has checked that there are `len` entries to read and as many and a group more
    /// to write.
    fn narrow_between<S: Scalar>(
        self,
        (scores, weights, len): (*const S, *const S, usize),
        bracket: (S, S),
        (to_keys, to_weights): (*mut S, *mut S),
    ) -> PartitionSums {
        let mut sides = PartitionSums::default();
        for at in (0..len).step_by(CHUNK) {
            let here = CHUNK.min(len - at);
            let (scores, weights) = (scores.wrapping_add(at), weights.wrapping_add(at));
            let output = to_keys.wrapping_add(sides.inside);
            let out = to_weights.wrapping_add(sides.inside);
            let part = at_level!(self, narrow(scores, weights, here, bracket, output, out));
            sides.below += part.below;
            sides.within += part.within;
            sides.above += part.above;
            sides.count_above += part.count_above;
            sides.inside += part.inside;
        }
        sides
    }

    /// The largest score of a bracket of at most [`RANKED`] whose strictly smaller scores weigh at most `room`, roughly.
    pub(crate) fn candidate<S: Scalar>(self, bracket: &mut Bracket<S>, room: S) -> S {
        let visible = bracket.len();
        assert!(visible <= RANKED);
        let (scores, weights) = bracket.padded(RANKED);
        at_level!(self, candidate(scores, weights, visible, room))
    }

    /// Sums a kept set, given as one byte per score, and its tail, over whole groups.
    pub(crate) fn given<E: Element, W: WeightFn<E::Scalar>>(
        self,
        scores: &[E],
        keep: &[u8],
        weight_fn: W,
    ) -> Given<E::Scalar> {
        assert!(scores.len().is_multiple_of(LANES) && keep.len() == scores.len());
        at_level!(self, given(scores, keep, weight_fn))
    }

    /// Appends, in order, the positions of the scores (whole groups) that are above an edge, or at it if `inclusive`.
    pub(crate) fn emit<E: Element>(
        self,
        scores: &[E],
        positions: Positions<'_>,
        edge: E::Scalar,
        inclusive: bool,
        to: &mut Vec<u32>,
    ) {
        assert!(scores.len().is_multiple_of(LANES));
        if let Positions::Listed(list) = positions {
            assert!(list.len() >= scores.len());
        }
        for (c, scores) in scores.chunks(EMIT).enumerate() {
            let positions = match positions {
                Positions::From(first) => Positions::From(first.wrapping_add((c * EMIT) as u32)),
                Positions::Listed(list) => Positions::Listed(&list[c * EMIT..][..scores.len()]),
            };
            to.reserve(scores.len() + LANES);
            let out = to.spare_capacity_mut().as_mut_ptr().cast();
            let written = at_level!(self, emit(scores, positions, edge, inclusive, out));
            assert!(written <= scores.len());
            // SAFETY: the pass wrote that many positions behind the old ones, within the room reserved.
            unsafe { to.set_len(to.len() + written) };
        }
    }

    /// Copies, weighs and searches a few short rows, up to a candidate for the worst score kept.
    pub(crate) fn find_candidate<E: Element, M: WeightFnOf<E::Scalar>>(
        self,
        rows: &[&[E]],
        target: &TailTarget,
        weight_fn: M,
        room: &mut BatchScratch<'_, E>,
    ) -> [Candidate<E::Scalar>; BATCH]
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        at_level!(self, find_candidate(rows, target, weight_fn, room))
    }

    /// Sums a row (whole groups) on both sides of an edge and appends the positions of the scores from the edge upward.
    pub(crate) fn sum_and_emit<E: Element>(
        self,
        scores: &[E],
        weights: &[E::Scalar],
        edge: E::Scalar,
        positions: Positions<'_>,
        to: &mut Vec<u32>,
    ) -> KeptSums {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        if let Positions::Listed(list) = positions {
            assert!(list.len() >= scores.len());
        }
        to.reserve(scores.len() + LANES);
        let out = to.spare_capacity_mut().as_mut_ptr().cast();
        let kept_sums = at_level!(self, sum_and_emit(scores, weights, edge, positions, out));
        assert!(kept_sums.kept <= scores.len());
        // SAFETY: the pass wrote that many positions behind the old ones, within the room reserved.
        unsafe { to.set_len(to.len() + kept_sums.kept) };
        kept_sums
    }

    /// Sums a row (whole groups) on both sides of the scores that equal one.
    pub(crate) fn sum_around_ties<E: Element>(
        self,
        scores: &[E],
        weights: &[E::Scalar],
        score: E::Scalar,
    ) -> TieSums {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == weights.len());
        at_level!(self, sum_around_ties(scores, weights, score))
    }

    /// Where the `nth` score (from 1) that equals `score` is among whole groups, or how many there are.
    pub(crate) fn find_equal<E: Element>(
        self,
        scores: &[E],
        score: E::Scalar,
        nth: usize,
    ) -> Result<usize, usize> {
        assert!(scores.len().is_multiple_of(LANES));
        at_level!(self, find_equal(scores, score, nth))
    }
}

/// Scores per call of the emitting pass.
const EMIT: usize = 4096;
