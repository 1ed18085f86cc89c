//! Balls around values: bounds on values without reading them.

use std::ops::Range;

use crate::error::Error;
use crate::kernels::{LANES, Simd};
use crate::numerics::finite::all_finite;
use crate::rows::{Vectors, for_dtype};
use crate::runtime::memory::{check_memory, list};
use crate::runtime::threads;

/// Number of values whose mean is the centre. Any centre is sound; this many place it well.
const SAMPLES: usize = 1024;
/// Bound on the root of a square that underflows.
const SQRT_MIN_POSITIVE: f64 = 1.5e-154;

/// Ball around some vectors.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Ball {
    /// In whole groups.
    pub(super) centre: Vec<f64>,
    /// Upper bound on the distance from the centre; infinite if a vector is not finite.
    pub(super) radius: f64,
}

/// Returns an upper bound on the Euclidean norm of some numbers.
pub(super) fn norm(entries: impl Iterator<Item = f64>) -> f64 {
    // Sums that do not wait for each other.
    let (mut squares, mut count, mut nothing) = ([0.0; 4], 0usize, true);
    for entry in entries {
        squares[count % 4] += entry * entry;
        count += 1;
        nothing &= entry == 0.0;
    }
    if nothing { 0.0 } else { norm_of_square(squares.iter().sum(), count) }
}

/// Returns an upper bound on the root of a sum of `count` squares, given its computed value.
pub(super) fn norm_of_square(square: f64, count: usize) -> f64 {
    let count = count as f64;
    (square * (1.0 + (count + 8.0) * f64::EPSILON)).sqrt() * UP + SQRT_MIN_POSITIVE * count
}

/// Factor that covers a few roundings.
pub(super) const UP: f64 = 1.0 + 8.0 * f64::EPSILON;

impl Ball {
    /// Returns a ball around the vectors of a matrix at some places.
    pub(super) fn around(
        simd: Simd,
        vectors: &Vectors<'_>,
        head: usize,
        places: &[Range<usize>],
    ) -> Self {
        let dim = vectors.dim();
        let mut centre = vec![0.0; dim.next_multiple_of(LANES)];
        let count: usize = places.iter().map(ExactSizeIterator::len).sum();
        let step = count.div_ceil(SAMPLES).max(1);
        let (mut wide, mut skip, mut taken) = (Vec::new(), 0, 0.0);
        for places in places {
            let mut at = places.start + skip;
            while at < places.end {
                vectors.widen(head, at, &mut wide);
                centre.iter_mut().zip(&wide).for_each(|(sum, entry)| *sum += entry);
                taken += 1.0;
                at += step;
            }
            skip = at - places.end;
        }
        for entry in &mut centre {
            *entry /= f64::max(taken, 1.0);
            if !entry.is_finite() {
                *entry = 0.0;
            }
        }
        let mut ball = Ball { centre, radius: 0.0 };
        ball.extend(simd, vectors, head, places);
        ball
    }

    /// Returns the ball about the same centre that also contains zero.
    pub(super) fn with_origin(mut self) -> Self {
        self.radius = self.radius.max(norm(self.centre.iter().copied()));
        self
    }

    /// Extends the ball to contain more vectors.
    fn extend(&mut self, simd: Simd, vectors: &Vectors<'_>, head: usize, places: &[Range<usize>]) {
        for places in places {
            self.radius = self.radius.max(self.reach(simd, vectors, head, places));
        }
    }

    /// Returns an upper bound on the distance of these vectors from the centre.
    fn reach(&self, simd: Simd, vectors: &Vectors<'_>, head: usize, places: &Range<usize>) -> f64 {
        let dim = vectors.dim();
        let square = for_dtype!(vectors.data, stored => {
            let rows = stored.matrix(head).behind(places.start);
            simd.farthest(rows, places.len(), &self.centre)
        });
        // A difference, its square and sixteen lanes of sums; squares may underflow.
        let roundings = (dim / LANES + 16) as f64;
        let reach = (square * (1.0 + roundings * f64::EPSILON)).sqrt() * UP
            + SQRT_MIN_POSITIVE * dim as f64;
        if reach.is_nan() { f64::INFINITY } else { reach }
    }

