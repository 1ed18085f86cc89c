//! Draws from a row's tail in proportion to given upper bounds, with replacement.
//!
//! With `top` the largest bound of the tail, position i owns `m_i >= 2^p e^(U_i - top)` tickets, a whole number, and a block of
//! positions has at least as many as its positions own together. One of all M tickets is drawn, each being equally likely (a
//! uniform integer below M, found by rejection). A ticket that no position owns is worth 0, one of position i is worth
//! `X_i = 2^p e^(s_i - top) / m_i`, which is at most 1; the mean is exactly `2^p e^(-top) / M` times the tail's mass. Nothing
//! is assumed of the scores but `s_i <= U_i`; the bounds decide only how narrow the result is.
//!
//! # Proof that a block has enough tickets
//! A row is read once: of each block only the largest bound `t` and the kernel's sum of `w_i = e^(U_i - t)` are kept.
//! The owners of tickets are computed for drawn blocks only. With `F = 2^p e^(t - top) (1 + 2^-13)` position i gets the
//! integer nearest `w_i F`, and one more. These products are off by less than 1/8, so that the block's positions own at
//! most `F sum w_i + 1.625 * 256`. The kernel adds f32 weights sixteen deep, so that their sum is at most 2^-19 larger
//! than the result; enlarging that by 2^-17 and adding 512 covers both. A weight itself is off by at most 2^-15.8
//! (`mass`: 216u and the rounding of its argument), and flushed weights are below 2^-75 tickets: so the 2^-13 makes
//! `m_i` an upper bound, also for scores that exceed their bounds by a rounding.

use super::population::Population;
use crate::error::Error;
use crate::kernels::{Element, Exp, LANES, Scalar, Simd, Strided};
use crate::numerics::certified_sums::{self, Compensated, ErrorBound};
use crate::numerics::random::Random;
use crate::rows::{Keep, Scores, for_dtype};
use crate::runtime::ambient::{self, asked, pieces};
use crate::runtime::memory::{check_memory, filled, list, room};
use crate::runtime::threads;

/// Positions read per draw.
const BLOCK: usize = 256;
/// Blocks per task.
const TASK: usize = 256;
/// Floats from here to twice as much are whole.
const WHOLE: f64 = 4_503_599_627_370_496.0;
/// Factor that enlarges weights.
const ENLARGED: f64 = 1.0 + 1.0 / 8192.0;
/// Further factor on the kernel's sum over a block, and the extra tickets of a block.
const SUMMED: f64 = 1.0 + 1.0 / 131_072.0;
const SPARE: u64 = 2 * BLOCK as u64;
/// Largest error of a score (nats) that the enlargement covers.
const MOST_ERROR: f64 = 1.0 / 131_072.0;
/// Draws whose tickets are held at a time.
const HELD: usize = 1 << 16;

/// Summary of a block.
struct BlockMass {
    /// Largest bound of its part of the tail; -inf if there is none.
    largest: f64,
    /// Sum of e^(bound - largest).
    mass: f64,
    /// `true` if there is a NaN or +inf.
    bad: bool,
}

/// Bounds of one row's tail.
struct Bounds<'a> {
    all: &'a Scores<'a>,
    row: usize,
    /// Non-zero for positions outside the tail.
    outside: Vec<u8>,
    simd: Simd,
}

