//! AVX-512 (F, DQ, BW, VL): one register of sixteen f32 lanes, two of eight f64 lanes.
//!
//! SAFETY: methods are `unsafe` as the traits have it: the CPU has these features, and pointers are valid for sixteen
//! elements; unaligned loads and stores are used throughout.
#![allow(clippy::wildcard_imports)] // the intrinsics are a vocabulary

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::lanes::{BESIDE, LANES, Lanes, Level, Single};

/// The AVX-512 instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512;

/// Toward minus infinity, no exceptions.
const FLOOR: i32 = 0x09;

#[derive(Clone, Copy)]
pub(crate) struct F32(pub(super) __m512);

impl F32 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(__m512, __m512) -> __m512) -> Self {
        F32(f(self.0, other.0))
    }
    #[inline(always)]
    fn test(self, other: Self, f: impl Fn(__m512, __m512) -> __mmask16) -> __mmask16 {
        f(self.0, other.0)
    }
}

impl Lanes for F32 {
    type Scalar = f32;
    type Mask = __mmask16;
    type Wide = F64;

    lanewise! {
        add: _mm512_add_ps, sub: _mm512_sub_ps, mul: _mm512_mul_ps, div: _mm512_div_ps, max: _mm512_max_ps, min: _mm512_min_ps,
    }
    compare!(_mm512_cmp_ps_mask);

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        F32(_mm512_set1_ps(value))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        F32(_mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm512_storeu_ps(to, self.0);
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        F32(_mm512_fmadd_ps(self.0, factor.0, term.0))
    }
    #[inline(always)]
    unsafe fn within(self, lo: Self, hi: Self) -> u16 {
        let over = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(self.0, lo.0);
        _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(over, self.0, hi.0)
    }
    #[inline(always)]
    unsafe fn bits(mask: __mmask16) -> u16 {
        mask
    }
    #[inline(always)]
    unsafe fn number(mask: __mmask16) -> u16 {
        number(mask)
    }
    #[inline(always)]
    unsafe fn mask(bits: u16) -> __mmask16 {
        bits
    }
    #[inline(always)]
    unsafe fn keep(self, mask: __mmask16) -> Self {
        F32(_mm512_maskz_mov_ps(mask, self.0))
    }
    #[inline(always)]
    unsafe fn select(self, mask: __mmask16, other: Self) -> Self {
        F32(_mm512_mask_mov_ps(other.0, mask, self.0))
    }
    #[inline(always)]
    unsafe fn add_where(self, mask: __mmask16, other: Self) -> Self {
        F32(_mm512_mask_add_ps(self.0, mask, self.0, other.0))
    }
    #[inline(always)]
    unsafe fn fraction(self) -> Self {
        F32(_mm512_reduce_ps::<FLOOR>(self.0))
    }
    #[inline(always)]
    unsafe fn scale_by_floor(self, exponent: Self, mask: __mmask16) -> Self {
        F32(_mm512_maskz_scalef_ps(mask, self.0, exponent.0))
    }
    #[inline(always)]
    unsafe fn affine(self, shift: f64, scale: f64) -> Self {
        let (shift, scale) = (_mm512_set1_pd(shift), _mm512_set1_pd(scale));
        F32(narrow(widen(self.0).map(|half| _mm512_mul_pd(scale, _mm512_sub_pd(half, shift)))))
    }
    #[inline(always)]
    unsafe fn widen_add(self, wide: F64) -> F64 {
        wide.add(F64(widen(self.0)))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let eight = _mm256_add_ps(_mm512_castps512_ps256(self.0), upper(self.0));
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn sums(groups: [Self; BESIDE]) -> [f32; BESIDE] {
        // The tree of `sum`, two groups in a register from each step on: quarters of registers, then pairs, then lanes.
        let halves = |a: __m512, b: __m512| {
            let (low, high) =
                (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
            _mm512_add_ps(low, high)
        };
        let quarters = |a: __m512, b: __m512| {
            let (low, high) =
                (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
            _mm512_add_ps(low, high)
        };
        let [a, b, c, d, e, f, g, h] = groups;
        let even = _mm512_castps_pd(quarters(halves(a.0, c.0), halves(e.0, g.0)));
        let odd = _mm512_castps_pd(quarters(halves(b.0, d.0), halves(f.0, h.0)));
        let (low, high) = (_mm512_unpacklo_pd(even, odd), _mm512_unpackhi_pd(even, odd));
        let pairs = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        let all = _mm512_add_ps(pairs, _mm512_permute_ps::<0xB1>(pairs));
        let every_other = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
        let mut sums = [0.0; BESIDE];
        let first = _mm512_castps512_ps256(_mm512_permutexvar_ps(every_other, all));
        _mm256_storeu_ps(sums.as_mut_ptr(), first);
        sums
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let eight = _mm256_max_ps(_mm512_castps512_ps256(self.0), upper(self.0));
        let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn smallest(self) -> f32 {
        let eight = _mm256_min_ps(_mm512_castps512_ps256(self.0), upper(self.0));
        let four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_min_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn compress_store(self, bits: u16, to: *mut f32) {
        // Into a register and stored whole: compressing to memory is microcoded on Zen 4. Merging into the
        // operand itself avoids the false dependency of the zeroing form.
        _mm512_storeu_ps(to, _mm512_mask_compress_ps(self.0, bits, self.0));
    }
}

/// Moves a mask to a general register. Else compilers compute with it in place, on the ports of the vectors.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn number(mask: __mmask16) -> u16 {
    let bits: u32;
    // A move between registers.
    std::arch::asm!(
        "kmovw {0:e}, {1}",
        out(reg) bits,
        in(kreg) mask,
        options(pure, nomem, nostack, preserves_flags)
    );
    bits as u16
}

/// The low and the high eight lanes in f64.
#[inline(always)]
unsafe fn widen(lanes: __m512) -> [__m512d; 2] {
    [
        _mm512_cvtps_pd(_mm512_castps512_ps256(lanes)),
        _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(lanes)),
    ]
}

/// Two registers of f64 lanes rounded to one of f32.
#[inline(always)]
unsafe fn narrow(lanes: [__m512d; 2]) -> __m512 {
    let low = _mm512_castps256_ps512(_mm512_cvtpd_ps(lanes[0]));
    _mm512_insertf32x8::<1>(low, _mm512_cvtpd_ps(lanes[1]))
}

/// The upper eight lanes.
#[inline(always)]
unsafe fn upper(lanes: __m512) -> __m256 {
    _mm512_extractf32x8_ps::<1>(lanes)
}

impl Single for F32 {
    #[inline(always)]
    unsafe fn as_bits(self) -> Self {
        F32(_mm512_castsi512_ps(_mm512_cvttps_epi32(self.0)))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct F64([__m512d; 2]);

impl F64 {
    #[inline(always)]
    fn map(self, f: impl Fn(__m512d) -> __m512d) -> Self {
        F64([f(self.0[0]), f(self.0[1])])
    }
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(__m512d, __m512d) -> __m512d) -> Self {
        F64([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
    }
    #[inline(always)]
    fn test(self, other: Self, f: impl Fn(__m512d, __m512d) -> __mmask8) -> [__mmask8; 2] {
        [f(self.0[0], other.0[0]), f(self.0[1], other.0[1])]
    }
}

impl Lanes for F64 {
    type Scalar = f64;
    type Mask = [__mmask8; 2];
    type Wide = F64;

    lanewise! {
        add: _mm512_add_pd, sub: _mm512_sub_pd, mul: _mm512_mul_pd, div: _mm512_div_pd, max: _mm512_max_pd, min: _mm512_min_pd,
    }
    compare!(_mm512_cmp_pd_mask);

    #[inline(always)]
    unsafe fn splat(value: f64) -> Self {
        F64([_mm512_set1_pd(value); 2])
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        F64([_mm512_loadu_pd(from), _mm512_loadu_pd(from.add(8))])
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        _mm512_storeu_pd(to, self.0[0]);
        _mm512_storeu_pd(to.add(8), self.0[1]);
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        F64(std::array::from_fn(|i| _mm512_fmadd_pd(self.0[i], factor.0[i], term.0[i])))
    }
    #[inline(always)]
    unsafe fn within(self, lo: Self, hi: Self) -> u16 {
        Self::number(std::array::from_fn(|i| {
            let over = _mm512_cmp_pd_mask::<_CMP_GE_OQ>(self.0[i], lo.0[i]);
            _mm512_mask_cmp_pd_mask::<_CMP_LT_OQ>(over, self.0[i], hi.0[i])
        }))
    }
    #[inline(always)]
    unsafe fn bits(mask: [__mmask8; 2]) -> u16 {
        u16::from_le_bytes(mask)
    }
    #[inline(always)]
    unsafe fn number(mask: [__mmask8; 2]) -> u16 {
        mask.map(|half| number(half.into())).into_iter().rev().fold(0, |all, half| all << 8 | half)
    }
    #[inline(always)]
    unsafe fn mask(bits: u16) -> [__mmask8; 2] {
        bits.to_le_bytes()
    }
    #[inline(always)]
    unsafe fn keep(self, mask: [__mmask8; 2]) -> Self {
        F64([_mm512_maskz_mov_pd(mask[0], self.0[0]), _mm512_maskz_mov_pd(mask[1], self.0[1])])
    }
    #[inline(always)]
    unsafe fn select(self, mask: [__mmask8; 2], other: Self) -> Self {
        F64({
            [
                _mm512_mask_mov_pd(other.0[0], mask[0], self.0[0]),
                _mm512_mask_mov_pd(other.0[1], mask[1], self.0[1]),
            ]
        })
    }
    #[inline(always)]
    unsafe fn add_where(self, mask: [__mmask8; 2], other: Self) -> Self {
        F64({
            [
                _mm512_mask_add_pd(self.0[0], mask[0], self.0[0], other.0[0]),
                _mm512_mask_add_pd(self.0[1], mask[1], self.0[1], other.0[1]),
            ]
        })
    }
    #[inline(always)]
    unsafe fn fraction(self) -> Self {
        self.map(|t| _mm512_reduce_pd::<FLOOR>(t))
    }
    #[inline(always)]
    unsafe fn scale_by_floor(self, exponent: Self, mask: [__mmask8; 2]) -> Self {
        F64(std::array::from_fn(|i| _mm512_maskz_scalef_pd(mask[i], self.0[i], exponent.0[i])))
    }
    #[inline(always)]
    unsafe fn affine(self, shift: f64, scale: f64) -> Self {
        let (half, two) = (_mm512_set1_pd(0.5), _mm512_set1_pd(2.0));
        let (shift, scale) = (_mm512_set1_pd(0.5 * shift), _mm512_set1_pd(scale));
        self.map(|s| {
            let difference = _mm512_sub_pd(_mm512_mul_pd(half, s), shift);
            _mm512_mul_pd(_mm512_mul_pd(difference, scale), two)
        })
    }
    #[inline(always)]
    unsafe fn widen_add(self, wide: F64) -> F64 {
        wide.add(self)
    }
    #[inline(always)]
    unsafe fn sum(self) -> f64 {
        let eight = _mm512_add_pd(self.0[0], self.0[1]);
        let high = _mm512_extractf64x4_pd::<1>(eight);
        let four = _mm256_add_pd(_mm512_castpd512_pd256(eight), high);
        let two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd::<1>(four));
        _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)))
    }
    #[inline(always)]
    unsafe fn sums(groups: [Self; BESIDE]) -> [f64; BESIDE] {
        // As in f32, from eight lanes of each on.
        let halves = |a: __m512d, b: __m512d| {
            let (low, high) =
                (_mm512_shuffle_f64x2::<0x44>(a, b), _mm512_shuffle_f64x2::<0xEE>(a, b));
            _mm512_add_pd(low, high)
        };
        let quarters = |a: __m512d, b: __m512d| {
            let (low, high) =
                (_mm512_shuffle_f64x2::<0x88>(a, b), _mm512_shuffle_f64x2::<0xDD>(a, b));
            _mm512_add_pd(low, high)
        };
        let eight = |group: F64| _mm512_add_pd(group.0[0], group.0[1]);
        let [a, b, c, d, e, f, g, h] = groups;
        let even = quarters(halves(eight(a), eight(c)), halves(eight(e), eight(g)));
        let odd = quarters(halves(eight(b), eight(d)), halves(eight(f), eight(h)));
        let all = _mm512_add_pd(_mm512_unpacklo_pd(even, odd), _mm512_unpackhi_pd(even, odd));
        let mut sums = [0.0; BESIDE];
        _mm512_storeu_pd(sums.as_mut_ptr(), all);
        sums
    }
    #[inline(always)]
    unsafe fn largest(self) -> f64 {
        let eight = _mm512_max_pd(self.0[0], self.0[1]);
        let high = _mm512_extractf64x4_pd::<1>(eight);
        let four = _mm256_max_pd(_mm512_castpd512_pd256(eight), high);
        let two = _mm_max_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd::<1>(four));
        _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)))
    }
    #[inline(always)]
    unsafe fn smallest(self) -> f64 {
        let eight = _mm512_min_pd(self.0[0], self.0[1]);
        let high = _mm512_extractf64x4_pd::<1>(eight);
        let four = _mm256_min_pd(_mm512_castpd512_pd256(eight), high);
        let two = _mm_min_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd::<1>(four));
        _mm_cvtsd_f64(_mm_min_sd(two, _mm_unpackhi_pd(two, two)))
    }
    #[inline(always)]
    unsafe fn compress_store(self, bits: u16, to: *mut f64) {
        let masks = bits.to_le_bytes();
        // The second store starts at most eight places in and writes eight.
        _mm512_storeu_pd(to, _mm512_mask_compress_pd(self.0[0], masks[0], self.0[0]));
        let next = to.add(masks[0].count_ones() as usize);
        _mm512_storeu_pd(next, _mm512_mask_compress_pd(self.0[1], masks[1], self.0[1]));
    }
}

