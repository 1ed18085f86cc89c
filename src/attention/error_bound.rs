//! Bound on the distance of a computed output from the real-number attention.
//!
//! Write `o` for the returned output, `o*` for the real one, `o_S` for the real average over the kept keys, `tau` for the tail
//! mass, `mu_T` for the real average over the dropped ones, and `(c, R)` for a ball around all values that a row sees. As
//! `o* = (1 - tau) o_S + tau mu_T`,
//!
//! `|o - o*| <= (1 - tau) |o - o_S| + tau |o - mu_T| <= |o - o_S| + tau (|o - c| + R)`.
//!
//! The distance of `o` and `o_S` has these parts. Weights off by a factor within `1 +- delta` of a common one move the
//! average by at most `delta / (1 - delta)` times the mean distance from `o_S`. That is at most R, because the mean
//! square distance is smallest about the average. Sums, the division and the rounding of weights move it by a multiple
//! of the mean length of a value, at most `|c| + R`. The rounding to the returned precision is measured.
//!
//! A sink is one more kept key, with the value zero: the ball is then one that also contains zero.

use super::ball::{Ball, UP};
use super::options::{AttentionOptions, Precision};
use super::query_rows::QueryRows;
use super::result::Attention;
use crate::error::Error;
use crate::index::RowVisibility;
use crate::kernels::Simd;
use crate::rows::{Ragged, Stored, Vectors};
use crate::runtime::memory::{check_memory, list};
use crate::runtime::reused::Reused;
use crate::runtime::threads;
use std::collections::BTreeSet;
use std::ops::Range;

/// Terms that are summed in the values' own precision before f64 takes over, and the rounding of their weights.
const DEPTH: f64 = 17.0;

/// Returns a bound on the error of sums of weighted values, relative to their lengths, without the share of f64.
pub(super) fn sum_error(values: &Stored<'_>) -> f64 {
    DEPTH * if let Stored::F64(_) = values { f64::EPSILON } else { f64::from(f32::EPSILON) / 2.0 }
}

/// Balls around the values that rows see: one per head for all its rows, or a row's own.
pub(super) struct Balls<'a> {
    shared: Shared<'a>,
    /// Balls of single rows, where the shared one is infinite.
    own: Vec<Option<Ball>>,
    query_rows: &'a QueryRows<'a>,
}

enum Shared<'a> {
    Given(&'a [Ball]),
    Made(Vec<Ball>),
}

impl<'a> Balls<'a> {
    /// Reads the values that rows see, unless a ball around them is given.
    pub(super) fn new(query_rows: &'a QueryRows<'a>, values: &Vectors<'_>) -> Result<Self, Error> {
        let options = &query_rows.options;
        if let Some(ball) = options.ball {
            ball.check(values)?;
            let balls = &ball.balls[..];
            let shared = if options.sinks.is_some() {
                Shared::Made(balls.iter().cloned().map(Ball::with_origin).collect())
            } else {
                Shared::Given(balls)
            };
            return Ok(Balls { shared, own: Vec::new(), query_rows });
        }
        let simd = Simd::current()?;
        let heads = values.heads();
        let work = heads.saturating_mul(values.len()).saturating_mul(values.dim());
        let threads = threads::count(options.threads, work > 1 << 20)?;
        let each = values.dim().saturating_mul(8).saturating_add(2 * size_of::<Ball>());
        check_memory("v", heads, each)?;
        let mut made = list("v", heads)?;
        // A sink counts as a value of zeros.
        let around = |head: usize, places: &[Range<usize>]| {
            let ball = Ball::around(simd, values, head, places);
            if options.sinks.is_some() { ball.with_origin() } else { ball }
        };
        let one = |head| Ok(around(head, &query_rows.seen_by_any(head)));
        threads::in_portions(threads, heads, (threads, 1), one, |ball| made.push(ball))?;
        let mut own = Vec::new();
        if made.iter().any(|ball| ball.radius == f64::INFINITY) {
            let rows = query_rows.rows();
            check_memory("v", rows, each)?;
            let one = |row: usize| {
                let head = query_rows.head_of(row);
                let needed = made[head].radius == f64::INFINITY;
                Ok(needed.then(|| around(head, &query_rows.seen(row))))
            };
            threads::in_portions(threads, rows, (64, 1), one, |ball| own.push(ball))?;
        }
        Ok(Balls { shared: Shared::Made(made), own, query_rows })
    }

    fn of(&self, row: usize) -> &Ball {
        let shared = match &self.shared {
            Shared::Given(given) => &given[self.query_rows.head_of(row)],
            Shared::Made(made) => &made[self.query_rows.head_of(row)],
        };
        self.own.get(row).and_then(Option::as_ref).unwrap_or(shared)
    }
}

