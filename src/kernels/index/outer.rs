//! Outer products of residuals, summed in integers.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use super::encode::{BIAS, ROUND};
use super::triangle::Triangle;
use crate::kernels::isa::{ByteDots, LANES, LINE, Lanes, Level, STEP};
use crate::kernels::simd::{BytePass, Pass, Simd};
use crate::runtime::held::held;

/// Keys whose outer products are summed in integers.
pub(crate) const PANEL: usize = 256;

/// Scratch of [`Simd::outer`].
#[derive(Debug, Default)]
pub(crate) struct Packed {
    bytes: Vec<u8>,
    signed: Vec<i8>,
    totals: Vec<i32>,
}

held!(Packed { bytes, signed, totals });

struct Pack<'a> {
    residuals: &'a [f32],
    width: usize,
    inverse: f32,
    unit: f32,
    /// Four keys' bytes of a dimension behind each other, dimension after dimension.
    packed: &'a mut [u8],
}

impl Pass<f64> for Pack<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let four = STEP * self.width;
        let mut total = 0.0;
        for (rows, packed) in
            self.residuals.chunks_exact(four).zip(self.packed.chunks_exact_mut(four))
        {
            let (inverse, round) = (L::F32::splat(self.inverse), L::F32::splat(ROUND));
            let offset = L::F32::splat(ROUND + f32::from(BIAS));
            let unit = L::F32::splat(-self.unit);
            let mut lost = L::F32::splat(0.0);
            for (at, to) in packed.chunks_exact_mut(LINE).enumerate() {
                let mut bytes = [[0; LANES]; STEP];
                for (r, bytes) in bytes.iter_mut().enumerate() {
                    let rest = L::F32::load(rows[r * self.width + at * LANES..].as_ptr());
                    let code = rest.mul_add(inverse, round).sub(round);
                    *bytes = L::low_bytes(code.add(offset));
                    let left = code.mul_add(unit, rest);
                    lost = left.mul_add(left, lost);
                }
                // As words, so that compilers see vectors.
                let [a, b, c, d] = bytes.map(|row| row.map(u32::from));
                for (i, to) in to.as_chunks_mut::<STEP>().0.iter_mut().enumerate() {
                    *to = (a[i] | b[i] << 8 | c[i] << 16 | d[i] << 24).to_le_bytes();
                }
            }
            total += f64::from(lost.sum());
        }
        total
    }
}

/// Rows and groups of columns of a tile of outer products.
const TILE: (usize, usize) = (4, 2);

struct Outer<'a> {
    packed: &'a [u8],
    /// The same without the bias.
    signed: &'a [i8],
    /// Sum of each dimension's numbers.
    totals: &'a mut [i32],
    width: usize,
    square: f64,
    sums: &'a mut [f64],
    places: Triangle,
}

impl Outer<'_> {
    /// Computes the tile of rows `i ..` and columns `j ..`.
    #[inline(always)]
    unsafe fn tile<B: ByteDots, const GROUPS: usize>(&mut self, i: usize, j: usize) {
        let mut sums = [[B::short_zero(); GROUPS]; TILE.0];
        let four = STEP * self.width;
        for (keys, signed) in self.packed.chunks_exact(four).zip(self.signed.chunks_exact(four)) {
            let rows = signed[STEP * i..][..STEP * TILE.0].as_chunks::<STEP>().0;
            let columns = &keys[STEP * j..][..GROUPS * LINE];
            for (sums, row) in sums.iter_mut().zip(rows) {
                for (sum, line) in sums.iter_mut().zip(columns.chunks_exact(LINE)) {
                    *sum = B::short_add(*sum, line.as_ptr(), *row);
                }
            }
        }
        let totals = self.totals[i..i + TILE.0].iter();
        let (start, stride) = self.places.group(i / LANES);
        let first = start + i % LANES * stride + j - i / LANES * LANES;
        for (r, (sums, &total)) in sums.into_iter().zip(totals).enumerate() {
            for (g, sum) in sums.into_iter().enumerate() {
                let to = &mut self.sums[first + r * stride + g * LANES..][..LANES];
                for (to, sum) in to.iter_mut().zip(B::short_sums(sum)) {
                    *to += self.square * f64::from(sum - i32::from(BIAS) * total);
                }
            }
        }
    }
}

impl BytePass for Outer<'_> {
    #[inline(always)]
    unsafe fn run<B: ByteDots>(mut self) {
        let four = STEP * self.width;
        let keys = i32::from(BIAS) * (self.packed.len() / self.width) as i32;
        for (g, totals) in self.totals.chunks_exact_mut(LANES).enumerate() {
            let mut sum = B::short_zero();
            for keys in self.packed.chunks_exact(four) {
                sum = B::short_add(sum, keys[g * LINE..][..LINE].as_ptr(), [1; STEP]);
            }
            totals.copy_from_slice(&B::short_sums(sum).map(|sum| sum - keys));
        }
        for i in (0..self.width).step_by(TILE.0) {
            let mut j = i / LANES * LANES;
            while j + TILE.1 * LANES <= self.width {
                self.tile::<B, { TILE.1 }>(i, j);
                j += TILE.1 * LANES;
            }
            while j < self.width {
                self.tile::<B, 1>(i, j);
                j += LANES;
            }
        }
    }
}

impl Simd {
    /// Adds the outer products of at most [`PANEL`] rows, rounded to multiples of `unit`, to a matrix, which may be packed. Entries
    /// left of the diagonal's groups are not touched. The unit must be at least a 127th of the largest absolute entry, and its
    /// reciprocal a normal number. Returns the approximate sum of squares of the rounding errors. `packed` is scratch.
    pub(crate) fn outer(
        self,
        rows: &[f32],
        width: usize,
        unit: f32,
        packed: &mut Packed,
        sums: &mut [f64],
    ) -> f64 {
        assert!(width.is_multiple_of(LANES) && width > 0);
        let places = Triangle::of(width, sums.len()).expect("a matrix for the rows");
        assert!(rows.len().is_multiple_of(STEP * width) && rows.len() <= PANEL * width);
        let Packed { bytes, signed, totals } = packed;
        bytes.resize(rows.len(), BIAS);
        signed.clear();
        totals.resize(width, 0);
        let to = &mut bytes[..];
        let lost = self.run(Pack { residuals: rows, width, inverse: 1.0 / unit, unit, packed: to });
        signed.extend(bytes.iter().map(|byte| (byte ^ BIAS).cast_signed()));
        let square = f64::from(unit) * f64::from(unit);
        self.run_bytes(Outer { packed: bytes, signed, totals, width, square, sums, places });
        lost
    }
}