impl Bounds<'_> {
    fn blocks(&self) -> usize {
        self.outside.len().div_ceil(BLOCK)
    }

    fn at(&self, position: usize) -> f64 {
        let mut bound = [0.0];
        self.all.stretch64(self.row, position, &mut bound);
        bound[0]
    }

    /// Returns a block's bounds in whole groups, masked outside the tail: in place, or in `room`.
    fn load<'a, E: Element>(
        &self,
        stored: &Strided<'a, E>,
        block: usize,
        room: &'a mut [E; BLOCK],
    ) -> &'a [E] {
        let start = block * BLOCK;
        let outside = &self.outside[start..self.outside.len().min(start + BLOCK)];
        let stored = &self.all.row(stored, self.row)[start..][..outside.len()];
        if outside.len() == BLOCK && outside.iter().fold(0, |any, byte| any | byte) == 0 {
            return stored;
        }
        for ((to, &bound), &outside) in room.iter_mut().zip(stored).zip(outside) {
            *to = if outside == 0 { bound } else { E::MASKED };
        }
        &room[..]
    }

    fn weigh<E: Element>(&self, stored: &Strided<'_, E>, block: usize) -> BlockMass {
        let mut room = [E::MASKED; BLOCK];
        let bounds = self.load(stored, block, &mut room);
        let seen = self.simd.scan(bounds, None).0;
        let largest: f64 = seen.largest.into();
        let bad = seen.nan || largest == f64::INFINITY;
        let empty = bad || largest == f64::NEG_INFINITY;
        let mass = if empty { 0.0 } else { self.simd.mass(bounds, Exp(seen.largest)) };
        BlockMass { largest, mass, bad }
    }

    /// Computes the number of tickets of each position of a block, given the block's largest bound and F.
    fn owned<E: Element>(
        &self,
        stored: &Strided<'_, E>,
        block: usize,
        (largest, factor): (f64, f64),
        to: &mut [u64; BLOCK],
    ) {
        let mut room = [E::MASKED; BLOCK];
        let bounds = self.load(stored, block, &mut room);
        let mut weights = [E::Scalar::default(); BLOCK];
        // It was widened from this very type.
        let largest = E::Scalar::nearest(largest);
        self.simd.weights(bounds, Exp(largest), &mut weights);
        for ((to, &weight), &bound) in to.iter_mut().zip(&weights).zip(bounds) {
            let weight: f64 = weight.into();
            // Below 2^51: beside 2^52 the last bits are the integer nearest.
            let nearest = (weight * factor + WHOLE).to_bits() - WHOLE.to_bits();
            // Far below the top, but not masked: its only ticket.
            *to = if bound.widen() > E::Scalar::NEG_INFINITY { nearest + 1 } else { 0 };
        }
    }

    /// Returns the error that names the first invalid bound of a block.
    fn complain(&self, block: usize) -> Error {
        let end = self.outside.len().min((block + 1) * BLOCK);
        let unusable = |j: &usize| {
            let bound = self.at(*j);
            self.outside[*j] == 0 && (bound.is_nan() || bound == f64::INFINITY)
        };
        let found = (block * BLOCK..end).find(unusable);
        let place = self.all.place(self.row, found);
        // If there is none, the buffer changed meanwhile: nothing is certified.
        found.map_or(Error::Changed { place: place.clone() }, |j| Error::UpperBound {
            place,
            value: self.at(j),
        })
    }
}

/// A row's tail to draw from.
pub(super) struct Importance<'a> {
    scores: &'a Scores<'a>,
    bounds: Bounds<'a>,
    blocks: Vec<BlockMass>,
    /// F of each block: tickets per weight relative to its largest.
    factors: Vec<f64>,
    /// Tickets before each block, and their total.
    starts: Vec<u64>,
    top: f64,
    /// 2^p.
    unit: f64,
    random: Random,
}

