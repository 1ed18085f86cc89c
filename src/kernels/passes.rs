//! The passes over a row, written once for all instruction sets, element types and weight laws.
//!
//! Every pass reads whole groups of sixteen scores: a row is padded with masked entries, which weigh nothing and are
//! below every finite pivot. Sums that a decision ends with run sixteen groups deep in the lanes' own precision, then go
//! to sixteen f64 accumulators, which are added in a fixed tree at the end of the pass.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, for slices of whole groups where it does not say
//! otherwise, and for the room behind a raw pointer that it says.

use super::lanes::{Element, LANES, Lanes, Level, Scalar, Single};

/// Groups of sixteen that are summed before the lanes are emptied into f64.
pub(super) const DEPTH: usize = 16;
/// The same for sums that only show the way.
const LOOSE: usize = 64;

/// Pivots per round of the search.
pub(crate) const PIVOTS: usize = 8;
/// Within this range, in natural-log units, mass is spread evenly enough to guess where it ends.
pub(crate) const GUESSABLE_SPAN: f64 = 4.0;
/// The most scores that [`candidate`] ranks.
pub(crate) const RANKED: usize = 2 * LANES;

/// The lanes that an element type is computed in at a level.
type Of<L, E> = <<E as Element>::Scalar as Scalar>::Lanes<L>;

/// How a score becomes a weight.
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

/// The score itself, nothing for a masked one.
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

/// A running sum of lanes.
#[derive(Clone, Copy)]
pub(super) struct Sum<V: Lanes> {
    lanes: V,
    wide: V::Wide,
}

impl<V: Lanes> Sum<V> {
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Sum { lanes: V::splat(V::Scalar::default()), wide: V::wide_zero() }
    }
    #[inline(always)]
    pub(super) unsafe fn add(&mut self, weights: V) {
        self.lanes = self.lanes.add(weights);
    }
    #[inline(always)]
    pub(super) unsafe fn add_where(&mut self, mask: V::Mask, weights: V) {
        self.lanes = self.lanes.add_where(mask, weights);
    }
    /// Empties the lanes into f64; at most `DEPTH` additions lie between two calls.
    #[inline(always)]
    pub(super) unsafe fn flush(&mut self) {
        self.wide = self.lanes.widen_add(self.wide);
        self.lanes = V::splat(V::Scalar::default());
    }
    /// The total, by a fixed tree over the lanes.
    #[inline(always)]
    pub(super) unsafe fn total(mut self) -> f64 {
        self.flush();
        V::wide_total(self.wide)
    }
}

/// What [`survey`] saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Survey<S> {
    /// The largest score, -inf if there is none.
    pub(crate) largest: S,
    /// The smallest score; -inf if there is none or a masked entry.
    pub(crate) smallest: S,
    /// Whether there is a NaN.
    pub(crate) nan: bool,
}

impl<S: Scalar> Survey<S> {
    /// Of two parts that are both there.
    pub(crate) fn join(self, other: Self) -> Self {
        Survey {
            largest: if self.largest > other.largest { self.largest } else { other.largest },
            smallest: if self.smallest < other.smallest { self.smallest } else { other.smallest },
            nan: self.nan || other.nan,
        }
    }
}

/// The extremes of lanes, so far.
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
    /// The second operand wins where a comparison fails, so a NaN never becomes an extreme.
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

/// Bytes that a row is fetched ahead of its first look.
const AHEAD: usize = 1024;

/// Looks over the `len` entries of a row in padded scratch, after copying it there if it is given, and fills up the
/// padding.
#[inline(always)]
pub(super) unsafe fn survey<L: Level, E: Element>(
    from: Option<&[E]>,
    len: usize,
    to: &mut [E],
) -> Survey<E::Scalar> {
    debug_assert!(to.len().is_multiple_of(LANES) && to.len() >= len);
    let mut seen = Extremes::<Of<L, E>>::new();
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
        // Padding must not be the smallest: for now it repeats a score.
        let repeated = to[len - 1];
        let used = len.next_multiple_of(LANES);
        to[len..used].fill(repeated);
        let (one, other) = (to[pairs..].as_ptr(), to[used - LANES..].as_ptr());
        seen.see(E::load::<L>(one), E::load::<L>(other));
    }
    to[len..].fill(E::MASKED);
    seen.survey()
}