    /// Returns an upper bound on the distance of a point from the centre.
    pub(super) fn away(&self, point: &[f64]) -> f64 {
        norm(point.iter().zip(&self.centre).map(|(a, b)| a - b)) * UP
    }

    /// Returns an upper bound on the length of a vector in the ball.
    pub(super) fn longest(&self) -> f64 {
        (norm(self.centre.iter().copied()) + self.radius) * UP
    }
}

/// Ball around the values of each head, so that an output error is proven without reading the values again.
///
/// It holds for the values at the time they were added.
///
/// ```
/// use certk_rs::{ValueBall, Vectors};
/// let mut ball = ValueBall::new(&Vectors::new("v", &[0.0_f32, 2.0], &[1, 2, 1])?)?;
/// assert!(ball.radii()[0] >= 1.0);
/// ball.append(&Vectors::new("v", &[9.0_f32], &[1, 1, 1])?)?;
/// assert!(ball.radii()[0] >= 4.5);
/// assert_eq!(ball.shape(), [1, 3, 1]);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ValueBall {
    batch: Vec<usize>,
    dim: usize,
    len: usize,
    pub(super) balls: Vec<Ball>,
}

impl ValueBall {
    /// Reads all values `(..., n, d_v)`.
    ///
    /// # Errors
    /// [`Error::NoMemory`], [`Error::Option`] for the threads of the context.
    pub fn new(values: &Vectors<'_>) -> Result<Self, Error> {
        let _modes = threads::default_floats();
        let simd = Simd::current()?;
        let (heads, all) = (values.heads(), 0..values.len());
        check_memory("v", heads, values.dim().saturating_mul(8).saturating_add(size_of::<Ball>()))?;
        let work = heads.saturating_mul(values.len()).saturating_mul(values.dim());
        let threads = threads::count(None, work > 1 << 20)?;
        let mut balls = list("v", heads)?;
        let one = |head| Ok(Ball::around(simd, values, head, std::slice::from_ref(&all)));
        threads::in_portions(threads, heads, (threads, 1), one, |ball| balls.push(ball))?;
        let (batch, dim) = (values.batch().to_vec(), values.dim());
        Ok(ValueBall { batch, dim, len: values.len(), balls })
    }

    /// Returns the shape of the values.
    pub fn shape(&self) -> Vec<usize> {
        [&self.batch[..], &[self.len, self.dim]].concat()
    }

    /// Returns, per head, the centre followed by the radius.
    pub fn parts(&self) -> impl Iterator<Item = Vec<f64>> {
        let dim = self.dim;
        self.balls.iter().map(move |ball| [&ball.centre[..dim], &[ball.radius]].concat())
    }

    /// Returns the ball with these parts.
    ///
    /// ```
    /// # use certk_rs::{ValueBall, Vectors};
    /// # let ball = ValueBall::new(&Vectors::new("v", &[0.0_f32, 2.0], &[1, 2, 1])?)?;
    /// let parts: Vec<_> = ball.parts().collect();
    /// let heads: Vec<&[f64]> = parts.iter().map(Vec::as_slice).collect();
    /// assert_eq!(ValueBall::of_parts(&ball.shape(), &heads)?, ball);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Option`] if they cannot be the parts of a ball of any values.
    pub fn of_parts(shape: &[usize], heads: &[&[f64]]) -> Result<Self, Error> {
        let wrong = || {
            let problem = "it has parts of another shape, or that are no numbers";
            Error::Option { argument: "a ball", value: format!("of {shape:?}"), problem }
        };
        let &[ref batch @ .., len, dim] = shape else { return Err(wrong()) };
        let count: Option<usize> =
            batch.iter().try_fold(1usize, |all, &axis| all.checked_mul(axis));
        if count != Some(heads.len()) {
            return Err(wrong());
        }
        let mut balls = list("v", heads.len())?;
        for head in heads {
            let Some((&radius, centre)) = head.split_last() else { return Err(wrong()) };
            if centre.len() != dim || !all_finite(centre) || radius.is_nan() || radius < 0.0 {
                return Err(wrong());
            }
            let mut centre = centre.to_vec();
            centre.resize(dim.next_multiple_of(LANES), 0.0);
            balls.push(Ball { centre, radius });
        }
        Ok(ValueBall { batch: batch.to_vec(), dim, len, balls })
    }

