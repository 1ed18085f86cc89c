//! Inner products of bytes by NEON alone, and by its extensions for them.
//!
//! The instructions are written out: their intrinsics are not stable in the oldest Rust that is promised.
//!
//! SAFETY: as in `bytes.rs`: the CPU has what a type asks for, and a pointer is to a readable line.
#![allow(clippy::wildcard_imports)] // the intrinsics are a vocabulary

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use super::bytes::{ByteDots, STEP, Step};
use super::lanes::LANES;
use super::neon::{F32, Neon};

impl ByteDots for Neon {
    type Level = Neon;
    type Sums = [int32x4_t; 4];

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        [vdupq_n_s32(0); 4]
    }
    #[inline(always)]
    unsafe fn add(sums: Self::Sums, line: *const u8, step: Step) -> Self::Sums {
        multiplied(sums, line, vld1_s16(step.both.as_ptr()))
    }
    #[inline(always)]
    unsafe fn plus(sums: Self::Sums, number: i32) -> F32 {
        rounded(sums, number)
    }

    type Short = Self::Sums;
    #[inline(always)]
    unsafe fn short_zero() -> Self::Short {
        Self::zero()
    }
    #[inline(always)]
    unsafe fn short_add(sums: Self::Short, line: *const u8, four: [i8; STEP]) -> Self::Short {
        let all = vreinterpret_s8_s32(vdup_n_s32(i32::from_ne_bytes(four.map(i8::cast_unsigned))));
        multiplied(sums, line, vget_low_s16(vmovl_s8(all)))
    }
    #[inline(always)]
    unsafe fn short_sums(sums: Self::Short) -> [i32; LANES] {
        stored(sums)
    }
}

/// Adds products of bytes and four numbers. The load takes dimensions apart, so that a register has one of sixteen keys.
#[inline(always)]
unsafe fn multiplied(sums: [int32x4_t; 4], line: *const u8, numbers: int16x4_t) -> [int32x4_t; 4] {
    let uint8x16x4_t(first, second, third, fourth) = vld4q_u8(line);
    let sums = of_dimension::<0>(sums, first, numbers);
    let sums = of_dimension::<1>(sums, second, numbers);
    let sums = of_dimension::<2>(sums, third, numbers);
    of_dimension::<3>(sums, fourth, numbers)
}

#[inline(always)]
unsafe fn of_dimension<const AT: i32>(
    [a, b, c, d]: [int32x4_t; 4],
    bytes: uint8x16_t,
    numbers: int16x4_t,
) -> [int32x4_t; 4] {
    let low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
    let high = vreinterpretq_s16_u16(vmovl_high_u8(bytes));
    [
        vmlal_lane_s16::<AT>(a, vget_low_s16(low), numbers),
        vmlal_high_lane_s16::<AT>(b, low, numbers),
        vmlal_lane_s16::<AT>(c, vget_low_s16(high), numbers),
        vmlal_high_lane_s16::<AT>(d, high, numbers),
    ]
}

#[inline(always)]
unsafe fn rounded(sums: [int32x4_t; 4], number: i32) -> F32 {
    let number = vdupq_n_s32(number);
    F32(sums.map(|four| vcvtq_f32_s32(vaddq_s32(four, number))))
}

#[inline(always)]
unsafe fn stored(sums: [int32x4_t; 4]) -> [i32; LANES] {
    let mut stored = [0; LANES];
    for (i, four) in sums.into_iter().enumerate() {
        vst1q_s32(stored.as_mut_ptr().add(4 * i), four);
    }
    stored
}

/// NEON with an instruction for inner products of bytes: of unsigned with signed ones (`MIXED`, the extension i8mm), or of
/// signed ones only (dotprod).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dots<const MIXED: bool>;

/// Sums of a line with signed bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Summed {
    sums: [int32x4_t; 4],
    /// Excess of the sums: signed bytes are those of a line less 128.
    excess: int32x4_t,
}

impl Summed {
    #[inline(always)]
    unsafe fn zero() -> Self {
        Summed { sums: [vdupq_n_s32(0); 4], excess: vdupq_n_s32(0) }
    }

    #[inline(always)]
    unsafe fn add<const MIXED: bool>(mut self, line: [uint8x16_t; 4], four: [i8; STEP]) -> Self {
        let numbers =
            vreinterpretq_s8_s32(vdupq_n_s32(i32::from_ne_bytes(four.map(i8::cast_unsigned))));
        for (sum, bytes) in self.sums.iter_mut().zip(line) {
            *sum = if MIXED {
                usdot(*sum, bytes, numbers)
            } else {
                sdot(*sum, vreinterpretq_s8_u8(bytes), numbers)
            };
        }
        if !MIXED {
            self.excess = sdot(self.excess, vdupq_n_s8(-128), numbers);
        }
        self
    }

    #[inline(always)]
    unsafe fn whole(self) -> [int32x4_t; 4] {
        self.sums.map(|four| vsubq_s32(four, self.excess))
    }
}

/// The bytes of a line, less 128 if they are to be signed.
#[inline(always)]
unsafe fn loaded<const MIXED: bool>(line: *const u8) -> [uint8x16_t; 4] {
    from_fn(|i| {
        let bytes = vld1q_u8(line.add(16 * i));
        if MIXED { bytes } else { veorq_u8(bytes, vdupq_n_u8(128)) }
    })
}

/// An instruction for inner products of bytes, of an extension.
macro_rules! dot {
    ($instruction:ident, $bytes:ty, $extension:literal) => {
        #[inline(always)]
        unsafe fn $instruction(mut sums: int32x4_t, a: $bytes, b: int8x16_t) -> int32x4_t {
            asm!(
                concat!(".arch_extension ", $extension),
                concat!(stringify!($instruction), " {0:v}.4s, {1:v}.16b, {2:v}.16b"),
                inout(vreg) sums, in(vreg) a, in(vreg) b,
                options(pure, nomem, nostack, preserves_flags)
            );
            sums
        }
    };
}
dot!(sdot, int8x16_t, "dotprod");
dot!(usdot, uint8x16_t, "i8mm");

impl<const MIXED: bool> ByteDots for Dots<MIXED> {
    type Level = Neon;
    /// Sums with the high halves and with the low ones.
    type Sums = [Summed; 2];

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        [Summed::zero(); 2]
    }
    #[inline(always)]
    unsafe fn add([high, low]: Self::Sums, line: *const u8, step: Step) -> Self::Sums {
        let line = loaded::<MIXED>(line);
        [high.add::<MIXED>(line, step.high), low.add::<MIXED>(line, step.low)]
    }
    #[inline(always)]
    unsafe fn plus([high, low]: Self::Sums, number: i32) -> F32 {
        let (high, low) = (high.whole(), low.whole());
        rounded(from_fn(|i| vaddq_s32(vshlq_n_s32::<8>(high[i]), low[i])), number)
    }

    type Short = Summed;
    #[inline(always)]
    unsafe fn short_zero() -> Summed {
        Summed::zero()
    }
    #[inline(always)]
    unsafe fn short_add(sums: Summed, line: *const u8, four: [i8; STEP]) -> Summed {
        sums.add::<MIXED>(loaded::<MIXED>(line), four)
    }
    #[inline(always)]
    unsafe fn short_sums(sums: Summed) -> [i32; LANES] {
        stored(sums.whole())
    }
}
