//! Cells: runs of keys in a ball and a box, from which bounds of all their scores follow.
//!
//! A cell has a centre c with `|k - c| <= r`, and per dimension the smallest and the largest entry of its keys. For a query q
//! and a scale a, every score of the cell lies within `a q.c +- |a||q| r`, and between the sums over j of the smaller and of
//! the larger of `a q_j lo_j` and `a q_j hi_j`. The tighter of both counts. Balls are what arXiv 2512.07647 bounds its cells
//! by; the boxes are ours, and so are cells of consecutive keys: how the paper shares keys out among cells is not known here.

use super::query::Query;
use crate::kernels::{Element, Keys};

/// Keys to a cell; a choice of ours.
pub(crate) const CELL: usize = 16;
/// Relative error of a few f64 operations, generously.
const CELL_ROUNDING: f64 = 1e-12;

/// One head's keys in cells of consecutive keys; the last may be short.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Cells {
    dim: usize,
    n: usize,
    /// Per cell: centres, then the smallest and the largest entries, `dim` each.
    edges: Vec<[Vec<f32>; 3]>,
    /// Upper bounds of the distances from the centres.
    radii: Vec<f32>,
}

/// Bounds of the scores of a cell's keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bounds {
    pub(crate) lower: f64,
    pub(crate) upper: f64,
}

impl Cells {
    /// About what the cells of so many keys take.
    pub(crate) fn bytes(n: usize, dim: usize) -> usize {
        let each = dim.saturating_mul(3 * size_of::<f32>()).saturating_add(160);
        n.div_ceil(CELL).saturating_mul(each)
    }

    /// Of `n` keys, all finite.
    pub(crate) fn build<E: Element<Scalar = f32>>(keys: Keys<'_, E>, n: usize) -> Self {
        let dim = keys.dim();
        let mut cells = Cells { dim, n, edges: Vec::new(), radii: Vec::new() };
        for first in (0..n).step_by(CELL) {
            let members = first..n.min(first + CELL);
            let count = members.len() as f64;
            let entry = |key: usize, j: usize| -> f32 { keys.row(key)[j].widen() };
            let column = |j: usize| members.clone().map(move |key| entry(key, j));
            let low: Vec<f32> = (0..dim).map(|j| column(j).fold(f32::INFINITY, f32::min)).collect();
            let high: Vec<f32> =
                (0..dim).map(|j| column(j).fold(f32::NEG_INFINITY, f32::max)).collect();
            let centre: Vec<f32> =
                (0..dim).map(|j| (column(j).map(f64::from).sum::<f64>() / count) as f32).collect();
            let distance = |key: usize| {
                let square = |(k, c): (&E, &f32)| (f64::from(k.widen()) - f64::from(*c)).powi(2);
                keys.row(key).iter().zip(&centre).map(square).sum::<f64>().sqrt()
            };
            let radius = members.clone().map(distance).fold(0.0, f64::max);
            // Sums of `dim` terms; the conversion may round down by half a step.
            let radius = (radius * (1.0 + CELL_ROUNDING + dim as f64 * f64::EPSILON)) as f32;
            cells.radii.push(radius.next_up());
            cells.edges.push([centre, low, high]);
        }
        cells
    }

    pub(crate) fn len(&self) -> usize {
        self.radii.len()
    }

    /// The keys of a cell.
    pub(crate) fn members(&self, cell: usize) -> std::ops::Range<usize> {
        cell * CELL..self.n.min((cell + 1) * CELL)
    }

    /// Bounds of all scores of a cell less an offset, for keys whose entries are at most `largest` in size; the offset is at
    /// most the score of a vector of such entries.
    pub(crate) fn bounds(&self, cell: usize, query: &Query, offset: f64, largest: f64) -> Bounds {
        let entries = &query.entries[..self.dim];
        let [centre, low, high] = &self.edges[cell];
        let norm = norm(entries);
        let size = entries.iter().map(|q| q.abs()).sum::<f64>() * largest;
        // Sums of `dim` terms, a scale, an offset; centres may exceed the largest entry by a rounding. Each may also underflow.
        let roundings = (self.dim as f64 + 16.0) * 1.01;
        let error = (size * f64::EPSILON + f64::from_bits(1)) * roundings * query.scale.abs()
            + f64::MIN_POSITIVE;
        let (mut middle, mut below, mut above) = (0.0, 0.0, 0.0);
        for (j, &q) in entries.iter().enumerate() {
            let q = q * query.scale.signum();
            middle += q * f64::from(centre[j]);
            let ends = (q * f64::from(low[j]), q * f64::from(high[j]));
            below += ends.0.min(ends.1);
            above += ends.0.max(ends.1);
        }
        let scale = query.scale.abs();
        let reach = norm * f64::from(self.radii[cell]) * scale * (1.0 + CELL_ROUNDING) + error;
        let (middle, below, above) = (middle * scale, below * scale, above * scale);
        let or = |value: f64, other: f64| if value.is_nan() { other } else { value };
        Bounds {
            lower: or((middle - reach).max(below - error) - offset, f64::NEG_INFINITY),
            upper: or((middle + reach).min(above + error) - offset, f64::INFINITY),
        }
    }
}

/// At least the norm of some entries, whose squares may underflow or overflow.
fn norm(entries: &[f64]) -> f64 {
    let top = entries.iter().fold(0.0, |top: f64, q| top.max(q.abs()));
    if top == 0.0 {
        return 0.0;
    }
    let square: f64 = entries.iter().map(|q| (q / top).powi(2)).sum();
    (top * square.sqrt() * (1.0 + CELL_ROUNDING + entries.len() as f64 * f64::EPSILON)).next_up()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_scores_lie_within_the_bounds_of_their_cells() {
        let value = |i: usize| ((i as f64 * 0.754_877_666).fract() - 0.4) as f32;
        for (n, dim) in [(1, 1), (16, 3), (37, 20), (64, 128)] {
            let data: Vec<f32> = (0..n * dim).map(|i| value(i) * [1.0, 300.0][i / 7 % 2]).collect();
            let keys = Keys::new(&data[..], dim, dim);
            let cells = Cells::build(keys, n);
            assert_eq!((0..cells.len()).map(|c| cells.members(c).len()).sum::<usize>(), n);
            for scale in [0.3, -2.0, 0.0] {
                let entries: Vec<f64> = (0..dim).map(|j| f64::from(value(j + 11))).collect();
                let largest = data.iter().fold(0.0f32, |top, k| top.max(k.abs()));
                let query = Query::new(&entries, scale, f64::from(largest));
                let mut tight = f64::INFINITY;
                for cell in 0..cells.len() {
                    let bounds = cells.bounds(cell, &query, 0.25, f64::from(largest));
                    for key in cells.members(cell) {
                        let score: f64 = keys
                            .row(key)
                            .iter()
                            .zip(&entries)
                            .map(|(k, q)| f64::from(*k) * q)
                            .sum();
                        let score = score * scale - 0.25;
                        assert!(bounds.lower <= score && score <= bounds.upper);
                        tight = tight.min(bounds.upper - score);
                    }
                }
                // A cell of one key is that key, up to rounding.
                assert!(n > 1 || tight < 1e-4);
            }
        }
    }
}
