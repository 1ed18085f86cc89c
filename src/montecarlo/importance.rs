//! Draws from a row's tail in proportion to given upper bounds, with replacement.
//!
//! Position i has the integer weight `m_i >= 2^p e^(U_i - top)`, top the largest bound of the tail, and is drawn with
//! probability exactly `m_i / M`: sums are integers, and a uniform integer below M is found by rejection. Then
//! `X_i = 2^p e^(s_i - top) / m_i` is at most 1 and has the mean `2^p e^(-top) / M` times the tail's mass. Nothing is assumed
//! of the scores but `s_i <= U_i`; the bounds decide only how narrow the result is.
//!
//! The integers come from the f32 kernel and are not stored: only sums over blocks are, and a draw looks into one block. The
//! kernel's weights are off by at most 2^-15.8 (`mass`: x rounds to f32, u|x| <= 87.4u, and 216u), so that enlarging them by
//! 2^-13 makes them upper bounds, also of scores that exceed their bounds by a rounding.

use super::tail::Urn;
use crate::error::Error;
use crate::kernels::{Shifted, Simd};
use crate::mass::{self, Compensated, Slack};
use crate::random::Random;
use crate::scores::{Keep, Scores};

/// Positions whose sum is kept: what a draw has to look at.
const BLOCK: usize = 256;
/// What the weights of the kernel are enlarged by.
const ENLARGED: f64 = 1.0 + 1.0 / 8192.0;
/// The largest error of a score (nats) that the enlargement covers.
const MOST_ERROR: f64 = 1.0 / 131_072.0;

/// The scores at some positions of a row, natural-log units, -inf where masked.
pub(super) type Fetch<'a> = dyn FnMut(&[usize]) -> Result<Vec<f64>, Error> + 'a;

/// The integer weights of one row's tail.
struct Integers<'a> {
    bounds: &'a Scores<'a>,
    row: usize,
    n: usize,
    /// 1 for what is not in the tail.
    outside: Vec<u8>,
    top: f64,
    /// 2^p.
    unit: f64,
    simd: Simd,
}

impl Integers<'_> {
    fn block(&self, block: usize, scratch: &mut Vec<f64>, integers: &mut [u64; BLOCK]) {
        let start = block * BLOCK;
        let len = BLOCK.min(self.n - start);
        self.bounds.stretch64(self.row, start, len, scratch);
        let mut below = [f32::NEG_INFINITY; BLOCK];
        for ((x, bound), outside) in below.iter_mut().zip(&*scratch).zip(&self.outside[start..]) {
            // Far below the top, but not masked: its integer is 1.
            let distance = ((bound - self.top) as f32).max(-1000.0);
            let drawable = *outside == 0 && *bound > f64::NEG_INFINITY;
            *x = if drawable { distance } else { f32::NEG_INFINITY };
        }
        let mut weights = [0.0_f32; BLOCK];
        self.simd.weights(&below, Shifted(0.0_f32), &mut weights);
        let factor = self.unit * ENLARGED;
        for ((integer, weight), x) in integers.iter_mut().zip(weights).zip(below) {
            // The weight is below 1.1, hence the product below 2^62.
            #[allow(clippy::cast_sign_loss)]
            let whole = (f64::from(weight) * factor) as i64 as u64 + 1;
            *integer = if x == f32::NEG_INFINITY { 0 } else { whole };
        }
    }
}

/// A row's tail to draw from.
pub(super) struct Importance<'a> {
    integers: Integers<'a>,
    /// Sums of the integers before each block, and the sum of all.
    starts: Vec<u64>,
    /// Whether scores are rounded, so that one may exceed its bound by that.
    rounded: bool,
    random: Random,
}

