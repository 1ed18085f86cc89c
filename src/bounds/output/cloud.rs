//! The value vectors of one head as points around their mean, in units in which the largest component is about 1.
//!
//! Differences of values do not change when a common vector is subtracted, and centred points lose the least to rounding.
//! With c the mean (any vector would do; it is exact once it is stored) and e the common exponent, the stored point u of a
//! value v satisfies `|2^-e (v - c) - u| <= 2^-53 |u|` per component, up to underflow.

use crate::runtime::ambient::{asked, pieces, pieces_mut};

use super::rounding::{BLOCK, SUM, UP, V};
use super::spectrum;

/// Bound on the underflow in lengths: squares below 2^-1074, of far fewer than 2^70 components.
const FLOOR: f64 = f64::from_bits((1023 - 500) << 52);
/// Steps towards the smallest enclosing ball.
const BALL_STEPS: u32 = 24;

/// Centred values of one head, with statistics over all of them.
pub(super) struct Cloud {
    pub(super) n: usize,
    pub(super) d: usize,
    /// Keys that some row sees. The others are zeros here and never read.
    pub(super) seen: Vec<bool>,
    points: Vec<f64>,
    /// Lengths of the real points, rounded up.
    pub(super) lengths: Vec<f64>,
    /// Largest of the lengths.
    pub(super) largest: f64,
    /// Point of the zero vector of the values.
    pub(super) origin: Vec<f64>,
    /// Bound on the underflow of every length; 0 if all points are exactly the centre.
    pub(super) floor: f64,
    /// Factor that rounds a computed length up.
    pub(super) grow: f64,
    exponent: i32,
}

impl Cloud {
    /// Centres `values`, n vectors of d finite numbers. The values of keys that no row sees must be zeros.
    pub(super) fn new(mut values: Vec<f64>, seen: Vec<bool>, d: usize) -> Self {
        let n = seen.len();
        let size =
            |numbers: &[f64]| pieces(numbers).flatten().fold(0.0, |a: f64, b| a.max(b.abs()));
        // Near the largest f64 differences would overflow. The loss in small components is far below the floor.
        let shrink = if size(&values) >= pow2(1012) { -10 } else { 0 };
        let mut lost = false;
        if shrink != 0 {
            for value in asked(&mut values) {
                let shrunk = *value * pow2(shrink);
                lost |= shrunk * pow2(-shrink) != *value;
                *value = shrunk;
            }
        }
        let centre = centre(&values, &seen, d);
        for (point, _) in asked(rows(&mut values, d).zip(&seen)).filter(|(_, seen)| **seen) {
            point.iter_mut().zip(&centre).for_each(|(u, c)| *u -= c);
        }
        // Not so far below the centre's own size that its square would overflow, nor so far above it that it would underflow.
        let log2 = |size: f64| (size > 0.0).then(|| floor_log2(size));
        let exponent = log2(size(&values)).max(log2(size(&centre)).map(|e| e - 400)).unwrap_or(0);
        let floor = if lost || pieces(&values).flatten().any(|u| *u != 0.0) { FLOOR } else { 0.0 };
        for u in pieces_mut(&mut values).flatten() {
            *u = scaled(*u, -exponent);
        }
        let origin = centre.iter().map(|c| scaled(-c, -exponent)).collect();
        let grow = 1.0 + (d as f64 + 64.0) * f64::EPSILON;
        let mut cloud = Cloud {
            n,
            d,
            seen,
            points: values,
            lengths: Vec::new(),
            largest: 0.0,
            origin,
            floor,
            grow,
            exponent: exponent - shrink,
        };
        // Zeros from the allocator, whose pages a cancelled call does not touch.
        let mut lengths = vec![0.0; n];
        for (j, length) in asked(lengths.iter_mut().enumerate()) {
            *length = cloud.length(cloud.point(j));
        }
        cloud.lengths = lengths;
        cloud.largest = pieces(&cloud.lengths).flatten().copied().fold(0.0, f64::max);
        cloud
    }

    #[inline]
    pub(super) fn point(&self, j: usize) -> &[f64] {
        &self.points[j * self.d..(j + 1) * self.d]
    }

    /// Returns an upper bound on the length of a stored vector, and of the point it represents.
    pub(super) fn length(&self, vector: &[f64]) -> f64 {
        square(vector).sqrt() * self.grow + self.floor
    }

