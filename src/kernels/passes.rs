//! The passes over a row, written once for all instruction sets, element types and weight laws.
//!
//! Every pass reads whole groups of sixteen keys: a row is padded with masked entries, which weigh nothing and are
//! below every finite pivot. Sums run sixteen groups deep in the lanes' own precision, then go to sixteen f64
//! accumulators, which are added in a fixed tree at the end of the pass.
//!
//! The `unsafe` functions here ask of their caller a CPU with the level's features, and of raw pointers what each says.

use super::lanes::{Element, LANES, Lanes, Level, Scalar};

/// Groups of sixteen that are summed before the lanes are emptied into f64.
const DEPTH: usize = 16;

/// Pivots per round of the search.
pub(crate) const PIVOTS: usize = 8;

/// The lanes that an element type is computed in at a level.
type Of<L, E> = <<E as Element>::Scalar as Scalar>::Lanes<L>;

/// How a key becomes a weight.
pub(crate) trait Weigh<S: Scalar>: Copy + Send + Sync {
    /// # Safety
    /// The CPU must have the features of the lanes' level.
    unsafe fn weigh<V: Lanes<Scalar = S>>(self, keys: V) -> V;
}

/// `exp(key - shift)`, the shift being the largest key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shifted<S>(pub(crate) S);

/// `exp(scale * (key - shift))` with the argument formed in f64.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scaled {
    pub(crate) shift: f64,
    pub(crate) scale: f64,
}

/// The key itself, nothing for a masked one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored;

/// e^x for x <= 0, flushed to +0 below [`Scalar::CUT`]; also 0 for -inf.
#[inline(always)]
unsafe fn exp<V: Lanes>(x: V) -> V {
    // SAFETY: the caller vouches for the level.
    unsafe {
        let t = x.mul(V::splat(V::Scalar::LOG2_E));
        let f = t.fraction();
        let c = V::Scalar::POLYNOMIAL;
        let mut p = V::splat(c[c.len() - 1]);
        for &coefficient in c[..c.len() - 1].iter().rev() {
            p = p.mul_add(f, V::splat(coefficient));
        }
        p.scale_by_floor(t).keep(x.ge(V::splat(V::Scalar::CUT)))
    }
}

impl<S: Scalar> Weigh<S> for Shifted<S> {
    #[inline(always)]
    unsafe fn weigh<V: Lanes<Scalar = S>>(self, keys: V) -> V {
        // SAFETY: the caller vouches for the level.
        unsafe { exp(keys.sub(V::splat(self.0))) }
    }
}

impl<S: Scalar> Weigh<S> for Scaled {
    #[inline(always)]
    unsafe fn weigh<V: Lanes<Scalar = S>>(self, keys: V) -> V {
        // SAFETY: the caller vouches for the level.
        unsafe { exp(keys.affine(self.shift, self.scale)) }
    }
}

impl<S: Scalar> Weigh<S> for Stored {
    #[inline(always)]
    unsafe fn weigh<V: Lanes<Scalar = S>>(self, keys: V) -> V {
        // SAFETY: the caller vouches for the level.
        unsafe { keys.keep(keys.gt(V::splat(S::default()))) }
    }
}

/// A running sum of lanes.
#[derive(Clone, Copy)]
struct Sum<V: Lanes> {
    lanes: V,
    wide: V::Wide,
}

impl<V: Lanes> Sum<V> {
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: the caller vouches for the level.
        unsafe { Sum { lanes: V::splat(V::Scalar::default()), wide: V::wide_zero() } }
    }
    #[inline(always)]
    unsafe fn add(&mut self, weights: V) {
        // SAFETY: the caller vouches for the level.
        self.lanes = unsafe { self.lanes.add(weights) };
    }
    /// Empties the lanes into f64; at most `DEPTH` additions lie between two calls.
    #[inline(always)]
    unsafe fn flush(&mut self) {
        // SAFETY: the caller vouches for the level.
        unsafe {
            self.wide = self.lanes.widen_add(self.wide);
            self.lanes = V::splat(V::Scalar::default());
        }
    }
    /// The total, by a fixed tree over the lanes.
    #[inline(always)]
    unsafe fn total(mut self) -> f64 {
        // SAFETY: the caller vouches for the level.
        let mut lanes = unsafe {
            self.flush();
            V::wide_store(self.wide)
        };
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }
}