/// Returns a bound on the error of summing so many weighted values, none of which is longer.
pub(super) fn summing(longest: f64, (count, values): (usize, &Vectors<'_>), sum_error: f64) -> f64 {
    let (n, dim) = (count as f64, values.dim() as f64);
    // Products that underflow, and weights that do; the largest weight is 1.
    let lost = if let Stored::F64(_) = values.data { 1e-300 } else { 2f64.powi(-124) };
    // In f64: the rest of the sum, the sum of the weights, the division.
    let relative = sum_error * (1.0 + 1e-4) + (n / 8.0 + 192.0) * f64::EPSILON;
    (relative * longest + lost * n * (dim + longest)) * UP
}

/// Returns a bound on the effect of weights whose relative error is at most `delta`.
fn weighing(ball: &Ball, delta: f64) -> f64 {
    // Two averages over the same values are never farther apart than the ball is wide.
    let share = if delta < 0.5 { (delta / (1.0 - delta) * UP).min(2.0) } else { 2.0 };
    share * ball.radius * UP
}

/// Returns a bound of a row's error.
fn bound(ball: &Ball, values: &Vectors<'_>, out: &[f64], made: &RowErrors) -> f64 {
    if made.k == 0 {
        return 0.0;
    }
    if made.coded_error > 0.0 {
        return (made.coded_error + made.rounding) * UP;
    }
    let computed = weighing(ball, made.weight_error)
        + summing(ball.longest(), (values.len(), values), made.sum_error)
        + made.rounding;
    let dropped = if made.upper > 0.0 { made.upper * (ball.away(out) + ball.radius) } else { 0.0 };
    let bound = (computed + dropped) * UP;
    if bound.is_nan() { f64::INFINITY } else { bound }
}

/// Part of a row's answer that its bound depends on.
struct RowErrors {
    k: i64,
    upper: f64,
    weight_error: f64,
    sum_error: f64,
    coded_error: f64,
    rounding: f64,
}

impl Attention {
    fn row_errors(&self, row: usize) -> RowErrors {
        RowErrors {
            k: self.k[row],
            upper: self.tail_mass_upper[row],
            weight_error: self.weight_error[row],
            sum_error: self.sum_error[row],
            coded_error: self.coded_error[row],
            rounding: self.rounding[row],
        }
    }

    /// Bounds, row by row, the Euclidean norm of `out` less the real-number attention over everything that the row
    /// sees. Pass the queries, values and options of the call that returned this answer.
    ///
    /// Reads all values that some row sees, unless `options.ball` is around them. Infinite where a row sees, and
    /// dropped, a value that is not finite.
    ///
    /// ```
    /// # use certk_rs::{AttentionOptions, Budget, Precision, Vectors, attention};
    /// # let q = Vectors::new("q", &[4.0_f32, 0.0], &[1, 1, 2])?;
    /// # let k = Vectors::new("k", &[3.0_f32, 0.0, 0.0, 3.0, -3.0, 0.0], &[1, 3, 2])?;
    /// # let v = Vectors::new("v", &[0.1_f32, 20.0, 30.0], &[1, 3, 1])?;
    /// let options = AttentionOptions::new().even_if_slower(true);
    /// let plain = attention(&q, &k, &v, Budget::TailMass(&[0.0]), None, &options)?;
    /// let found = attention(&q, &k, &v, Budget::TailMass(&[0.1]), None, &options)?;
    /// let bound = found.error_bound(&q, &v, &options)?[0];
    /// assert!((found.row(0)[0] - plain.row(0)[0]).abs() <= bound && bound.is_finite());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`] and [`Error::RowLength`] if these are not the arguments of that call.
    pub fn error_bound(
        &self,
        queries: &Vectors<'_>,
        values: &Vectors<'_>,
        options: &AttentionOptions<'_>,
    ) -> Result<Vec<f64>, Error> {
        self.bound_errors(queries, values, options)
    }

    /// Bounds the errors of attention over heads of different lengths, as [`Attention::error_bound`].
    ///
    /// # Errors
    /// As [`Attention::error_bound`].
    pub fn error_bound_of_ragged(
        &self,
        queries: &Vectors<'_>,
        values: &Ragged<'_>,
        options: &AttentionOptions<'_>,
    ) -> Result<Vec<f64>, Error> {
        self.bound_errors(queries, values.vectors(), options)
    }

    fn bound_errors(
        &self,
        queries: &Vectors<'_>,
        values: &Vectors<'_>,
        options: &AttentionOptions<'_>,
    ) -> Result<Vec<f64>, Error> {
        let _modes = threads::default_floats();
        check_memory("q", queries.heads().saturating_mul(queries.len()), 5 * size_of::<f64>())?;
        check_memory("q", queries.heads(), 2 * size_of::<usize>())?;
        let query_rows =
            QueryRows::new(queries, (values.batch(), values.len(), values.counts()), options)?;
        let rows = query_rows.rows();
        let parts = [
            &self.tail_mass_upper,
            &self.weight_error,
            &self.sum_error,
            &self.coded_error,
            &self.rounding,
        ];
        if parts.map(Vec::len) != [rows; 5]
            || self.k.len() != rows
            || self.out.len() != rows.saturating_mul(values.dim())
        {
            return Err(queries.misfit("this is not what the attention was computed of".into()));
        }
        if self.coded_error.iter().all(|&error| error > 0.0) {
            // What codes of the values say needs no value.
            return Ok(self.bounds_by_codes());
        }
        let balls = Balls::new(&query_rows, values)?;
        Ok(self.bounds(&balls, values))
    }

    /// Returns the bounds of rows that codes have answered, or that see no key.
    pub(super) fn bounds_by_codes(&self) -> Vec<f64> {
        let errors = self.coded_error.iter().zip(&self.rounding).zip(&self.k);
        errors.map(|((error, moved), &k)| if k == 0 { 0.0 } else { (error + moved) * UP }).collect()
    }

    pub(super) fn bounds(&self, balls: &Balls<'_>, values: &Vectors<'_>) -> Vec<f64> {
        let dim = values.dim();
        let mut out = Reused::with_hint(dim);
        let mut bounds = Vec::with_capacity(self.k.len());
        for row in 0..self.k.len() {
            self.out.widen(row * dim..(row + 1) * dim, &mut out);
            bounds.push(bound(balls.of(row), values, &out, &self.row_errors(row)));
        }
        bounds
    }
}

/// Returns a tail mass that a row may drop so that its output is off by at most `tolerance`.
pub(super) fn allowed(
    balls: &Balls<'_>,
    values: &Vectors<'_>,
    row: usize,
    tolerance: f64,
    precision: Precision,
    (weight_error, known): (f64, f64),
) -> f64 {
    let ball = balls.of(row);
    let computed = weighing(ball, weight_error)
        + summing(ball.longest(), (values.len(), values), known.max(sum_error(&values.data)));
    let rounded = computed + precision.moves(ball.longest() + computed, values.dim());
    // The output is within the ball but for its own error.
    let eps = (tolerance - rounded) / (2.0 * ball.radius + rounded) * (1.0 - 1e-9);
    // Where even no mass at all is too much, no number compares as greater.
    if eps > 0.0 { eps.min(MOST) } else { 0.0 }
}

/// Largest tail mass that is allowed, for any tolerance.
const MOST: f64 = 0.999;

/// Returns the runs of consecutive non-zero bytes.
fn runs(seen: &[u8]) -> Reused<Range<usize>> {
    let mut runs = Reused::new();
    let mut start = None;
    for (at, &seen) in seen.iter().enumerate() {
        match (seen != 0, start) {
            (true, None) => start = Some(at),
            (false, Some(from)) => {
                runs.push(from..at);
                start = None;
            }
            _ => {}
        }
    }
    runs.extend(start.map(|from| from..seen.len()));
    runs
}

impl QueryRows<'_> {
    /// Returns the ranges of keys that a row sees.
    fn seen(&self, row: usize) -> Reused<Range<usize>> {
        let RowVisibility { prefix, allowed } = self.row_visibility(row);
        match allowed {
            None => std::iter::once(0..prefix).collect(),
            Some(allowed) => runs(&allowed[..prefix]),
        }
    }

    /// Returns the ranges of keys that some row of a head sees.
    pub(super) fn seen_by_any(&self, head: usize) -> Reused<Range<usize>> {
        let rows = self.rows_of(head);
        if self.options.mask.is_none() {
            let longest = rows.map(|row| self.row_visibility(row).prefix).max().unwrap_or(0);
            return std::iter::once(0..longest).collect();
        }
        let mut seen: Reused<u8> = std::iter::repeat_n(0, self.keys).collect();
        // Many rows may share a mask.
        let mut known = BTreeSet::new();
        for row in rows {
            let RowVisibility { prefix, allowed } = self.row_visibility(row);
            let Some(allowed) = allowed else { continue };
            if known.insert((allowed.as_ptr(), prefix)) {
                let pairs = seen[..prefix].iter_mut().zip(allowed);
                pairs.for_each(|(seen, &allowed)| *seen |= u8::from(allowed != 0));
            }
        }
        runs(&seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_seen_keys() {
        assert!(runs(&[]).is_empty());
        assert!(runs(&[0, 0]).is_empty());
        assert_eq!(runs(&[1, 0, 2, 3, 0, 1])[..], [0..1, 2..4, 5..6]);
    }

    #[test]
    fn rounding_is_measured() {
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            let exact = [0.1, -3.3, 1e-9, 0.0, 1234.567];
            let mut rounded = exact;
            let moved = precision.round(&mut rounded);
            let off =
                exact.iter().zip(&rounded).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
            assert!(moved >= off && moved <= off * 1.0001);
            let length = exact.iter().map(|v| v * v).sum::<f64>().sqrt();
            assert!(moved <= precision.moves(length, exact.len()));
        }
        for bits in [1, 0x7F, 0x80, 0x81, 0x3F80_7FFF, 0x3F80_8000, 0x3F81_8000, 0x7F7F_8000] {
            for sign in [0, 1 << 31] {
                let entry = f32::from_bits(bits | sign);
                let found = Precision::Bf16.nearest(entry.into());
                assert_eq!(found, f64::from(half::bf16::from_f32(entry)), "{entry}");
            }
        }
        assert!(Precision::Bf16.nearest(f64::NAN).is_nan());
        let mut same = [0.1];
        assert_eq!(Precision::F64.round(&mut same), 0.0);
        assert_eq!(Precision::F32.round(&mut [0.5, 3.0]), 0.0);
    }
}