    /// Returns an upper bound on the distance of the two real points that `a` and `b` represent.
    pub(super) fn distance(&self, a: &[f64], b: &[f64]) -> f64 {
        self.distance_of(square_distance(a, b))
    }

    /// Returns the same from a computed squared distance of stored points.
    pub(super) fn distance_of(&self, square: f64) -> f64 {
        square.sqrt() * self.grow + 4.0 * V * self.largest + self.floor
    }

    /// Returns `factor * length` in the units of the values, rounded up, for a length in units of the points.
    pub(super) fn publish(&self, factor: f64, length: f64) -> f64 {
        if factor == 0.0 || length == 0.0 {
            return 0.0;
        }
        // Large distances may overflow though their share does not. A share that underflows loses up to one step.
        let room = if self.exponent > 500 { 8 } else { 0 };
        let share = scaled(length * UP, self.exponent - room).next_up() * factor * UP;
        share.next_up() * pow2(room)
    }

    /// Returns a length in the units of the values, rounded down.
    pub(super) fn publish_low(&self, length: f64) -> f64 {
        scaled(length, self.exponent) * (1.0 - 64.0 * f64::EPSILON)
    }

    /// Returns the statistics for the bounds over all values.
    pub(super) fn outline(&self) -> Outline {
        let mut total = WeightedSum::new(self.d);
        let mut gram = spectrum::Gram::new(self.d);
        let mut count = 0;
        let mut sizes = 0.0;
        for j in asked(0..self.n).filter(|&j| self.seen[j]) {
            total.add(1.0, self.point(j));
            gram.add(self.point(j));
            sizes += self.lengths[j];
            count += 1;
        }
        let count = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
        let offset = self.length(&total.finish())
            + sizes * (SUM + V + count * V * V) * UP
            + count * self.floor;
        let (ball_centre, ball_radius) = self.ball();
        let spread = (gram.largest_eigenvalue() + count * self.floor) * UP;
        Outline { spread, offset, count, ball_centre, ball_radius }
    }

    /// Returns a ball around all seen points: Badoiu and Clarkson's steps towards the farthest point, the best one
    /// kept.
    fn ball(&self) -> (Vec<f64>, f64) {
        let mut centre = vec![0.0; self.d];
        let mut best = (centre.clone(), f64::INFINITY);
        for step in 1..=BALL_STEPS {
            let mut farthest = (0.0, None);
            for j in asked(0..self.n).filter(|&j| self.seen[j]) {
                let square = square_distance(self.point(j), &centre);
                if square > farthest.0 || farthest.1.is_none() {
                    farthest = (square, Some(j));
                }
            }
            let Some(j) = farthest.1 else { return (centre, 0.0) };
            if farthest.0 < best.1 {
                best = (centre.clone(), farthest.0);
            }
            let share = 1.0 / f64::from(step + 1);
            for (c, u) in centre.iter_mut().zip(self.point(j)) {
                *c += share * (u - *c);
            }
        }
        (best.0, self.distance_of(best.1))
    }
}

/// Statistics of all seen points.
pub(super) struct Outline {
    /// Upper bound of the largest eigenvalue of the sum of u u^T.
    pub(super) spread: f64,
    /// Upper bound on the length of the sum of all points, nearly 0.
    pub(super) offset: f64,
    /// Number of points.
    pub(super) count: f64,
    pub(super) ball_centre: Vec<f64>,
    pub(super) ball_radius: f64,
}

/// Weighted sum of vectors: plain within a block, compensated over blocks. The error of each component is below [`SUM`]
/// times the sum of the sizes of its terms.
pub(super) struct WeightedSum {
    block: Vec<f64>,
    in_block: usize,
    sum: Vec<crate::numerics::certified_sums::Compensated>,
}

impl WeightedSum {
    pub(super) fn new(d: usize) -> Self {
        WeightedSum {
            block: vec![0.0; d],
            in_block: 0,
            sum: vec![crate::numerics::certified_sums::Compensated::default(); d],
        }
    }

    #[inline]
    pub(super) fn add(&mut self, weight: f64, vector: &[f64]) {
        for (sum, u) in self.block.iter_mut().zip(vector) {
            *sum += weight * u;
        }
        self.in_block += 1;
        if self.in_block == BLOCK {
            self.flush();
        }
    }

    fn flush(&mut self) {
        for (sum, block) in self.sum.iter_mut().zip(&mut self.block) {
            sum.add(std::mem::take(block));
        }
        self.in_block = 0;
    }

