//! NEON: four registers of four f32 lanes, eight of two f64 lanes.
//!
//! Part of every aarch64 CPU that this crate runs on. Two choices between its instructions matter for the bits: FMAX and FMIN
//! have rules of their own for NaN and for zeros of both signs, so that maxima are selections by a comparison; and FCVTL
//! converts f16 without the extension for arithmetic in it.
//!
//! SAFETY: methods are `unsafe` as the traits have it: the CPU has NEON, and pointers are valid for sixteen elements; the
//! loads and stores used here need no alignment.
#![allow(clippy::wildcard_imports)] // the intrinsics are a vocabulary

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use half::{bf16, f16};

use super::lanes::{BESIDE, LANES, Lanes, Level, Single};

/// The NEON instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neon;

/// For each set of four lanes of four bytes, the bytes of the set first: what `tbl` needs to compress.
static COMPRESS: [[u8; 16]; 16] = compressions(4);
/// The same for two lanes of eight bytes.
static COMPRESS_WIDE: [[u8; 16]; 4] = compressions(8);
/// Lanes of each set. To count bits is slow here: it goes through a vector register and back.
static COUNT: [u8; 16] = {
    let mut table = [0; 16];
    let mut at = 1;
    while at < 16 {
        table[at] = table[at / 2] + (at % 2) as u8;
        at += 1;
    }
    table
};

const fn compressions<const SETS: usize>(lane_bytes: usize) -> [[u8; 16]; SETS] {
    let mut table = [[0; 16]; SETS];
    let mut at = 0;
    while at < SETS {
        let (mut byte, mut next) = (0, 0);
        while byte < 16 {
            if at >> (byte / lane_bytes) & 1 == 1 {
                table[at][next] = byte as u8;
                next += 1;
            }
            byte += 1;
        }
        at += 1;
    }
    table
}

