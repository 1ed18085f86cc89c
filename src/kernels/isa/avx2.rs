//! AVX2 with FMA and F16C: two registers of eight f32 lanes, four of four f64 lanes.
//!
//! SAFETY: methods are `unsafe` as the traits have it: the CPU has these features, and pointers are valid for sixteen
//! elements; unaligned loads and stores are used throughout.
#![allow(clippy::wildcard_imports)] // the intrinsics are a vocabulary
#![allow(clippy::cast_sign_loss)] // they return bit sets as i32

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::lanes::{LANES, Lanes, Level, Single};

/// The AVX2 instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2;

/// For each set of eight lanes, the lanes of the set first: what `vpermd` needs to compress.
static COMPRESS: [[u32; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut bits = 0;
    while bits < 256 {
        let (mut lane, mut next) = (0, 0);
        while lane < 8 {
            if bits >> lane & 1 == 1 {
                table[bits][next] = lane as u32;
                next += 1;
            }
            lane += 1;
        }
        bits += 1;
    }
    table
};

/// For each set of four wide lanes, the set of the eight lanes that they fill.
static PAIRS: [u8; 16] = {
    let mut table = [0; 16];
    let mut at = 0;
    while at < 16 * 4 {
        let (bits, lane) = (at / 4, at % 4);
        table[bits] |= ((bits >> lane & 1) as u8 * 3) << (2 * lane);
        at += 1;
    }
    table
};

/// The permutation that compresses the lanes of `bits`.
#[inline(always)]
unsafe fn permutation(bits: u8) -> __m256i {
    _mm256_loadu_si256(COMPRESS[usize::from(bits)].as_ptr().cast())
}

#[derive(Clone, Copy)]
pub(crate) struct F32(pub(super) [__m256; 2]);

// Closures are called here, not by `array::map`: what that leaves to a call is compiled without these instructions.
impl F32 {
    #[inline(always)]
    fn map(self, f: impl Fn(__m256) -> __m256) -> Self {
        let [a, b] = self.0;
        F32([f(a), f(b)])
    }
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(__m256, __m256) -> __m256) -> Self {
        F32([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
    }
    #[inline(always)]
    fn test(self, other: Self, f: impl Fn(__m256, __m256) -> __m256) -> [__m256; 2] {
        self.zip(other, f).0
    }
}

impl Lanes for F32 {
    type Scalar = f32;
    type Mask = [__m256; 2];
    type Wide = F64;

    lanewise! {
        add: _mm256_add_ps, sub: _mm256_sub_ps, mul: _mm256_mul_ps, div: _mm256_div_ps, max: _mm256_max_ps, min: _mm256_min_ps,
    }
    compare!(_mm256_cmp_ps);

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        F32([_mm256_set1_ps(value); 2])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        F32([_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))])
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm256_storeu_ps(to, self.0[0]);
        _mm256_storeu_ps(to.add(8), self.0[1]);
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        F32(std::array::from_fn(|i| _mm256_fmadd_ps(self.0[i], factor.0[i], term.0[i])))
    }
    #[inline(always)]
    unsafe fn within(self, lo: Self, hi: Self) -> u16 {
        let over = F32(self.ge(lo));
        Self::bits(over.zip(F32(self.lt(hi)), |a, b| _mm256_and_ps(a, b)).0)
    }
    #[inline(always)]
    unsafe fn bits(mask: [__m256; 2]) -> u16 {
        let [low, high] = mask.map(|half| _mm256_movemask_ps(half) as u16);
        low | high << 8
    }
    #[inline(always)]
    unsafe fn mask(bits: u16) -> [__m256; 2] {
        let lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        let half = |half: u8| {
            let chosen = _mm256_and_si256(_mm256_set1_epi32(i32::from(half)), lanes);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, lanes))
        };
        let [low, high] = bits.to_le_bytes();
        [half(low), half(high)]
    }
    #[inline(always)]
    unsafe fn keep(self, mask: [__m256; 2]) -> Self {
        self.zip(F32(mask), |a, mask| _mm256_and_ps(a, mask))
    }
    #[inline(always)]
    unsafe fn select(self, mask: [__m256; 2], other: Self) -> Self {
        F32(std::array::from_fn(|i| _mm256_blendv_ps(other.0[i], self.0[i], mask[i])))
    }
    #[inline(always)]
    unsafe fn fraction(self) -> Self {
        self.map(|t| _mm256_sub_ps(t, _mm256_floor_ps(t)))
    }
    #[inline(always)]
    unsafe fn scale_by_floor(self, exponent: Self, mask: [__m256; 2]) -> Self {
        let scaled = self.zip(exponent, |p, t| {
            let power = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(_mm256_floor_ps(t)));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power))
        });
        scaled.keep(mask)
    }
    #[inline(always)]
    unsafe fn add_where(self, mask: [__m256; 2], other: Self) -> Self {
        self.add(other.keep(mask))
    }
    #[inline(always)]
    unsafe fn affine(self, shift: f64, scale: f64) -> Self {
        let (shift, scale) = (_mm256_set1_pd(shift), _mm256_set1_pd(scale));
        narrow(widen(self).map(|quarter| _mm256_mul_pd(scale, _mm256_sub_pd(quarter, shift))))
    }
    #[inline(always)]
    unsafe fn widen_add(self, wide: F64) -> F64 {
        wide.add(F64(widen(self)))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let eight = _mm256_add_ps(self.0[0], self.0[1]);
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let eight = _mm256_max_ps(self.0[0], self.0[1]);
        let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn smallest(self) -> f32 {
        let eight = _mm256_min_ps(self.0[0], self.0[1]);
        let four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_min_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn compress_store(self, bits: u16, to: *mut f32) {
        let [low, high] = bits.to_le_bytes();
        _mm256_storeu_ps(to, _mm256_permutevar8x32_ps(self.0[0], permutation(low)));
        let next = to.add(low.count_ones() as usize);
        _mm256_storeu_ps(next, _mm256_permutevar8x32_ps(self.0[1], permutation(high)));
    }
}

/// The four quarters of the lanes in f64.
#[inline(always)]
unsafe fn widen(lanes: F32) -> [__m256d; 4] {
    [
        _mm256_cvtps_pd(_mm256_castps256_ps128(lanes.0[0])),
        _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(lanes.0[0])),
        _mm256_cvtps_pd(_mm256_castps256_ps128(lanes.0[1])),
        _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(lanes.0[1])),
    ]
}

