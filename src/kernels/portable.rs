//! The definition of the bits: sixteen lanes as an array, plain IEEE arithmetic.
//!
//! The `unsafe` methods need no CPU feature here; what pointers must be valid for is said where they are used.
//! Compiled twice: for any CPU, where `mul_add` is a correctly rounded library call, and with FMA enabled.

use half::{bf16, f16};

use super::lanes::{LANES, Lanes, Level, Single};

/// Portable code, at whatever features its entry point is compiled with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Array<T>([T; LANES]);

macro_rules! lanes {
    ($float:ident, $bits:ident, $mantissa:literal, $affine:expr) => {
        impl Array<$float> {
            #[inline(always)]
            fn map(self, f: impl Fn($float) -> $float) -> Self {
                Array(std::array::from_fn(|i| f(self.0[i])))
            }
            #[inline(always)]
            fn zip(self, other: Self, f: impl Fn($float, $float) -> $float) -> Self {
                Array(std::array::from_fn(|i| f(self.0[i], other.0[i])))
            }
            /// Lanes of ones where the test holds: what compilers turn into vector code.
            #[inline(always)]
            fn test(self, other: Self, f: impl Fn(&$float, &$float) -> bool) -> [$bits; LANES] {
                std::array::from_fn(|i| $bits::from(f(&self.0[i], &other.0[i])).wrapping_neg())
            }
        }

        impl Lanes for Array<$float> {
            type Scalar = $float;
            type Mask = [$bits; LANES];
            type Wide = [f64; LANES];

            #[inline(always)]
            unsafe fn splat(value: $float) -> Self {
                Array([value; LANES])
            }
            #[inline(always)]
            unsafe fn load(from: *const $float) -> Self {
                // SAFETY: the caller vouches for sixteen readable elements; alignment is not assumed.
                Array(unsafe { from.cast::<[$float; LANES]>().read_unaligned() })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $float) {
                // SAFETY: the caller vouches for sixteen writable elements.
                unsafe { to.cast::<[$float; LANES]>().write_unaligned(self.0) }
            }
            #[inline(always)]
            unsafe fn sub(self, other: Self) -> Self {
                self.zip(other, |a, b| a - b)
            }
            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                self.zip(other, |a, b| a * b)
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                self.zip(other, |a, b| a + b)
            }
            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
                Array(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], term.0[i])))
            }
            #[inline(always)]
            unsafe fn max(self, other: Self) -> Self {
                self.zip(other, |a, b| if a > b { a } else { b })
            }
            #[inline(always)]
            unsafe fn min(self, other: Self) -> Self {
                self.zip(other, |a, b| if a < b { a } else { b })
            }
            #[inline(always)]
            unsafe fn lt(self, other: Self) -> [$bits; LANES] {
                self.test(other, <$float>::lt)
            }
            #[inline(always)]
            unsafe fn ge(self, other: Self) -> [$bits; LANES] {
                self.test(other, <$float>::ge)
            }
            #[inline(always)]
            unsafe fn gt(self, other: Self) -> [$bits; LANES] {
                self.test(other, <$float>::gt)
            }
            #[inline(always)]
            unsafe fn eq(self, other: Self) -> [$bits; LANES] {
                self.test(other, <$float>::eq)
            }
            #[inline(always)]
            unsafe fn within(self, lo: Self, hi: Self) -> u16 {
                // SAFETY: portable code needs no CPU feature.
                unsafe {
                    let (over, under) = (self.ge(lo), self.lt(hi));
                    Self::bits(std::array::from_fn(|i| over[i] & under[i]))
                }
            }
            #[inline(always)]
            unsafe fn unordered(self, other: Self) -> [$bits; LANES] {
                self.test(other, |a, b| a.is_nan() | b.is_nan())
            }
            #[inline(always)]
            unsafe fn bits(mask: [$bits; LANES]) -> u16 {
                let lanes: [$bits; LANES] = std::array::from_fn(|i| mask[i] & (1 << i));
                tree(lanes, |a, b| a | b) as u16
            }
            #[inline(always)]
            unsafe fn mask(bits: u16) -> [$bits; LANES] {
                std::array::from_fn(|i| $bits::from(bits >> i & 1).wrapping_neg())
            }
            #[inline(always)]
            unsafe fn keep(self, mask: [$bits; LANES]) -> Self {
                Array(std::array::from_fn(|i| $float::from_bits(self.0[i].to_bits() & mask[i])))
            }
            #[inline(always)]
            unsafe fn select(self, mask: [$bits; LANES], other: Self) -> Self {
                Array(std::array::from_fn(|i| if mask[i] != 0 { self.0[i] } else { other.0[i] }))
            }
            #[inline(always)]
            unsafe fn add_where(self, mask: [$bits; LANES], other: Self) -> Self {
                // SAFETY: portable code needs no CPU feature.
                unsafe { self.add(other.keep(mask)) }
            }
            #[inline(always)]
            unsafe fn fraction(self) -> Self {
                self.map(|t| t - t.floor())
            }
            #[inline(always)]
            unsafe fn scale_by_floor(self, exponent: Self, mask: [$bits; LANES]) -> Self {
                /// Adding it leaves an integer in the low bits.
                const MAGIC: $float = 1.5 * (1u64 << $mantissa) as $float;
                let scaled = self.zip(exponent, |p, t| {
                    let power = (t.floor() + MAGIC).to_bits() << $mantissa;
                    $float::from_bits(p.to_bits().wrapping_add(power))
                });
                // SAFETY: portable code needs no CPU feature.
                unsafe { scaled.keep(mask) }
            }
            #[inline(always)]
            unsafe fn affine(self, shift: f64, scale: f64) -> Self {
                self.map(|s| $affine(s, shift, scale))
            }
            #[inline(always)]
            unsafe fn wide_zero() -> [f64; LANES] {
                [0.0; LANES]
            }
            #[inline(always)]
            unsafe fn widen_add(self, wide: [f64; LANES]) -> [f64; LANES] {
                std::array::from_fn(|i| wide[i] + f64::from(self.0[i]))
            }
            #[inline(always)]
            unsafe fn wide_store(wide: [f64; LANES]) -> [f64; LANES] {
                wide
            }
            #[inline(always)]
            unsafe fn wide_total(wide: [f64; LANES]) -> f64 {
                tree(wide, |a, b| a + b)
            }
            #[inline(always)]
            unsafe fn sum(self) -> $float {
                tree(self.0, |a, b| a + b)
            }
            #[inline(always)]
            unsafe fn largest(self) -> $float {
                tree(self.0, |a, b| if a > b { a } else { b })
            }
            #[inline(always)]
            unsafe fn smallest(self) -> $float {
                tree(self.0, |a, b| if a < b { a } else { b })
            }
            #[inline(always)]
            unsafe fn compress_store(self, bits: u16, to: *mut $float) {
                // SAFETY: the caller vouches for sixteen writable elements.
                unsafe { compress(&self.0, bits, to) }
            }
        }
    };
}

