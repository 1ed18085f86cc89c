//! Multipliers of the rows for a part of the keys: the dual of the covering program's relaxation.
//!
//! With every row's weights divided by its budget, dropping a set D is affordable if `sum_{i in D} A_j(i) <= 1` in
//! every row, and for multipliers a >= 0
//!
//! `|D| <= sum_j a_j + sum_i max(0, 1 - c_i)`, where `c_i = sum_j a_j A_j(i)`.
//!
//! The right-hand side is convex in a, and is minimised approximately here. The kink at `c_i = 1` is rounded off to a
//! ramp, which gives a second derivative: the inner products of the rows over the keys on the ramp. A step minimises
//! the quadratic model subject to a >= 0, coordinate by coordinate. Nothing here is a proof: users of the multipliers
//! sum again.

use super::bound::crossing;
use crate::error::Error;
use crate::kernels::{Panel, Simd, padded_stride};
use crate::runtime::ambient::asked_each;
use crate::runtime::threads;

/// Most rows that a step changes: those furthest from their target.
const MOST_ROWS: usize = 64;
/// Half width of a ramp that is hardly one.
const SHARP: f32 = 1e-3;
/// Sweeps over the coordinates of a quadratic model.
const SWEEPS: usize = 50;
/// Columns that are mixed and summed together, times the rows.
const BLOCK: usize = 1 << 16;
/// Weights that are worth a task of their own.
pub(super) const SHARED: usize = 1 << 15;
/// A weight in units of its row's budget that is as good as infinite.
const UNAFFORDABLE: f32 = 1e9;
/// Multipliers beyond this do not differ, so that nothing overflows.
const LARGEST_MULTIPLIER: f64 = 1e28;
/// Budgets above this have inverses in f32.
const SMALLEST_BUDGET: f64 = 1e-30;

/// Update rule of multipliers, given the loss of their rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepRule {
    /// By a power of loss over budget: fast if many keys share the mass.
    Power,
    /// By an exponential of the difference: steadier if single keys decide.
    Exponential,
}

/// Some keys with their weights in all rows that set a limit, in units of the rows' budgets.
pub(super) struct Part {
    /// Positions, ascending.
    pub(super) keys: Vec<u32>,
    weights: Vec<f32>,
    stride: usize,
    /// Remainder of each row's budget after the keys outside.
    pub(super) free: Vec<f64>,
    /// Size of the whole budget, in the same units.
    share: f64,
    /// Number of the first keys that stand for several each (whole groups of lanes), and for how many.
    standing: (usize, f32),
    pub(super) threads: usize,
}

/// Rounded dual at a point.
#[derive(Clone, Default)]
struct Point {
    multipliers: Vec<f64>,
    value: f64,
    /// Slopes along the multipliers.
    slopes: Vec<f64>,
    mixed: Vec<f32>,
}

impl Part {
    /// Gathers keys from rows; `inverse` are the inverse budgets.
    pub(super) fn new(
        rows: &[(&[f32], f64)],
        keys: Vec<u32>,
        (free, share): (Vec<f64>, f64),
        threads: usize,
    ) -> Result<Self, Error> {
        let stride = padded_stride(keys.len());
        let mut weights = vec![0.0; rows.len() * stride];
        let gather = |(to, &(row, inverse)): (&mut [f32], &(&[f32], f64))| {
            if inverse < SMALLEST_BUDGET.recip() {
                let inverse = inverse as f32;
                for (to, &key) in to.iter_mut().zip(&keys) {
                    *to = (row[key as usize] * inverse).min(UNAFFORDABLE);
                }
            } else {
                for (to, &key) in to.iter_mut().zip(&keys) {
                    *to = (f64::from(row[key as usize]) * inverse) as f32;
                    *to = to.min(UNAFFORDABLE);
                }
            }
        };
        let each = weights.chunks_exact_mut(stride).zip(rows);
        threads::map(threads, each, SHARED.div_ceil(stride), gather)?;
        Ok(Part { keys, weights, stride, free, share, standing: (0, 1.0), threads })
    }

