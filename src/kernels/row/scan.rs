//! First survey of a row: extremes, NaN, visible entries, and its rough weight.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for slices of whole groups; of the
//! room behind a raw pointer it says what it asks for.

use crate::kernels::isa::{Element, LANES, Lanes, LanesOf, Level, Scalar, Single};
use crate::kernels::simd::{Pass, Simd};
use crate::kernels::weights::LOOSE;

/// Bytes that what is read or written in order is prefetched ahead.
pub(super) const AHEAD: usize = 1024;

/// Result of a survey of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Survey<S> {
    /// Largest score, -inf if there is none.
    pub(crate) largest: S,
    /// Smallest score; -inf if there is none or a masked entry.
    pub(crate) smallest: S,
    /// `true` if there is a NaN.
    pub(crate) nan: bool,
}

impl<S: Scalar> Survey<S> {
    /// Combines the surveys of two non-empty parts.
    pub(crate) fn join(self, other: Self) -> Self {
        Survey {
            largest: if self.largest > other.largest { self.largest } else { other.largest },
            smallest: if self.smallest < other.smallest { self.smallest } else { other.smallest },
            nan: self.nan || other.nan,
        }
    }
}

/// Extremes of lanes so far.
struct Extremes<V: Lanes> {
    largest: V,
    smallest: V,
    nan: u16,
}

impl<V: Lanes> Extremes<V> {
    #[inline(always)]
    unsafe fn new() -> Self {
        let largest = V::splat(V::Scalar::NEG_INFINITY);
        Extremes { largest, smallest: V::splat(V::Scalar::INFINITY), nan: 0 }
    }
    /// Adds two groups. The second operand wins where a comparison fails, so a NaN never becomes an extreme.
    #[inline(always)]
    unsafe fn see(&mut self, one: V, other: V) {
        self.largest = one.max(other.max(self.largest));
        self.smallest = one.min(other.min(self.smallest));
        self.nan |= V::bits(one.unordered(other));
    }
    #[inline(always)]
    unsafe fn survey(self) -> Survey<V::Scalar> {
        let (largest, mut smallest) = (self.largest.largest(), self.smallest.smallest());
        if largest == V::Scalar::NEG_INFINITY {
            smallest = largest;
        }
        Survey { largest, smallest, nan: self.nan != 0 }
    }
}

/// [`Simd::survey`]; also fills the padding.
pub(super) struct PaddedSurvey<'a, E> {
    pub(super) from: Option<&'a [E]>,
    pub(super) len: usize,
    pub(super) to: &'a mut [E],
}

impl<E: Element> Pass<Survey<E::Scalar>> for PaddedSurvey<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> Survey<E::Scalar> {
        let PaddedSurvey { from, len, to } = self;
        let mut seen = Extremes::<LanesOf<L, E>>::new();
        let pairs = len - len % (2 * LANES);
        if let Some(from) = from {
            let (from, to) = (&from[..len], &mut to[..len]);
            let outputs = to.chunks_exact_mut(2 * LANES);
            for (pair, out) in from.chunks_exact(2 * LANES).zip(outputs) {
                let ahead = pair.as_ptr().wrapping_byte_add(AHEAD);
                L::prefetch(ahead.cast());
                L::prefetch(ahead.wrapping_byte_add(64).cast());
                let one = E::copy::<L>(pair.as_ptr(), out.as_mut_ptr());
                let other = E::copy::<L>(pair[LANES..].as_ptr(), out[LANES..].as_mut_ptr());
                seen.see(one, other);
            }
            to[pairs..].copy_from_slice(&from[pairs..]);
        } else {
            for pair in to[..pairs].chunks_exact(2 * LANES) {
                seen.see(E::load::<L>(pair.as_ptr()), E::load::<L>(pair[LANES..].as_ptr()));
            }
        }
        if pairs < len {
            // Padding must not be the smallest: until the end it repeats a score.
            let repeated = to[len - 1];
            let used = len.next_multiple_of(LANES);
            to[len..used].fill(repeated);
            let (one, other) = (to[pairs..].as_ptr(), to[used - LANES..].as_ptr());
            seen.see(E::load::<L>(one), E::load::<L>(other));
        }
        to[len..].fill(E::MASKED);
        seen.survey()
    }
}

/// [`Simd::scan`], with the rough sum or without.
pub(super) struct Scan<'a, E: Element, const ROUGH: bool> {
    scores: &'a [E],
    shift: E::Scalar,
    scale: f64,
}

impl<'a, E: Element> Scan<'a, E, false> {
    pub(super) fn plain(scores: &'a [E]) -> Self {
        Scan { scores, shift: E::Scalar::default(), scale: 1.0 }
    }
}