/// The floats whose bits are `score * factor + bias` as an integer.
#[inline(always)]
unsafe fn rough_weights<L: Level, E: Element>(
    at: *const E,
    factor: L::F32,
    bias: L::F32,
) -> L::F32 {
    let zero = <L::F32 as Lanes>::splat(0.0);
    E::single::<L>(E::load::<L>(at)).mul_add(factor, bias).max(zero).as_bits()
}

/// Factor and bias of [`rough_weights`].
#[inline(always)]
unsafe fn rough_line<L: Level>(shift: f64, scale: f64) -> (L::F32, L::F32) {
    // 2^23 / ln(2), and the exponent's bias less the logarithm of the mean of (1 + f) / 2^f over [0, 1).
    const UNIT: f64 = 8_388_608.0;
    const BIAS: f64 = (127.0 - 0.0575) * UNIT;
    let factor = scale * (UNIT * std::f64::consts::LOG2_E);
    let bias = <L::F32 as Lanes>::splat((BIAS - factor * shift) as f32);
    (<L::F32 as Lanes>::splat(factor as f32), bias)
}

/// Looks over whole groups where they are; with `ROUGH` also the sum of `exp(scale * (score - shift))`, as [`rough`] has it.
#[inline(always)]
pub(super) unsafe fn scan<L: Level, E: Element, const ROUGH: bool>(
    scores: &[E],
    shift: E::Scalar,
    scale: f64,
) -> (Survey<E::Scalar>, f64) {
    let mut seen = Extremes::<Of<L, E>>::new();
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

/// The sum of `exp(scale * (score - largest))` to within a few per cent, for `|scale * largest|` up to about 1e5.
///
/// It comes from the bits: an integer that is linear in x, read as a float, is a piecewise linear 2^x (N. N. Schraudolph,
/// "A Fast, Compact Approximation of the Exponential Function", 1999).
#[inline(always)]
pub(super) unsafe fn rough<L: Level, E: Element>(
    scores: &[E],
    largest: E::Scalar,
    scale: f64,
) -> f64 {
    scan::<L, E, true>(scores, largest, scale).1
}

/// Copies the entries that are allowed and not masked one behind another, widened, with their positions.
///
/// # Safety
/// The caller vouches for the level, and for room for `from.len()` entries and sixteen more in both outputs.
#[inline(always)]
pub(super) unsafe fn compact<L: Level, E: Element>(
    from: &[E],
    allowed: &[u8],
    to: *mut E::Scalar,
    positions: *mut u32,
) -> usize {
    assert_eq!(from.len(), allowed.len());
    // Groups are whole or copied to where they are.
    let bottom = Of::<L, E>::splat(E::Scalar::NEG_INFINITY);
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
        // What is not masked: a NaN is let in, so that it is seen.
        let admitted = L::nonzero_bytes(bytes) & !Of::<L, E>::bits(scores.eq(bottom));
        scores.compress_store(admitted, to.add(written));
        L::compress_count(at as u32, admitted, positions.add(written));
        written += admitted.count_ones() as usize;
    }
    written
}

/// How many entries are not masked.
#[inline(always)]
pub(super) unsafe fn count_visible<L: Level, E: Element>(scores: &[E]) -> usize {
    let bottom = Of::<L, E>::splat(E::Scalar::NEG_INFINITY);
    let mut visible = 0;
    for group in scores.chunks_exact(LANES) {
        let scores = E::load::<L>(group.as_ptr());
        visible += Of::<L, E>::bits(scores.gt(bottom)).count_ones() as usize;
    }
    visible
}

/// The largest score, and the smallest that is not masked.
#[inline(always)]
pub(super) unsafe fn extent<L: Level, E: Element>(scores: &[E]) -> (E::Scalar, E::Scalar) {
    let bottom = Of::<L, E>::splat(E::Scalar::NEG_INFINITY);
    let top = Of::<L, E>::splat(E::Scalar::INFINITY);
    let (mut smallest, mut largest) = (top, bottom);
    for group in scores.chunks_exact(LANES) {
        let scores = E::load::<L>(group.as_ptr());
        largest = scores.max(largest);
        smallest = scores.select(scores.gt(bottom), top).min(smallest);
    }
    (smallest.smallest(), largest.largest())
}

