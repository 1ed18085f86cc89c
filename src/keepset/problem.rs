//! Covering program of some rows: the weights of all columns in them, and the passes over the weights.

use bytemuck::allocation::try_zeroed_vec;

use super::frame::Frame;
use super::source::Source;
use crate::error::Error;
use crate::kernels::{MIXED, Panel, SUMMED, Simd, padded_stride};
use crate::numerics::certified_sums::{ErrorBound, SplitSums};
use crate::runtime::memory::{check_memory, room};
use crate::runtime::threads;
use crate::select::{Effort, RowWeights};

/// Relative error of a stored weight: three roundings to f32.
const STORED: f64 = 1.0 / 4_194_304.0;
/// Share of the budget that the lower bound leaves to an auditor's own rounding.
const AUDIT_MARGIN: f64 = 1e-6;
/// Weights mixed and summed together: they stay in the second-level cache meanwhile.
const BLOCK: usize = 1 << 16;
/// Lower bound of a set in which not every key counts.
pub(super) const SMALL: usize = 2000;
/// Inverse relative distances from the lower bound at which a search ends, fast or not; and the bound from which it
/// may.
const CLOSE: [(usize, usize); 2] = [(50, 0), (200, SMALL)];
/// Error of a product of f32 numbers, or of a step of their sum, where it underflows.
const UNDERFLOW: f64 = f32::MIN_POSITIVE as f64 * f32::EPSILON as f64;
/// Relative error of a factor that stands for a weight of a row: a rounding to f32, and three to f64.
const FACTOR: f64 = 1.01 / 16_777_216.0;

/// Program of some rows, with weights laid out row by row.
pub(super) struct Problem<'a> {
    pub(super) frame: &'a Frame,
    pub(super) simd: Simd,
    pub(super) threads: usize,
    pub(super) stride: usize,
    /// Numbers of the rows.
    pub(super) listed: Vec<usize>,
    /// Weights relative to each row's largest, (rows, stride); 0 for a masked column and beyond the last.
    weights: Vec<f32>,
    /// Computed sum of each row, 0 for a row without visible columns.
    pub(super) totals: Vec<f64>,
    /// Budgets that the search uses.
    pub(super) aims: Vec<f64>,
    /// Excess over 1 of the divisor of each budget, so that the final set can be certified.
    pub(super) margin: Vec<f64>,
    /// Slack of a ratio of computed sums.
    slack: Vec<ErrorBound>,
    /// Multipliers to continue from.
    pub(super) multipliers: Vec<f64>,
    /// `true` to spend time on exchanges.
    pub(super) thorough: bool,
    pub(super) effort: Effort,
}

/// Row of a mixture: its reported weight, and the corresponding factor of its stored weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Term {
    pub(super) row: usize,
    weight: f32,
    pub(super) factor: f32,
}

/// A set, with a lower bound on the size of any set.
#[derive(Clone)]
pub(super) struct Best {
    pub(super) kept: Vec<bool>,
    pub(super) size: usize,
    pub(super) lower_bound: usize,
    /// Mixture of normalised rows at the best lower bound: rows of the program, and their weights.
    pub(super) mixture: Vec<(usize, f32)>,
}

impl<'a> Problem<'a> {
    /// Returns a program without rows.
    pub(super) fn new(frame: &'a Frame, threads: usize) -> Result<Self, Error> {
        let stride = padded_stride(frame.columns());
        check_memory("scores", stride, 32)?;
        Ok(Problem {
            frame,
            simd: Simd::current()?,
            threads,
            stride,
            listed: Vec::new(),
            weights: Vec::new(),
            totals: Vec::new(),
            aims: Vec::new(),
            margin: Vec::new(),
            slack: Vec::new(),
            multipliers: Vec::new(),
            thorough: false,
            effort: Effort::Default,
        })
    }

    /// Weighs more rows.
    pub(super) fn admit<S: Source>(&mut self, source: &S, rows: &[usize]) -> Result<(), Error> {
        let all = self.listed.len() + rows.len();
        // Per row its weights and some numbers of 8 bytes; per part of a pass the loss of every row.
        let bytes = self.stride.saturating_mul(size_of::<f32>());
        check_memory("scores", all, bytes.saturating_add(192))?;
        let parts = self.stride.div_ceil(Self::width(all)).saturating_add(4);
        check_memory("scores", all.saturating_mul(parts), 2 * size_of::<f64>())?;
        let start = self.weights.len();
        let count = rows.len() * self.stride;
        if start == 0 {
            // Pages that nobody has written to: the threads that weigh do.
            self.weights = try_zeroed_vec(count)
                .map_err(|()| Error::NoMemory { argument: "scores", bytes: 4 * count })?;
        } else {
            room("scores", &mut self.weights, count)?;
            self.weights.resize(start + count, 0.0);
        }
        let to = &mut self.weights[start..];
        let found = match source.weigh(rows, self.stride, to) {
            Ok(found) => found,
            Err(error) => {
                self.weights.truncate(start);
                return Err(error);
            }
        };
        for (slots, row) in to.chunks_exact_mut(self.stride).zip(&found) {
            if !row.whole {
                for weight in slots {
                    *weight = weight.max(0.0);
                }
            }
        }
        let n = self.frame.columns() as f64;
        for (&row, RowWeights { total, slack, .. }) in rows.iter().zip(&found) {
            self.listed.push(row);
            self.totals.push(*total);
            self.aims.push(self.frame.aim(source.eps(row)));
            self.margin.push((1.0 + slack.select) * (1.0 + STORED) - 1.0 + n * f64::EPSILON);
            self.slack.push(*slack);
            self.multipliers.push(0.0);
        }
        Ok(())
    }