impl<E: Element, const ROUGH: bool> Pass<(Survey<E::Scalar>, f64)> for Scan<'_, E, ROUGH> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> (Survey<E::Scalar>, f64) {
        let Scan { scores, shift, scale } = self;
        let mut seen = Extremes::<LanesOf<L, E>>::new();
        let (factor, bias) = rough_line::<L>(shift.into(), scale);
        let zero = <L::F32 as Lanes>::splat(0.0);
        let mut total = 0.0;
        for block in scores.chunks(LANES * LOOSE) {
            let (mut first, mut second) = (zero, zero);
            let pairs = block.chunks_exact(2 * LANES);
            if let [_, ..] = pairs.remainder() {
                let at = pairs.remainder().as_ptr();
                let one = E::load::<L>(at);
                seen.see(one, one);
                if ROUGH {
                    first = rough_weights::<L, E>(at, factor, bias);
                }
            }
            for pair in pairs {
                let ahead = pair.as_ptr().wrapping_byte_add(AHEAD);
                L::prefetch(ahead.cast());
                L::prefetch(ahead.wrapping_byte_add(64).cast());
                let (one, other) = (pair.as_ptr(), pair[LANES..].as_ptr());
                seen.see(E::load::<L>(one), E::load::<L>(other));
                if ROUGH {
                    first = first.add(rough_weights::<L, E>(one, factor, bias));
                    second = second.add(rough_weights::<L, E>(other, factor, bias));
                }
            }
            if ROUGH {
                total += f64::from(first.add(second).sum());
            }
        }
        (seen.survey(), total)
    }
}

/// Returns floats whose bits are `score * factor + bias` as an integer. An integer that is linear in x, read as a
/// float, is a piecewise linear 2^x (N. N. Schraudolph, "A Fast, Compact Approximation of the Exponential Function",
/// 1999).
#[inline(always)]
unsafe fn rough_weights<L: Level, E: Element>(
    at: *const E,
    factor: L::F32,
    bias: L::F32,
) -> L::F32 {
    let zero = <L::F32 as Lanes>::splat(0.0);
    E::single::<L>(E::load::<L>(at)).mul_add(factor, bias).max(zero).as_bits()
}

/// Returns factor and bias of [`rough_weights`].
#[inline(always)]
unsafe fn rough_line<L: Level>(shift: f64, scale: f64) -> (L::F32, L::F32) {
    // 2^23 / ln(2), and the exponent's bias less the logarithm of the mean of (1 + f) / 2^f over [0, 1).
    const UNIT: f64 = 8_388_608.0;
    const BIAS: f64 = (127.0 - 0.0575) * UNIT;
    let factor = scale * (UNIT * std::f64::consts::LOG2_E);
    let bias = <L::F32 as Lanes>::splat((BIAS - factor * shift) as f32);
    (<L::F32 as Lanes>::splat(factor as f32), bias)
}

/// [`Simd::compact`]; both outputs have room for as many entries and sixteen more.
struct Compact<'a, E: Element> {
    from: &'a [E],
    allowed: &'a [u8],
    to: *mut E::Scalar,
    positions: *mut u32,
}

impl<E: Element> Pass<usize> for Compact<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> usize {
        let Compact { from, allowed, to, positions } = self;
        // Groups are whole, or copied to be so.
        let bottom = LanesOf::<L, E>::splat(E::Scalar::NEG_INFINITY);
        let mut written = 0;
        let whole = from.len() - from.len() % LANES;
        for at in (0..from.len()).step_by(LANES) {
            let (mut scores, mut bytes) = ([E::MASKED; LANES], [0u8; LANES]);
            let (scores, bytes) = if at < whole {
                (from.as_ptr().add(at), allowed.as_ptr().add(at))
            } else {
                scores[..from.len() - whole].copy_from_slice(&from[whole..]);
                bytes[..from.len() - whole].copy_from_slice(&allowed[whole..]);
                (scores.as_ptr(), bytes.as_ptr())
            };
            let scores = E::load::<L>(scores);
            // Unmasked entries. A NaN passes, so that it is detected.
            let admitted = L::nonzero_bytes(bytes) & !LanesOf::<L, E>::bits(scores.eq(bottom));
            scores.compress_store(admitted, to.add(written));
            L::compress_count(at as u32, admitted, positions.add(written));
            written += admitted.count_ones() as usize;
        }
        written
    }
}

struct CountVisible<'a, E>(&'a [E]);

impl<E: Element> Pass<usize> for CountVisible<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> usize {
        let CountVisible(scores) = self;
        let bottom = LanesOf::<L, E>::splat(E::Scalar::NEG_INFINITY);
        let mut visible = 0;
        for group in scores.chunks_exact(LANES) {
            let scores = E::load::<L>(group.as_ptr());
            visible += LanesOf::<L, E>::bits(scores.gt(bottom)).count_ones() as usize;
        }
        visible
    }
}

struct Extent<'a, E>(&'a [E]);