/// The smallest and the largest score of `[lo, hi)`; infinities if there is none.
#[inline(always)]
pub(super) unsafe fn extent_within<L: Level, E: Element>(
    scores: &[E],
    lo: E::Scalar,
    hi: E::Scalar,
) -> (E::Scalar, E::Scalar) {
    let (lo, hi) = (Of::<L, E>::splat(lo), Of::<L, E>::splat(hi));
    let bottom = Of::<L, E>::splat(E::Scalar::NEG_INFINITY);
    let top = Of::<L, E>::splat(E::Scalar::INFINITY);
    let (mut least, mut most) = (top, bottom);
    for group in scores.chunks_exact(LANES) {
        let scores = E::load::<L>(group.as_ptr());
        let within = Of::<L, E>::mask(scores.within(lo, hi));
        least = scores.select(within, top).min(least);
        most = scores.select(within, bottom).max(most);
    }
    (least.smallest(), most.largest())
}

/// The scores in the type computed in.
#[inline(always)]
pub(super) unsafe fn widen<L: Level, E: Element>(scores: &[E], to: &mut [E::Scalar]) {
    assert_eq!(scores.len(), to.len());
    for (group, out) in scores.chunks_exact(LANES).zip(to.chunks_exact_mut(LANES)) {
        E::load::<L>(group.as_ptr()).store(out.as_mut_ptr());
    }
}

/// The sum of all weights.
#[inline(always)]
pub(super) unsafe fn mass<L: Level, E: Element, W: WeightFn<E::Scalar>>(
    scores: &[E],
    weight_fn: W,
) -> f64 {
    let mut sum = Sum::new();
    for block in scores.chunks(LANES * DEPTH) {
        for group in block.chunks_exact(LANES) {
            sum.add(weight_fn.weigh(E::load::<L>(group.as_ptr())));
        }
        sum.flush();
    }
    sum.total()
}

/// The weights themselves, in the precision that the law computes in, and their sum.
#[inline(always)]
pub(super) unsafe fn weights<L: Level, E: Element, W: WeightFn<E::Scalar>>(
    scores: &[E],
    weight_fn: W,
    to: &mut [E::Scalar],
) -> f64 {
    assert_eq!(scores.len(), to.len());
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

/// The sum of the squares of weights; it shows the way and decides nothing.
#[inline(always)]
pub(super) unsafe fn squares<L: Level, S: Scalar>(weights: &[S]) -> f64 {
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

/// Sums below and counts from each pivot upward.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct PivotSums {
    /// Weight of the scores strictly below pivot i, to within some units of the lanes' precision per score.
    pub(crate) below: [f64; PIVOTS],
    /// How many scores are at or above pivot i; 0 if that was not asked for.
    pub(crate) at_least: [usize; PIVOTS],
}

/// [`PivotSums`] for eight pivots, from scores and their weights. These sums show the way and decide nothing.
#[inline(always)]
pub(super) unsafe fn pivot_sums<L: Level, S: Scalar, const COUNT: bool>(
    scores: &[S],
    weights: &[S],
    pivots: &[S; PIVOTS],
) -> PivotSums {
    assert_eq!(scores.len(), weights.len());
    let pivots = pivots.map(|p| S::Lanes::<L>::splat(p));
    let mut below = [0.0; PIVOTS];
    let mut under = [0usize; PIVOTS];
    for (scores, weights) in scores.chunks(LANES * LOOSE).zip(weights.chunks(LANES * LOOSE)) {
        let mut sums = [S::Lanes::<L>::splat(S::default()); PIVOTS];
        for (scores, weights) in scores.chunks_exact(LANES).zip(weights.chunks_exact(LANES)) {
            let scores = S::Lanes::<L>::load(scores.as_ptr());
            let weights = S::Lanes::<L>::load(weights.as_ptr());
            for i in 0..PIVOTS {
                let less = scores.lt(pivots[i]);
                sums[i] = sums[i].add_where(less, weights);
                if COUNT {
                    under[i] += S::Lanes::<L>::number(less).count_ones() as usize;
                }
            }
        }
        for i in 0..PIVOTS {
            below[i] += sums[i].sum().into();
        }
    }
    let at_least = if COUNT { under.map(|count| scores.len() - count) } else { under };
    PivotSums { below, at_least }
}

/// What lies on either side of a bracket and in it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct PartitionSums {
    /// Weight strictly below the bracket.
    pub(crate) below: f64,
    /// Weight inside; 0 from [`split`], which does not weigh it.
    pub(crate) within: f64,
    /// Weight at or above its upper end.
    pub(crate) above: f64,
    /// Scores at or above its upper end.
    pub(crate) count_above: usize,
    /// Scores inside.
    pub(crate) inside: usize,
}

/// Where the next row will be read, and where the positions of this one will be written: fetched early.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefetch {
    read: *const u8,
    write: *const u8,
}