/// Four registers of f64 lanes rounded to two of f32.
#[inline(always)]
unsafe fn narrow(lanes: [__m256d; 4]) -> F32 {
    let quarters = lanes.map(|quarter| _mm256_cvtpd_ps(quarter));
    F32([_mm256_set_m128(quarters[1], quarters[0]), _mm256_set_m128(quarters[3], quarters[2])])
}

impl Single for F32 {
    #[inline(always)]
    unsafe fn as_bits(self) -> Self {
        self.map(|half| _mm256_castsi256_ps(_mm256_cvttps_epi32(half)))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct F64([__m256d; 4]);

impl F64 {
    #[inline(always)]
    fn map(self, f: impl Fn(__m256d) -> __m256d) -> Self {
        let [a, b, c, d] = self.0;
        F64([f(a), f(b), f(c), f(d)])
    }
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(__m256d, __m256d) -> __m256d) -> Self {
        F64(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
    #[inline(always)]
    fn test(self, other: Self, f: impl Fn(__m256d, __m256d) -> __m256d) -> [__m256d; 4] {
        self.zip(other, f).0
    }
}

impl Lanes for F64 {
    type Scalar = f64;
    type Mask = [__m256d; 4];
    type Wide = F64;

    lanewise! {
        add: _mm256_add_pd, sub: _mm256_sub_pd, mul: _mm256_mul_pd, div: _mm256_div_pd, max: _mm256_max_pd, min: _mm256_min_pd,
    }
    compare!(_mm256_cmp_pd);

    #[inline(always)]
    unsafe fn splat(value: f64) -> Self {
        F64([_mm256_set1_pd(value); 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        F64(std::array::from_fn(|i| _mm256_loadu_pd(from.add(4 * i))))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        for (i, quarter) in self.0.into_iter().enumerate() {
            _mm256_storeu_pd(to.add(4 * i), quarter);
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        F64(std::array::from_fn(|i| _mm256_fmadd_pd(self.0[i], factor.0[i], term.0[i])))
    }
    #[inline(always)]
    unsafe fn within(self, lo: Self, hi: Self) -> u16 {
        let over = F64(self.ge(lo));
        Self::bits(over.zip(F64(self.lt(hi)), |a, b| _mm256_and_pd(a, b)).0)
    }
    #[inline(always)]
    unsafe fn bits(mask: [__m256d; 4]) -> u16 {
        let quarters = mask.map(|quarter| _mm256_movemask_pd(quarter) as u16);
        quarters[0] | quarters[1] << 4 | quarters[2] << 8 | quarters[3] << 12
    }
    #[inline(always)]
    unsafe fn mask(bits: u16) -> [__m256d; 4] {
        let lanes = _mm256_setr_epi64x(1, 2, 4, 8);
        std::array::from_fn(|i| {
            let quarter = _mm256_set1_epi64x(i64::from(bits >> (4 * i)));
            let chosen = _mm256_and_si256(quarter, lanes);
            _mm256_castsi256_pd(_mm256_cmpeq_epi64(chosen, lanes))
        })
    }
    #[inline(always)]
    unsafe fn keep(self, mask: [__m256d; 4]) -> Self {
        self.zip(F64(mask), |a, mask| _mm256_and_pd(a, mask))
    }
    #[inline(always)]
    unsafe fn select(self, mask: [__m256d; 4], other: Self) -> Self {
        F64(std::array::from_fn(|i| _mm256_blendv_pd(other.0[i], self.0[i], mask[i])))
    }
    #[inline(always)]
    unsafe fn fraction(self) -> Self {
        self.map(|t| _mm256_sub_pd(t, _mm256_floor_pd(t)))
    }
    #[inline(always)]
    unsafe fn scale_by_floor(self, exponent: Self, mask: [__m256d; 4]) -> Self {
        let scaled = self.zip(exponent, |p, t| {
            // Adding 1.5 * 2^52 leaves the integer in the low bits.
            let magic = _mm256_set1_pd(6_755_399_441_055_744.0);
            let integer = _mm256_castpd_si256(_mm256_add_pd(_mm256_floor_pd(t), magic));
            let power = _mm256_slli_epi64::<52>(integer);
            _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(p), power))
        });
        scaled.keep(mask)
    }
    #[inline(always)]
    unsafe fn add_where(self, mask: [__m256d; 4], other: Self) -> Self {
        self.add(other.keep(mask))
    }
    #[inline(always)]
    unsafe fn affine(self, shift: f64, scale: f64) -> Self {
        let (half, two) = (_mm256_set1_pd(0.5), _mm256_set1_pd(2.0));
        let (shift, scale) = (_mm256_set1_pd(0.5 * shift), _mm256_set1_pd(scale));
        self.map(|s| {
            let difference = _mm256_sub_pd(_mm256_mul_pd(half, s), shift);
            _mm256_mul_pd(_mm256_mul_pd(difference, scale), two)
        })
    }
    #[inline(always)]
    unsafe fn widen_add(self, wide: F64) -> F64 {
        wide.add(self)
    }
    #[inline(always)]
    unsafe fn sum(self) -> f64 {
        let low = _mm256_add_pd(self.0[0], self.0[2]);
        let high = _mm256_add_pd(self.0[1], self.0[3]);
        let four = _mm256_add_pd(low, high);
        let two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd::<1>(four));
        _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)))
    }
    #[inline(always)]
    unsafe fn largest(self) -> f64 {
        let low = _mm256_max_pd(self.0[0], self.0[2]);
        let high = _mm256_max_pd(self.0[1], self.0[3]);
        let four = _mm256_max_pd(low, high);
        let two = _mm_max_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd::<1>(four));
        _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)))
    }
    #[inline(always)]
    unsafe fn smallest(self) -> f64 {
        let low = _mm256_min_pd(self.0[0], self.0[2]);
        let high = _mm256_min_pd(self.0[1], self.0[3]);
        let four = _mm256_min_pd(low, high);
        let two = _mm_min_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd::<1>(four));
        _mm_cvtsd_f64(_mm_min_sd(two, _mm_unpackhi_pd(two, two)))
    }
    #[inline(always)]
    unsafe fn compress_store(self, bits: u16, to: *mut f64) {
        let mut next = to;
        for (i, quarter) in self.0.into_iter().enumerate() {
            let chosen = bits >> (4 * i) & 0xf;
            let words = permutation(PAIRS[usize::from(chosen)]);
            let first = _mm256_permutevar8x32_ps(_mm256_castpd_ps(quarter), words);
            _mm256_storeu_pd(next, _mm256_castps_pd(first));
            next = next.add(chosen.count_ones() as usize);
        }
    }
}