/// What [`load`] saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Loaded<S> {
    /// The largest key, -inf if there is none.
    pub(crate) largest: S,
    /// Unmasked entries.
    pub(crate) finite: usize,
    /// Whether a NaN or +inf was among the unmasked entries.
    pub(crate) bad: bool,
}

/// Tiles stay in the first-level cache between the copy and the look at the copy.
const TILE: usize = 4096;

/// Copies a row into padded scratch, masking and negating on the way.
#[inline(always)]
pub(super) unsafe fn load<L: Level, E: Element>(
    from: &[E],
    allowed: Option<&[u8]>,
    negate: bool,
    to: &mut [E],
) -> Loaded<E::Scalar> {
    debug_assert!(to.len().is_multiple_of(LANES) && to.len() >= from.len());
    let infinity = E::Scalar::INFINITY;
    let (mut finite, mut good) = (0usize, u16::MAX);
    // SAFETY: the caller vouches for the level; the scratch is whole groups.
    unsafe {
        let top = Of::<L, E>::splat(infinity);
        let bottom = Of::<L, E>::splat(E::Scalar::NEG_INFINITY);
        let mut largest = bottom;
        for (t, tile) in to.chunks_mut(TILE).enumerate() {
            let start = (t * TILE).min(from.len());
            let source = &from[start..(start + TILE).min(from.len())];
            let (body, padding) = tile.split_at_mut(source.len());
            if negate {
                for (key, &value) in body.iter_mut().zip(source) {
                    *key = value.negated();
                }
            } else {
                body.copy_from_slice(source);
            }
            padding.fill(E::MASKED);
            if let Some(allowed) = allowed {
                for (key, &allow) in body.iter_mut().zip(&allowed[start..]) {
                    *key = if allow == 0 { E::MASKED } else { *key };
                }
            }
            for group in tile.chunks_exact(LANES) {
                let keys = E::load::<L>(group.as_ptr());
                good &= Of::<L, E>::bits(keys.lt(top));
                finite += Of::<L, E>::bits(keys.gt(bottom)).count_ones() as usize;
                // The second operand wins where the comparison fails, so a NaN never becomes the maximum.
                largest = keys.max(largest);
            }
        }
        let mut lanes = [E::Scalar::default(); LANES];
        largest.store(lanes.as_mut_ptr());
        let mut best = lanes[0];
        for &lane in &lanes[1..] {
            if lane > best {
                best = lane;
            }
        }
        Loaded { largest: best, finite, bad: good != u16::MAX }
    }
}

/// The sum of all weights.
#[inline(always)]
pub(super) unsafe fn mass<L: Level, E: Element, W: Weigh<E::Scalar>>(keys: &[E], law: W) -> f64 {
    // SAFETY: the caller vouches for the level; every chunk is a whole group.
    unsafe {
        let mut sum = Sum::new();
        for block in keys.chunks(LANES * DEPTH) {
            for group in block.chunks_exact(LANES) {
                sum.add(law.weigh(E::load::<L>(group.as_ptr())));
            }
            sum.flush();
        }
        sum.total()
    }
}

/// The weights themselves, in the precision that the law computes in.
#[inline(always)]
pub(super) unsafe fn weights<L: Level, E: Element, W: Weigh<E::Scalar>>(
    keys: &[E],
    law: W,
    to: &mut [E::Scalar],
) {
    assert_eq!(keys.len(), to.len());
    // SAFETY: the caller vouches for the level; both are whole groups of the same number.
    unsafe {
        for (group, out) in keys.chunks_exact(LANES).zip(to.chunks_exact_mut(LANES)) {
            law.weigh(E::load::<L>(group.as_ptr())).store(out.as_mut_ptr());
        }
    }
}

/// Sums below and counts from each pivot upward.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct PivotSums {
    /// Weight of the keys strictly below pivot i.
    pub(crate) below: [f64; PIVOTS],
    /// How many keys are at or above pivot i.
    pub(crate) at_least: [usize; PIVOTS],
}

