//! Tail masses of rows from draws.

use super::confidence::{Confidence, Method, check_delta, mean_bounds};
use super::importance::Importance;
use super::population::Population;
use super::sample::ROUNDED;
use super::uniform::Uniform;
use crate::builders::builders;
use crate::error::Error;
use crate::numerics::random::Random;
use crate::rows::{Keep, Kind, PerRow, Scores, StoredMask};
use crate::runtime::memory::{check_memory, check_memory_in_each, list, room};
use crate::runtime::threads;

/// Options of [`tail_mass`].
///
/// ```
/// use certk_rs::montecarlo::{Method, TailOptions};
/// let options = TailOptions::new(0.01, 500).method(Method::Bernstein).seed(7).all_rows(true);
/// assert_eq!((options.draws, options.method, options.seed), (500, Method::Bernstein, 7));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TailOptions {
    /// Failure probability of each end of each row's interval, in (0, 1).
    pub delta: f64,
    /// `true` if delta is for all rows together; each row then gets an equal share.
    pub all_rows: bool,
    /// Largest number of draws per row.
    pub draws: usize,
    /// Method of the confidence bounds.
    pub method: Method,
    /// Seed of the random numbers, which depend on it and on the row.
    pub seed: u64,
    /// Budgets, one or one per row: drawing stops once they are decided. Only with [`Method::Betting`].
    pub eps: Option<Vec<f64>>,
    /// Number of threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

impl TailOptions {
    /// Returns options for bounds by betting that fail with probability `delta` at each end, from at most `draws` draws
    /// per row, with seed 0.
    #[must_use]
    pub fn new(delta: f64, draws: usize) -> Self {
        let (method, seed) = (Method::Betting, 0);
        TailOptions { delta, all_rows: false, draws, method, seed, eps: None, threads: None }
    }
}

builders! { TailOptions {
    /// Divides delta among all rows, or gives it to each.
    all_rows(together: bool) = together;
    /// Sets the method of the confidence bounds.
    method(method: Method) = method;
    /// Sets the seed of the random numbers.
    seed(seed: u64) = seed;
    /// Sets budgets, one or one per row: drawing stops once they are decided. Only with [`Method::Betting`].
    eps(budgets: impl Into<Option<Vec<f64>>>) = budgets.into();
    /// Sets the number of threads; `None` for all available.
    threads(threads: impl Into<Option<usize>>) = threads.into();
} }

/// Estimate of the tail mass of each row.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TailEstimate {
    /// Lower bound: exceeds the real tail mass with probability at most delta.
    pub lower: Vec<f64>,
    /// Upper bound: is below the real tail mass with probability at most delta.
    pub upper: Vec<f64>,
    /// Plain estimate, without a guarantee.
    pub point: Vec<f64>,
    /// Draws used.
    pub draws: Vec<i64>,
}

/// Interval of one row.
#[derive(Clone, Copy)]
struct Estimate {
    lower: f64,
    upper: f64,
    point: f64,
    draws: usize,
}

/// First number of draws at which an early stop is considered; it doubles from there.
const FIRST_LOOK: usize = 32;
const MOST_DRAWS: usize = u32::MAX as usize;
/// A tail's sum (the row's largest weight being 1) below which nothing is claimed of it: 2^-960.
const LEAST_TAIL: f64 = 1.026_134_200_324_594_1e-289;
/// Entries per task.
const TASK: usize = 1 << 15;
/// Least cost of a row in entries: its estimate waits for the rest of the portion.
const LEAST: usize = 64;