    /// Adds values `(..., m, d_v)` behind the known ones, in time proportional to m. The centres stay.
    ///
    /// # Errors
    /// [`Error::Shape`] if the axes differ.
    pub fn append(&mut self, values: &Vectors<'_>) -> Result<(), Error> {
        if values.batch() != self.batch || values.dim() != self.dim {
            return Err(values.misfit(format!(
                "the ball takes values of {} entries for axes {:?}",
                self.dim, self.batch
            )));
        }
        let simd = Simd::current()?;
        let _modes = threads::default_floats();
        for (head, ball) in self.balls.iter_mut().enumerate() {
            ball.extend(simd, values, head, std::slice::from_ref(&(0..values.len())));
        }
        self.len += values.len();
        Ok(())
    }

    /// Returns the number of values of a head.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if no values are known.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the radius of each head's ball; infinite where a value is not finite.
    pub fn radii(&self) -> Vec<f64> {
        self.balls.iter().map(|ball| ball.radius).collect()
    }

    /// Checks that the ball is of as many values of this shape.
    pub(super) fn check(&self, values: &Vectors<'_>) -> Result<(), Error> {
        if self.batch == values.batch() && self.dim == values.dim() && self.len == values.len() {
            return Ok(());
        }
        let mut shape = self.batch.clone();
        shape.extend([self.len, self.dim]);
        Err(values.misfit(format!(
            "the ball was built of values of shape {shape:?}; build it of these, or append what is new"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_it_was_built_of() {
        let data: Vec<f32> = (0..60).map(|i| (i as f32 * 0.7).sin() * 1e3).collect();
        let values = Vectors::new("v", &data, &[2, 10, 3]).unwrap();
        let mut ball = ValueBall::new(&values).unwrap();
        let more: Vec<f32> = data.iter().map(|v| 2.0 * v + 1.0).collect();
        let more_values = Vectors::new("v", &more, &[2, 10, 3]).unwrap();
        ball.append(&more_values).unwrap();
        assert_eq!(ball.len(), 20);
        for (of, data) in [(&values, &data), (&more_values, &more)] {
            for head in 0..of.heads() {
                for value in data[30 * head..][..30].chunks(3) {
                    let value: Vec<f64> = value.iter().map(|&v| f64::from(v)).collect();
                    let ball = &ball.balls[head];
                    let away = value.iter().zip(&ball.centre).map(|(a, b)| (a - b) * (a - b));
                    assert!(away.sum::<f64>().sqrt() <= ball.radius);
                }
            }
        }
        assert!(ball.append(&Vectors::new("v", &data, &[60, 1]).unwrap()).is_err());
    }

    /// Also if what is added is nearer than what was there before.
    #[test]
    fn holds_what_it_held_before() {
        let far = [3.0f32, -4.0, -3.0, 4.0, 300.0, -400.0];
        let mut ball = ValueBall::new(&Vectors::new("v", &far[..], &[3, 2]).unwrap()).unwrap();
        let before = ball.radii()[0];
        let centre: Vec<f32> = ball.balls[0].centre[..2].iter().map(|&c| c as f32).collect();
        ball.append(&Vectors::new("v", &centre, &[1, 2]).unwrap()).unwrap();
        assert_eq!(ball.radii()[0], before);
        ball.append(&Vectors::new("v", &[-3e3f32, 4e3][..], &[1, 2]).unwrap()).unwrap();
        assert!(ball.radii()[0] > before);
    }

    #[test]
    fn no_ball_around_what_is_not_finite() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut data = vec![1.0; 40];
            data[33] = bad;
            let ball = ValueBall::new(&Vectors::new("v", &data, &[4, 5, 2]).unwrap()).unwrap();
            assert_eq!(
                ball.radii().iter().map(|r| r.is_finite()).collect::<Vec<_>>(),
                [true, true, true, false]
            );
        }
    }
}