/// [`PivotSums`] for eight pivots.
#[inline(always)]
pub(super) unsafe fn pivot_sums<L: Level, E: Element, W: Weigh<E::Scalar>>(
    keys: &[E],
    law: W,
    pivots: &[E::Scalar; PIVOTS],
) -> PivotSums {
    // SAFETY: the caller vouches for the level; every chunk is a whole group.
    unsafe {
        let pivots = pivots.map(|p| Of::<L, E>::splat(p));
        let mut sums = [Sum::new(); PIVOTS];
        let mut at_least = [0usize; PIVOTS];
        for block in keys.chunks(LANES * DEPTH) {
            for group in block.chunks_exact(LANES) {
                let keys = E::load::<L>(group.as_ptr());
                let weights = law.weigh(keys);
                for i in 0..PIVOTS {
                    let below = keys.lt(pivots[i]);
                    sums[i].add(weights.keep(below));
                    at_least[i] += LANES - Of::<L, E>::bits(below).count_ones() as usize;
                }
            }
            for sum in &mut sums {
                sum.flush();
            }
        }
        PivotSums { below: sums.map(|sum| sum.total()), at_least }
    }
}

/// What [`split`] found on either side of a bracket.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Sides {
    /// Weight strictly below the bracket.
    pub(crate) below: f64,
    /// Weight at or above its upper end.
    pub(crate) above: f64,
    /// Keys at or above its upper end.
    pub(crate) count_above: usize,
    /// Keys inside.
    pub(crate) inside: usize,
}

/// Where the keys of a bracket and their positions are written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Output<S> {
    pub(super) keys: *mut S,
    pub(super) positions: *mut u32,
}

/// Where the positions of the keys read come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Positions {
    /// Consecutive from here.
    From(u32),
    /// Listed.
    Listed(*const u32),
}

/// Sums both sides of `[lo, hi)` and writes what lies inside, in order.
///
/// # Safety
/// The caller vouches for the level. `to` must have room for all keys inside plus fifteen; it may be the very buffer
/// that is read, since it is never written ahead of what has been read.
#[inline(always)]
pub(super) unsafe fn split<L: Level, E: Element, W: Weigh<E::Scalar>>(
    keys: *const E,
    len: usize,
    positions: Positions,
    law: W,
    bracket: (E::Scalar, E::Scalar),
    to: Output<E::Scalar>,
) -> Sides {
    debug_assert!(len.is_multiple_of(LANES));
    // SAFETY: reads stay in `len` keys and positions; a group is in registers before anything is written over it.
    unsafe {
        let lo = Of::<L, E>::splat(bracket.0);
        let hi = Of::<L, E>::splat(bracket.1);
        let (mut below, mut above) = (Sum::new(), Sum::new());
        let (mut count_above, mut inside) = (0usize, 0usize);
        let mut at = 0;
        while at < len {
            let end = (at + LANES * DEPTH).min(len);
            while at < end {
                let group = E::load::<L>(keys.add(at));
                let weights = law.weigh(group);
                let (under, over) = (group.lt(lo), group.ge(hi));
                below.add(weights.keep(under));
                above.add(weights.keep(over));
                let over = Of::<L, E>::bits(over);
                let within = !(Of::<L, E>::bits(under) | over);
                count_above += over.count_ones() as usize;
                if within != 0 {
                    match positions {
                        Positions::From(first) => L::compress_count(
                            first.wrapping_add(at as u32),
                            within,
                            to.positions.add(inside),
                        ),
                        Positions::Listed(list) => {
                            L::compress_positions(list.add(at), within, to.positions.add(inside));
                        }
                    }
                    group.compress_store(within, to.keys.add(inside));
                    inside += within.count_ones() as usize;
                }
                at += LANES;
            }
            below.flush();
            above.flush();
        }
        Sides { below: below.total(), above: above.total(), count_above, inside }
    }
}