impl<'a> Importance<'a> {
    /// Reads all bounds, and the scores of the kept positions.
    ///
    /// `bounds` are rows like those of the scores. The bounds of hidden and kept positions are not checked.
    ///
    /// # Errors
    /// The error of an invalid bound, kept set or score of a kept position.
    pub(super) fn new(
        scores: &'a Scores<'a>,
        bounds: &'a Scores<'a>,
        keep: &Keep<'_>,
        row: usize,
        random: Random,
        threads: usize,
    ) -> Result<(Self, Population), Error> {
        let span = bounds.span(row);
        let mut outside = filled("scores", span.n, 0)?;
        // Summaries of the blocks of keys.
        check_memory("upper_bounds", span.n.div_ceil(BLOCK), 4 * size_of::<BlockMass>())?;
        keep.lay(scores, row, &mut outside)?;
        let kept = positions(&outside)?;
        check_memory("keep", kept.len(), 2 * size_of::<f64>())?;
        scores.mark_hidden(row, &mut outside);
        let bounds = Bounds { all: bounds, row, outside, simd: Simd::current()? };
        let blocks: Vec<BlockMass> = for_dtype!(bounds.all.data, stored => {
            threads::map(threads, 0..bounds.blocks(), TASK, |b| bounds.weigh(stored, b))?
        });
        if let Some(bad) = blocks.iter().position(|block| block.bad) {
            return Err(bounds.complain(bad));
        }
        let top = blocks.iter().fold(f64::NEG_INFINITY, |top, block| top.max(block.largest));
        // n integers of at most 2^p (1 + 2^-12) + 2, and 512, sum to less than 2^63; each is below 2^51.
        let unit = 2f64.powi((61 - (span.n as u64 + 1).ilog2() as i32).min(50));
        let factors = factors(bounds.simd, &blocks, top, unit);
        let (mut starts, mut all) = (vec![0], 0);
        for (block, factor) in blocks.iter().zip(&factors) {
            if block.largest > f64::NEG_INFINITY {
                let owned = ((block.mass * factor * SUMMED) as i64).unsigned_abs();
                all = owned.saturating_add(SPARE).saturating_add(all);
            }
            starts.push(all);
        }
        let of_kept = kept.iter().map(|&position| scores.entry(row, position));
        let mut head_scores = of_kept.collect::<Result<Vec<_>, _>>()?;
        head_scores.retain(|score| *score > f64::NEG_INFINITY);
        let shift = head_scores.iter().copied().fold(top, f64::max);
        let head: Compensated =
            head_scores.iter().map(|score| certified_sums::exp(score - shift)).collect();
        // Scores round once where a scale does; those that weigh anything are within 708 of the shift.
        let error = if shift.is_finite() { f64::EPSILON * (shift.abs() + 708.0) } else { 0.0 };
        if error > MOST_ERROR {
            return Err(Error::Option {
                argument: "upper_bounds",
                value: format!("up to {shift:e}"),
                problem: "scores this large leave no digits for their differences; subtract a constant per row",
            });
        }
        let drawn_from = Population {
            items: None,
            // Some of them may be hidden; that is sound, because each adds at most a flushed weight.
            dropped: if top > f64::NEG_INFINITY { span.n } else { 0 },
            kept: head_scores.len(),
            head: head.value(),
            unit: if all == 0 { 0.0 } else { all as f64 / unit * certified_sums::exp(top - shift) },
            equal: false,
            slack: ErrorBound::f64(0, error + scores.row_radius(row)),
        };
        let draws = Importance { scores, bounds, blocks, factors, starts, top, unit, random };
        Ok((draws, drawn_from))
    }

    /// Draws `count` more values, each a weight relative to its bound.
    ///
    /// # Errors
    /// [`Error::UpperBoundBroken`] if a drawn score exceeds its bound, and the error of an invalid score.
    pub(super) fn draw(&mut self, count: usize, values: &mut Vec<f64>) -> Result<(), Error> {
        for start in (0..count).step_by(HELD) {
            self.draw_few(HELD.min(count - start), values)?;
        }
        Ok(())
    }

    fn draw_few(&mut self, count: usize, values: &mut Vec<f64>) -> Result<(), Error> {
        let all = self.starts[self.blocks.len()];
        let mut tickets: Vec<(u64, usize)> = Vec::with_capacity(count);
        ambient::check()?;
        tickets.extend((0..count).map(|i| (self.random.below(all), i)));
        // In ascending order, so that each block is read once.
        tickets.sort_unstable();
        let first = values.len();
        room("draws", values, count)?;
        values.resize(first + count, 0.0);
        let mut drawn = Vec::with_capacity(count);
        let mut owned = [0; BLOCK];
        let mut loaded = usize::MAX;
        for (ticket, i) in tickets {
            let b = self.starts.partition_point(|start| *start <= ticket) - 1;
            if b != loaded {
                let line = (self.blocks[b].largest, self.factors[b]);
                for_dtype!(self.bounds.all.data, stored => {
                    self.bounds.owned(stored, b, line, &mut owned);
                });
                loaded = b;
            }
            let mut rest = ticket - self.starts[b];
            for (within, &owned) in owned.iter().enumerate() {
                if rest < owned {
                    drawn.push((i, b * BLOCK + within, owned));
                    break;
                }
                rest -= owned;
            }
        }
        drawn.sort_unstable();
        let row = self.bounds.row;
        for (i, position, owned) in drawn {
            let (score, bound) = (self.scores.entry(row, position)?, self.bounds.at(position));
            // A scale rounds the score, which may then exceed its bound by that much.
            let rounded = self.scores.scale != 1.0;
            let rounding = if rounded { score.abs() * f64::EPSILON } else { 0.0 };
            if score - rounding > bound {
                let place = self.bounds.all.place(row, Some(position));
                return Err(Error::UpperBoundBroken { place, score, bound });
            }
            let weight = certified_sums::exp((score - self.top).min(0.0));
            values[first + i] = (weight * self.unit / owned as f64).min(1.0);
        }
        Ok(())
    }
}

