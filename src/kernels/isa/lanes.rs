//! Interface of an instruction set: sixteen virtual lanes with IEEE operations.
//!
//! Every pass is written once over these traits, so all levels execute the same sequence of correctly rounded
//! operations on the same sixteen lanes and return the same bits. The portable implementation is the definition.
//!
//! SAFETY: all methods are `unsafe`: the caller must run on a CPU with the level's features (the entries of `Simd` see
//! to that), and pointers must be valid for the sixteen elements they address, however aligned. Every implementation is
//! `inline(always)` so that it is compiled with the features of the entry point it ends up in.

use half::{bf16, f16};

use crate::numerics::order::Ordered;

/// Lanes per group, on every instruction set.
pub(crate) const LANES: usize = 16;

/// Groups of lanes whose sums are taken side by side.
pub(crate) const BESIDE: usize = 8;

/// Sixteen lanes of one float type.
pub(crate) trait Lanes: Copy {
    type Scalar: Scalar + Element<Scalar = Self::Scalar>;
    /// One truth value per lane, in the form that the level computes with.
    type Mask: Copy;
    /// Sixteen f64 accumulators.
    type Wide: Lanes<Scalar = f64>;

    unsafe fn splat(value: Self::Scalar) -> Self;
    unsafe fn load(from: *const Self::Scalar) -> Self;
    unsafe fn store(self, to: *mut Self::Scalar);
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * factor + term`, rounded once.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn min(self, other: Self) -> Self;
    unsafe fn lt(self, other: Self) -> Self::Mask;
    unsafe fn ge(self, other: Self) -> Self::Mask;
    unsafe fn gt(self, other: Self) -> Self::Mask;
    unsafe fn eq(self, other: Self) -> Self::Mask;
    /// Returns the set of lanes in `[lo, hi)`.
    unsafe fn within(self, lo: Self, hi: Self) -> u16;
    /// Returns a mask of the lanes where either operand is NaN.
    unsafe fn unordered(self, other: Self) -> Self::Mask;
    /// Returns the mask as a number; bit i is lane i.
    unsafe fn bits(mask: Self::Mask) -> u16;
    /// Returns the same for masks used as numbers only: moved to a general register at once, where logic is free.
    #[inline(always)]
    unsafe fn number(mask: Self::Mask) -> u16 {
        Self::bits(mask)
    }
    unsafe fn mask(bits: u16) -> Self::Mask;
    /// Returns the lanes where the mask holds, +0 elsewhere.
    unsafe fn keep(self, mask: Self::Mask) -> Self;
    /// Returns `where(mask, self, other)`.
    unsafe fn select(self, mask: Self::Mask, other: Self) -> Self;
    /// Returns `where(mask, self + other, self)` for `self` that is not -0.
    unsafe fn add_where(self, mask: Self::Mask, other: Self) -> Self;
    /// Returns `self - floor(self)` for lanes that are at most -1, where the difference is exact; any number elsewhere.
    unsafe fn fraction(self) -> Self;
    /// Returns `self * 2^floor(exponent)` where the mask holds, if that is a normal number; +0 elsewhere.
    unsafe fn scale_by_floor(self, exponent: Self, mask: Self::Mask) -> Self;
    /// Returns `scale * (self - shift)` with the difference and the product taken in f64.
    unsafe fn affine(self, shift: f64, scale: f64) -> Self;
    /// Returns `wide + self`, lane by lane, in f64.
    unsafe fn widen_add(self, wide: Self::Wide) -> Self::Wide;
    /// Returns the lanes as an array.
    #[inline(always)]
    unsafe fn array(self) -> [Self::Scalar; LANES] {
        let mut lanes = [Self::Scalar::default(); LANES];
        self.store(lanes.as_mut_ptr());
        lanes
    }
    /// Returns the sum of the lanes in their own precision: lane i and i + 8, then i + 4, i + 2, i + 1.
    unsafe fn sum(self) -> Self::Scalar;
    /// Returns the sums of several groups of lanes, each in the order of [`Lanes::sum`].
    #[inline(always)]
    unsafe fn sums(groups: [Self; BESIDE]) -> [Self::Scalar; BESIDE] {
        groups.map(|group| group.sum())
    }
    /// Returns the largest lane, found in the same tree by [`Lanes::max`].
    unsafe fn largest(self) -> Self::Scalar;
    /// Returns the smallest lane, found in the same tree by [`Lanes::min`].
    unsafe fn smallest(self) -> Self::Scalar;
    /// Writes the lanes of the mask one behind another; the rest of the sixteen places may receive any values.
    unsafe fn compress_store(self, bits: u16, to: *mut Self::Scalar);
}

/// Sixteen f32 lanes.
pub(crate) trait Single: Lanes<Scalar = f32> {
    /// Returns the floats whose bits are the lanes as integers, rounded toward zero, for lanes in [0, 2^31); any floats
    /// for others.
    unsafe fn as_bits(self) -> Self;
}

/// The f32 and f64 lanes of one instruction set, and its conversions.
pub(crate) trait Level: Copy {
    type F32: Single<Wide = Self::F64>;
    type F64: Lanes<Scalar = f64, Wide = Self::F64>;
    /// `true` if thirty-two groups of f32 fit in registers.
    const ROOMY: bool = false;

    /// Returns f64 lanes rounded to f32.
    unsafe fn single(lanes: Self::F64) -> Self::F32;
    /// Returns f32 lanes as f64.
    unsafe fn double(lanes: Self::F32) -> Self::F64;
    /// Returns the lowest byte of each lane.
    unsafe fn low_bytes(lanes: Self::F32) -> [u8; LANES];
    /// Prefetches the cache line at any address.
    unsafe fn prefetch(at: *const u8);
    /// Prefetches into the second-level cache, which has more room for pending requests.
    unsafe fn prefetch_far(at: *const u8);
    /// Prefetches a line that will be written.
    unsafe fn prefetch_to_write(at: *const u8);
    unsafe fn load_f16(from: *const f16) -> Self::F32;
    unsafe fn load_bf16(from: *const bf16) -> Self::F32;
    /// Returns the set of non-zero bytes; bit i is byte i.
    unsafe fn nonzero_bytes(from: *const u8) -> u16;
    /// Compresses `first, first + 1, ..` as [`Lanes::compress_store`] does.
    unsafe fn compress_count(first: u32, bits: u16, to: *mut u32);
    /// Compresses sixteen loaded positions; `from` and `to` may overlap when `to <= from`.
    unsafe fn compress_positions(from: *const u32, bits: u16, to: *mut u32);
}

/// A float type that kernels compute in.
pub(crate) trait Scalar:
    Ordered + Default + Send + Sync + std::fmt::Debug + Into<f64> + 'static
{
    /// Lanes of this type at a level.
    type Lanes<L: Level>: Lanes<Scalar = Self>;
    const INFINITY: Self;
    const NEG_INFINITY: Self;
    const LOWEST: Self;
    /// Exponent below which weights are flushed: e^x would come close to the smallest normal number.
    const CUT: Self;
    const LOG2_E: Self;
    /// Coefficients of 2^(1 + f) on [0, 1), constant term first.
    const POLYNOMIAL: &'static [Self];

    /// Returns the nearest value of this type.
    fn nearest(value: f64) -> Self;
    /// Returns the smallest value of this type that is at least `value`, which is not NaN.
    fn at_least(value: f64) -> Self;
}

impl Scalar for f32 {
    type Lanes<L: Level> = L::F32;
    const INFINITY: Self = f32::INFINITY;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;
    const LOWEST: Self = f32::MIN;
    const CUT: Self = -87.33;
    const LOG2_E: Self = std::f32::consts::LOG2_E;
    // Minimax with constant term 2; relative error below 2^-23.3.
    const POLYNOMIAL: &'static [Self] =
        &[2.0, 1.386_302_6, 0.480_328_9, 0.111_599_825, 0.018_034_061, 0.003_734_26];

    fn nearest(value: f64) -> Self {
        value as f32
    }
    fn at_least(value: f64) -> Self {
        let nearest = value as f32;
        if f64::from(nearest) < value { nearest.next_up() } else { nearest }
    }
}

impl Scalar for f64 {
    type Lanes<L: Level> = L::F64;
    const INFINITY: Self = f64::INFINITY;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;
    const LOWEST: Self = f64::MIN;
    const CUT: Self = -708.0;
    const LOG2_E: Self = std::f64::consts::LOG2_E;
    // As above; relative error below 2^-45.9.
    const POLYNOMIAL: &'static [Self] = &[
        2.0,
        1.386_294_361_123_737,
        0.480_453_013_756_451_7,
        0.111_008_219_650_085_37,
        0.019_236_242_023_567_277,
        0.002_666_775_079_640_252_4,
        0.000_307_921_563_985_505_66,
        3.071_916_134_247_814e-5,
        2.461_133_745_380_836_5e-6,
        2.865_073_880_710_366_7e-7,
    ];

    fn nearest(value: f64) -> Self {
        value
    }
    fn at_least(value: f64) -> Self {
        value
    }
}

/// A stored type that kernels read.
pub(crate) trait Element: Copy + Default + Send + Sync + std::fmt::Debug + 'static {
    type Scalar: Scalar + Element<Scalar = Self::Scalar>;
    /// The stored value of a masked entry.
    const MASKED: Self;
    /// Number of bf16 whose sum is any number of this type of usual size; none for f64.
    const PIECES: usize;

    /// Returns `-self`; infinities keep their sign, because they mean "masked" and "bad" for every scale.
    fn negated(self) -> Self;
    /// Returns the same number in the type computed in, exactly.
    fn widen(self) -> Self::Scalar;
    /// Loads sixteen elements, widened.
    unsafe fn load<L: Level>(from: *const Self) -> <Self::Scalar as Scalar>::Lanes<L>;
    /// Copies sixteen elements and returns them, widened.
    unsafe fn copy<L: Level>(
        from: *const Self,
        to: *mut Self,
    ) -> <Self::Scalar as Scalar>::Lanes<L>;
    /// Returns lanes of the type computed in, rounded to f32.
    unsafe fn single<L: Level>(lanes: <Self::Scalar as Scalar>::Lanes<L>) -> L::F32;
    /// Returns lanes of the type computed in, as f64.
    unsafe fn double<L: Level>(lanes: <Self::Scalar as Scalar>::Lanes<L>) -> L::F64;
    /// Returns the entries in place, if they are stored in the type computed in.
    fn scalars(entries: &[Self]) -> Option<&[Self::Scalar]>;
}

/// Lanes that an element type is computed in at a level.
pub(crate) type LanesOf<L, E> = <<E as Element>::Scalar as Scalar>::Lanes<L>;

/// Returns its argument; unsafe only to match the conversions beside it.
#[inline(always)]
unsafe fn already<T>(lanes: T) -> T {
    lanes
}

/// Copies through the registers that are returned.
#[inline(always)]
unsafe fn copy_lanes<L: Level, E: Scalar + Element<Scalar = E>>(
    from: *const E,
    to: *mut E,
) -> E::Lanes<L> {
    let lanes = E::Lanes::<L>::load(from);
    lanes.store(to);
    lanes
}

/// Copies the stored elements, and returns them widened.
#[inline(always)]
unsafe fn copy_stored<L: Level, E: Element>(
    from: *const E,
    to: *mut E,
) -> <E::Scalar as Scalar>::Lanes<L> {
    to.copy_from_nonoverlapping(from, LANES);
    E::load::<L>(to)
}

macro_rules! element {
    ($type:ty, $scalar:ty, $widen:expr, $load:expr, $single:expr, $double:expr, $scalars:expr, $copy:ident, $pieces:literal) => {
        impl Element for $type {
            type Scalar = $scalar;
            const MASKED: Self = <$type>::NEG_INFINITY;
            const PIECES: usize = $pieces;

            #[inline(always)]
            fn negated(self) -> Self {
                if self.is_infinite() { self } else { -self }
            }
            #[inline(always)]
            #[allow(clippy::redundant_closure_call)] // the identity is one of the conversions
            fn widen(self) -> $scalar {
                $widen(self)
            }
            #[inline(always)]
            unsafe fn load<L: Level>(from: *const Self) -> <$scalar as Scalar>::Lanes<L> {
                $load(from)
            }
            #[inline(always)]
            unsafe fn copy<L: Level>(
                from: *const Self,
                to: *mut Self,
            ) -> <$scalar as Scalar>::Lanes<L> {
                $copy::<L, Self>(from, to)
            }
            #[inline(always)]
            unsafe fn single<L: Level>(lanes: <$scalar as Scalar>::Lanes<L>) -> L::F32 {
                $single(lanes)
            }
            #[inline(always)]
            unsafe fn double<L: Level>(lanes: <$scalar as Scalar>::Lanes<L>) -> L::F64 {
                $double(lanes)
            }
            #[inline(always)]
            #[allow(clippy::redundant_closure_call)]
            fn scalars(entries: &[Self]) -> Option<&[$scalar]> {
                $scalars(entries)
            }
        }
    };
}
element!(f32, f32, |v| v, <L::F32 as Lanes>::load, already, L::double, Some, copy_lanes, 3);
element!(f64, f64, |v| v, <L::F64 as Lanes>::load, L::single, already, Some, copy_lanes, 0);
element!(f16, f32, f16::to_f32, L::load_f16, already, L::double, |_| None, copy_stored, 2);
element!(bf16, f32, bf16::to_f32, L::load_bf16, already, L::double, |_| None, copy_stored, 1);