    /// Removes the rows not in `keep`.
    pub(super) fn retain(&mut self, keep: &[bool]) {
        let mut to = 0;
        for from in (0..self.rows()).filter(|&j| keep[j]) {
            self.weights
                .copy_within(from * self.stride..(from + 1) * self.stride, to * self.stride);
            self.listed[to] = self.listed[from];
            self.slack[to] = self.slack[from];
            for numbers in
                [&mut self.totals, &mut self.aims, &mut self.margin, &mut self.multipliers]
            {
                numbers[to] = numbers[from];
            }
            to += 1;
        }
        self.listed.truncate(to);
        self.weights.truncate(to * self.stride);
        for numbers in [&mut self.totals, &mut self.aims, &mut self.margin, &mut self.multipliers] {
            numbers.truncate(to);
        }
        self.slack.truncate(to);
    }

    pub(super) fn rows(&self) -> usize {
        self.listed.len()
    }

    /// Returns `true` if a set is so close to a bound that the search ends.
    pub(super) fn is_enough(&self, size: usize, lower_bound: usize) -> bool {
        let (inverse, from) = match self.effort {
            Effort::Fast => CLOSE[0],
            Effort::Default => CLOSE[1],
            Effort::Thorough => (1, usize::MAX),
        };
        let most = if lower_bound < from { 0 } else { lower_bound / inverse };
        size <= lower_bound + most
    }

    /// Returns the number of columns in one part of a pass over that many rows.
    fn width(rows: usize) -> usize {
        (BLOCK / rows.max(1) / 64).clamp(4, 64) * 64
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.weights[row * self.stride..][..self.stride]
    }

    /// Returns the set of all visible columns.
    pub(super) fn all_visible(&self) -> Best {
        let size = self.frame.visible.iter().filter(|v| **v).count();
        let lower_bound = self.frame.forced_count;
        Best { kept: self.frame.visible.clone(), size, lower_bound, mixture: Vec::new() }
    }

    /// Returns the terms of a mixture of rows, given factors of their stored weights. The reported weights are f32
    /// numbers, the largest being 1, and the terms are made of these.
    pub(super) fn terms(&self, factors: impl Iterator<Item = (usize, f64)>) -> Vec<Term> {
        let weights: Vec<(usize, f64)> =
            factors.map(|(row, factor)| (row, factor * self.totals[row])).collect();
        let largest = weights.iter().map(|(_, weight)| *weight).fold(0.0, f64::max);
        if !(largest > 0.0 && largest.is_finite()) {
            return Vec::new();
        }
        (weights.into_iter())
            .map(|(row, weight)| {
                let weight = (weight / largest) as f32;
                let factor = (f64::from(weight) * largest / self.totals[row]) as f32;
                Term { row, weight, factor }
            })
            .filter(|t| t.weight >= f32::MIN_POSITIVE && t.factor >= f32::MIN_POSITIVE)
            .collect()
    }

    /// Returns an upper bound on the loss of a mixture of stored weights whose rows keep to budgets.
    ///
    /// The loss of each real row is within its slack of the computed one. Added are the rounding of weights and factors
    /// to f32, of the mixing, and of the sums over columns and rows, and an allowance for an auditor's own arithmetic.
    pub(super) fn limit(&self, terms: &[Term], eps: &[f64]) -> f64 {
        let budget: f64 = (terms.iter())
            .map(|t| {
                f64::from(t.factor)
                    * (eps[t.row] * self.totals[t.row])
                    * (1.0 + self.slack[t.row].certify)
            })
            .sum();
        let rounding = (self.rows() + self.frame.columns() + 8) as f64 * f64::EPSILON;
        let relative = STORED + MIXED + SUMMED + 2.0 * FACTOR + 2.0 * rounding + AUDIT_MARGIN;
        let underflow = 2.0 * UNDERFLOW * self.rows() as f64 * self.frame.columns() as f64;
        budget * (1.0 + relative) + underflow
    }

    /// Returns the largest share of its budget that each column takes from some of the rows, whose inverses are given.
    pub(super) fn heaviest(&self, rows: &[usize], inverses: &[f64]) -> Result<Vec<f32>, Error> {
        let width = Self::width(rows.len());
        let mut heaviest = vec![0.0; self.stride];
        let work = |(b, heaviest): (usize, &mut [f32])| {
            for (&row, inverse) in rows.iter().zip(inverses) {
                let inverse = inverse.min(f64::from(f32::MAX)) as f32;
                let weights = &self.row(row)[b * width..][..heaviest.len()];
                for (heaviest, weight) in heaviest.iter_mut().zip(weights) {
                    *heaviest = (weight * inverse).max(*heaviest);
                }
            }
        };
        threads::map(self.threads, heaviest.chunks_mut(width).enumerate(), 1, work)?;
        Ok(heaviest)
    }

