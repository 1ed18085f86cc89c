//! Quantized queries, and their residuals.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use super::encode::ROUND;
use crate::kernels::isa::{LANES, Lanes, Level};
use crate::kernels::simd::{Pass, Simd};

/// The largest number of a query in bytes.
const MOST: f32 = 127.0;

/// Statistics of a quantized vector. Sums of squares and the product are computed in f64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Quantized {
    /// Value of a byte of 1.
    pub(crate) unit: f32,
    /// Sum of all bytes.
    pub(crate) total: i32,
    pub(crate) square: f64,
    /// Sum of squares of the residual.
    pub(crate) rest_square: f64,
    /// Product with the vector `beside`.
    pub(crate) product: f64,
}

struct Quantize<'a> {
    row: &'a [f32],
    beside: &'a [f32],
    bytes: &'a mut [i8],
    rest: &'a mut [f32],
}

impl Pass<Quantized> for Quantize<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> Quantized {
        let zero = L::F32::splat(0.0);
        let (mut top, mut square, mut product) = (zero, L::F64::splat(0.0), L::F64::splat(0.0));
        for (row, beside) in self.row.chunks_exact(LANES).zip(self.beside.chunks_exact(LANES)) {
            let row = L::F32::load(row.as_ptr());
            top = row.max(zero.sub(row).max(top));
            let (wide, beside) = (L::double(row), L::double(L::F32::load(beside.as_ptr())));
            square = wide.mul_add(wide, square);
            product = wide.mul_add(beside, product);
        }
        let unit = (top.largest() / MOST).max(f32::MIN_POSITIVE);
        let (inverse, round) = (L::F32::splat(1.0 / unit), L::F32::splat(ROUND));
        let (mut total, mut rest_square) = (zero, L::F64::splat(0.0));
        let to = self.bytes.chunks_exact_mut(LANES).zip(self.rest.chunks_exact_mut(LANES));
        for (row, (bytes, rest)) in self.row.chunks_exact(LANES).zip(to) {
            let row = L::F32::load(row.as_ptr());
            let rounded = row.mul_add(inverse, round);
            let number = rounded.sub(round);
            // Integers, which f32 adds exactly.
            total = total.add(number);
            let left = number.mul_add(L::F32::splat(-unit), row);
            left.store(rest.as_mut_ptr());
            let left = L::double(left);
            rest_square = left.mul_add(left, rest_square);
            for (to, byte) in bytes.iter_mut().zip(L::low_bytes(rounded)) {
                *to = byte.cast_signed();
            }
        }
        Quantized {
            unit,
            total: total.sum() as i32,
            square: square.sum(),
            rest_square: rest_square.sum(),
            product: product.sum(),
        }
    }
}

impl Simd {
    /// Writes the nearest bytes of a finite vector in whole groups, -127 to 127 for its largest entries, and the
    /// residuals, each rounded once. `beside` is another vector.
    pub(crate) fn quantize(
        self,
        row: &[f32],
        beside: &[f32],
        bytes: &mut [i8],
        rest: &mut [f32],
    ) -> Quantized {
        assert!(row.len().is_multiple_of(LANES) && row.len() == beside.len());
        assert!(row.len() == bytes.len() && row.len() == rest.len());
        self.run(Quantize { row, beside, bytes, rest })
    }
}