impl<E: Element> Pass<(E::Scalar, E::Scalar)> for Extent<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> (E::Scalar, E::Scalar) {
        let Extent(scores) = self;
        let bottom = LanesOf::<L, E>::splat(E::Scalar::NEG_INFINITY);
        let top = LanesOf::<L, E>::splat(E::Scalar::INFINITY);
        let (mut smallest, mut largest) = (top, bottom);
        for group in scores.chunks_exact(LANES) {
            let scores = E::load::<L>(group.as_ptr());
            largest = scores.max(largest);
            smallest = scores.select(scores.gt(bottom), top).min(smallest);
        }
        (smallest.smallest(), largest.largest())
    }
}

/// [`Simd::extent_within`].
pub(super) struct ExtentWithin<'a, E: Element> {
    pub(super) scores: &'a [E],
    pub(super) lo: E::Scalar,
    pub(super) hi: E::Scalar,
}

impl<E: Element> Pass<(E::Scalar, E::Scalar)> for ExtentWithin<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> (E::Scalar, E::Scalar) {
        let ExtentWithin { scores, lo, hi } = self;
        let (lo, hi) = (LanesOf::<L, E>::splat(lo), LanesOf::<L, E>::splat(hi));
        let bottom = LanesOf::<L, E>::splat(E::Scalar::NEG_INFINITY);
        let top = LanesOf::<L, E>::splat(E::Scalar::INFINITY);
        let (mut least, mut most) = (top, bottom);
        for group in scores.chunks_exact(LANES) {
            let scores = E::load::<L>(group.as_ptr());
            let within = LanesOf::<L, E>::mask(scores.within(lo, hi));
            least = scores.select(within, top).min(least);
            most = scores.select(within, bottom).max(most);
        }
        (least.smallest(), most.largest())
    }
}

struct Widen<'a, E: Element> {
    scores: &'a [E],
    to: &'a mut [E::Scalar],
}

impl<E: Element> Pass for Widen<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let Widen { scores, to } = self;
        for (group, out) in scores.chunks_exact(LANES).zip(to.chunks_exact_mut(LANES)) {
            E::load::<L>(group.as_ptr()).store(out.as_mut_ptr());
        }
    }
}

impl Simd {
    /// Surveys a row of `len` entries in padded scratch (whole groups), after copying `from` there if given.
    pub(crate) fn survey<E: Element>(
        self,
        from: Option<&[E]>,
        len: usize,
        to: &mut [E],
    ) -> Survey<E::Scalar> {
        assert!(to.len().is_multiple_of(LANES) && to.len() >= len);
        assert!(from.is_none_or(|from| from.len() == len));
        self.run(PaddedSurvey { from, len, to })
    }

    /// Surveys whole groups in place. Given a shift and a scale, also returns the sum of
    /// `exp(scale * (score - shift))`, as rough as [`Simd::rough`], if no exponent is above 80.
    pub(crate) fn scan<E: Element>(
        self,
        scores: &[E],
        rough: Option<(E::Scalar, f64)>,
    ) -> (Survey<E::Scalar>, f64) {
        assert!(scores.len().is_multiple_of(LANES));
        match rough {
            Some((shift, scale)) => self.run(Scan::<E, true> { scores, shift, scale }),
            None => self.run(Scan::<E, false>::plain(scores)),
        }
    }

    /// Returns the weight of whole groups of scores relative to the largest, to within a few per cent, for `|scale *
    /// largest|` up to about 1e5.
    pub(crate) fn rough<E: Element>(self, scores: &[E], largest: E::Scalar, scale: f64) -> f64 {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(Scan::<E, true> { scores, shift: largest, scale }).1
    }

    /// Appends the allowed entries that are not masked, widened, and their positions.
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
        let visible = self.run(Compact { from, allowed, to: output, positions: listed });
        assert!(visible <= from.len());
        // SAFETY: the pass wrote `visible` entries from the start of each, within the room reserved.
        unsafe {
            to.set_len(visible);
            positions.set_len(visible);
        }
    }

    /// Returns the number of unmasked entries in whole groups.
    pub(crate) fn count_visible<E: Element>(self, scores: &[E]) -> usize {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(CountVisible(scores))
    }

    /// Returns the smallest unmasked score and the largest of whole groups.
    pub(crate) fn extent<E: Element>(self, scores: &[E]) -> (E::Scalar, E::Scalar) {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(Extent(scores))
    }

    /// Returns the smallest and the largest score of `[lo, hi)` in whole groups; infinities if there is none.
    pub(crate) fn extent_within<E: Element>(
        self,
        scores: &[E],
        (lo, hi): (E::Scalar, E::Scalar),
    ) -> (E::Scalar, E::Scalar) {
        assert!(scores.len().is_multiple_of(LANES));
        self.run(ExtentWithin { scores, lo, hi })
    }

    /// Widens whole groups of scores to the type computed in.
    pub(crate) fn widen<E: Element>(self, scores: &[E], to: &mut [E::Scalar]) {
        assert!(scores.len().is_multiple_of(LANES) && scores.len() == to.len());
        self.run(Widen { scores, to });
    }
}
