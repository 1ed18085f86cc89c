//! Inner products of stored bytes with 16-bit numbers, in integers: exact, so all implementations agree.
//!
//! Bytes come in lines of 64: sixteen keys by four dimensions, a key's four behind each other. A number of the query is
//! `256 * high + low` with both halves signed bytes, because the fastest instruction multiplies bytes only.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's features, and for a readable line behind a pointer.

use super::lanes::{LANES, Level};
use super::portable::{Array, Portable};

/// Dimensions of a line.
pub(crate) const STEP: usize = 4;
/// Bytes of a line.
pub(crate) const LINE: usize = STEP * LANES;

/// Four 16-bit numbers of a query, in the forms that instructions need.
///
/// The halves are not adjacent: compilers would load both at once and separate them in registers, which takes twice as
/// long as broadcasting each from memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(super) high: [i8; STEP],
    pub(super) both: [i16; STEP],
    pub(super) low: [i8; STEP],
}

impl Step {
    /// Returns the step of `256 * high + low`. Panics above 32 639, which has no high half.
    pub(crate) fn new(both: [i16; STEP]) -> Self {
        let low = both.map(|number| number as i8);
        let high = std::array::from_fn(|i| {
            let high = (i32::from(both[i]) - i32::from(low[i])) / 256;
            assert!((-128..128).contains(&high));
            high as i8
        });
        Step { high, both, low }
    }

    /// Returns the four numbers.
    pub(crate) fn numbers(&self) -> [i16; STEP] {
        self.both
    }

    /// Returns a step for readers of `both` alone.
    #[inline(always)]
    fn widened(four: [i8; STEP]) -> Self {
        Step { high: four, both: four.map(i16::from), low: four }
    }
}

/// Many 16-bit numbers, in the forms that instructions need.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps<const N: usize> {
    high: [[u8; LANES]; N],
    low: [[u8; LANES]; N],
    both: [[i16; LANES]; N],
}

impl<const N: usize> Steps<N> {
    pub(crate) const ZERO: Self =
        Steps { high: [[0; LANES]; N], low: [[0; LANES]; N], both: [[0; LANES]; N] };

    /// Replaces a group by `256 * high + low`, none above 32 639, given the bits of signed bytes.
    #[inline(always)]
    pub(crate) fn set<B: ByteDots>(&mut self, group: usize, high: [u8; LANES], low: [u8; LANES]) {
        (self.high[group], self.low[group]) = (high, low);
        if B::HALVES {
            return;
        }
        for ((both, high), low) in self.both[group].iter_mut().zip(high).zip(low) {
            let high = 256 * i16::from(high.cast_signed());
            *both = high.wrapping_add(low.cast_signed().into());
        }
    }

    /// Returns four numbers.
    ///
    /// # Safety
    /// They are there: `at` is below `4 * N`.
    #[inline(always)]
    pub(crate) unsafe fn step(&self, at: usize) -> Step {
        Step {
            high: *self.high.as_ptr().cast::<[i8; STEP]>().add(at),
            both: *self.both.as_ptr().cast::<[i16; STEP]>().add(at),
            low: *self.low.as_ptr().cast::<[i8; STEP]>().add(at),
        }
    }
}