/// Returns F of each block, in whole groups: by the kernel in f64, which is off by 2^-41 at most.
fn factors(simd: Simd, blocks: &[BlockMass], top: f64, unit: f64) -> Vec<f64> {
    let len = blocks.len().next_multiple_of(LANES);
    let mut factors = vec![0.0; len];
    if top > f64::NEG_INFINITY {
        let mut tops: Vec<f64> = blocks.iter().map(|block| block.largest).collect();
        tops.resize(len, f64::NEG_INFINITY);
        simd.weights(&tops, Exp(top), &mut factors);
        for factor in &mut factors {
            *factor *= unit * ENLARGED;
        }
    }
    factors
}

/// Returns the positions of non-zero bytes.
fn positions(bytes: &[u8]) -> Result<Vec<usize>, Error> {
    let count = pieces(bytes).flatten().map(|byte| usize::from(*byte != 0)).sum();
    let mut found = list("keep", count)?;
    for (i, group) in asked(bytes.chunks(BLOCK).enumerate()) {
        // Most groups have none.
        if group.iter().fold(0, |any, byte| any | byte) != 0 {
            found.extend((0..group.len()).filter(|&j| group[j] != 0).map(|j| i * BLOCK + j));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The estimate's mean needs tickets for every bound, negligible ones included, and blocks with room for them.
    #[test]
    fn every_position_owns_what_its_bound_weighs() {
        let fraction = |i: usize| (i as f64 * 0.754_877_666).fract();
        let mut rounded = 0;
        for n in [1, 100, 256, 3000] {
            // Every other block lies so far below that its positions own little beside their last tickets.
            let depth = |i: usize| if i / BLOCK % 2 == 1 { 30.0 } else { 5.0 };
            let row: Vec<f64> = (0..n).map(|i| -45.0 * fraction(i) - depth(i)).collect();
            let single: Vec<f32> = row.iter().map(|&x| x as f32).collect();
            let kept: Vec<u8> = (0..n).map(|i| u8::from(i % 7 == 5)).collect();
            let keep = Keep::Mask { kept: &kept, strides: &[] };
            for rows in [Scores::new(&row, &[n]).unwrap(), Scores::new(&single, &[n]).unwrap()] {
                let random = Random::new(3, 0);
                let (draws, _) = Importance::new(&rows, &rows, &keep, 0, random, 1).unwrap();
                for b in 0..draws.blocks.len() {
                    let mut owned = [0; BLOCK];
                    let line = (draws.blocks[b].largest, draws.factors[b]);
                    for_dtype!(rows.data, stored => draws.bounds.owned(stored, b, line, &mut owned));
                    let all = draws.starts[b + 1] - draws.starts[b];
                    assert!(owned.iter().sum::<u64>() <= all, "{n} {b}");
                    for (position, &owned) in (b * BLOCK..n).zip(&owned) {
                        if kept[position] != 0 {
                            assert_eq!(owned, 0);
                            continue;
                        }
                        let tickets = (draws.bounds.at(position) - draws.top).exp() * draws.unit;
                        assert!(owned as f64 >= tickets, "{n} {position}: {owned} < {tickets}");
                        rounded += usize::from(tickets.fract() < 0.5 && tickets < 1e3);
                    }
                }
            }
        }
        assert!(rounded > 10, "{rounded}");
    }
}