/// What [`given`] found about a kept set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Given<S> {
    /// Weight of the kept set.
    pub(crate) head: f64,
    /// Unmasked keys in it.
    pub(crate) kept: usize,
    /// Weight of the rest.
    pub(crate) tail: f64,
    /// Unmasked keys in the rest.
    pub(crate) dropped: usize,
    /// The smallest kept key, +inf if none.
    pub(crate) worst_kept: S,
    /// The largest dropped key, -inf if none.
    pub(crate) best_dropped: S,
}

/// Sums a kept set, given as a byte per key, and its tail.
#[inline(always)]
pub(super) unsafe fn given<L: Level, E: Element, W: Weigh<E::Scalar>>(
    keys: &[E],
    keep: &[u8],
    law: W,
) -> Given<E::Scalar> {
    assert_eq!(keys.len(), keep.len());
    // SAFETY: the caller vouches for the level; both are whole groups of the same number.
    unsafe {
        let bottom = Of::<L, E>::splat(E::Scalar::NEG_INFINITY);
        let top = Of::<L, E>::splat(E::Scalar::INFINITY);
        let (mut head, mut tail) = (Sum::new(), Sum::new());
        let (mut kept, mut dropped) = (0usize, 0usize);
        let (mut worst, mut best) = (top, bottom);
        for (block, bytes) in keys.chunks(LANES * DEPTH).zip(keep.chunks(LANES * DEPTH)) {
            for (group, bytes) in block.chunks_exact(LANES).zip(bytes.chunks_exact(LANES)) {
                let keys = E::load::<L>(group.as_ptr());
                let weights = law.weigh(keys);
                let live = Of::<L, E>::bits(keys.gt(bottom));
                let chosen = L::nonzero_bytes(bytes.as_ptr()) & live;
                let rest = live & !chosen;
                let (inside, outside) = (Of::<L, E>::mask(chosen), Of::<L, E>::mask(rest));
                head.add(weights.keep(inside));
                tail.add(weights.keep(outside));
                kept += chosen.count_ones() as usize;
                dropped += rest.count_ones() as usize;
                worst = worst.min(keys.select(inside, top));
                best = best.max(keys.select(outside, bottom));
            }
            head.flush();
            tail.flush();
        }
        let (mut worst_kept, mut best_dropped) = (E::Scalar::INFINITY, E::Scalar::NEG_INFINITY);
        let mut lanes = [E::Scalar::default(); LANES];
        worst.store(lanes.as_mut_ptr());
        for &lane in &lanes {
            worst_kept = if lane < worst_kept { lane } else { worst_kept };
        }
        best.store(lanes.as_mut_ptr());
        for &lane in &lanes {
            best_dropped = if lane > best_dropped { lane } else { best_dropped };
        }
        Given { head: head.total(), kept, tail: tail.total(), dropped, worst_kept, best_dropped }
    }
}

/// Lists, in order, the positions of the keys that are kept down to a boundary (see `order::kept`).
///
/// # Safety
/// The caller vouches for the level, and `to` for room for all positions written plus fifteen.
#[inline(always)]
pub(super) unsafe fn emit<L: Level, E: Element>(
    keys: &[E],
    first: u32,
    boundary: (E::Scalar, u32),
    to: *mut u32,
) -> usize {
    // SAFETY: every chunk is a whole group; the caller vouches for the rest.
    unsafe {
        let edge = Of::<L, E>::splat(boundary.0);
        let mut written = 0;
        for (g, group) in keys.chunks_exact(LANES).enumerate() {
            let at = first.wrapping_add((g * LANES) as u32);
            let keys = E::load::<L>(group.as_ptr());
            // Lanes whose position is at most the boundary's: ties beyond it are dropped.
            let early = match (u64::from(boundary.1) + 1).saturating_sub(u64::from(at)) {
                lanes if lanes >= LANES as u64 => u16::MAX,
                lanes => (1u16 << lanes) - 1,
            };
            let better = Of::<L, E>::bits(keys.gt(edge));
            let tied = Of::<L, E>::bits(keys.eq(edge));
            let kept = better | (tied & early);
            if kept != 0 {
                L::compress_count(at, kept, to.add(written));
                written += kept.count_ones() as usize;
            }
        }
        written
    }
}