impl Level for Avx512 {
    type F32 = F32;
    type F64 = F64;
    const ROOMY: bool = true;

    #[inline(always)]
    unsafe fn single(lanes: F64) -> F32 {
        F32(narrow(lanes.0))
    }
    #[inline(always)]
    unsafe fn double(lanes: F32) -> F64 {
        let high = _mm512_extractf32x8_ps::<1>(lanes.0);
        F64([_mm512_cvtps_pd(_mm512_castps512_ps256(lanes.0)), _mm512_cvtps_pd(high)])
    }
    #[inline(always)]
    unsafe fn low_bytes(lanes: F32) -> [u8; LANES] {
        let mut bytes = [0; LANES];
        let low = _mm512_cvtepi32_epi8(_mm512_castps_si512(lanes.0));
        _mm_storeu_si128(bytes.as_mut_ptr().cast(), low);
        bytes
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // A prefetch never faults.
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[inline(always)]
    unsafe fn prefetch_far(at: *const u8) {
        // A prefetch never faults.
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[inline(always)]
    unsafe fn prefetch_to_write(at: *const u8) {
        // A prefetch never faults.
        _mm_prefetch::<_MM_HINT_ET0>(at.cast());
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> F32 {
        F32(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> F32 {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        F32(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
    }
    #[inline(always)]
    unsafe fn nonzero_bytes(from: *const u8) -> u16 {
        let bytes = _mm_loadu_si128(from.cast());
        _mm_test_epi8_mask(bytes, bytes)
    }
    #[inline(always)]
    unsafe fn compress_count(first: u32, bits: u16, to: *mut u32) {
        let steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let positions = _mm512_add_epi32(_mm512_set1_epi32(first.cast_signed()), steps);
        let packed = _mm512_mask_compress_epi32(positions, bits, positions);
        _mm512_storeu_si512(to.cast(), packed);
    }
    #[inline(always)]
    unsafe fn compress_positions(from: *const u32, bits: u16, to: *mut u32) {
        // The load is complete before the store.
        let positions = _mm512_loadu_si512(from.cast());
        let packed = _mm512_mask_compress_epi32(positions, bits, positions);
        _mm512_storeu_si512(to.cast(), packed);
    }
}
