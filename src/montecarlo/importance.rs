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

use super::tail::{Fetch, Urn};
use crate::error::Error;
use crate::kernels::{Shifted, Simd};
use crate::mass::{self, Compensated, Slack};
use crate::random::Random;
use crate::scores::{Keep, Scores};
use crate::threads;

/// Positions whose sum is kept: what a draw has to look at.
const BLOCK: usize = 256;
/// Blocks that are worth a task.
const TASK: usize = 256;
/// Floats from here to twice as much are whole.
const WHOLE: f64 = 4_503_599_627_370_496.0;
/// What the weights of the kernel are enlarged by.
const ENLARGED: f64 = 1.0 + 1.0 / 8192.0;
/// The largest error of a score (nats) that the enlargement covers.
const MOST_ERROR: f64 = 1.0 / 131_072.0;

/// The integer weights of one row's tail.
struct Integers<'a> {
    bounds: &'a Scores<'a>,
    row: usize,
    /// 1 for what is not in the tail.
    outside: Vec<u8>,
    top: f64,
    /// 2^p.
    unit: f64,
    simd: Simd,
}

impl Integers<'_> {
    fn blocks(&self) -> usize {
        self.outside.len().div_ceil(BLOCK)
    }

    /// A block's bounds, -inf for what is not in the tail.
    fn load(&self, block: usize) -> [f64; BLOCK] {
        let start = block * BLOCK;
        let len = BLOCK.min(self.outside.len() - start);
        let mut loaded = [f64::NEG_INFINITY; BLOCK];
        self.bounds.stretch64(self.row, start, &mut loaded[..len]);
        for (bound, outside) in loaded.iter_mut().zip(&self.outside[start..]) {
            *bound = if *outside == 0 { *bound } else { f64::NEG_INFINITY };
        }
        loaded
    }

    /// The largest bound of a block's part of the tail; judges them.
    fn largest(&self, block: usize) -> Result<f64, Error> {
        let loaded = self.load(block);
        let mut bad = 0;
        let mut tops = [f64::NEG_INFINITY; 8];
        for group in loaded.chunks_exact(8) {
            for (top, &bound) in tops.iter_mut().zip(group) {
                *top = if bound > *top { bound } else { *top };
                // A byte, not an early end: compilers turn such loops into vector code.
                bad |= u8::from(bound.is_nan());
            }
        }
        let top = tops.into_iter().fold(f64::NEG_INFINITY, f64::max);
        let unusable = |bound: &f64| bound.is_nan() || *bound == f64::INFINITY;
        if (bad != 0 || top == f64::INFINITY)
            && let Some(j) = loaded.iter().position(unusable)
        {
            let place = self.bounds.place(self.row, Some(block * BLOCK + j));
            return Err(Error::UpperBound { place, value: loaded[j] });
        }
        Ok(top)
    }

    fn block(&self, block: usize) -> [u64; BLOCK] {
        let loaded = self.load(block);
        let mut below = [0.0_f32; BLOCK];
        for (x, bound) in below.iter_mut().zip(loaded) {
            // Far below the top, but not masked: its integer is 1.
            let distance = ((bound - self.top) as f32).max(-1000.0);
            *x = if bound > f64::NEG_INFINITY { distance } else { f32::NEG_INFINITY };
        }
        let mut weights = [0.0_f32; BLOCK];
        self.simd.weights(&below, Shifted(0.0_f32), &mut weights);
        let factor = self.unit * ENLARGED;
        let mut integers = [0; BLOCK];
        for ((integer, weight), x) in integers.iter_mut().zip(weights).zip(below) {
            // Below 2^51: beside 2^52 the last bits are the integer nearest, and one more is no less. A cast would not
            // become vector code.
            let nearest = (f64::from(weight) * factor + WHOLE).to_bits() - WHOLE.to_bits();
            *integer = (nearest + 1) & 0_u64.wrapping_sub(u64::from(x > f32::NEG_INFINITY));
        }
        integers
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
    /// `bounds` are rows like those of the scores; `scores` say which positions are hidden, if there are any. The bounds of
    /// hidden and kept positions are not looked at.
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
        threads: usize,
    ) -> Result<(Self, Urn), Error> {
        let n = bounds.span(row).n;
        let mut outside = vec![0; n];
        keep.lay(scores.unwrap_or(bounds), row, &mut outside)?;
        let kept: Vec<usize> = positions(&outside);
        if let Some(scores) = scores {
            scores.mark_hidden(row, &mut outside);
        }
        // n integers of at most 2^p 1.1 + 1 sum to less than 2^63, and each is below 2^51.
        let unit = 2f64.powi((61 - (n as u64 + 1).ilog2() as i32).min(50));
        let (top, simd) = (f64::NEG_INFINITY, Simd::current()?);
        let mut integers = Integers { bounds, row, outside, top, unit, simd };
        for top in threads::map(threads, 0..integers.blocks(), TASK, |b| integers.largest(b))? {
            integers.top = integers.top.max(top?);
        }
        let top = integers.top;
        let mut starts = vec![0];
        let (mut sum, mut dropped) = (0, 0);
        if top > f64::NEG_INFINITY {
            let part = |b| {
                let integers = integers.block(b);
                let live: u64 = integers.iter().map(|&integer| u64::from(integer > 0)).sum();
                (integers.iter().sum::<u64>(), live as usize)
            };
            for (more, live) in threads::map(threads, 0..integers.blocks(), TASK, part)? {
                sum += more;
                dropped += live;
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
        let mut block = [0; BLOCK];
        let mut loaded = usize::MAX;
        let mut drawn = vec![(0, 0); count];
        for (ticket, i) in tickets {
            let b = self.starts.partition_point(|start| *start <= ticket) - 1;
            if b != loaded {
                block = integers.block(b);
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
            let mut bound = [0.0];
            integers.bounds.stretch64(integers.row, position, &mut bound);
            let [bound] = bound;
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

/// Where bytes are not 0.
fn positions(bytes: &[u8]) -> Vec<usize> {
    let mut found = Vec::new();
    for (i, group) in bytes.chunks(BLOCK).enumerate() {
        // Most groups have none.
        if group.iter().fold(0, |any, byte| any | byte) != 0 {
            found.extend((0..group.len()).filter(|&j| group[j] != 0).map(|j| i * BLOCK + j));
        }
    }
    found
}