impl Level for Avx2 {
    type F32 = F32;
    type F64 = F64;

    #[inline(always)]
    unsafe fn single(lanes: F64) -> F32 {
        narrow(lanes.0)
    }
    #[inline(always)]
    unsafe fn double(lanes: F32) -> F64 {
        let [low, high] = lanes.0;
        F64([
            _mm256_cvtps_pd(_mm256_castps256_ps128(low)),
            _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(low)),
            _mm256_cvtps_pd(_mm256_castps256_ps128(high)),
            _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(high)),
        ])
    }
    #[inline(always)]
    unsafe fn low_bytes(lanes: F32) -> [u8; LANES] {
        let mut words = [0u32; LANES];
        lanes.store(words.as_mut_ptr().cast());
        words.map(|word| word as u8)
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
        let halves = [from, from.add(8)];
        F32(halves.map(|half| _mm256_cvtph_ps(_mm_loadu_si128(half.cast()))))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> F32 {
        let halves = [from, from.add(8)];
        F32(halves.map(|half| {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(half.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }))
    }
    #[inline(always)]
    unsafe fn nonzero_bytes(from: *const u8) -> u16 {
        let zero = _mm_cmpeq_epi8(_mm_loadu_si128(from.cast()), _mm_setzero_si128());
        !(_mm_movemask_epi8(zero) as u16)
    }
    #[inline(always)]
    unsafe fn compress_count(first: u32, bits: u16, to: *mut u32) {
        let steps = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let low = _mm256_add_epi32(_mm256_set1_epi32(first.cast_signed()), steps);
        let high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
        compress_words([low, high], bits, to);
    }
    #[inline(always)]
    unsafe fn compress_positions(from: *const u32, bits: u16, to: *mut u32) {
        let low = _mm256_loadu_si256(from.cast());
        let high = _mm256_loadu_si256(from.add(8).cast());
        // Both halves are loaded before anything is stored.
        compress_words([low, high], bits, to);
    }
}

#[inline(always)]
unsafe fn compress_words(words: [__m256i; 2], bits: u16, to: *mut u32) {
    let [low, high] = bits.to_le_bytes();
    // The second store starts at most eight places in and writes eight.
    _mm256_storeu_si256(to.cast(), _mm256_permutevar8x32_epi32(words[0], permutation(low)));
    let next = to.add(low.count_ones() as usize);
    _mm256_storeu_si256(next.cast(), _mm256_permutevar8x32_epi32(words[1], permutation(high)));
}