    /// Returns the rows of the program in a mixture, with their weights.
    pub(super) fn mixture(terms: &[Term]) -> Vec<(usize, f32)> {
        terms.iter().map(|term| (term.row, term.weight)).collect()
    }

    /// Mixes all columns, with infinity in place of those that do not compete; without terms, `mixed` is left
    /// unchanged. Sums the loss of each row to the columns below `low`, without those in `except` (if not empty).
    pub(super) fn sweep(
        &self,
        terms: Option<&[Term]>,
        low: f32,
        mixed: &mut [f32],
        except: &[bool],
    ) -> Result<Vec<f64>, Error> {
        let width = Self::width(self.rows());
        let panel = Panel::new(&self.weights, self.stride);
        let n = self.frame.columns();
        let factors: Option<Vec<(usize, f32)>> =
            terms.map(|terms| terms.iter().map(|term| (term.row, term.factor)).collect());
        let work = |(b, mixed): (usize, &mut [f32])| {
            let columns = b * width..b * width + mixed.len();
            if let Some(factors) = &factors {
                self.simd.mix(panel, columns.clone(), factors, mixed);
                for (i, mixed) in columns.clone().zip(mixed.iter_mut()) {
                    if i >= n || !self.frame.competes(i) {
                        *mixed = f32::INFINITY;
                    }
                }
            }
            let mut losses = vec![0.0; self.rows()];
            if low > 0.0 {
                let mut shares: Vec<f32> =
                    mixed.iter().map(|mixed| f32::from(u8::from(*mixed < low))).collect();
                if !except.is_empty() {
                    for (share, &except) in shares.iter_mut().zip(&except[columns.clone()]) {
                        *share = if except { 0.0 } else { *share };
                    }
                }
                self.simd.losses(panel, columns, &shares, &mut losses);
            }
            losses
        };
        let columns = mixed.chunks_mut(width).enumerate();
        let mut losses = vec![0.0; self.rows()];
        for part in threads::map(self.threads, columns, 1, work)? {
            for (sum, loss) in losses.iter_mut().zip(part) {
                *sum += loss;
            }
        }
        Ok(losses)
    }

    /// Sums each row's weights over the columns that satisfy a predicate.
    fn sums(&self, within: impl Fn(usize) -> bool) -> Result<Vec<f64>, Error> {
        let mut marks: Vec<f32> =
            (0..self.stride).map(|i| f32::from(u8::from(!within(i)))).collect();
        self.sweep(None, 0.5, &mut marks, &[])
    }

    /// Returns the approximate loss of each row to a set, in units of its budget.
    pub(super) fn ratios(&self, kept: &[bool]) -> Result<Vec<f64>, Error> {
        let n = self.frame.columns();
        let losses = self.sums(|i| i < n && self.frame.visible[i] && !kept[i])?;
        let losses = losses.iter().zip(&self.totals).zip(&self.aims);
        let ratio = |((loss, total), aim): ((&f64, &f64), &f64)| {
            loss / (total * aim).max(f64::MIN_POSITIVE)
        };
        Ok(losses.map(ratio).collect())
    }

    /// Returns the lower and upper end of each row's tail mass that its stored weights prove. The weights were made in
    /// f64.
    ///
    /// A weight is within [`STORED`] of the computed one, a sum of weights within [`SUMMED`] and the f64 rounding of
    /// its parts. Where a weight is 0, the real one may be as large as the smallest f32 number (as 2^-1021 in f64, for
    /// which a slack allows).
    pub(super) fn masses(
        &self,
        kept: &[bool],
        block_size: usize,
    ) -> Result<Vec<(f64, f64)>, Error> {
        let n = self.frame.columns();
        let gone = |i: usize| i < n && self.frame.visible[i] && !kept[i];
        let (tails, heads) = (self.sums(gone)?, self.sums(|i| i < n && kept[i])?);
        let dropped = (0..n).filter(|&i| gone(i)).count() * block_size;
        let kept = kept.iter().filter(|kept| **kept).count() * block_size;
        let more = STORED + SUMMED + (n + self.rows() + 8) as f64 * f64::EPSILON;
        let flush = 2f64.powi(1021 - 125);
        let each = tails.iter().zip(&heads).zip(&self.slack).zip(&self.totals);
        let ends = each.map(|(((&tail, &head), slack), &total)| {
            if total == 0.0 {
                return (0.0, 0.0);
            }
            let slack = slack.widened(more);
            let split = SplitSums { tail, dropped, head, kept };
            let upper = split.upper(slack.certify, slack.flush * flush);
            (split.lower(slack.certify, slack.flush * flush).min(upper), upper)
        });
        Ok(ends.collect())
    }
}