    /// Lets the first keys stand for several each.
    pub(super) fn standing(self, count: usize, each: f32) -> Self {
        Part { standing: (count, each), ..self }
    }

    /// Returns `true` if some row loses more than twice its budget where the mixture drops what is below 1.
    pub(super) fn is_far(&self, simd: Simd, a: &[f64]) -> Result<bool, Error> {
        let at = self.point(simd, a.to_vec(), SHARP)?;
        Ok(at.slopes.iter().any(|slope| *slope < -1.0))
    }

    /// Updates multipliers multiplicatively, also those that are 0, and returns the best ones. Ends after so many
    /// rounds, or where a round hardly gains.
    pub(super) fn adapt(
        &self,
        simd: Simd,
        mut a: Vec<f64>,
        rounds: usize,
    ) -> Result<Vec<f64>, Error> {
        /// Share of the kept keys that the last round gains.
        const LITTLE: f64 = 1.0 / 1024.0;
        let several = self.standing.0 as f64;
        let counted = self.keys.len() as f64 + several * (f64::from(self.standing.1) - 1.0);
        let little = |a: &[f64]| 1e-3 * a.iter().sum::<f64>() / a.len() as f64;
        let seed = if a.iter().any(|a| *a > 0.0) { little(&a) } else { little(&[1.0]) };
        for a in &mut a {
            *a = a.max(seed);
        }
        // Of the loss to the budget.
        let ratio = |slope: f64| (1.0 - slope).clamp(0.02, 50.0);
        let mut at = self.point(simd, a, SHARP)?;
        let mut power: f64 = 1.0;
        for _ in asked_each(0..rounds) {
            let alpha = (1.0 - power) / (1.0 + power);
            let moved = |(a, slope): (&f64, &f64)| {
                a * (alpha + ratio(*slope)) / (1.0 + alpha * ratio(*slope))
            };
            let next = at.multipliers.iter().zip(&at.slopes).map(moved).collect();
            let next = self.point(simd, next, SHARP)?;
            let gain = at.value - next.value;
            if gain > 0.0 {
                at = next;
            } else {
                power *= 0.5;
            }
            // What is gained is added to the number of keys that are kept.
            if gain >= 0.0 && gain < LITTLE * (counted - at.value) {
                break;
            }
        }
        // Rows that gained nothing from so little set no limit.
        let seed = little(&at.multipliers);
        let idle = |(a, slope): (&f64, &f64)| {
            if *a <= seed && ratio(*slope) < 0.5 { 0.0 } else { *a }
        };
        Ok(at.multipliers.iter().zip(&at.slopes).map(idle).collect())
    }