/// Bounds the tail mass of each row from a few of its tail's scores.
///
/// For any scores, each end of each row's interval is wrong with probability at most `delta` over the draws (for all
/// rows together with `all_rows`), provided that the kept set was fixed before. The kept mass is computed in full, and
/// its rounding is included in the interval.
///
/// Without `upper_bounds` the tail is drawn uniformly without replacement. The row is read to find the tail's largest
/// weight, but only kept and drawn scores are exponentiated. `upper_bounds` are rows of the same shape in natural-log
/// units, each entry no smaller than `scale` times the score beside it. With them draws are by importance, with
/// replacement, and only kept and drawn scores are read.
///
/// ```
/// use certk_rs::{Keep, Options, Scores, certify, montecarlo::{TailOptions, tail_mass}, select};
/// let row: Vec<f32> = (0..1000).map(|i| (i * i % 97) as f32 / 24.0).collect();
/// let scores = Scores::new(&row, &[1, 1000])?;
/// let set = select(&scores, &[0.3], &Options::new())?;
/// let found = tail_mass(&scores, &Keep::from(&set), None, &TailOptions::new(0.001, 200))?;
/// assert!(found.lower[0] <= set.tail_mass_upper[0] && set.tail_mass_lower[0] <= found.upper[0]);
/// assert!(found.upper[0] < 0.5 && found.draws[0] <= 200);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Option`] for delta, draws; [`Error::Draws`]; [`Error::UpperBound`], [`Error::UpperBoundBroken`];
/// [`Error::Conflict`] for `upper_bounds` with probabilities or an additive mask, or `eps` with another method than
/// betting; the error of invalid scores or kept sets.
pub fn tail_mass(
    scores: &Scores<'_>,
    keep: &Keep<'_>,
    upper_bounds: Option<&Scores<'_>>,
    options: &TailOptions,
) -> Result<TailEstimate, Error> {
    let _modes = threads::default_floats();
    let rows = scores.rows();
    check_memory("scores", rows, 4 * size_of::<f64>())?;
    let mut result = TailEstimate::room(rows)?;
    let (delta, budgets) = check(options, scores)?;
    keep.check(scores)?;
    if let Some(bounds) = upper_bounds {
        check_bounds(scores, bounds)?;
    }
    let n = scores.longest().max(1);
    let threads = threads::count(options.threads, rows.saturating_mul(n) > 2 * TASK)?;
    check_memory_in_each("scores", threads, (rows, n), 1)?;
    // A single row is itself split over threads.
    let inside = if rows == 1 { threads } else { 1 };
    let one = |row: usize| {
        let random = Random::new(options.seed, row as u64);
        let eps = budgets.map(|eps| eps.of(row));
        let plan = Plan { options, delta, eps };
        if let Some(bounds) = upper_bounds {
            let (mut draws, drawn_from) =
                Importance::new(scores, bounds, keep, row, random, inside)?;
            return plan.estimate(&drawn_from, |count, values| draws.draw(count, values));
        }
        let (mut draws, drawn_from) = Uniform::new(scores, keep, row, random)?;
        if drawn_from.kept > 0 && drawn_from.dropped > 0 && options.draws > drawn_from.dropped {
            let place = scores.place(row, None);
            return Err(Error::Draws { place, draws: options.draws, items: drawn_from.dropped });
        }
        plan.estimate(&drawn_from, |count, values| {
            room("draws", values, count)?;
            draws.draw(count, values);
            Ok(())
        })
    };
    let sizes = (((TASK << 6) / n.max(LEAST)).max(threads), (TASK / n).max(1));
    threads::in_portions(threads, rows, sizes, one, |estimate| result.push(estimate))?;
    Ok(result)
}

impl TailEstimate {
    /// Makes room for the estimates of `rows` rows.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    fn room(rows: usize) -> Result<Self, Error> {
        Ok(TailEstimate {
            lower: list("scores", rows)?,
            upper: list("scores", rows)?,
            point: list("scores", rows)?,
            draws: list("scores", rows)?,
        })
    }

    fn push(&mut self, estimate: Estimate) {
        self.lower.push(estimate.lower);
        self.upper.push(estimate.upper);
        self.point.push(estimate.point);
        self.draws.push(estimate.draws as i64);
    }
}

struct Plan<'a> {
    options: &'a TailOptions,
    /// Share of delta of a row.
    delta: f64,
    eps: Option<f64>,
}

