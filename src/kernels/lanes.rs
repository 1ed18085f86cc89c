//! What an instruction set must provide: sixteen virtual lanes with IEEE operations and nothing else.
//!
//! Every pass is written once over these traits, so all levels execute the same sequence of correctly rounded
//! operations on the same sixteen lanes and return the same bits. The portable implementation is the definition.
//!
//! All methods are `unsafe`: the caller must run on a CPU with the level's features (the entry points in `dispatch`
//! see to that), and pointers must be valid for the sixteen elements they address. Every implementation is
//! `inline(always)` so that it is compiled with the features of the entry point it ends up in.

use half::{bf16, f16};

use crate::order::Ordered;

/// Lanes per group, on every instruction set.
pub(crate) const LANES: usize = 16;

/// Sixteen lanes of one float type.
pub(crate) trait Lanes: Copy {
    type Scalar: Scalar;
    /// One truth value per lane, in the form that the level computes with.
    type Mask: Copy;
    /// Sixteen f64 accumulators.
    type Wide: Copy;

    unsafe fn splat(value: Self::Scalar) -> Self;
    unsafe fn load(from: *const Self::Scalar) -> Self;
    unsafe fn store(self, to: *mut Self::Scalar);
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    /// `self * factor + term`, rounded once.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn min(self, other: Self) -> Self;
    unsafe fn lt(self, other: Self) -> Self::Mask;
    unsafe fn ge(self, other: Self) -> Self::Mask;
    unsafe fn gt(self, other: Self) -> Self::Mask;
    unsafe fn eq(self, other: Self) -> Self::Mask;
    /// Bit i is lane i.
    unsafe fn bits(mask: Self::Mask) -> u16;
    unsafe fn mask(bits: u16) -> Self::Mask;
    /// The lanes where the mask holds, +0 elsewhere.
    unsafe fn keep(self, mask: Self::Mask) -> Self;
    /// `where(mask, self, other)`.
    unsafe fn select(self, mask: Self::Mask, other: Self) -> Self;
    /// `self - floor(self)`, rounded once (exact outside (-1, 0)); anything for non-finite lanes.
    unsafe fn fraction(self) -> Self;
    /// `self * 2^floor(exponent)` for normal results; anything otherwise.
    unsafe fn scale_by_floor(self, exponent: Self) -> Self;
    /// `scale * (self - shift)` with the difference and the product taken in f64.
    unsafe fn affine(self, shift: f64, scale: f64) -> Self;
    unsafe fn wide_zero() -> Self::Wide;
    /// `wide + self`, lane by lane, in f64.
    unsafe fn widen_add(self, wide: Self::Wide) -> Self::Wide;
    unsafe fn wide_store(wide: Self::Wide) -> [f64; LANES];
    /// Writes the lanes of the mask one behind another; may write anything to the rest of the sixteen places.
    unsafe fn compress_store(self, bits: u16, to: *mut Self::Scalar);
}

/// The f32 and f64 lanes of one instruction set, and its conversions.
pub(crate) trait Level: Copy {
    type F32: Lanes<Scalar = f32>;
    type F64: Lanes<Scalar = f64>;

    unsafe fn load_f16(from: *const f16) -> Self::F32;
    unsafe fn load_bf16(from: *const bf16) -> Self::F32;
    /// Bit i says whether byte i is not zero.
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
    /// This type's lanes at a level.
    type Lanes<L: Level>: Lanes<Scalar = Self>;
    const INFINITY: Self;
    const NEG_INFINITY: Self;
    const LOWEST: Self;
    /// Exponents below this are flushed: e^x would come close to the smallest normal number.
    const CUT: Self;
    const LOG2_E: Self;
    /// Coefficients of 2^f on [0, 1), constant term first.
    const POLYNOMIAL: &'static [Self];

    /// The nearest value of this type.
    fn nearest(value: f64) -> Self;
}

impl Scalar for f32 {
    type Lanes<L: Level> = L::F32;
    const INFINITY: Self = f32::INFINITY;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;
    const LOWEST: Self = f32::MIN;
    const CUT: Self = -87.33;
    const LOG2_E: Self = std::f32::consts::LOG2_E;
    // Interpolates at Chebyshev nodes with constant term 1; relative error below 2^-26.3.
    const POLYNOMIAL: &'static [Self] = &[
        1.0,
        std::f32::consts::LN_2,
        0.240_227_21,
        0.055_496_022,
        0.009_652_195_5,
        0.001_269_216_6,
        0.000_208_179_15,
    ];

    fn nearest(value: f64) -> Self {
        value as f32
    }
}

impl Scalar for f64 {
    type Lanes<L: Level> = L::F64;
    const INFINITY: Self = f64::INFINITY;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;
    const LOWEST: Self = f64::MIN;
    const CUT: Self = -708.0;
    const LOG2_E: Self = std::f64::consts::LOG2_E;
    // As above; relative error below 2^-54.8.
    const POLYNOMIAL: &'static [Self] = &[
        1.0,
        std::f64::consts::LN_2,
        0.240_226_506_959_096_73,
        0.055_504_108_664_980_67,
        0.009_618_129_105_151_757,
        0.001_333_355_834_393_728,
        0.000_154_035_212_191_077_33,
        1.525_299_889_972_841_8e-5,
        1.321_058_347_776_518_9e-6,
        1.023_602_380_327_517_9e-7,
        6.634_445_866_251_414e-9,
        6.123_092_916_826_387e-10,
    ];

    fn nearest(value: f64) -> Self {
        value
    }
}

/// A stored type that kernels read.
pub(crate) trait Element: Copy + Send + Sync + std::fmt::Debug + 'static {
    type Scalar: Scalar;
    /// The stored value of a masked entry.
    const MASKED: Self;

    /// `-self`; infinities keep their sign, because they say "masked" and "bad" whatever the scale.
    fn negated(self) -> Self;
    /// The same number in the type computed in, exactly.
    fn widen(self) -> Self::Scalar;
    /// Sixteen elements, widened.
    unsafe fn load<L: Level>(from: *const Self) -> <Self::Scalar as Scalar>::Lanes<L>;
}

macro_rules! element {
    ($type:ty, $scalar:ty, $widen:expr, $load:expr) => {
        impl Element for $type {
            type Scalar = $scalar;
            const MASKED: Self = <$type>::NEG_INFINITY;

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
                // SAFETY: the caller vouches for the level and for sixteen readable elements.
                unsafe { $load(from) }
            }
        }
    };
}
element!(f32, f32, |v| v, <L::F32 as Lanes>::load);
element!(f64, f64, |v| v, <L::F64 as Lanes>::load);
element!(f16, f32, f16::to_f32, L::load_f16);
element!(bf16, f32, bf16::to_f32, L::load_bf16);