// SAFETY: the addresses are only hints to the caches; nothing is ever read or written through them.
unsafe impl Send for Prefetch {}
// SAFETY: as above.
unsafe impl Sync for Prefetch {}

impl Prefetch {
    pub(crate) fn new<E>(read: *const E, write: *const u32) -> Self {
        Prefetch { read: read.cast(), write: write.cast() }
    }

    /// Fetches what goes with the group at an entry.
    #[inline(always)]
    pub(super) unsafe fn fetch<L: Level, E>(self, at: usize) {
        L::prefetch(self.read.wrapping_add(at * size_of::<E>()));
        L::prefetch_to_write(self.write.wrapping_add(at * size_of::<u32>()));
    }

    /// The same from a later entry on.
    pub(crate) fn from<E>(self, at: usize) -> Self {
        Prefetch {
            read: self.read.wrapping_add(at * size_of::<E>()),
            write: self.write.wrapping_add(at * size_of::<u32>()),
        }
    }
}

/// Sums both sides of `[lo, hi)` over a row and writes the scores inside, in order.
///
/// # Safety
/// The caller vouches for the level. `to` must have room for all scores inside plus sixteen.
#[inline(always)]
pub(super) unsafe fn split<L: Level, E: Element, W: WeightFn<E::Scalar>>(
    scores: &[E],
    weight_fn: W,
    bracket: (E::Scalar, E::Scalar),
    prefetch: Prefetch,
    to: *mut E::Scalar,
) -> PartitionSums {
    let lo = Of::<L, E>::splat(bracket.0);
    let hi = Of::<L, E>::splat(bracket.1);
    let (mut below, mut above) = (Sum::new(), Sum::new());
    let (mut count_above, mut inside) = (0usize, 0usize);
    for (b, block) in scores.chunks(LANES * DEPTH).enumerate() {
        // What is inside is only marked here and collected afterwards, group by group that has any: a branch in
        // this loop would be a coin toss, and compressing without one costs as much as half the exponential.
        let (mut marks, mut marked) = ([0u16; DEPTH], 0u16);
        for (g, group) in block.chunks_exact(LANES).enumerate() {
            // This pass computes; meanwhile the memory can work.
            prefetch.fetch::<L, E>((b * DEPTH + g) * LANES);
            let scores = E::load::<L>(group.as_ptr());
            let weights = weight_fn.weigh(scores);
            let (under, over) = (scores.lt(lo), scores.ge(hi));
            below.add_where(under, weights);
            above.add_where(over, weights);
            let over = Of::<L, E>::number(over);
            let within = !(Of::<L, E>::number(under) | over);
            count_above += over.count_ones() as usize;
            marks[g] = within;
            marked |= u16::from(within != 0) << g;
        }
        below.flush();
        above.flush();
        while marked != 0 {
            let g = marked.trailing_zeros() as usize;
            marked &= marked - 1;
            let scores = E::load::<L>(block.as_ptr().add(g * LANES));
            scores.compress_store(marks[g], to.add(inside));
            inside += marks[g].count_ones() as usize;
        }
    }
    PartitionSums { below: below.total(), within: 0.0, above: above.total(), count_above, inside }
}

/// The same from scores and their weights, writing both; `to` may be the very buffers that are read, since nothing is
/// written ahead of what has been read.
///
/// # Safety
/// The caller vouches for the level, for `len` (whole groups) of scores and weights, and for room for all scores inside plus
/// sixteen.
#[inline(always)]
pub(super) unsafe fn narrow<L: Level, S: Scalar>(
    scores: *const S,
    weights: *const S,
    len: usize,
    bracket: (S, S),
    to: *mut S,
    to_weights: *mut S,
) -> PartitionSums {
    debug_assert!(len.is_multiple_of(LANES));
    // Reads stay in `len` scores; a group is in registers before anything is written over it.
    let lo = S::Lanes::<L>::splat(bracket.0);
    let hi = S::Lanes::<L>::splat(bracket.1);
    let (mut below, mut within, mut above) = (Sum::new(), Sum::new(), Sum::new());
    let (mut count_above, mut inside) = (0usize, 0usize);
    let mut at = 0;
    while at < len {
        let end = (at + LANES * DEPTH).min(len);
        while at < end {
            let scores = S::Lanes::<L>::load(scores.add(at));
            let weights = S::Lanes::<L>::load(weights.add(at));
            let (under, over) = (scores.lt(lo), scores.ge(hi));
            below.add_where(under, weights);
            above.add_where(over, weights);
            let over = S::Lanes::<L>::bits(over);
            let chosen = !(S::Lanes::<L>::bits(under) | over);
            within.add_where(S::Lanes::<L>::mask(chosen), weights);
            count_above += over.count_ones() as usize;
            scores.compress_store(chosen, to.add(inside));
            weights.compress_store(chosen, to_weights.add(inside));
            inside += chosen.count_ones() as usize;
            at += LANES;
        }
        below.flush();
        within.flush();
        above.flush();
    }
    let (below, within, above) = (below.total(), within.total(), above.total());
    PartitionSums { below, within, above, count_above, inside }
}

