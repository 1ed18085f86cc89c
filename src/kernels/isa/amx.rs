//! Tiles by AMX.
//!
//! The instructions are written out, because their intrinsics are not stable. Tile registers hold what is shaped and
//! summed between blocks of assembly: compilers use none of them.
//!
//! SAFETY: methods are `unsafe` as the trait has it: [`granted`] has got the registers.
#![allow(clippy::wildcard_imports)] // the intrinsics are a vocabulary

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx512::{Avx512, F32};
use super::tiles::{DEEP, Line, TILE, Tiles};

/// AVX-512 with AMX for bf16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx;

/// Returns `true` if the CPU has AMX for bf16 and the system lets this process use it.
#[allow(unused_unsafe)] // newer compilers know that these instructions are safe
pub(crate) fn granted() -> bool {
    const TILES: u32 = 1 << 24;
    const BF16: u32 = 1 << 22;
    const ASK: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: every CPU of this kind has the instruction.
    let known = !cfg!(miri) && unsafe { __cpuid(0) }.eax >= 7;
    // SAFETY: the CPU has this part of it.
    if !known || unsafe { __cpuid_count(7, 0) }.edx & (TILES | BF16) != TILES | BF16 {
        return false;
    }
    // SAFETY: it asks for a permission, and changes no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ASK, TILE_DATA) == 0 }
}

/// Shapes of the tile registers, as the CPU reads them: all whole.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    begin: [u8; 15],
    widths: [u16; 16],
    rows: [u8; 16],
}

static SHAPES: Shapes = {
    let (mut widths, mut rows, mut tile) = ([0; 16], [0; 16], 0);
    while tile < 8 {
        (widths[tile], rows[tile]) = (size_of::<Line>() as u16, TILE as u8);
        tile += 1;
    }
    Shapes { palette: 1, begin: [0; 15], widths, rows }
};

impl Tiles for Amx {
    type Level = Avx512;
    type Words = __m512i;
    type Registers = ();

    #[inline(always)]
    unsafe fn begin() {
        asm!("ldtilecfg [{shapes}]", shapes = in(reg) &raw const SHAPES, options(nostack, readonly));
    }
    #[inline(always)]
    unsafe fn end((): ()) {
        asm!("tilerelease", options(nostack, nomem));
    }
    #[inline(always)]
    unsafe fn clear((): &mut ()) {
        asm!(
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            options(nostack, nomem)
        );
    }
    #[inline(always)]
    unsafe fn load_rows((): &mut (), tiles: [*const Line; 2], apart: usize) {
        asm!(
            "tileloadd tmm0, [{a} + 1*{stride}]",
            "tileloadd tmm1, [{b} + 1*{stride}]",
            a = in(reg) tiles[0],
            b = in(reg) tiles[1],
            stride = in(reg) apart * size_of::<Line>(),
            options(nostack, readonly)
        );
    }
    #[inline(always)]
    unsafe fn load_columns((): &mut (), tiles: [*const Line; 2]) {
        asm!(
            "tileloadd tmm2, [{a} + 1*{stride}]",
            "tileloadd tmm3, [{b} + 1*{stride}]",
            a = in(reg) tiles[0],
            b = in(reg) tiles[1],
            stride = in(reg) size_of::<Line>(),
            options(nostack, readonly)
        );
    }
    #[inline(always)]
    unsafe fn add((): &mut ()) {
        asm!(
            "tdpbf16ps tmm4, tmm0, tmm2",
            "tdpbf16ps tmm5, tmm0, tmm3",
            "tdpbf16ps tmm6, tmm1, tmm2",
            "tdpbf16ps tmm7, tmm1, tmm3",
            options(nostack, nomem)
        );
    }
    #[inline(always)]
    unsafe fn store((): &mut (), to: *mut f32, apart: usize) {
        asm!(
            "tilestored [{a} + 1*{stride}], tmm4",
            "tilestored [{a} + 1*{stride} + 64], tmm5",
            "tilestored [{b} + 1*{stride}], tmm6",
            "tilestored [{b} + 1*{stride} + 64], tmm7",
            a = in(reg) to,
            b = in(reg) to.add(TILE * apart),
            stride = in(reg) apart * size_of::<f32>(),
            options(nostack)
        );
    }
    #[inline(always)]
    unsafe fn piece(numbers: F32) -> (__m512i, F32) {
        let half = _mm512_set1_epi32(0x8000);
        let high = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
        let bits = _mm512_castps_si512(numbers.0);
        let rounded = _mm512_and_si512(_mm512_add_epi32(bits, half), high);
        (rounded, F32(_mm512_sub_ps(numbers.0, _mm512_castsi512_ps(rounded))))
    }
    #[inline(always)]
    unsafe fn zero() -> __m512i {
        _mm512_setzero_si512()
    }
    #[inline(always)]
    unsafe fn pairs(even: __m512i, odd: __m512i) -> __m512i {
        _mm512_or_si512(_mm512_srli_epi32::<16>(even), odd)
    }
    #[inline(always)]
    unsafe fn beside(first: __m512i, second: __m512i) -> __m512i {
        let mut places = [0u16; DEEP];
        let mut at = 0;
        while at < DEEP {
            places[at] = (2 * at + 1) as u16;
            at += 1;
        }
        let places = _mm512_loadu_si512(places.as_ptr().cast());
        _mm512_permutex2var_epi16(first, places, second)
    }
    #[inline(always)]
    unsafe fn write(words: __m512i, to: *mut Line) {
        _mm512_storeu_si512(to.cast(), words);
    }
    #[inline(always)]
    unsafe fn turn(rows: [__m512i; TILE]) -> [__m512i; TILE] {
        let (mut a, mut b) = (rows, rows);
        for i in 0..8 {
            b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        // Of rows 4 i to 4 i + 3, entry e of each quarter of a register.
        for i in 0..4 {
            let b = &b[4 * i..];
            a[4 * i] = _mm512_unpacklo_epi64(b[0], b[2]);
            a[4 * i + 1] = _mm512_unpackhi_epi64(b[0], b[2]);
            a[4 * i + 2] = _mm512_unpacklo_epi64(b[1], b[3]);
            a[4 * i + 3] = _mm512_unpackhi_epi64(b[1], b[3]);
        }
        for e in 0..4 {
            let low = _mm512_shuffle_i32x4::<0x88>(a[e], a[4 + e]);
            let high = _mm512_shuffle_i32x4::<0xDD>(a[e], a[4 + e]);
            let other_low = _mm512_shuffle_i32x4::<0x88>(a[8 + e], a[12 + e]);
            let other_high = _mm512_shuffle_i32x4::<0xDD>(a[8 + e], a[12 + e]);
            b[e] = _mm512_shuffle_i32x4::<0x88>(low, other_low);
            b[8 + e] = _mm512_shuffle_i32x4::<0xDD>(low, other_low);
            b[4 + e] = _mm512_shuffle_i32x4::<0x88>(high, other_high);
            b[12 + e] = _mm512_shuffle_i32x4::<0xDD>(high, other_high);
        }
        b
    }
}
