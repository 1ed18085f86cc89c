//! The covering program: the weights of all keys in all rows, and the passes over them.

use crate::error::{Error, Place};
use crate::interrupt;
use crate::kernels::{MIXED, Panel, SUMMED, Simd, padded_stride};
use crate::memory::check_memory;
use crate::rows::{PerRow, Scores};
use crate::select::{self, HIDDEN, Options, RowWeights, allowed_keys};
use crate::threads;

/// The budget that a row without one is given when `max_keep` makes it lose something.
const LEAST_BUDGET: f64 = 1e-12;
/// Relative error of a stored weight: two roundings to f32.
const STORED: f64 = 1.0 / 4_194_304.0;
/// Scores weighed between two checks for an interrupt.
const PORTION: usize = 1 << 24;
/// What the lower bound leaves to an auditor's own rounding, relative to the budget.
const AUDIT_MARGIN: f64 = 1e-6;
/// Weights that are mixed and summed together: they stay in the second-level cache meanwhile.
const BLOCK: usize = 1 << 16;
/// By how much a product of f32 numbers, or a step of a sum of such, may be off where it underflows.
const UNDERFLOW: f64 = f32::MIN_POSITIVE as f64 * f32::EPSILON as f64;

/// The covering program, with weights laid out row by row.
pub(super) struct Problem<'a> {
    pub(super) scores: &'a Scores<'a>,
    pub(super) simd: Simd,
    pub(super) threads: usize,
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) stride: usize,
    /// Weights relative to each row's largest, (rows, stride); 0 for a masked key and beyond the last.
    weights: Vec<f32>,
    /// Computed sum of each row, 0 for a row without visible keys.
    pub(super) totals: Vec<f64>,
    pub(super) eps: Vec<f64>,
    /// The budgets that the search works with.
    pub(super) aims: Vec<f64>,
    /// By how much each budget is divided, beyond 1, so that the certificate of the final set goes through.
    pub(super) margin: Vec<f64>,
    /// The largest slack of a ratio of computed sums, over the rows.
    slack: f64,
    /// Keys that at least one row sees.
    pub(super) visible: Vec<bool>,
    pub(super) forced: Vec<bool>,
    pub(super) forced_count: usize,
    /// Keys that are visible and not forced.
    pub(super) competing: usize,
    pub(super) max_keep: usize,
}

/// A set, and what proves that none can be much smaller.
#[derive(Clone)]
pub(super) struct Best {
    pub(super) kept: Vec<bool>,
    pub(super) size: usize,
    pub(super) lower_bound: usize,
    /// The mixture of normalised rows at the best lower bound.
    pub(super) weights: Vec<f64>,
    /// Multipliers of the rows that set a limit, to go on from.
    pub(super) multipliers: Option<Vec<f64>>,
}

impl<'a> Problem<'a> {
    pub(super) fn new(
        scores: &'a Scores<'a>,
        eps: PerRow<'_, f64>,
        options: &Options,
        threads: usize,
    ) -> Result<Self, Error> {
        let (rows, n) = (scores.rows(), scores.longest());
        let stride = padded_stride(n);
        // Of each row its weights and some numbers of 8 bytes; of each key flags, positions and mixtures.
        let weights = stride.saturating_mul(size_of::<f32>());
        check_memory("scores", rows, weights.saturating_add(192))?;
        check_memory("scores", stride, 32)?;
        // Of each part of a pass over all keys what every row loses.
        let parts = stride.div_ceil(Self::width(rows)).saturating_add(4);
        check_memory("scores", rows.saturating_mul(parts), 2 * size_of::<f64>())?;
        let eps: Vec<f64> = (0..rows).map(|row| eps.of(row)).collect();
        let mut weights = vec![0.0; rows * stride];
        let mut all: Vec<RowWeights> = Vec::with_capacity(rows);
        let portion = (PORTION / stride).max(1);
        for (p, slots) in weights.chunks_mut(portion * stride).enumerate() {
            let work =
                |(i, slot): (_, &mut [f32])| select::weigh_row(scores, p * portion + i, slot);
            let slots = slots.chunks_mut(stride).enumerate();
            for part in threads::map(threads, slots, 1, work) {
                all.push(part?);
            }
            interrupt::check()?;
        }
        let mut visible = vec![false; n];
        // What rows that may lose nothing see.
        let mut lossless = vec![false; n];
        for ((slots, row), &eps) in weights.chunks_exact_mut(stride).zip(&all).zip(&eps) {
            if row.whole {
                visible.fill(true);
                if eps == 0.0 {
                    lossless.fill(true);
                }
                continue;
            }
            for ((weight, visible), lossless) in
                slots.iter_mut().zip(&mut visible).zip(&mut lossless)
            {
                let seen = *weight != HIDDEN;
                *visible |= seen;
                *lossless |= seen && eps == 0.0;
                *weight = weight.max(0.0);
            }
        }
        let positions: Vec<usize> = (0..n).filter(|&i| visible[i]).collect();
        let first = options.keep_first.min(positions.len());
        let last = options.keep_last.min(positions.len());
        let mut forced = vec![false; n];
        for &i in positions[..first].iter().chain(&positions[positions.len() - last..]) {
            forced[i] = true;
        }
        let count = |flags: &[bool]| flags.iter().filter(|flag| **flag).count();
        let max_keep = allowed_keys(options, positions.len(), 0, scores, 0)?;
        if count(&forced) > max_keep {
            let place = Place(vec![]);
            return Err(Error::ForcedOverMax { place, forced: count(&forced), max_keep });
        }
        let demanded: Vec<bool> = forced.iter().zip(&lossless).map(|(a, b)| a | b).collect();
        // Where `max_keep` forbids what those rows ask for, they take part with a budget that is next to nothing.
        let aims = if count(&demanded) <= max_keep {
            forced = demanded;
            eps.clone()
        } else {
            eps.iter().map(|e| if *e == 0.0 { LEAST_BUDGET } else { *e }).collect()
        };
        let slack = all.iter().map(|row| row.slack.certify).fold(0.0, f64::max);
        let margin = (all.iter())
            .map(|row| (1.0 + row.slack.select) * (1.0 + STORED) - 1.0 + n as f64 * f64::EPSILON)
            .collect();
        let totals = all.iter().map(|row| row.total).collect();
        let forced_count = count(&forced);
        let competing = (0..n).filter(|&i| visible[i] && !forced[i]).count();
        Ok(Problem {
            scores,
            simd: Simd::current()?,
            threads,
            rows,
            n,
            stride,
            weights,
            totals,
            eps,
            aims,
            margin,
            slack,
            visible,
            forced,
            forced_count,
            competing,
            max_keep,
        })
    }