/// The largest of at most [`RANKED`] scores whose strictly smaller scores weigh at most `room`, up to the rounding of a few
/// additions; -inf if there is none. Compares all pairs.
#[inline(always)]
pub(super) unsafe fn candidate<L: Level, S: Scalar>(
    scores: &[S],
    weights: &[S],
    visible: usize,
    room: S,
) -> S {
    assert!(scores.len() == RANKED && weights.len() == RANKED && visible <= RANKED);
    let groups =
        [S::Lanes::<L>::load(scores.as_ptr()), S::Lanes::<L>::load(scores.as_ptr().add(LANES))];
    let mut below = [S::Lanes::<L>::splat(S::default()); 2];
    for (&score, &weight) in scores[..visible].iter().zip(weights) {
        let (score, weight) = (S::Lanes::<L>::splat(score), S::Lanes::<L>::splat(weight));
        for g in 0..2 {
            below[g] = below[g].add_where(groups[g].gt(score), weight);
        }
    }
    let (room, bottom) = (S::Lanes::<L>::splat(room), S::Lanes::<L>::splat(S::NEG_INFINITY));
    let one = groups[0].select(room.ge(below[0]), bottom);
    let other = groups[1].select(room.ge(below[1]), bottom);
    one.max(other).largest()
}

/// What [`given`] found about a kept set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Given<S> {
    /// Weight of the kept set.
    pub(crate) head: f64,
    /// Unmasked scores in it.
    pub(crate) kept: usize,
    /// Weight of the rest.
    pub(crate) tail: f64,
    /// Unmasked scores in the rest.
    pub(crate) dropped: usize,
    /// The smallest kept score, +inf if none.
    pub(crate) worst_kept: S,
    /// The largest dropped score, -inf if none.
    pub(crate) best_dropped: S,
}

/// Sums a kept set, given as a byte per score, and its tail.
#[inline(always)]
pub(super) unsafe fn given<L: Level, E: Element, W: WeightFn<E::Scalar>>(
    scores: &[E],
    keep: &[u8],
    weight_fn: W,
) -> Given<E::Scalar> {
    assert_eq!(scores.len(), keep.len());
    let bottom = Of::<L, E>::splat(E::Scalar::NEG_INFINITY);
    let top = Of::<L, E>::splat(E::Scalar::INFINITY);
    let (mut head, mut tail) = (Sum::new(), Sum::new());
    let (mut kept, mut dropped) = (0usize, 0usize);
    let (mut worst, mut best) = (top, bottom);
    for (block, bytes) in scores.chunks(LANES * DEPTH).zip(keep.chunks(LANES * DEPTH)) {
        for (group, bytes) in block.chunks_exact(LANES).zip(bytes.chunks_exact(LANES)) {
            let scores = E::load::<L>(group.as_ptr());
            let weights = weight_fn.weigh(scores);
            let visible = Of::<L, E>::bits(scores.gt(bottom));
            let chosen = L::nonzero_bytes(bytes.as_ptr()) & visible;
            let rest = visible & !chosen;
            let (inside, outside) = (Of::<L, E>::mask(chosen), Of::<L, E>::mask(rest));
            head.add_where(inside, weights);
            tail.add_where(outside, weights);
            kept += chosen.count_ones() as usize;
            dropped += rest.count_ones() as usize;
            worst = worst.min(scores.select(inside, top));
            best = best.max(scores.select(outside, bottom));
        }
        head.flush();
        tail.flush();
    }
    let (worst_kept, best_dropped) = (worst.smallest(), best.largest());
    Given { head: head.total(), kept, tail: tail.total(), dropped, worst_kept, best_dropped }
}

/// Where the positions of scores come from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Positions<'a> {
    /// Consecutive from here.
    From(u32),
    /// Listed, one per score.
    Listed(&'a [u32]),
}

