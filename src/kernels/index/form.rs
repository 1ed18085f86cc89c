//! The form `y^T G y` of a symmetric matrix stored from the diagonal on.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use super::triangle::Triangle;
use crate::kernels::isa::{LANES, Lanes, Level};
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
    rows: Triangle,
    vector: &'a [f64],
}

impl Pass<f64> for Form<'_> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let width = self.vector.len();
        let mut total = L::F64::splat(0.0);
        for at in (0..width).step_by(LANES) {
            let mut sums = [L::F64::splat(0.0); 2];
            for first in (0..at).step_by(LANES) {
                let (start, stride) = self.rows.group(first / LANES);
                for row in 0..LANES {
                    let place = start + row * stride + at - first;
                    let entries = L::F64::load(self.matrix[place..][..LANES].as_ptr());
                    let factor = L::F64::splat(2.0 * self.vector[first + row]);
                    sums[row % 2] = entries.mul_add(factor, sums[row % 2]);
                }
            }
            let (start, stride) = self.rows.group(at / LANES);
            for (i, counts) in COUNTS.iter().enumerate() {
                let entries = L::F64::load(self.matrix[start + i * stride..][..LANES].as_ptr());
                // Entries left of the diagonal have multiplicity 0, so any finite value will do.
                let counts = L::F64::load(counts.as_ptr()).mul(L::F64::splat(self.vector[at + i]));
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
    /// finite. The matrix may be packed.
    pub(crate) fn form(self, matrix: &[f64], vector: &[f64]) -> f64 {
        assert!(vector.len().is_multiple_of(LANES));
        let rows = Triangle::of(vector.len(), matrix.len()).expect("a matrix for the vector");
        self.run(Form { matrix, rows, vector })
    }
}