lanes!(f32, u32, 23, |s: f32, shift: f64, scale: f64| (scale * (f64::from(s) - shift)) as f32);
// Halves, because the difference of two scores may overflow where the scaled one does not.
lanes!(f64, u64, 52, |s: f64, shift: f64, scale: f64| (0.5 * s - 0.5 * shift) * scale * 2.0);

/// Combines the lanes in halves: i with i + 8, then with i + 4, i + 2, i + 1.
#[inline(always)]
fn tree<T: Copy>(mut lanes: [T; LANES], combine: impl Fn(T, T) -> T) -> T {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = combine(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

impl Single for Array<f32> {
    #[inline(always)]
    unsafe fn as_bits(self) -> Self {
        // SAFETY: the caller vouches for lanes that an i32 can hold.
        self.map(|lane| f32::from_bits(unsafe { lane.to_int_unchecked::<i32>() }.cast_unsigned()))
    }
}

/// Writes the chosen elements one behind another, without a branch per element.
///
/// # Safety
/// `to` must be valid for sixteen writes.
#[inline(always)]
pub(super) unsafe fn compress<T: Copy>(values: &[T; LANES], bits: u16, to: *mut T) {
    if bits == 0 {
        return;
    }
    let mut next = 0;
    for (i, &value) in values.iter().enumerate() {
        // SAFETY: `next <= i < 16`, within what the caller vouches for.
        unsafe { to.add(next).write(value) };
        next += usize::from(bits >> i & 1);
    }
}

impl Level for Portable {
    type F32 = Array<f32>;
    type F64 = Array<f64>;

    #[inline(always)]
    unsafe fn single(lanes: Array<f64>) -> Array<f32> {
        Array(lanes.0.map(|lane| lane as f32))
    }
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_to_write(_at: *const u8) {}
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Array<f32> {
        // SAFETY: the caller vouches for sixteen readable elements.
        let stored = unsafe { from.cast::<[f16; LANES]>().read_unaligned() };
        Array(stored.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Array<f32> {
        // SAFETY: the caller vouches for sixteen readable elements.
        let stored = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Array(stored.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    unsafe fn nonzero_bytes(from: *const u8) -> u16 {
        // SAFETY: the caller vouches for sixteen readable bytes.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        let lanes: [u16; LANES] = std::array::from_fn(|i| u16::from(bytes[i] != 0) << i);
        tree(lanes, |a, b| a | b)
    }
    #[inline(always)]
    unsafe fn compress_count(first: u32, bits: u16, to: *mut u32) {
        let positions: [u32; LANES] = std::array::from_fn(|i| first.wrapping_add(i as u32));
        // SAFETY: the caller vouches for sixteen writable positions.
        unsafe { compress(&positions, bits, to) }
    }
    #[inline(always)]
    unsafe fn compress_positions(from: *const u32, bits: u16, to: *mut u32) {
        // SAFETY: the caller vouches for both pointers; everything is read before anything is written.
        unsafe { compress(&from.cast::<[u32; LANES]>().read_unaligned(), bits, to) }
    }
}