impl Positions<'_> {
    /// Writes those of the group at an entry that are chosen, one behind another.
    ///
    /// # Safety
    /// The caller vouches for the level, for the group, and for sixteen writable places.
    #[inline(always)]
    pub(super) unsafe fn compress<L: Level>(self, at: usize, chosen: u16, to: *mut u32) {
        match self {
            Positions::From(first) => {
                L::compress_count(first.wrapping_add(at as u32), chosen, to);
            }
            Positions::Listed(list) => {
                L::compress_positions(list.as_ptr().add(at), chosen, to);
            }
        }
    }
}

/// Lists, in order, the positions of the scores at or above an edge, or only of those above it.
///
/// # Safety
/// The caller vouches for the level, for room for all positions written plus sixteen, and that a list has as many
/// positions as there are scores.
#[inline(always)]
pub(super) unsafe fn emit<L: Level, E: Element>(
    scores: &[E],
    positions: Positions<'_>,
    edge: E::Scalar,
    inclusive: bool,
    to: *mut u32,
) -> usize {
    let lanes = Of::<L, E>::splat(edge);
    let mut written = 0;
    for (g, group) in scores.chunks_exact(LANES).enumerate() {
        let scores = E::load::<L>(group.as_ptr());
        let kept = if inclusive { scores.ge(lanes) } else { scores.gt(lanes) };
        let kept = Of::<L, E>::bits(kept);
        let to = to.add(written);
        positions.compress::<L>(g * LANES, kept, to);
        written += kept.count_ones() as usize;
    }
    written
}

/// Where the `nth` score (from 1) that equals `score` is, or how many there are.
#[inline(always)]
pub(super) unsafe fn find_equal<L: Level, E: Element>(
    scores: &[E],
    score: E::Scalar,
    nth: usize,
) -> Result<usize, usize> {
    let wanted = Of::<L, E>::splat(score);
    let mut seen = 0;
    for (g, group) in scores.chunks_exact(LANES).enumerate() {
        let mut equal = Of::<L, E>::bits(E::load::<L>(group.as_ptr()).eq(wanted));
        let here = equal.count_ones() as usize;
        if seen + here < nth {
            seen += here;
            continue;
        }
        for _ in seen + 1..nth {
            equal &= equal - 1;
        }
        return Ok(g * LANES + equal.trailing_zeros() as usize);
    }
    Err(seen)
}

/// Copies entries from places spread over a row, one from each of its parts of a length, not always the same place in the
/// part: rows of attention have structure.
#[inline(always)]
pub(crate) fn sample<T: Copy>(all: &[T], stride: usize, to: &mut [T]) {
    for (q, (one, part)) in to.iter_mut().zip(all.chunks_exact(stride)).enumerate() {
        let random = (q as u32).wrapping_mul(0x9E37_79B9) >> 8;
        *one = part[(random as usize * stride) >> 24];
    }
}

/// The range from the last of the first `accepted` pivots to the next, within an outer range.
#[inline(always)]
pub(crate) fn around<S: Copy, const N: usize>(
    pivots: &[S; N],
    accepted: usize,
    outer: (S, S),
) -> (S, S) {
    let lo = if accepted == 0 { outer.0 } else { pivots[accepted - 1] };
    let hi = if accepted == N { outer.1 } else { pivots[accepted] };
    (lo, hi)
}

/// Pivots around a share of a range, closer together near it, ascending.
pub(crate) fn values_around<S: Scalar>(least: S, most: S, share: f64) -> [S; PIVOTS] {
    const STEPS: [f64; PIVOTS] = [-0.25, -0.1, -0.03, -0.01, 0.01, 0.03, 0.1, 0.25];
    let (least, most): (f64, f64) = (least.into(), most.into());
    let share = if share.is_nan() { 0.5 } else { share.clamp(0.0, 1.0) };
    STEPS.map(|step| {
        let share = (share + step).clamp(0.0, 1.0);
        S::nearest(least * (1.0 - share) + most * share)
    })
}

/// Pivots spaced evenly among the floats of a range, ascending; the last lies above its lower end.
pub(crate) fn ranks_between<S: Scalar>(least: S, most: S) -> [S; PIVOTS] {
    let (least, most) = (i128::from(least.rank()), i128::from(most.rank()));
    std::array::from_fn(|i| {
        let step = ((most - least) * (i as i128 + 1) + PIVOTS as i128) / (PIVOTS as i128 + 1);
        S::from_rank((least + step) as i64)
    })
}