impl<'a> Importance<'a> {
    /// Reads all bounds, and the scores of the kept positions.
    ///
    /// `bounds` are rows like those of the scores; `scores` say which positions are hidden, if there are any.
    ///
    /// # Errors
    /// Whatever is wrong with the bounds, the kept set, or the scores of the kept positions.
    pub(super) fn new(
        bounds: &'a Scores<'a>,
        scores: Option<&Scores<'_>>,
        keep: &Keep<'_>,
        row: usize,
        fetch: &mut Fetch<'_>,
        random: Random,
    ) -> Result<(Self, Urn), Error> {
        let n = bounds.span(row).n;
        let mut outside = vec![0; n];
        keep.lay(scores.unwrap_or(bounds), row, &mut outside)?;
        let kept: Vec<usize> = (0..n).filter(|&i| outside[i] != 0).collect();
        if let Some(scores) = scores {
            scores.mark_hidden(row, &mut outside);
        }
        let mut scratch = Vec::with_capacity(BLOCK);
        let top = largest(bounds, row, &outside, &mut scratch)?;
        let simd = Simd::current()?;
        // n integers of at most 2^p 1.1 + 1 sum to less than 2^63.
        let unit = 2f64.powi(61 - (n as u64 + 1).ilog2() as i32);
        let integers = Integers { bounds, row, n, outside, top, unit, simd };
        let mut starts = vec![0];
        let (mut sum, mut dropped) = (0, 0);
        let mut block = [0; BLOCK];
        if top > f64::NEG_INFINITY {
            for b in 0..n.div_ceil(BLOCK) {
                integers.block(b, &mut scratch, &mut block);
                sum += block.iter().sum::<u64>();
                dropped += block.iter().filter(|integer| **integer > 0).count();
                starts.push(sum);
            }
        }
        let mut head_scores = fetch(&kept)?;
        head_scores.retain(|score| *score > f64::NEG_INFINITY);
        let shift = head_scores.iter().copied().fold(top, f64::max);
        let head: Compensated = head_scores.iter().map(|score| mass::exp(score - shift)).collect();
        // Scores round once where a scale does; those that weigh anything are within 708 of the shift.
        let error = if shift.is_finite() { f64::EPSILON * (shift.abs() + 708.0) } else { 0.0 };
        if error > MOST_ERROR {
            return Err(Error::Option {
                argument: "upper_bounds",
                value: format!("up to {shift:e}"),
                problem: "scores this large leave no digits for their differences; subtract a constant per row",
            });
        }
        let urn = Urn {
            population: None,
            dropped,
            kept: head_scores.len(),
            head: head.value(),
            unit: if dropped == 0 { 0.0 } else { sum as f64 / unit * mass::exp(top - shift) },
            equal: false,
            slack: Slack::f64(0, error),
        };
        let rounded = scores.is_some_and(|scores| scores.scale != 1.0);
        Ok((Importance { integers, starts, rounded, random }, urn))
    }

    /// Draws that many more, each a weight relative to what its bound allows.
    ///
    /// # Errors
    /// [`Error::UpperBoundBroken`] if a drawn score exceeds its bound, and whatever fetching the scores brings.
    pub(super) fn draw(
        &mut self,
        count: usize,
        fetch: &mut Fetch<'_>,
        values: &mut Vec<f64>,
    ) -> Result<(), Error> {
        let integers = &self.integers;
        let all = self.starts[self.starts.len() - 1];
        let mut tickets: Vec<(u64, usize)> = Vec::with_capacity(count);
        tickets.extend((0..count).map(|i| (self.random.below(all), i)));
        // In ascending order each block is looked into once.
        tickets.sort_unstable();
        let (mut scratch, mut block) = (Vec::with_capacity(BLOCK), [0; BLOCK]);
        let mut loaded = usize::MAX;
        let mut drawn = vec![(0, 0); count];
        for (ticket, i) in tickets {
            let b = self.starts.partition_point(|start| *start <= ticket) - 1;
            if b != loaded {
                integers.block(b, &mut scratch, &mut block);
                loaded = b;
            }
            let mut rest = ticket - self.starts[b];
            let mut within = 0;
            while rest >= block[within] {
                rest -= block[within];
                within += 1;
            }
            drawn[i] = (b * BLOCK + within, block[within]);
        }
        let positions: Vec<usize> = drawn.iter().map(|(position, _)| *position).collect();
        let scores = fetch(&positions)?;
        for (&(position, integer), &score) in drawn.iter().zip(&scores) {
            integers.bounds.stretch64(integers.row, position, 1, &mut scratch);
            let bound = scratch[0];
            let rounding = if self.rounded { score.abs() * f64::EPSILON } else { 0.0 };
            if score - rounding > bound {
                let place = integers.bounds.place(integers.row, Some(position));
                return Err(Error::UpperBoundBroken { place, score, bound });
            }
            let weight = mass::exp((score - integers.top).min(0.0));
            values.push((weight * integers.unit / integer as f64).min(1.0));
        }
        Ok(())
    }
}

/// The largest bound of what is not outside, -inf if there is none; judges them all.
fn largest(
    bounds: &Scores<'_>,
    row: usize,
    outside: &[u8],
    scratch: &mut Vec<f64>,
) -> Result<f64, Error> {
    let mut tops = [f64::NEG_INFINITY; 16];
    for start in (0..outside.len()).step_by(BLOCK) {
        let len = BLOCK.min(outside.len() - start);
        bounds.stretch64(row, start, len, scratch);
        if let Some(j) = scratch.iter().position(|bound| bound.is_nan() || *bound == f64::INFINITY)
        {
            let place = bounds.place(row, Some(start + j));
            return Err(Error::UpperBound { place, value: scratch[j] });
        }
        for (j, (bound, outside)) in scratch.iter().zip(&outside[start..]).enumerate() {
            let bound = if *outside == 0 { *bound } else { f64::NEG_INFINITY };
            let top = &mut tops[j % 16];
            *top = if bound > *top { bound } else { *top };
        }
    }
    Ok(tops.into_iter().fold(f64::NEG_INFINITY, f64::max))
}