/// Prefetches a line of memory, if there is one at that address.
#[inline(always)]
pub(crate) fn ask_for(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint: nothing is read that the program could see, and no address is a fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        <super::neon::Neon as Level>::prefetch(line);
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// Sixteen integer sums of products of bytes and 16-bit numbers at a level. Sums wrap.
pub(crate) trait ByteDots: Copy {
    type Level: Level;
    type Sums: Copy;
    /// `true` if only the halves of numbers are read.
    const HALVES: bool = false;

    unsafe fn zero() -> Self::Sums;
    /// Adds to sum i the products of bytes `4 i .. 4 i + 4` of a line and the numbers of a step.
    unsafe fn add(sums: Self::Sums, line: *const u8, step: Step) -> Self::Sums;
    /// Returns the sums plus a number, as f32, each rounded once.
    unsafe fn plus(sums: Self::Sums, number: i32) -> <Self::Level as Level>::F32;

    /// Sixteen sums of products of bytes with signed bytes.
    type Short: Copy;
    unsafe fn short_zero() -> Self::Short;
    /// Adds to sum i the products of bytes `4 i .. 4 i + 4` of a line and four signed bytes.
    unsafe fn short_add(sums: Self::Short, line: *const u8, four: [i8; STEP]) -> Self::Short;
    unsafe fn short_sums(sums: Self::Short) -> [i32; LANES];
}

impl ByteDots for Portable {
    type Level = Portable;
    type Sums = [i32; LANES];

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn add(mut sums: Self::Sums, line: *const u8, step: Step) -> Self::Sums {
        let line = line.cast::<[[u8; STEP]; LANES]>().read_unaligned();
        for (sum, bytes) in sums.iter_mut().zip(line) {
            for (byte, number) in bytes.into_iter().zip(step.both) {
                *sum = sum.wrapping_add(i32::from(byte) * i32::from(number));
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn plus(sums: Self::Sums, number: i32) -> Array<f32> {
        Array(sums.map(|sum| sum.wrapping_add(number) as f32))
    }

    type Short = [i32; LANES];
    #[inline(always)]
    unsafe fn short_zero() -> Self::Short {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn short_add(sums: Self::Short, line: *const u8, four: [i8; STEP]) -> Self::Short {
        Self::add(sums, line, Step::widened(four))
    }
    #[inline(always)]
    unsafe fn short_sums(sums: Self::Short) -> [i32; LANES] {
        sums
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(clippy::wildcard_imports)] // the intrinsics are a vocabulary
mod x86 {
    use std::arch::x86_64::*;

    use super::super::avx2::{self, Avx2};
    use super::super::avx512::{self, Avx512};
    use super::{ByteDots, Step};

    impl ByteDots for Avx2 {
        type Level = Avx2;
        /// Two sums for each key, that of its first two dimensions and that of the others, key after key.
        type Sums = [__m256i; 4];

        #[inline(always)]
        unsafe fn zero() -> Self::Sums {
            [_mm256_setzero_si256(); 4]
        }
        #[inline(always)]
        unsafe fn add(mut sums: Self::Sums, line: *const u8, step: Step) -> Self::Sums {
            // A product is below 2^23, so that pairs of them do not saturate.
            let numbers = _mm256_set1_epi64x(i64::from_ne_bytes(bytes(step.both)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let four = _mm256_cvtepu8_epi16(_mm_loadu_si128(line.add(16 * i).cast()));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(four, numbers));
            }
            sums
        }
        #[inline(always)]
        unsafe fn plus(sums: Self::Sums, number: i32) -> avx2::F32 {
            let number = _mm256_set1_epi32(number);
            let half = |one, other| {
                // Keys 0 1 4 5 | 2 3 6 7, and back into order.
                let paired = _mm256_hadd_epi32(one, other);
                let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(paired);
                _mm256_cvtepi32_ps(_mm256_add_epi32(ordered, number))
            };
            let [a, b, c, d] = sums;
            avx2::F32([half(a, b), half(c, d)])
        }

        type Short = Self::Sums;
        #[inline(always)]
        unsafe fn short_zero() -> Self::Short {
            Self::zero()
        }
        #[inline(always)]
        unsafe fn short_add(sums: Self::Short, line: *const u8, four: [i8; 4]) -> Self::Short {
            Self::add(sums, line, Step::widened(four))
        }
        #[inline(always)]
        unsafe fn short_sums(sums: Self::Short) -> [i32; 16] {
            let mut stored = [[0; 8]; 4];
            for (stored, sums) in stored.iter_mut().zip(sums) {
                _mm256_storeu_si256(stored.as_mut_ptr().cast(), sums);
            }
            std::array::from_fn(|i| stored[i / 4][i % 4 * 2] + stored[i / 4][i % 4 * 2 + 1])
        }
    }

    impl ByteDots for Avx512 {
        type Level = Avx512;
        /// As with AVX2, eight keys a register.
        type Sums = [__m512i; 2];

        #[inline(always)]
        unsafe fn zero() -> Self::Sums {
            [_mm512_setzero_si512(); 2]
        }
        #[inline(always)]
        unsafe fn add(mut sums: Self::Sums, line: *const u8, step: Step) -> Self::Sums {
            // A product is below 2^23, so that pairs of them do not saturate.
            let numbers = _mm512_set1_epi64(i64::from_ne_bytes(bytes(step.both)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let eight = _mm512_cvtepu8_epi16(_mm256_loadu_si256(line.add(32 * i).cast()));
                *sum = _mm512_add_epi32(*sum, _mm512_madd_epi16(eight, numbers));
            }
            sums
        }
        #[inline(always)]
        unsafe fn plus(sums: Self::Sums, number: i32) -> avx512::F32 {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            let paired = _mm512_add_epi32(
                _mm512_permutex2var_epi32(sums[0], even, sums[1]),
                _mm512_permutex2var_epi32(sums[0], odd, sums[1]),
            );
            let all = _mm512_add_epi32(paired, _mm512_set1_epi32(number));
            avx512::F32(_mm512_cvtepi32_ps(all))
        }

        type Short = Self::Sums;
        #[inline(always)]
        unsafe fn short_zero() -> Self::Short {
            Self::zero()
        }
        #[inline(always)]
        unsafe fn short_add(sums: Self::Short, line: *const u8, four: [i8; 4]) -> Self::Short {
            Self::add(sums, line, Step::widened(four))
        }
        #[inline(always)]
        unsafe fn short_sums(sums: Self::Short) -> [i32; 16] {
            let mut stored = [[0; 16]; 2];
            for (stored, sums) in stored.iter_mut().zip(sums) {
                _mm512_storeu_si512(stored.as_mut_ptr().cast(), sums);
            }
            std::array::from_fn(|i| stored[i / 8][i % 8 * 2] + stored[i / 8][i % 8 * 2 + 1])
        }
    }

    /// AVX-512 with its instruction for inner products of bytes.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Vnni;

    impl ByteDots for Vnni {
        type Level = Avx512;
        const HALVES: bool = true;
        /// Sums with the high halves and with the low ones.
        type Sums = [__m512i; 2];

        #[inline(always)]
        unsafe fn zero() -> Self::Sums {
            [_mm512_setzero_si512(); 2]
        }
        #[inline(always)]
        unsafe fn add([high, low]: Self::Sums, line: *const u8, step: Step) -> Self::Sums {
            let line = _mm512_loadu_si512(line.cast());
            let halves = [step.high, step.low]
                .map(|half| _mm512_set1_epi32(i32::from_ne_bytes(half.map(i8::cast_unsigned))));
            [_mm512_dpbusd_epi32(high, line, halves[0]), _mm512_dpbusd_epi32(low, line, halves[1])]
        }
        #[inline(always)]
        unsafe fn plus([high, low]: Self::Sums, number: i32) -> avx512::F32 {
            let both = _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low);
            let all = _mm512_add_epi32(both, _mm512_set1_epi32(number));
            avx512::F32(_mm512_cvtepi32_ps(all))
        }

        type Short = __m512i;
        #[inline(always)]
        unsafe fn short_zero() -> __m512i {
            _mm512_setzero_si512()
        }
        #[inline(always)]
        unsafe fn short_add(sums: __m512i, line: *const u8, four: [i8; 4]) -> __m512i {
            let four = _mm512_set1_epi32(i32::from_ne_bytes(four.map(i8::cast_unsigned)));
            _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(line.cast()), four)
        }
        #[inline(always)]
        unsafe fn short_sums(sums: __m512i) -> [i32; 16] {
            let mut stored = [0; 16];
            _mm512_storeu_si512(stored.as_mut_ptr().cast(), sums);
            stored
        }
    }

    #[inline(always)]
    fn bytes(numbers: [i16; 4]) -> [u8; 8] {
        let [a, b, c, d] = numbers.map(i16::to_ne_bytes);
        [a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]]
    }
}
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Vnni;