/// Declares a float type: its operations register by register, and the combination of its lanes.
macro_rules! registers {
    ($name:ident, $float:ident, $vector:ident, $mask:ident, $each:literal, {
        splat: $splat:ident, load: $load:ident, store: $store:ident,
        add: $add:ident, sub: $sub:ident, mul: $mul:ident, div: $div:ident, fma: $fma:ident, floor: $floor:ident,
        lt: $lt:ident, ge: $ge:ident, gt: $gt:ident, eq: $eq:ident,
        select: $select:ident, as_float: $as_float:ident, as_bits: $as_bits:ident,
        both: $both:ident, bytes: $bytes:ident, of_bytes: $of_bytes:ident, table: $table:ident, tree: $tree:ident,
    }) => {
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $name(pub(super) [$vector; LANES / $each]);

        impl $name {
            #[inline(always)]
            fn map(self, f: impl Fn($vector) -> $vector) -> Self {
                $name(self.0.map(f))
            }
            #[inline(always)]
            fn zip(self, other: Self, f: impl Fn($vector, $vector) -> $vector) -> Self {
                $name(from_fn(|i| f(self.0[i], other.0[i])))
            }
            #[inline(always)]
            fn test(
                self,
                other: Self,
                f: impl Fn($vector, $vector) -> $mask,
            ) -> [$mask; LANES / $each] {
                from_fn(|i| f(self.0[i], other.0[i]))
            }
            /// Returns b where they are equal or one is NaN.
            #[inline(always)]
            unsafe fn larger(a: $vector, b: $vector) -> $vector {
                $select($gt(a, b), a, b)
            }
            #[inline(always)]
            unsafe fn smaller(a: $vector, b: $vector) -> $vector {
                $select($lt(a, b), a, b)
            }
        }

        impl Lanes for $name {
            type Scalar = $float;
            type Mask = [$mask; LANES / $each];
            type Wide = F64;

            #[inline(always)]
            unsafe fn splat(value: $float) -> Self {
                $name([$splat(value); LANES / $each])
            }
            #[inline(always)]
            unsafe fn load(from: *const $float) -> Self {
                $name(from_fn(|i| $load(from.add($each * i))))
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $float) {
                for (i, register) in self.0.into_iter().enumerate() {
                    $store(to.add($each * i), register);
                }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                self.zip(other, |a, b| $add(a, b))
            }
            #[inline(always)]
            unsafe fn sub(self, other: Self) -> Self {
                self.zip(other, |a, b| $sub(a, b))
            }
            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                self.zip(other, |a, b| $mul(a, b))
            }
            #[inline(always)]
            unsafe fn div(self, other: Self) -> Self {
                self.zip(other, |a, b| $div(a, b))
            }
            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
                $name(from_fn(|i| $fma(term.0[i], self.0[i], factor.0[i])))
            }
            #[inline(always)]
            unsafe fn max(self, other: Self) -> Self {
                self.zip(other, |a, b| Self::larger(a, b))
            }
            #[inline(always)]
            unsafe fn min(self, other: Self) -> Self {
                self.zip(other, |a, b| Self::smaller(a, b))
            }
            #[inline(always)]
            unsafe fn lt(self, other: Self) -> Self::Mask {
                self.test(other, |a, b| $lt(a, b))
            }
            #[inline(always)]
            unsafe fn ge(self, other: Self) -> Self::Mask {
                self.test(other, |a, b| $ge(a, b))
            }
            #[inline(always)]
            unsafe fn gt(self, other: Self) -> Self::Mask {
                self.test(other, |a, b| $gt(a, b))
            }
            #[inline(always)]
            unsafe fn eq(self, other: Self) -> Self::Mask {
                self.test(other, |a, b| $eq(a, b))
            }
            #[inline(always)]
            unsafe fn within(self, lo: Self, hi: Self) -> u16 {
                let (over, under) = (self.ge(lo), self.lt(hi));
                Self::bits(from_fn(|i| $both(over[i], under[i])))
            }
            #[inline(always)]
            unsafe fn unordered(self, other: Self) -> Self::Mask {
                // NaN does not equal itself, and all ones are NaN.
                self.test(other, |a, b| {
                    let numbers = $as_float($both($eq(a, a), $eq(b, b)));
                    $eq(numbers, numbers)
                })
            }
            #[inline(always)]
            unsafe fn keep(self, mask: Self::Mask) -> Self {
                $name(from_fn(|i| $as_float($both($as_bits(self.0[i]), mask[i]))))
            }
            #[inline(always)]
            unsafe fn select(self, mask: Self::Mask, other: Self) -> Self {
                $name(from_fn(|i| $select(mask[i], self.0[i], other.0[i])))
            }
            #[inline(always)]
            unsafe fn add_where(self, mask: Self::Mask, other: Self) -> Self {
                self.add(other.keep(mask))
            }
            #[inline(always)]
            unsafe fn fraction(self) -> Self {
                self.map(|t| $sub(t, $floor(t)))
            }
            #[inline(always)]
            unsafe fn sum(self) -> $float {
                $tree(self, |a, b| $add(a, b))
            }
            #[inline(always)]
            unsafe fn largest(self) -> $float {
                $tree(self, |a, b| Self::larger(a, b))
            }
            #[inline(always)]
            unsafe fn smallest(self) -> $float {
                $tree(self, |a, b| Self::smaller(a, b))
            }
            #[inline(always)]
            unsafe fn compress_store(self, bits: u16, to: *mut $float) {
                let mut next = to;
                for (i, register) in self.0.into_iter().enumerate() {
                    let chosen = usize::from(bits >> ($each * i)) & ((1 << $each) - 1);
                    let order = vld1q_u8($table[chosen].as_ptr());
                    $store(next, $of_bytes(vqtbl1q_u8($bytes(register), order)));
                    next = next.add(usize::from(COUNT[chosen]));
                }
            }
            registers!($name, $float);
        }
    };
    // Methods written by hand for each type.
    (F32, f32) => {
        #[inline(always)]
        unsafe fn bits(mask: [uint32x4_t; 4]) -> u16 {
            narrow_mask(mask)
        }
        #[inline(always)]
        unsafe fn mask(bits: u16) -> [uint32x4_t; 4] {
            let all = vdupq_n_u32(bits.into());
            let lanes = vld1q_u32([1, 2, 4, 8].as_ptr());
            [
                vtstq_u32(all, lanes),
                vtstq_u32(all, vshlq_n_u32::<4>(lanes)),
                vtstq_u32(all, vshlq_n_u32::<8>(lanes)),
                vtstq_u32(all, vshlq_n_u32::<12>(lanes)),
            ]
        }
        #[inline(always)]
        unsafe fn scale_by_floor(self, exponent: Self, mask: [uint32x4_t; 4]) -> Self {
            let scaled = self.zip(exponent, |p, t| {
                let power = vshlq_n_s32::<23>(vcvtmq_s32_f32(t));
                vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), power))
            });
            scaled.keep(mask)
        }
        #[inline(always)]
        unsafe fn affine(self, shift: f64, scale: f64) -> Self {
            let (shift, scale) = (vdupq_n_f64(shift), vdupq_n_f64(scale));
            narrow(widen(self).map(|two| vmulq_f64(scale, vsubq_f64(two, shift))))
        }
        #[inline(always)]
        unsafe fn widen_add(self, wide: F64) -> F64 {
            wide.add(widen(self))
        }
        #[inline(always)]
        unsafe fn sums(groups: [Self; BESIDE]) -> [f32; BESIDE] {
            // Four lanes of each are left; then those of two groups in one register, and of four.
            let four =
                groups.map(|group| vreinterpretq_f64_f32(fold(group, |a, b| vaddq_f32(a, b))));
            let two: [float32x4_t; BESIDE / 2] = from_fn(|i| {
                let (one, other) = (four[2 * i], four[2 * i + 1]);
                let first = vreinterpretq_f32_f64(vzip1q_f64(one, other));
                vaddq_f32(first, vreinterpretq_f32_f64(vzip2q_f64(one, other)))
            });
            let mut sums = [0.0; BESIDE];
            vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(two[0], two[1]));
            vst1q_f32(sums.as_mut_ptr().add(4), vpaddq_f32(two[2], two[3]));
            sums
        }
    };
    (F64, f64) => {
        #[inline(always)]
        unsafe fn bits(mask: [uint64x2_t; 8]) -> u16 {
            // Both halves of a lane agree.
            let words = mask.map(|lanes| vreinterpretq_u32_u64(lanes));
            narrow_mask(from_fn(|i| vuzp1q_u32(words[2 * i], words[2 * i + 1])))
        }
        #[inline(always)]
        unsafe fn mask(bits: u16) -> [uint64x2_t; 8] {
            let words = F32::mask(bits).map(|lanes| vreinterpretq_s32_u32(lanes));
            from_fn(|i| {
                let two = if i % 2 == 0 {
                    vget_low_s32(words[i / 2])
                } else {
                    vget_high_s32(words[i / 2])
                };
                vreinterpretq_u64_s64(vmovl_s32(two))
            })
        }
        #[inline(always)]
        unsafe fn scale_by_floor(self, exponent: Self, mask: [uint64x2_t; 8]) -> Self {
            let scaled = self.zip(exponent, |p, t| {
                let power = vshlq_n_s64::<52>(vcvtmq_s64_f64(t));
                vreinterpretq_f64_s64(vaddq_s64(vreinterpretq_s64_f64(p), power))
            });
            scaled.keep(mask)
        }
        #[inline(always)]
        unsafe fn affine(self, shift: f64, scale: f64) -> Self {
            let (half, two) = (vdupq_n_f64(0.5), vdupq_n_f64(2.0));
            let (shift, scale) = (vdupq_n_f64(0.5 * shift), vdupq_n_f64(scale));
            self.map(|s| vmulq_f64(vmulq_f64(vsubq_f64(vmulq_f64(half, s), shift), scale), two))
        }
        #[inline(always)]
        unsafe fn widen_add(self, wide: F64) -> F64 {
            wide.add(self)
        }
    };
}

