//! Quantized keys, and the error of quantization.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use half::bf16;

use crate::kernels::isa::{Element, LANES, Lanes, Level};
use crate::kernels::matrix::Keys;
use crate::kernels::simd::{Pass, Simd};

/// The largest code of either sign.
const CODE: f32 = 127.0;
/// Difference of a byte and its code.
pub(crate) const BIAS: u8 = 128;
/// 2^23 + 2^22: a float of this size has a last place of 1, so adding it rounds to an integer, ties to even.
pub(crate) const ROUND: f32 = 12_582_912.0;
/// Scales of keys lie in this range: their reciprocals are normal numbers, and so are products of them with codes.
const SCALES: (f32, f32) = (1e-30, 1e28);

/// Transformation of keys before they are rounded: `rotation(key - mean)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame<'a> {
    /// One entry for each dimension, in whole groups.
    pub(crate) mean: &'a [f32],
    /// Size of the blocks of dimensions that go through a Hadamard matrix (a power of two); 1 leaves keys unrotated.
    pub(crate) block: usize,
    /// -1 or 1 for each dimension: its factor before the matrix.
    pub(crate) signs: &'a [f32],
}

/// Statistics of a quantized key.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Encoded {
    /// Factor of the codes; 0 if the key cannot be encoded.
    pub(crate) scale: bf16,
    /// Approximate sum of squares of the quantization error.
    pub(crate) lost: f32,
    /// Approximate sum of squares of the transformed key.
    pub(crate) square: f32,
    /// Largest absolute entry of the key; NaN if an entry is not finite.
    pub(crate) largest: f32,
}

struct Encode<'a, E> {
    keys: Keys<'a, E>,
    from: usize,
    frame: Frame<'a>,
    /// Power of two that codes are multiples of.
    unit: f32,
    /// Bytes of the keys, per key the number of dimensions in whole groups.
    bytes: &'a mut [u8],
    /// Residuals: per key the transformed key minus its decoded form.
    residuals: &'a mut [f32],
    encoded: &'a mut [Encoded],
}

/// Applies the Hadamard matrix of a power of two, not normalised, in place.
#[inline(always)]
fn hadamard(block: &mut [f32]) {
    let mut half = 1;
    while half < block.len() {
        for pair in block.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

impl<E: Element<Scalar = f32>> Pass for Encode<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let width = self.frame.mean.len();
        let most = (CODE / self.unit).floor() * self.unit;
        let rows = self.residuals.chunks_exact_mut(width).zip(self.bytes.chunks_exact_mut(width));
        for (r, ((residual, bytes), encoded)) in rows.zip(self.encoded.iter_mut()).enumerate() {
            let key = self.keys.row(self.from + r);
            let zero = L::F32::splat(0.0);
            let (mut largest, mut spoiled) = (zero, zero);
            let (mut reach, mut square) = (zero, zero);
            for at in (0..width).step_by(LANES) {
                let lanes = Keys::group::<L>(key, at);
                largest = largest.max(lanes.max(zero.sub(lanes)));
                // 0 for finite entries, NaN for others.
                spoiled = lanes.sub(lanes).add(spoiled);
                let moved = lanes.sub(L::F32::load(self.frame.mean[at..].as_ptr()));
                moved.store(residual[at..].as_mut_ptr());
                reach = reach.max(moved.max(zero.sub(moved)));
                square = moved.mul_add(moved, square);
            }
            if self.frame.block > 1 {
                for (entry, sign) in residual.iter_mut().zip(self.frame.signs) {
                    *entry *= sign;
                }
                residual[..self.keys.dim()].chunks_exact_mut(self.frame.block).for_each(hadamard);
                (reach, square) = (zero, zero);
                for group in residual.chunks_exact(LANES) {
                    let moved = L::F32::load(group.as_ptr());
                    reach = reach.max(moved.max(zero.sub(moved)));
                    square = moved.mul_add(moved, square);
                }
            }
            encoded.largest = largest.largest() + spoiled.sum();
            encoded.square = square.sum();
            let scale = rounded_up(reach.largest() / most);
            // Too large or NaN: no codes for this key.
            if !(scale.to_f32() <= SCALES.1 && encoded.square < f32::INFINITY) {
                encoded.scale = bf16::ZERO;
                residual.fill(0.0);
                bytes.fill(BIAS);
                encoded.lost = f32::INFINITY;
                continue;
            }
            encoded.scale = scale;
            let inverse = L::F32::splat(1.0 / scale.to_f32());
            let scale = L::F32::splat(0.0 - scale.to_f32());
            // A sum with a float so many times as large rounds to so many.
            let (round, top) = (L::F32::splat(ROUND * self.unit), L::F32::splat(most));
            let bottom = L::F32::splat(-most);
            let offset = L::F32::splat(ROUND + f32::from(BIAS));
            let mut lost = zero;
            for (group, bytes) in
                residual.chunks_exact_mut(LANES).zip(bytes.chunks_exact_mut(LANES))
            {
                let moved = L::F32::load(group.as_ptr());
                let code = moved.mul_add(inverse, round).sub(round).min(top).max(bottom);
                bytes.copy_from_slice(&L::low_bytes(code.add(offset)));
                let rest = code.mul_add(scale, moved);
                lost = rest.mul_add(rest, lost);
                rest.store(group.as_mut_ptr());
            }
            encoded.lost = lost.sum();
        }
    }
}

/// Returns the smallest bfloat16 number that is not below a value, and in the range of scales.
#[inline(always)]
fn rounded_up(value: f32) -> bf16 {
    let value = value.max(SCALES.0);
    bf16::from_bits((value.to_bits().wrapping_add(0xffff) >> 16) as u16)
}

impl Simd {
    /// Encodes keys `from ..`, as many as there are places in `encoded`, in codes that are multiples of a unit, a power of two. Every
    /// key has whole groups of bytes and residuals.
    pub(crate) fn encode<E: Element<Scalar = f32>>(
        self,
        keys: Keys<'_, E>,
        from: usize,
        (frame, unit): (Frame<'_>, f32),
        bytes: &mut [u8],
        residuals: &mut [f32],
        encoded: &mut [Encoded],
    ) {
        let width = frame.mean.len();
        assert!(width.is_multiple_of(LANES) && width >= keys.dim() && keys.dim() > 0);
        assert!(bytes.len() == encoded.len() * width && residuals.len() == bytes.len());
        assert!(frame.block == 1 || keys.dim().is_multiple_of(frame.block));
        self.run(Encode { keys, from, frame, unit, bytes, residuals, encoded });
    }
}
