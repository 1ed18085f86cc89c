//! Decoding of codes.

use half::bf16;

use super::codes::Codes;
use super::moments::Moments;
use crate::error::Error;
use crate::kernels::{BIAS, LANES, LINE, PANEL, Packed, STEP, Simd};
use crate::runtime::reused::{Reused, filled_again};
use crate::runtime::scratch::Lent;

impl Codes<'_> {
    /// The moments of these codes.
    ///
    /// # Errors
    /// [`Error::NoMemory`], or what stops the call.
    pub(crate) fn moments(&self, simd: Simd) -> Result<Moments, Error> {
        let (_, width) = self.widths();
        let (_, residual, norm) = self.gram().bounds();
        // A code is a key less what it loses.
        let mut moments = Moments::new(width, norm + residual)?;
        let mut packed = Lent::<Packed>::new();
        let mut rows: Reused<f32> = filled_again("keys", PANEL * width, 0.0)?;
        for (lines, scales, _) in self.pieces(self.len().div_ceil(LANES), PANEL / LANES) {
            let largest = self.decode(lines, scales, &mut rows);
            moments.add(simd, &rows[..scales.len() * width], largest, &mut packed);
        }
        Ok(moments)
    }

    /// Decodes keys, one per row, and returns an upper bound on their absolute entries.
    fn decode(&self, lines: &[u8], scales: &[bf16], rows: &mut [f32]) -> f32 {
        let (dim, width) = self.widths();
        let steps = dim.div_ceil(STEP);
        let mut largest = 0.0f32;
        for ((key, row), scale) in rows.chunks_exact_mut(width).enumerate().zip(scales) {
            let (block, lane) = (key / LANES * steps, key % LANES);
            let scale = scale.to_f32();
            largest = largest.max(scale);
            let lines = lines[block * LINE..].chunks_exact(LINE);
            for (four, line) in row.as_chunks_mut::<STEP>().0.iter_mut().zip(lines.take(steps)) {
                let codes: [u8; STEP] = std::array::from_fn(|i| line[lane * STEP + i]);
                // Products of numbers of eight bits: exact.
                *four = codes.map(|code| scale * (f32::from(code) - f32::from(BIAS)));
            }
        }
        largest * f32::from(BIAS)
    }
}