    pub(super) fn finish(mut self) -> Vec<f64> {
        self.flush();
        self.sum.iter().map(crate::numerics::certified_sums::Compensated::value).collect()
    }
}

/// Returns the approximate mean of the seen vectors, each component within the range of the values'. Equal values are
/// returned unchanged.
fn centre(values: &[f64], seen: &[bool], d: usize) -> Vec<f64> {
    let share = 1.0 / seen.iter().filter(|seen| **seen).count().max(1) as f64;
    let mut total = WeightedSum::new(d);
    let (mut low, mut high) = (vec![f64::INFINITY; d], vec![f64::NEG_INFINITY; d]);
    for (j, _) in asked(seen.iter().enumerate()).filter(|(_, seen)| **seen) {
        let value = &values[j * d..(j + 1) * d];
        total.add(share, value);
        for ((low, high), v) in low.iter_mut().zip(&mut high).zip(value) {
            *low = low.min(*v);
            *high = high.max(*v);
        }
    }
    let mean = total.finish().into_iter().zip(low.iter().zip(&high));
    mean.map(|(mean, (low, high))| if low <= high { mean.clamp(*low, *high) } else { 0.0 })
        .collect()
}

fn rows(values: &mut [f64], d: usize) -> std::slice::ChunksExactMut<'_, f64> {
    values.chunks_exact_mut(d.max(1))
}

/// Returns the sum of squares.
pub(super) fn square(vector: &[f64]) -> f64 {
    lanes(vector.len(), |i| vector[i] * vector[i])
}

/// Returns the squared distance of two vectors of one length.
#[inline]
pub(super) fn square_distance(a: &[f64], b: &[f64]) -> f64 {
    let b = &b[..a.len()];
    lanes(a.len(), |i| {
        let difference = a[i] - b[i];
        difference * difference
    })
}

/// Sums over eight lanes, so that the compiler vectorizes the loop.
#[inline]
fn lanes(len: usize, term: impl Fn(usize) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    let whole = len - len % 8;
    for start in (0..whole).step_by(8) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += term(start + lane);
        }
    }
    let rest: f64 = (whole..len).map(term).sum();
    let pairs = [sums[0] + sums[4], sums[1] + sums[5], sums[2] + sums[6], sums[3] + sums[7]];
    (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]) + rest
}

/// Returns a power of two with an exponent of a normal number.
fn pow2(exponent: i32) -> f64 {
    2f64.powi(exponent)
}

/// Returns the largest e with `2^e <= value`, for a positive finite value.
fn floor_log2(value: f64) -> i32 {
    let field = (value.to_bits() >> 52) as i32;
    if field == 0 { floor_log2(value * pow2(64)) - 64 } else { field - 1023 }
}

/// Returns `value * 2^exponent`, exact unless the result leaves the range of normal numbers.
pub(super) fn scaled(value: f64, exponent: i32) -> f64 {
    let half = exponent / 2;
    value * pow2(half) * pow2(exponent - half)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two() {
        for (value, want) in [(1.0, 0), (1.99, 0), (0.5, -1), (5e-324, -1074), (f64::MAX, 1023)] {
            assert_eq!(floor_log2(value), want);
        }
        assert_eq!(scaled(1.0, 1023), pow2(1023));
        assert_eq!(scaled(1.0, -1074), 5e-324);
    }

    #[test]
    fn shares_that_underflow_are_rounded_up() {
        for size in [4.0, 1e100, 1e300] {
            let cloud = Cloud::new(vec![size, -size], vec![true; 2], 1);
            // 37/32 of a power of two, so that the real product lies between subnormal numbers.
            let unit = 2f64.powi(floor_log2(size));
            for share in [-1067, -1071, -1074] {
                let factor = scaled(1.0, -1020);
                let length = 1.15625 * scaled(1.0, share + 1020) / unit;
                let published = cloud.publish(factor, length);
                let real = 1.15625 * 2f64.powi(share + 1074);
                assert!(published / f64::from_bits(1) >= real, "{size} {share}");
            }
        }
    }

    #[test]
    fn the_ball_holds_all_points() {
        let values: Vec<f64> = (0..60).map(|i| f64::from(i * i * 7919 % 101)).collect();
        let cloud = Cloud::new(values, vec![true; 20], 3);
        let outline = cloud.outline();
        for j in 0..20 {
            assert!(
                square_distance(cloud.point(j), &outline.ball_centre).sqrt() <= outline.ball_radius
            );
        }
    }
}
