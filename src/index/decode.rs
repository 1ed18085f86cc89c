//! What codes stand for, as numbers again.

use half::bf16;

use super::codes::Codes;
use super::moments::Moments;
use crate::error::Error;
use crate::kernels::{BIAS, LANES, LINE, PANEL, Packed, STEP, Simd};
use crate::reused::{Reused, filled_again};
use crate::scratch::Lent;

impl Codes<'_> {
    /// The moments of these codes.
    ///
    /// # Errors
    /// [`Error::NoMemory`], or what stops the call.
    pub(crate) fn moments(&self, simd: Simd) -> Result<Moments, Error> {
        let (_, width) = self.widths();
        let mut moments = Moments::new(width)?;
        let mut packed = Lent::<Packed>::new();
        let mut rows: Reused<f32> = filled_again("keys", PANEL * width, 0.0)?;
        for (lines, scales, _) in self.pieces(self.len().div_ceil(LANES), PANEL / LANES) {
            let most = self.decode(lines, scales, &mut rows);
            moments.add(simd, &rows[..scales.len() * width], most, &mut packed);
        }
        Ok(moments)
    }

    /// What codes stand for, a row for each key; the largest sum of squares of a row, and the largest absolute entry.
    fn decode(&self, lines: &[u8], scales: &[bf16], rows: &mut [f32]) -> (f32, f32) {
        let (dim, width) = self.widths();
        let steps = dim.div_ceil(STEP);
        let (mut largest, mut entry) = (0.0f32, 0.0f32);
        for ((key, row), scale) in rows.chunks_exact_mut(width).enumerate().zip(scales) {
            let (block, lane) = (key / LANES * steps, key % LANES);
            let scale = scale.to_f32();
            let mut square = 0.0;
            for (step, four) in row.chunks_exact_mut(STEP).take(steps).enumerate() {
                let codes = &lines[(block + step) * LINE + lane * STEP..][..STEP];
                for (to, code) in four.iter_mut().zip(codes) {
                    // Products of numbers of eight bits: exact.
                    *to = scale * (f32::from(*code) - f32::from(BIAS));
                    square += *to * *to;
                    entry = entry.max(to.abs());
                }
            }
            largest = largest.max(square);
        }
        (largest, entry)
    }
}
