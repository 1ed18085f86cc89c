//! The low plane: more bits of what codes lose, and products of a query with a few rows of it.
//!
//! A key's residual lies within half a step of its code. Its low code is a whole number of parts of a step: -7 to 7 of
//! fifteen, or -127 to 127 of 255, so that what is left lies within half a part.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use super::encode::{BIAS, Encoded, ROUND};
use crate::kernels::isa::{LANES, Lanes, Level};
use crate::kernels::simd::{Pass, Simd};

/// Rows that are prefetched ahead of their use.
const AHEAD: usize = 16;
/// Entries of a row that are multiplied at a time.
const RUN: usize = 32;

/// Returns the largest low code of so many bits.
fn largest_code(bits: usize) -> f32 {
    ((1 << (bits - 1)) - 1) as f32
}

/// Returns the step of low codes of so many bits, for codes of a scale.
pub(crate) fn low_step(scale: f32, bits: usize) -> f32 {
    scale / (2.0 * largest_code(bits) + 1.0)
}

struct Refine<'a> {
    bits: usize,
    encoded: &'a [Encoded],
    bytes: &'a mut [u8],
    residuals: &'a mut [f32],
}

impl Pass<f32> for Refine<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f32 {
        let width = self.bytes.len() / self.encoded.len();
        let top = largest_code(self.bits);
        let (bottom, top) = (L::F32::splat(-top), L::F32::splat(top));
        let (round, offset) = (L::F32::splat(ROUND), L::F32::splat(ROUND + f32::from(BIAS)));
        let mut most = 0.0f32;
        let rows = self.residuals.chunks_exact_mut(width).zip(self.bytes.chunks_exact_mut(width));
        for ((residual, bytes), key) in rows.zip(self.encoded) {
            let step = low_step(key.scale.to_f32(), self.bits);
            if step == 0.0 {
                bytes.fill(BIAS);
                continue;
            }
            let (inverse, step) = (L::F32::splat(1.0 / step), L::F32::splat(-step));
            let mut lost = L::F32::splat(0.0);
            let groups = residual.chunks_exact_mut(LANES).zip(bytes.chunks_exact_mut(LANES));
            for (group, bytes) in groups {
                let rest = L::F32::load(group.as_ptr());
                let code = rest.mul_add(inverse, round).sub(round).min(top).max(bottom);
                bytes.copy_from_slice(&L::low_bytes(code.add(offset)));
                let left = code.mul_add(step, rest);
                lost = left.mul_add(left, lost);
                left.store(group.as_mut_ptr());
            }
            most = most.max(lost.sum());
        }
        most
    }
}

/// Writes a row of low codes, as bytes with a bias, in so many bits each. In four, the halves of the row share bytes.
pub(crate) fn pack_low(bytes: &[u8], bits: usize, to: &mut [u8]) {
    if bits == 8 {
        to.copy_from_slice(bytes);
        return;
    }
    let (first, second) = bytes.split_at(bytes.len() / 2);
    for ((to, first), second) in to.iter_mut().zip(first).zip(second) {
        *to = (first - (BIAS - 8)) | (second - (BIAS - 8)) << 4;
    }
}

struct Products<'a> {
    /// Rows of the keys from `first` on, and the bytes of one.
    rows: &'a [u8],
    size: usize,
    bits: usize,
    first: u32,
    list: &'a [u32],
    /// The numbers of a query, in whole groups, and their sum.
    numbers: &'a [i16],
    sum: i32,
    to: &'a mut [i32],
}

/// Returns the product of up to `RUN` bytes with numbers.
#[inline(always)]
fn product(bytes: &[i16; RUN], numbers: &[i16]) -> i32 {
    bytes.iter().zip(numbers).map(|(byte, number)| i32::from(*byte) * i32::from(*number)).sum()
}

impl Pass for Products<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let bias = self.sum.wrapping_mul(if self.bits == 4 { 8 } else { BIAS.into() });
        let (low, high) = self.numbers.split_at(self.numbers.len() / 2);
        for (at, (to, key)) in self.to.iter_mut().zip(self.list).enumerate() {
            if let Some(ahead) = self.list.get(at + AHEAD) {
                let start =
                    self.rows.as_ptr().wrapping_add((ahead - self.first) as usize * self.size);
                for line in (0..self.size).step_by(64) {
                    L::prefetch_far(start.wrapping_add(line));
                }
                L::prefetch_far(start.wrapping_add(self.size - 1));
            }
            let row = &self.rows[(key - self.first) as usize * self.size..][..self.size];
            let mut sum = 0i32;
            let mut bytes = [0i16; RUN];
            if self.bits == 4 {
                let runs = row.chunks(RUN).zip(low.chunks(RUN)).zip(high.chunks(RUN));
                for ((row, low), high) in runs {
                    for (to, byte) in bytes.iter_mut().zip(row) {
                        *to = i16::from(byte & 15);
                    }
                    sum = sum.wrapping_add(product(&bytes, low));
                    for (to, byte) in bytes.iter_mut().zip(row) {
                        *to = i16::from(byte >> 4);
                    }
                    sum = sum.wrapping_add(product(&bytes, high));
                }
            } else {
                for (row, numbers) in row.chunks(RUN).zip(self.numbers.chunks(RUN)) {
                    for (to, byte) in bytes.iter_mut().zip(row) {
                        *to = i16::from(*byte);
                    }
                    sum = sum.wrapping_add(product(&bytes, numbers));
                }
            }
            *to = sum.wrapping_sub(bias);
        }
    }
}

impl Simd {
    /// Encodes residuals of keys in low codes of 4 or 8 bits, as bytes with a bias, and replaces each residual by what is left.
    /// Returns the largest approximate sum of squares of what is left of a key.
    pub(crate) fn refine(
        self,
        bits: usize,
        encoded: &[Encoded],
        bytes: &mut [u8],
        residuals: &mut [f32],
    ) -> f32 {
        assert!(!encoded.is_empty() && bytes.len().is_multiple_of(encoded.len() * LANES));
        assert!(residuals.len() == bytes.len());
        self.run(Refine { bits, encoded, bytes, residuals })
    }

    /// Computes the products of a query's numbers, in whole groups, with the low codes of listed keys, `rows` being those of
    /// the keys from `first` on. Exact as long as the products with codes of eight bits are.
    pub(crate) fn low_products(
        self,
        (rows, bits, first): (&[u8], usize, u32),
        list: &[u32],
        numbers: &[i16],
        to: &mut [i32],
    ) {
        let size = numbers.len() * bits / 8;
        assert!(size > 0 && numbers.len().is_multiple_of(LANES) && (bits == 4 || bits == 8));
        assert!(list.iter().all(|key| *key >= first) && list.len() == to.len());
        let sum = numbers.iter().fold(0, |sum: i32, number| sum.wrapping_add((*number).into()));
        self.run(Products { rows, size, bits, first, list, numbers, sum, to });
    }
}