    fn panel(&self) -> Panel<'_> {
        Panel::new(&self.weights, self.stride)
    }

    /// Returns a row's weights, in units of its budget.
    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.panel().row(row)[..self.keys.len()]
    }

    fn terms(multipliers: &[f64]) -> Vec<(usize, f32)> {
        let terms = multipliers.iter().enumerate().filter(|(_, a)| **a > 0.0);
        terms.map(|(j, a)| (j, a.min(LARGEST_MULTIPLIER) as f32)).collect()
    }

    /// Returns the number of columns that are mixed and summed together.
    fn width(&self) -> usize {
        (BLOCK / self.free.len() / 64).clamp(4, 64) * 64
    }

    /// Returns the weights of the keys in the mixture, and 0 beyond the last.
    fn mixture(&self, simd: Simd, multipliers: &[f64]) -> Vec<f32> {
        let mut mixed = vec![0.0; self.stride];
        simd.mix(self.panel(), 0..self.stride, &Self::terms(multipliers), &mut mixed);
        mixed
    }

    /// Returns the weights of the keys in the mixture.
    pub(super) fn mixed(&self, simd: Simd, multipliers: &[f64]) -> Vec<f32> {
        let mut mixed = self.mixture(simd, multipliers);
        mixed.truncate(self.keys.len());
        mixed
    }

    /// Returns the number of keys on a ramp.
    pub(super) fn on_ramp(&self, simd: Simd, multipliers: &[f64], half: f32) -> usize {
        let mixed = self.mixed(simd, multipliers);
        mixed.iter().filter(|mixed| (**mixed - 1.0).abs() < half).count()
    }

    fn point(&self, simd: Simd, multipliers: Vec<f64>, half: f32) -> Result<Point, Error> {
        let mut mixed = vec![0.0; self.stride];
        let (terms, width) = (Self::terms(&multipliers), self.width());
        // Each block has its own sums, for any assignment to threads; they are added in order.
        let work = |(b, block): (usize, &mut [f32])| {
            let columns = b * width..b * width + block.len();
            let (mut shares, mut losses) = (vec![0.0; block.len()], vec![0.0; self.free.len()]);
            simd.mix(self.panel(), columns.clone(), &terms, block);
            let (several, each) = (self.standing.0.saturating_sub(columns.start), self.standing.1);
            let (first, others) = block.split_at(several.min(block.len()));
            let (of_first, of_others) = shares.split_at_mut(first.len());
            let mut hinges = simd.ramp(others, half, of_others);
            if !first.is_empty() {
                hinges += f64::from(each) * simd.ramp(first, half, of_first);
                for share in of_first {
                    *share *= each;
                }
            }
            simd.losses(self.panel(), columns, &shares, &mut losses);
            (hinges, losses)
        };
        let (mut hinges, mut losses) = (0.0, vec![0.0; self.free.len()]);
        let least = SHARED.div_ceil(width * self.free.len());
        for (hinge, part) in
            threads::map(self.threads, mixed.chunks_mut(width).enumerate(), least, work)?
        {
            hinges += hinge;
            for (sum, loss) in losses.iter_mut().zip(part) {
                *sum += loss;
            }
        }
        let linear: f64 = multipliers.iter().zip(&self.free).map(|(a, free)| a * free).sum();
        let slopes = self.free.iter().zip(&losses).map(|(free, loss)| free - loss).collect();
        Ok(Point { multipliers, value: linear + hinges, slopes, mixed })
    }

    /// Updates multipliers multiplicatively, starting from equal ones: rows that exceed their budget at the mixture's
    /// largest drop gain weight. Faded multipliers become 0, and the mixture is scaled to drop everything below 1.
    pub(super) fn spread(&self, simd: Simd, rounds: usize, rule: StepRule) -> (f64, Vec<f64>) {
        /// Least factor by which rows that lose almost nothing fade.
        const LEAST: f64 = 0.02;
        /// Size, relative to the largest, below which a multiplier is 0 if its row loses less than half its budget.
        const FADED: f64 = 1e-4;
        let mut a = vec![1.0; self.free.len()];
        let mut best = (f64::INFINITY, a.clone(), vec![1.0; a.len()]);
        for round in asked_each(0..rounds) {
            let Some(mixed) = self.scale(simd, &mut a) else { break };
            let shares: Vec<f32> =
                mixed.iter().map(|mixed| f32::from(u8::from(*mixed < 1.0))).collect();
            let mut losses = vec![0.0; self.free.len()];
            simd.losses(self.panel(), 0..self.stride, &shares, &mut losses);
            let dropped: f64 = mixed.iter().map(|mixed| f64::from((1.0 - mixed).max(0.0))).sum();
            let value = dropped + a.iter().sum::<f64>() * self.share;
            if value < best.0 {
                let ratios = losses.iter().map(|loss| loss / self.share).collect();
                best = (value, a.clone(), ratios);
            }
            let rate = 2.0 / (1.0 + round as f64).sqrt();
            let ratios: Vec<f64> = losses.iter().map(|loss| loss / self.share).collect();
            let widest = ratios.iter().map(|r| (r - 1.0).abs()).fold(1e-12, f64::max);
            // (alpha + r)/(1 + alpha r) is r to the power (1 - alpha)/(1 + alpha) near 1, and bounded; (1 + s)/(1 - s)
            // is exp(2 s) near 0.
            let alpha = ((1.0 - rate) / (1.0 + rate)).max(0.0);
            for (a, ratio) in a.iter_mut().zip(ratios) {
                *a *= match rule {
                    StepRule::Power => {
                        (alpha + ratio.max(LEAST)) / (1.0 + alpha * ratio.max(LEAST))
                    }
                    StepRule::Exponential => {
                        let s = (0.5 * rate * (ratio - 1.0) / widest).clamp(-0.9, 0.9);
                        (1.0 + s) / (1.0 - s)
                    }
                };
            }
        }
        let (value, mut a, ratios) = best;
        let largest = a.iter().copied().fold(0.0, f64::max);
        for (a, ratio) in a.iter_mut().zip(ratios) {
            *a = if *a < FADED * largest && ratio < 0.5 { 0.0 } else { *a };
        }
        self.scale(simd, &mut a);
        (value, a)
    }

    /// Scales multipliers so that the mixture drops everything below 1, and returns the mixture.
    fn scale(&self, simd: Simd, a: &mut [f64]) -> Option<Vec<f32>> {
        let mut mixed = self.mixture(simd, a);
        let limit = a.iter().zip(&self.free).map(|(a, free)| a * free.max(0.0)).sum();
        let threshold = crossing(&mixed[..self.keys.len()], limit).threshold;
        if threshold <= 0.0 {
            return None;
        }
        for a in a.iter_mut() {
            *a /= f64::from(threshold);
        }
        for mixed in &mut mixed {
            *mixed /= threshold;
        }
        Some(mixed)
    }

    /// Improves multipliers for a ramp of half width `half`.
    pub(super) fn descend(
        &self,
        simd: Simd,
        multipliers: Vec<f64>,
        half: f32,
        (steps, tolerance): (usize, f64),
    ) -> Result<Vec<f64>, Error> {
        /// Trials along one direction, and the least and largest ratio of one to the previous.
        const TRIALS: usize = 5;
        const SHORTEST: f64 = 0.05;
        const LONGEST: f64 = 0.5;
        let mut at = self.point(simd, multipliers, half)?;
        let mut damping = 1e-3;
        for _ in asked_each(0..steps) {
            let pull = |j: usize| {
                let slope = at.slopes[j];
                if at.multipliers[j] > 0.0 { slope.abs() } else { (-slope).max(0.0) }
            };
            let mut rows: Vec<usize> = (0..self.free.len())
                .filter(|&j| pull(j) > 0.0 || at.multipliers[j] > 0.0)
                .collect();
            if rows.iter().all(|&j| pull(j) <= tolerance * self.share) {
                break;
            }
            rows.sort_by(|&j, &k| pull(k).total_cmp(&pull(j)).then(j.cmp(&k)));
            rows.truncate(MOST_ROWS);
            let mut model = self.curvature(simd, &at.mixed, &rows, half)?;
            let r = rows.len();
            // A mean that rows with a single heavy key on the ramp hardly raise.
            let typical = (0..r).map(|j| model[j * r + j].sqrt()).sum::<f64>() / r as f64;
            for j in 0..r {
                model[j * r + j] += damping * model[j * r + j] + 1e-6 * typical.powi(2) + 1e-30;
            }
            let steps = minimise(&model, &at, &rows);
            let slope: f64 = rows.iter().zip(&steps).map(|(&j, step)| at.slopes[j] * step).sum();
            let (mut length, mut better) = (1.0, None);
            for _ in asked_each(0..TRIALS) {
                let mut moved = at.multipliers.clone();
                for (&j, step) in rows.iter().zip(&steps) {
                    moved[j] = (moved[j] + length * step).max(0.0);
                }
                let point = self.point(simd, moved, half)?;
                let gain = point.value - at.value;
                if gain < 1e-4 * length * slope {
                    better = Some(point);
                    break;
                }
                // The minimum of the parabola through both values with this slope.
                let bottom = -0.5 * slope * length * length / (gain - slope * length);
                length = bottom.max(SHORTEST * length).min(LONGEST * length);
                damping = (10.0 * damping).max(1e-3);
            }
            let Some(point) = better else { break };
            at = point;
            damping = (0.25 * damping).max(1e-6);
        }
        Ok(at.multipliers)
    }

    /// Returns the second derivatives of the rounded dual along some multipliers.
    fn curvature(
        &self,
        simd: Simd,
        mixed: &[f32],
        rows: &[usize],
        half: f32,
    ) -> Result<Vec<f64>, Error> {
        let r = rows.len();
        let mut model = vec![0.0; r * r];
        let ramp: Vec<u32> = (mixed[..self.keys.len()].iter().enumerate())
            .filter(|(_, mixed)| (**mixed - 1.0).abs() < half)
            .map(|(i, _)| i as u32)
            .collect();
        let stride = padded_stride(ramp.len());
        let mut weights = vec![0.0; r * stride];
        // Products of two weights of a key that stands for several count so many times.
        let several = ramp.partition_point(|&i| (i as usize) < self.standing.0);
        let root = self.standing.1.sqrt();
        let gather = |(to, &row): (&mut [f32], &usize)| {
            let from = self.row(row);
            for (to, &i) in to.iter_mut().zip(&ramp) {
                *to = from[i as usize];
            }
            for to in &mut to[..several] {
                *to *= root;
            }
        };
        let each = weights.chunks_exact_mut(stride).zip(rows);
        threads::map(self.threads, each, SHARED.div_ceil(stride), gather)?;
        let panel = Panel::new(&weights, stride);
        let all: Vec<usize> = (0..r).collect();
        let height = 0.5 / f64::from(half);
        let multiply = |(j, row): (usize, &mut [f64])| {
            simd.products(panel.row(j), panel, &all[..=j], &mut row[..=j]);
            for product in &mut row[..=j] {
                *product *= height;
            }
        };
        // Long rows come first, so that no thread ends with one alone.
        let each = model.chunks_exact_mut(r).enumerate().rev();
        threads::map(self.threads, each, SHARED.div_ceil(stride * r.div_ceil(2)), multiply)?;
        for j in 0..r {
            for k in 0..j {
                model[k * r + j] = model[j * r + k];
            }
        }
        Ok(model)
    }
}

