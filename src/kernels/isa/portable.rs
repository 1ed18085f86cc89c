//! Definition of the bits: sixteen lanes as an array, in plain IEEE arithmetic.
//!
//! Compiled twice: for any CPU, where `mul_add` is a correctly rounded library call, and with FMA enabled.
//!
//! Compilers vectorize lane-wise code if it ends in memory: they work backwards from sixteen adjacent stores. Where
//! lanes are combined with each other they would work backwards from two numbers instead, so there the lanes go through
//! [`black_box`] first. That changes the speed only.
//!
//! SAFETY: methods are `unsafe` as the traits have it. They need no CPU feature; pointers must be valid for sixteen
//! elements.

use std::hint::black_box;

use half::{bf16, f16};

use super::lanes::{LANES, Lanes, Level, Single};

/// Portable code, with any features of its entry point.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

/// Sixteen lanes, aligned so that no spilled register straddles a cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Array<T>(pub(super) [T; LANES]);

macro_rules! lanes {
    ($float:ident, $mantissa:literal, $affine:expr) => {
        impl Array<$float> {
            #[inline(always)]
            fn map(self, f: impl Fn($float) -> $float) -> Self {
                Array(std::array::from_fn(|i| f(self.0[i])))
            }
            #[inline(always)]
            fn zip(self, other: Self, f: impl Fn($float, $float) -> $float) -> Self {
                Array(std::array::from_fn(|i| f(self.0[i], other.0[i])))
            }
            #[inline(always)]
            fn test(self, other: Self, f: impl Fn(&$float, &$float) -> bool) -> [bool; LANES] {
                std::array::from_fn(|i| f(&self.0[i], &other.0[i]))
            }
        }

        impl Lanes for Array<$float> {
            type Scalar = $float;
            type Mask = [bool; LANES];
            type Wide = Array<f64>;

            #[inline(always)]
            unsafe fn splat(value: $float) -> Self {
                Array([value; LANES])
            }
            #[inline(always)]
            unsafe fn load(from: *const $float) -> Self {
                Array(from.cast::<[$float; LANES]>().read_unaligned())
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $float) {
                to.cast::<[$float; LANES]>().write_unaligned(self.0)
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
            unsafe fn div(self, other: Self) -> Self {
                self.zip(other, |a, b| a / b)
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
            unsafe fn lt(self, other: Self) -> [bool; LANES] {
                self.test(other, <$float>::lt)
            }
            #[inline(always)]
            unsafe fn ge(self, other: Self) -> [bool; LANES] {
                self.test(other, <$float>::ge)
            }
            #[inline(always)]
            unsafe fn gt(self, other: Self) -> [bool; LANES] {
                self.test(other, <$float>::gt)
            }
            #[inline(always)]
            unsafe fn eq(self, other: Self) -> [bool; LANES] {
                self.test(other, <$float>::eq)
            }
            #[inline(always)]
            unsafe fn within(self, lo: Self, hi: Self) -> u16 {
                let (over, under) = (self.ge(lo), self.lt(hi));
                Self::bits(std::array::from_fn(|i| over[i] & under[i]))
            }
            #[inline(always)]
            unsafe fn unordered(self, other: Self) -> [bool; LANES] {
                self.test(other, |a, b| a.is_nan() | b.is_nan())
            }
            #[inline(always)]
            unsafe fn bits(mask: [bool; LANES]) -> u16 {
                gather(Array(mask.map(u8::from)))
            }
            #[inline(always)]
            unsafe fn mask(bits: u16) -> [bool; LANES] {
                let halves = bits.to_le_bytes().map(|half| &MASKS[usize::from(half)]);
                std::array::from_fn(|i| halves[i / 8][i % 8])
            }
            #[inline(always)]
            unsafe fn keep(self, mask: [bool; LANES]) -> Self {
                Array(std::array::from_fn(|i| if mask[i] { self.0[i] } else { 0.0 }))
            }
            #[inline(always)]
            unsafe fn select(self, mask: [bool; LANES], other: Self) -> Self {
                Array(std::array::from_fn(|i| if mask[i] { self.0[i] } else { other.0[i] }))
            }
            #[inline(always)]
            unsafe fn add_where(self, mask: [bool; LANES], other: Self) -> Self {
                self.add(other.keep(mask))
            }
            #[inline(always)]
            unsafe fn fraction(self) -> Self {
                self.map(|t| t - t.floor())
            }
            #[inline(always)]
            unsafe fn scale_by_floor(self, exponent: Self, mask: [bool; LANES]) -> Self {
                /// Adding it leaves an integer in the low bits.
                const MAGIC: $float = 1.5 * (1u64 << $mantissa) as $float;
                let scaled = self.zip(exponent, |p, t| {
                    let power = (t.floor() + MAGIC).to_bits() << $mantissa;
                    $float::from_bits(p.to_bits().wrapping_add(power))
                });
                scaled.keep(mask)
            }
            #[inline(always)]
            unsafe fn affine(self, shift: f64, scale: f64) -> Self {
                self.map(|s| $affine(s, shift, scale))
            }
            #[inline(always)]
            unsafe fn widen_add(self, wide: Array<f64>) -> Array<f64> {
                let lanes = black_box(self);
                Array(std::array::from_fn(|i| wide.0[i] + f64::from(lanes.0[i])))
            }
            #[inline(always)]
            unsafe fn sum(self) -> $float {
                tree(self, |a, b| a + b)
            }
            #[inline(always)]
            unsafe fn largest(self) -> $float {
                tree(self, |a, b| if a > b { a } else { b })
            }
            #[inline(always)]
            unsafe fn smallest(self) -> $float {
                tree(self, |a, b| if a < b { a } else { b })
            }
            #[inline(always)]
            unsafe fn compress_store(self, bits: u16, to: *mut $float) {
                compress(&self.0, bits, to)
            }
        }
    };
}

lanes!(f32, 23, |s: f32, shift: f64, scale: f64| (scale * (f64::from(s) - shift)) as f32);
// Halves, because the difference of two scores may overflow where the scaled one does not.
lanes!(f64, 52, |s: f64, shift: f64, scale: f64| (0.5 * s - 0.5 * shift) * scale * 2.0);

/// Gathers the lowest bits of sixteen bytes that are 0 or 1.
#[inline(always)]
fn gather(bytes: Array<u8>) -> u16 {
    let bytes = u128::from_le_bytes(black_box(bytes).0);
    // The product's highest byte has bit i from byte i, and no two of its terms meet in a bit.
    let eight = |bytes: u64| bytes.wrapping_mul(0x0102_0408_1020_4080) >> 56;
    (eight(bytes as u64) | eight((bytes >> 64) as u64) << 8) as u16
}

/// Combines the lanes in halves: i with i + 8, then with i + 4, i + 2, i + 1.
#[inline(always)]
fn tree<T: Copy>(lanes: Array<T>, combine: impl Fn(T, T) -> T) -> T {
    let lanes = black_box(lanes).0;
    let eight: [T; 8] = std::array::from_fn(|i| combine(lanes[i], lanes[i + 8]));
    let four: [T; 4] = std::array::from_fn(|i| combine(eight[i], eight[i + 4]));
    combine(combine(four[0], four[2]), combine(four[1], four[3]))
}

impl Single for Array<f32> {
    #[inline(always)]
    unsafe fn as_bits(self) -> Self {
        self.map(|lane| f32::from_bits((lane as i32).cast_unsigned()))
    }
}

/// Elements that [`compress`] writes before it tests for more.
const FEW: usize = 4;

/// For each set of eight lanes, the lanes of the set first.
static CHOSEN: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut bits = 0;
    while bits < 256 {
        let (mut lane, mut next) = (0, 0);
        while lane < 8 {
            if bits >> lane & 1 == 1 {
                table[bits][next] = lane;
                next += 1;
            }
            lane += 1;
        }
        bits += 1;
    }
    table
};

/// For each set of eight lanes, a flag per lane of the set.
static MASKS: [[bool; 8]; 256] = {
    let mut table = [[false; 8]; 256];
    let mut at = 0;
    while at < 256 * 8 {
        table[at / 8][at % 8] = (at / 8) >> (at % 8) & 1 == 1;
        at += 1;
    }
    table
};

/// Writes the chosen elements one behind another, a few without a branch.
///
/// # Safety
/// `to` must be valid for sixteen writes.
#[inline(always)]
unsafe fn compress<T: Copy>(values: &[T; LANES], bits: u16, to: *mut T) {
    let (mut rest, mut next) = (u32::from(bits), 0);
    loop {
        for _ in 0..FEW {
            // 16 is a multiple of `FEW`, so that `next < 16`, within what the caller vouches for.
            to.add(next).write(values[rest.trailing_zeros() as usize % LANES]);
            rest &= rest.wrapping_sub(1);
            next += 1;
        }
        if rest == 0 {
            return;
        }
    }
}

/// Returns an f16 as f32, by its bits.
#[inline(always)]
fn widen(half: u16) -> f32 {
    // Exponents gain 112, infinities and NaNs twice that; subnormal numbers borrow a leading one.
    const REBIAS: u32 = 112 << 23;
    let (sign, rest) = (u32::from(half & 0x8000) << 16, u32::from(half & 0x7fff) << 13);
    let magnitude = if rest >= 31 << 23 {
        rest + 2 * REBIAS
    } else if rest >= 1 << 23 {
        rest + REBIAS
    } else {
        const ONE: u32 = REBIAS + (1 << 23);
        (f32::from_bits(rest + ONE) - f32::from_bits(ONE)).to_bits()
    };
    f32::from_bits(sign | magnitude)
}

impl Level for Portable {
    type F32 = Array<f32>;
    type F64 = Array<f64>;

    #[inline(always)]
    unsafe fn single(lanes: Array<f64>) -> Array<f32> {
        Array(lanes.0.map(|lane| lane as f32))
    }
    #[inline(always)]
    unsafe fn double(lanes: Array<f32>) -> Array<f64> {
        Array(lanes.0.map(f64::from))
    }
    #[inline(always)]
    unsafe fn low_bytes(lanes: Array<f32>) -> [u8; LANES] {
        lanes.0.map(|lane| lane.to_bits() as u8)
    }
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_far(_at: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_to_write(_at: *const u8) {}
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Array<f32> {
        let stored = from.cast::<[u16; LANES]>().read_unaligned();
        Array(stored.map(widen))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Array<f32> {
        let stored = from.cast::<[u16; LANES]>().read_unaligned();
        Array(stored.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    unsafe fn nonzero_bytes(from: *const u8) -> u16 {
        let bytes = from.cast::<[u8; LANES]>().read_unaligned();
        gather(Array(bytes.map(|byte| u8::from(byte != 0))))
    }
    #[inline(always)]
    unsafe fn compress_count(first: u32, bits: u16, to: *mut u32) {
        let [low, high] = bits.to_le_bytes();
        let positions = |first: u32, bits: u8| {
            CHOSEN[usize::from(bits)].map(|lane| first.wrapping_add(u32::from(lane)))
        };
        // The second eight start at most eight places in.
        to.cast::<[u32; 8]>().write_unaligned(positions(first, low));
        let next = to.add(low.count_ones() as usize);
        next.cast::<[u32; 8]>().write_unaligned(positions(first.wrapping_add(8), high));
    }
    #[inline(always)]
    unsafe fn compress_positions(from: *const u32, bits: u16, to: *mut u32) {
        // Everything is read before anything is written.
        compress(&from.cast::<[u32; LANES]>().read_unaligned(), bits, to);
    }
}