registers!(F32, f32, float32x4_t, uint32x4_t, 4, {
    splat: vdupq_n_f32, load: vld1q_f32, store: vst1q_f32,
    add: vaddq_f32, sub: vsubq_f32, mul: vmulq_f32, div: vdivq_f32, fma: vfmaq_f32, floor: vrndmq_f32,
    lt: vcltq_f32, ge: vcgeq_f32, gt: vcgtq_f32, eq: vceqq_f32,
    select: vbslq_f32, as_float: vreinterpretq_f32_u32, as_bits: vreinterpretq_u32_f32,
    both: vandq_u32, bytes: vreinterpretq_u8_f32, of_bytes: vreinterpretq_f32_u8, table: COMPRESS, tree: tree,
});
registers!(F64, f64, float64x2_t, uint64x2_t, 2, {
    splat: vdupq_n_f64, load: vld1q_f64, store: vst1q_f64,
    add: vaddq_f64, sub: vsubq_f64, mul: vmulq_f64, div: vdivq_f64, fma: vfmaq_f64, floor: vrndmq_f64,
    lt: vcltq_f64, ge: vcgeq_f64, gt: vcgtq_f64, eq: vceqq_f64,
    select: vbslq_f64, as_float: vreinterpretq_f64_u64, as_bits: vreinterpretq_u64_f64,
    both: vandq_u64, bytes: vreinterpretq_u8_f64, of_bytes: vreinterpretq_f64_u8, table: COMPRESS_WIDE, tree: tree_wide,
});

