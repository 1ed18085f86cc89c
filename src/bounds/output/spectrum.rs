//! Upper bound of the largest eigenvalue of a sum of u u^T, proven without an eigenvalue solver.

use super::rounding::{BLOCK, UP, V};

/// Most multiplications for squarings.
const EFFORT: usize = 1 << 26;
const MOST_SQUARINGS: usize = 9;

/// Sum of u u^T over points u of `d` components.
pub(super) struct Gram {
    d: usize,
    /// Upper triangle, row by row, in a full matrix.
    sum: Vec<f64>,
    block: Vec<f64>,
    in_block: usize,
    added: usize,
}

impl Gram {
    pub(super) fn new(d: usize) -> Self {
        Gram { d, sum: vec![0.0; d * d], block: vec![0.0; d * d], in_block: 0, added: 0 }
    }

    pub(super) fn add(&mut self, point: &[f64]) {
        for (i, &a) in point.iter().enumerate() {
            let row = &mut self.block[i * self.d + i..(i + 1) * self.d];
            for (sum, b) in row.iter_mut().zip(&point[i..]) {
                *sum += a * b;
            }
        }
        self.added += 1;
        self.in_block += 1;
        if self.in_block == BLOCK {
            self.flush();
        }
    }

    fn flush(&mut self) {
        for (sum, block) in self.sum.iter_mut().zip(&mut self.block) {
            *sum += std::mem::take(block);
        }
        self.in_block = 0;
    }

    /// Returns an upper bound of the largest eigenvalue for the real points, apart from underflow.
    pub(super) fn largest_eigenvalue(mut self) -> f64 {
        self.flush();
        let d = self.d;
        for i in 0..d {
            for j in 0..i {
                self.sum[i * d + j] = self.sum[j * d + i];
            }
        }
        let trace: f64 = (0..d).map(|i| self.sum[i * d + i]).sum();
        // A product, the sum over a block, the sum over blocks, and three for the point itself. What entry (a, b) loses is at
        // most that share of sum |u_a| |u_b|, a matrix whose norm is at most its trace.
        let lost = (BLOCK + self.added / BLOCK + 8) as f64 * V;
        let trace = trace * (1.0 + 2.0 * lost + 2.0 * d as f64 * V) * UP;
        (largest(self.sum, d) + 2.0 * lost * trace).min(trace) * UP
    }
}

/// Returns an upper bound of the largest eigenvalue of a symmetric matrix of finite numbers.
fn largest(mut matrix: Vec<f64>, d: usize) -> f64 {
    let per = d * d * d;
    let squarings = (EFFORT / per.max(1)).clamp(1, MOST_SQUARINGS);
    // lambda(A) = factor_0 sqrt(lambda(A_1) + slip_1), A_1 = (A / factor_0)^2, and so on.
    let mut steps = Vec::new();
    for _ in 0..squarings {
        let norm = frobenius(&matrix, d);
        if norm < 1e-100 {
            // Squares underflow: use the trace.
            return f64::INFINITY;
        }
        for a in &mut matrix {
            *a /= norm;
        }
        let mut product = vec![0.0; d * d];
        for i in 0..d {
            for k in 0..d {
                let a = matrix[i * d + k];
                let (row, of) = (&mut product[i * d..(i + 1) * d], &matrix[k * d..(k + 1) * d]);
                for (sum, b) in row.iter_mut().zip(of) {
                    *sum += a * b;
                }
            }
        }
        // Dividing lost V per entry, and the norm of the quotient is about 1. Entries that underflow lose far less.
        steps.push(norm);
        matrix = product;
    }
    let slip = 2.0 * (d as f64 + 8.0) * V;
    let mut bound = frobenius(&matrix, d);
    for norm in steps.into_iter().rev() {
        bound = ((bound + slip).sqrt() + 2.0 * V) * norm * UP;
    }
    bound
}

/// Returns an upper bound of the Frobenius norm.
fn frobenius(matrix: &[f64], d: usize) -> f64 {
    let sum: f64 = matrix.chunks(d.max(1)).map(|row| row.iter().map(|a| a * a).sum::<f64>()).sum();
    sum.sqrt() * (1.0 + 2.0 * d as f64 * V) * UP
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_spectra() {
        // One direction: the eigenvalue is the squared length, and the trace says so.
        let mut gram = Gram::new(3);
        gram.add(&[1.0, 2.0, 2.0]);
        let found = gram.largest_eigenvalue();
        assert!((9.0..9.0 * (1.0 + 1e-11)).contains(&found), "{found}");
        // A diagonal matrix: the largest entry.
        for d in [1, 2, 16, 64] {
            let mut gram = Gram::new(d);
            for i in 0..d {
                let mut point = vec![0.0; d];
                point[i] = if i == d / 2 { 2.0 } else { 1.0 };
                gram.add(&point);
            }
            let found = gram.largest_eigenvalue();
            assert!((4.0..4.0 * (1.0 + 1e-9)).contains(&found), "{d} {found}");
        }
        // The identity: the overestimate is the largest there, d^(1/2^(p+1)).
        let mut gram = Gram::new(64);
        for i in 0..64 {
            let mut point = vec![0.0; 64];
            point[i] = 1.0;
            gram.add(&point);
        }
        let found = gram.largest_eigenvalue();
        assert!((1.0..1.005).contains(&found), "{found}");
        assert_eq!(Gram::new(4).largest_eigenvalue(), 0.0);
    }
}