/// Returns the steps d that minimise slopes . d + d . model d / 2 with no multiplier below 0, by coordinate sweeps.
fn minimise(model: &[f64], at: &Point, rows: &[usize]) -> Vec<f64> {
    /// Share of the first move at which sweeps end.
    const SETTLED: f64 = 1e-3;
    /// Largest growth of a multiplier, relative to itself or to the mean: the model is local.
    const FARTHEST: f64 = 1.0;
    let r = rows.len();
    let mean = rows.iter().map(|&j| at.multipliers[j]).sum::<f64>() / r as f64;
    let mut steps = vec![0.0; r];
    let mut slopes: Vec<f64> = rows.iter().map(|&j| at.slopes[j]).collect();
    let mut first = 0.0;
    for sweep in 0..SWEEPS {
        let mut moved: f64 = 0.0;
        for j in 0..r {
            let row = &model[j * r..(j + 1) * r];
            let here = at.multipliers[rows[j]];
            let most = FARTHEST * here.max(mean);
            let step = (steps[j] - slopes[j] / row[j]).min(most).max(-here) - steps[j];
            if step != 0.0 {
                steps[j] += step;
                for (slope, curvature) in slopes.iter_mut().zip(row) {
                    *slope += step * curvature;
                }
                moved = moved.max(step.abs() * row[j].sqrt());
            }
        }
        if sweep == 0 {
            first = moved;
        }
        if moved <= SETTLED * first {
            break;
        }
    }
    steps
}