/// Lanes i and i + 8, then i and i + 4.
#[inline(always)]
fn fold(lanes: F32, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> float32x4_t {
    let [a, b, c, d] = lanes.0;
    f(f(a, c), f(b, d))
}

/// The same, then i and i + 2, i and i + 1.
#[inline(always)]
unsafe fn tree(lanes: F32, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> f32 {
    let four = fold(lanes, &f);
    let two = f(four, vextq_f32::<2>(four, four));
    vgetq_lane_f32::<0>(f(two, vextq_f32::<1>(two, two)))
}

/// Lanes i and i + 8, i + 4, i + 2, i + 1.
#[inline(always)]
unsafe fn tree_wide(lanes: F64, f: impl Fn(float64x2_t, float64x2_t) -> float64x2_t) -> f64 {
    let [a, b, c, d, e, g, h, i] = lanes.0;
    let four = [f(a, e), f(b, g), f(c, h), f(d, i)];
    let two = f(f(four[0], four[2]), f(four[1], four[3]));
    vgetq_lane_f64::<0>(f(two, vextq_f64::<1>(two, two)))
}

/// Bit i from lane i, of lanes that are all ones or zeros.
#[inline(always)]
unsafe fn narrow_mask(mask: [uint32x4_t; 4]) -> u16 {
    let halves = [[mask[0], mask[1]], [mask[2], mask[3]]]
        .map(|[a, b]| vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
    byte_mask(vuzp1q_u8(vreinterpretq_u8_u16(halves[0]), vreinterpretq_u8_u16(halves[1])))
}

/// Bit i from byte i, of bytes that are all ones or zeros.
#[inline(always)]
unsafe fn byte_mask(bytes: uint8x16_t) -> u16 {
    const LANE: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
    let eighths = vandq_u8(bytes, vld1q_u8(LANE.as_ptr()));
    let pairs = vpaddq_u8(eighths, eighths);
    let fours = vpaddq_u8(pairs, pairs);
    vgetq_lane_u16::<0>(vreinterpretq_u16_u8(vpaddq_u8(fours, fours)))
}

/// The lanes in f64.
#[inline(always)]
unsafe fn widen(lanes: F32) -> F64 {
    F64(from_fn(|i| {
        let four = lanes.0[i / 2];
        if i % 2 == 0 { vcvt_f64_f32(vget_low_f32(four)) } else { vcvt_high_f64_f32(four) }
    }))
}

/// Lanes of f64 rounded to f32.
#[inline(always)]
unsafe fn narrow(lanes: F64) -> F32 {
    F32(from_fn(|i| vcvt_high_f32_f64(vcvt_f32_f64(lanes.0[2 * i]), lanes.0[2 * i + 1])))
}

impl Single for F32 {
    #[inline(always)]
    unsafe fn as_bits(self) -> Self {
        self.map(|lanes| vreinterpretq_f32_s32(vcvtq_s32_f32(lanes)))
    }
}

impl Level for Neon {
    type F32 = F32;
    type F64 = F64;

    #[inline(always)]
    unsafe fn single(lanes: F64) -> F32 {
        narrow(lanes)
    }
    #[inline(always)]
    unsafe fn double(lanes: F32) -> F64 {
        widen(lanes)
    }
    #[inline(always)]
    unsafe fn low_bytes(lanes: F32) -> [u8; LANES] {
        let words = lanes.0.map(|four| vreinterpretq_u16_f32(four));
        let halves = [vuzp1q_u16(words[0], words[1]), vuzp1q_u16(words[2], words[3])]
            .map(|eight| vreinterpretq_u8_u16(eight));
        let mut bytes = [0; LANES];
        vst1q_u8(bytes.as_mut_ptr(), vuzp1q_u8(halves[0], halves[1]));
        bytes
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // A prefetch never faults.
        asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[inline(always)]
    unsafe fn prefetch_far(at: *const u8) {
        // A prefetch never faults.
        asm!("prfm pldl2keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[inline(always)]
    unsafe fn prefetch_to_write(at: *const u8) {
        // A prefetch never faults.
        asm!("prfm pstl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> F32 {
        F32(from_fn(|i| {
            let four = vld1_u16(from.add(4 * i).cast());
            let wide: float32x4_t;
            // The intrinsic wants a type that is not stable. It depends on FPCR and on nothing else.
            asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) four, options(pure, nomem, nostack, preserves_flags));
            wide
        }))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> F32 {
        F32(from_fn(|i| vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.add(4 * i).cast())))))
    }
    #[inline(always)]
    unsafe fn nonzero_bytes(from: *const u8) -> u16 {
        let bytes = vld1q_u8(from);
        byte_mask(vtstq_u8(bytes, bytes))
    }
    #[inline(always)]
    unsafe fn compress_count(first: u32, bits: u16, to: *mut u32) {
        let steps = vld1q_u32([0, 1, 2, 3].as_ptr());
        let four = vaddq_u32(vdupq_n_u32(first), steps);
        compress_words(from_fn(|i| vaddq_u32(four, vdupq_n_u32(4 * i as u32))), bits, to);
    }
    #[inline(always)]
    unsafe fn compress_positions(from: *const u32, bits: u16, to: *mut u32) {
        // All are loaded before anything is stored.
        compress_words(from_fn(|i| vld1q_u32(from.add(4 * i))), bits, to);
    }
}

#[inline(always)]
unsafe fn compress_words(words: [uint32x4_t; 4], bits: u16, to: *mut u32) {
    F32(words.map(|four| vreinterpretq_f32_u32(four))).compress_store(bits, to.cast());
}
