//! The form `y^T G y` of a symmetric matrix stored from the diagonal on, of one vector in f64 or of many in f32.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{LANES, Lanes, Level};
use crate::kernels::matrix::product;
use crate::kernels::simd::{Pass, Simd};

/// Multiplicity of each entry of a group that holds the diagonal, by the row's place in the group.
const COUNTS: [[f64; LANES]; LANES] = {
    let mut counts = [[0.0; LANES]; LANES];
    let mut row = 0;
    while row < LANES {
        counts[row][row] = 1.0;
        let mut column = row + 1;
        while column < LANES {
            counts[row][column] = 2.0;
            column += 1;
        }
        row += 1;
    }
    counts
};

struct Form<'a> {
    matrix: &'a [f64],
    vector: &'a [f64],
}

impl Pass<f64> for Form<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let width = self.vector.len();
        let mut total = L::F64::splat(0.0);
        for at in (0..width).step_by(LANES) {
            let mut sums = [L::F64::splat(0.0); 2];
            for pair in 0..at / 2 {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let row = 2 * pair + i;
                    let entries = L::F64::load(self.matrix[row * width + at..][..LANES].as_ptr());
                    *sum = entries.mul_add(L::F64::splat(2.0 * self.vector[row]), *sum);
                }
            }
            for (i, counts) in COUNTS.iter().enumerate() {
                let row = at + i;
                let entries = L::F64::load(self.matrix[row * width + at..][..LANES].as_ptr());
                // Entries left of the diagonal have multiplicity 0, so any finite value will do.
                let counts = L::F64::load(counts.as_ptr()).mul(L::F64::splat(self.vector[row]));
                sums[i % 2] = entries.mul_add(counts, sums[i % 2]);
            }
            let vector = L::F64::load(self.vector[at..][..LANES].as_ptr());
            total = sums[0].add(sums[1]).mul_add(vector, total);
        }
        total.sum()
    }
}

impl Simd {
    /// Returns the form of a vector in whole groups. Each sum is at most as many terms deep as the vector has entries
    /// and eight more. Entries of the matrix left of the diagonal are not used; those in the diagonal's groups must be
    /// finite.
    pub(crate) fn form(self, matrix: &[f64], vector: &[f64]) -> f64 {
        assert!(vector.len().is_multiple_of(LANES));
        assert!(matrix.len() == vector.len() * vector.len());
        self.run(Form { matrix, vector })
    }
}

/// Vectors whose sums are in registers together, and groups of entries.
const TOGETHER: usize = 4;
const GROUPS: usize = 4;

struct Forms<'a> {
    matrix: &'a [f32],
    rows: &'a [f32],
    to: &'a mut [f64],
}

impl Forms<'_> {
    #[inline(always)]
    unsafe fn some<L: Level, const R: usize, const C: usize>(
        &self,
        first: usize,
        at: usize,
        totals: &mut [L::F64; R],
    ) {
        let width = self.rows.len() / self.to.len();
        // `forms` has checked that rows and columns are there.
        let left = self.rows.as_ptr().add(first * width);
        let right = self.matrix.as_ptr().add(at);
        // Entries below the diagonal are zero.
        let depth = at + C * LANES;
        let sums = product::<L, f32, R, C>((left, width, 1), (right, width), depth);
        for (r, (sums, total)) in sums.into_iter().zip(totals).enumerate() {
            for (c, sum) in sums.into_iter().enumerate() {
                let entries = L::F32::load(left.add(r * width + at + c * LANES));
                *total = L::double(sum).mul_add(L::double(entries), *total);
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<L: Level, const R: usize>(&mut self, first: usize) {
        let width = self.rows.len() / self.to.len();
        let whole = if L::ROOMY { width / (GROUPS * LANES) * (GROUPS * LANES) } else { 0 };
        let mut totals = [L::F64::splat(0.0); R];
        for at in (0..whole).step_by(GROUPS * LANES) {
            self.some::<L, R, GROUPS>(first, at, &mut totals);
        }
        for at in (whole..width).step_by(LANES) {
            self.some::<L, R, 1>(first, at, &mut totals);
        }
        for (to, total) in self.to[first..first + R].iter_mut().zip(totals) {
            *to = total.sum();
        }
    }
}

impl Pass for Forms<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let count = self.to.len();
        let whole = count / TOGETHER * TOGETHER;
        for first in (0..whole).step_by(TOGETHER) {
            self.rows::<L, TOGETHER>(first);
        }
        for first in whole..count {
            self.rows::<L, 1>(first);
        }
    }
}

impl Simd {
    /// Computes the forms of vectors in whole groups with an f32 matrix that has zeros below the diagonal. Each entry
    /// of a product with it is at most as many fused f32 terms deep as vectors have entries; the rest is f64.
    pub(crate) fn forms(self, matrix: &[f32], rows: &[f32], to: &mut [f64]) {
        if to.is_empty() {
            return;
        }
        let width = rows.len() / to.len();
        assert!(width > 0 && width.is_multiple_of(LANES) && rows.len() == width * to.len());
        assert!(matrix.len() == width * width);
        self.run(Forms { matrix, rows, to });
    }
}