    /// How many keys one part of a pass over that many rows takes.
    fn width(rows: usize) -> usize {
        (BLOCK / rows.max(1) / 64).clamp(4, 64) * 64
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.weights[row * self.stride..][..self.stride]
    }

    pub(super) fn competes(&self, i: usize) -> bool {
        self.visible[i] && !self.forced[i]
    }

    pub(super) fn all_visible(&self) -> Best {
        let size = self.visible.iter().filter(|v| **v).count();
        let weights = vec![0.0; self.rows];
        Best { kept: self.visible.clone(), size, lower_bound: 0, weights, multipliers: None }
    }

    /// What a mixture of computed weights cannot lose if its rows keep to their budgets, which sum to `budget`.
    ///
    /// What each real row loses is within the slack of what the computed one loses; beside that there are the weights'
    /// rounding to f32, the mixing, the sums over keys and rows, and what an auditor's own arithmetic may add.
    pub(super) fn limit(&self, budget: f64) -> f64 {
        let rounding = (self.rows + self.n + 8) as f64 * f64::EPSILON;
        let relative = STORED + MIXED + SUMMED + 2.0 * rounding + AUDIT_MARGIN;
        let underflow = 2.0 * UNDERFLOW * self.rows as f64 * self.n as f64;
        budget * (1.0 + self.slack) * (1.0 + relative) + underflow
    }

    /// Factors of rows of weights as factors of normalised rows, the largest being 1.
    pub(super) fn normalised(&self, terms: &[(usize, f32)]) -> Vec<f64> {
        let mut weights = vec![0.0; self.rows];
        for &(row, factor) in terms {
            weights[row] = f64::from(factor) * self.totals[row];
        }
        let largest = weights.iter().copied().fold(0.0, f64::max);
        if largest > 0.0 {
            for weight in &mut weights {
                *weight /= largest;
            }
        }
        weights
    }

    /// Mixes all keys, with infinity in place of those that do not compete (or leaves `mixed` as it is, without terms), and
    /// sums what each row loses to the keys that are below `low` in it, leaving out those in `except` (if not empty).
    pub(super) fn sweep(
        &self,
        terms: Option<&[(usize, f32)]>,
        low: f32,
        mixed: &mut [f32],
        except: &[bool],
    ) -> Vec<f64> {
        let width = Self::width(self.rows);
        let panel = Panel::new(&self.weights, self.stride);
        let work = |(b, mixed): (usize, &mut [f32])| {
            let columns = b * width..b * width + mixed.len();
            if let Some(terms) = terms {
                self.simd.mix(panel, columns.clone(), terms, mixed);
                for (i, mixed) in columns.clone().zip(mixed.iter_mut()) {
                    if i >= self.n || !self.competes(i) {
                        *mixed = f32::INFINITY;
                    }
                }
            }
            let mut losses = vec![0.0; self.rows];
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
        let mut losses = vec![0.0; self.rows];
        for part in threads::map(self.threads, columns, 1, work) {
            for (sum, loss) in losses.iter_mut().zip(part) {
                *sum += loss;
            }
        }
        losses
    }
}