impl Plan<'_> {
    fn estimate(
        &self,
        drawn_from: &Population,
        mut draw: impl FnMut(usize, &mut Vec<f64>) -> Result<(), Error>,
    ) -> Result<Estimate, Error> {
        // Nothing is lost, in an empty row too; or everything, if a key with a bound is known to have a score.
        let seen = drawn_from.items.is_some();
        if drawn_from.dropped == 0 || (drawn_from.kept == 0 && seen) {
            let mass = if drawn_from.dropped == 0 { 0.0 } else { 1.0 };
            return Ok(Estimate { lower: mass, upper: mass, point: mass, draws: 0 });
        }
        let TailOptions { draws, method, .. } = *self.options;
        let mut values = Vec::new();
        let mut wanted = if self.eps.is_some() { FIRST_LOOK.min(draws) } else { draws };
        loop {
            draw(wanted - values.len(), &mut values)?;
            let estimate = self.judge(drawn_from, method, &values)?;
            let decided = self.eps.is_some_and(|eps| estimate.upper <= eps || estimate.lower > eps);
            if decided || wanted == draws {
                return Ok(estimate);
            }
            wanted = (2 * wanted).min(draws);
        }
    }

    fn judge(
        &self,
        drawn_from: &Population,
        method: Method,
        values: &[f64],
    ) -> Result<Estimate, Error> {
        let draws = values.len();
        if drawn_from.kept == 0 {
            // Everything is lost if there is any weight: a drawn weight proves it.
            let mass = f64::from(u8::from(values.iter().any(|value| *value > 0.0)));
            return Ok(Estimate { lower: mass, upper: 1.0, point: mass, draws });
        }
        let (population, horizon) = (drawn_from.items, self.options.draws);
        let confidence = Confidence { method, delta: self.delta, population, horizon };
        let (low, high) =
            if drawn_from.equal { (1.0, 1.0) } else { mean_bounds(values, &confidence)? };
        let slack = drawn_from.slack.widened(ROUNDED - 1.0);
        let upper = drawn_from.split(high).upper(slack.certify, slack.flush);
        let mut least = drawn_from.split(low);
        if least.tail < LEAST_TAIL {
            // Near the subnormal numbers products may have been rounded up by any factor.
            least.tail = 0.0;
        }
        let lower = least.lower(slack.certify, slack.flush).min(upper);
        let mean = values.iter().sum::<f64>() / draws as f64;
        let tail = drawn_from.unit * mean;
        // Nothing against nothing, if bounds are hundreds of nats too high.
        let point = if tail > 0.0 { tail / (tail + drawn_from.head) } else { 0.0 };
        Ok(Estimate { lower, upper, point: point.clamp(lower, upper), draws })
    }
}

/// Checks the options; returns each row's share of delta, and the budgets.
fn check<'a>(
    options: &'a TailOptions,
    scores: &Scores<'_>,
) -> Result<(f64, Option<PerRow<'a, f64>>), Error> {
    check_delta(options.delta)?;
    if !(1..=MOST_DRAWS).contains(&options.draws) {
        return Err(Error::Option {
            argument: "draws",
            value: options.draws.to_string(),
            problem: "it must lie between 1 and 2^32 - 1",
        });
    }
    let budgets = options.eps.as_deref().map(|eps| scores.budgets(eps)).transpose()?;
    if budgets.is_some() && options.method != Method::Betting {
        return Err(Error::Conflict {
            first: "eps",
            second: "this method",
            remedy: "only the method \"betting\" may be looked at before all draws are made",
        });
    }
    if !options.all_rows || scores.rows() < 2 {
        return Ok((options.delta, budgets));
    }
    let share = (options.delta / scores.rows() as f64).next_down();
    check_delta(share)?;
    Ok((share, budgets))
}

fn check_bounds(scores: &Scores<'_>, bounds: &Scores<'_>) -> Result<(), Error> {
    let conflict = |second, remedy| Err(Error::Conflict { first: "upper_bounds", second, remedy });
    if scores.kind == Kind::Probs {
        return conflict("kind \"probs\"", "pass logits, whose bounds are in natural-log units");
    }
    if matches!(scores.mask, Some(StoredMask::Additive(_))) {
        return conflict("an additive mask", "add the biases to scores and bounds");
    }
    check_plain(bounds)?;
    let alike = |row: usize| scores.span(row).n == bounds.span(row).n;
    if scores.rows() != bounds.rows() || !(0..scores.rows()).all(alike) {
        let remedy = "one upper bound per score, in the same shape";
        let (got, expected) = (entries(bounds), entries(scores));
        return Err(Error::Length { argument: "upper_bounds", got, expected, remedy });
    }
    Ok(())
}

/// Checks that no option would change the bounds, which are read as stored.
fn check_plain(bounds: &Scores<'_>) -> Result<(), Error> {
    if bounds.is_plain() {
        return Ok(());
    }
    Err(Error::Conflict {
        first: "upper_bounds",
        second: "a kind, scale, mask, lengths, causal_offset or radius of their own",
        remedy: "store final bounds in natural-log units, -inf for what is hidden",
    })
}

fn entries(rows: &Scores<'_>) -> usize {
    (0..rows.rows()).map(|row| rows.span(row).n).sum()
}
