//! Upper bounds on the output error of attention after keys are dropped: the Euclidean norm of `Attn - Attn_S`.
//!
//! `Attn` is the softmax-weighted mean of the values, `Attn_S` that over the kept keys, renormalised. If nothing is
//! kept, `Attn_S` is the zero vector by convention, and the tail mass is 1. Bounds hold for the real numbers that are
//! stored: rounding is included. The forms are those of section 3 of the theory: the identity `tau |mu_T - mu_S|`, the
//! head-tail diameter, a ball around all values, a spectral form and a variance form. See `row` for each.

mod cloud;
mod prefix;
mod rounding;
mod row;
mod spectrum;

use crate::builders::builders_of_defaults;
use crate::error::Error;
use crate::names::names;
use crate::rows::{Keep, Scores, Values};
use crate::runtime::ambient::asked;
use crate::runtime::interrupt;
use crate::runtime::memory::{
    check_memory, check_memory_in_each, check_memory_square, filled, room,
};
use crate::runtime::threads;
use cloud::{Cloud, Outline};
use prefix::Found;
use row::{Bounds, Parted, Weighed};

/// Multiplications per portion, between two checks for an interrupt.
const PORTION: usize = 1 << 28;
/// Components of values held in f64 at a time, if one head has fewer.
const HELD: usize = 1 << 25;
/// Work below which one thread is used.
const SERIAL: usize = 1 << 17;
/// Bytes per key in the two sides of a row: positions, which grow by doubling, and weights.
const SIDES: usize = 24;
/// Bytes per key in the search for a prefix: a ranking that grows by doubling, ranks, weights, masses and errors.
const PREFIXES: usize = 64;
/// Bytes per row of the result.
const ROW: usize = 64;
/// Least cost of a row: its result waits for the rest of the portion.
const LEAST: usize = 1 << 10;

/// Name of a bound on the output error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum OutputBound {
    /// The identity `tau |mu_T - mu_S|`, rounded up.
    #[default]
    Exact = 0,
    /// tau times the diameter between kept and dropped values.
    Diameter = 1,
    /// tau times the largest distance from the kept set's output within a ball around all values.
    Ball = 2,
    /// The norm of the dropped probabilities times the largest singular value of the values around the kept set's output.
    Spectral = 3,
    /// The variance form, sharpened by the kept set's variance.
    Variance = 4,
}

names! { OutputBound, "bound", "use \"exact\", \"diameter\", \"ball\", \"spectral\" or \"variance\"", {
    "exact" => OutputBound::Exact,
    "diameter" => OutputBound::Diameter,
    "ball" => OutputBound::Ball,
    "spectral" => OutputBound::Spectral,
    "variance" => OutputBound::Variance,
} }

/// Upper bounds on `|Attn - Attn_S|`, one per row, in the units of the values.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct OutputError {
    /// The error itself, rounded up.
    pub exact: Vec<f64>,
    /// tau times the largest distance of a kept from a dropped value, or, for large sets, of a dropped value from
    /// `Attn_S`.
    pub diameter: Vec<f64>,
    /// `true` where `diameter` is over all pairs.
    pub farthest_pair: Vec<bool>,
    /// `tau (|c - Attn_S| + r)` for a ball (c, r) around the values of all keys that any row of the head sees.
    pub ball: Vec<f64>,
    /// `sqrt(sum_T P^2) sqrt(lambda_max(C_V) + n |mean V - Attn_S|^2)`, over those n keys.
    pub spectral: Vec<f64>,
    /// `sqrt(tau/(1-tau)) sqrt(Var_P(V) - (1-tau) Var_S(V))`; infinite if nothing is kept.
    pub variance: Vec<f64>,
    /// The smallest of the five.
    pub best: Vec<f64>,
    /// Name of the smallest bound, the first of equals.
    pub which: Vec<OutputBound>,
    /// `2 C tau` with C the longest value that the row sees.
    pub norm: Vec<f64>,
    /// `sqrt(tau/(1-tau)) sqrt(Var_P(V))`; infinite if nothing is kept.
    pub chi_square: Vec<f64>,
}

/// Shortest prefixes whose output error is within a budget.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct OutputSelection {
    /// Offsets into `indices`: row `i` keeps `indices[indptr[i]..indptr[i + 1]]`.
    pub indptr: Vec<i64>,
    /// Positions within the rows, ascending.
    pub indices: Vec<u32>,
    /// Upper bound on the real `|Attn - Attn_S|` of each row, at most the budget.
    pub error_upper: Vec<f64>,
    /// Upper bound on the real tail mass of each row.
    pub tail_mass_upper: Vec<f64>,
    /// Lower bound on the real tail mass of each row.
    pub tail_mass_lower: Vec<f64>,
    /// `true` where every shorter prefix of the ranking provably exceeds the budget.
    pub minimal: Vec<bool>,
}

impl OutputSelection {
    /// Returns the kept positions of a row, ascending.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn row(&self, row: usize) -> &[u32] {
        let at = |row: usize| self.indptr[row].unsigned_abs() as usize;
        &self.indices[at(row)..at(row + 1)]
    }
}

/// Options of [`output_error`] and [`select_output`].
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OutputOptions {
    /// Number of threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

builders_of_defaults! { OutputOptions {
    /// Sets the number of threads; `None` for all available.
    threads(threads: impl Into<Option<usize>>) = threads.into();
} }

/// Bounds the Euclidean norm of the error of each row's output when only the kept keys are attended to.
///
/// `values` are matched with the rows as in [`Values`]. A row that drops nothing, or sees nothing, has bounds 0. If
/// nothing is kept, `Attn_S` is the zero vector.
///
/// ```
/// use certk_rs::{OutputOptions, Keep, Scores, Values, output_error};
/// let scores = Scores::new(&[2.0_f64, 0.0, -2.0], &[1, 3])?;
/// let values = Values::new(&[0.0_f64, 1.0, 0.0], &[3, 1])?;
/// let keep = Keep::Indices { indptr: &[0, 1], indices: &[0] };
/// let found = output_error(&scores, &values, &keep, &OutputOptions::new())?;
/// let lost = 1.0 / (2f64.exp() + 1.0 + (-2f64).exp()); // the middle key's weight, whose value is 1
/// assert!(lost - 1e-15 <= found.exact[0] && found.exact[0] < lost + 1e-9);
/// assert!(found.best[0] <= found.norm[0]);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// The [`Error`] for invalid scores, values (not finite at a key that some row sees, or of a shape that does not fit)
/// or kept sets, for too little memory, or for a call that was ended.
pub fn output_error(
    scores: &Scores<'_>,
    values: &Values<'_>,
    keep: &Keep<'_>,
    options: &OutputOptions,
) -> Result<OutputError, Error> {
    let threads = options.threads;
    // Bounds are compared below; a caller that flushes subnormal numbers to zero would find 0 the best.
    let _modes = threads::default_floats();
    keep.check(scores)?;
    // The sum of outer products of a head's values, and a few more such matrices.
    check_memory_square("values", &[values.components()], 4 * size_of::<f64>())?;
    let outlined = |head: Cloud| {
        let outline = head.outline();
        (head, outline)
    };
    let bound = |head: &(Cloud, Outline), row: usize| {
        let (cloud, outline) = head;
        let weighed = Weighed::read(scores, row, cloud, Vec::new())?;
        check_memory("scores", weighed.keys.len(), SIDES)?;
        let mut kept = filled("scores", weighed.keys.len(), 0)?;
        keep.lay(scores, row, &mut kept)?;
        let parted = Parted::new(cloud, &weighed, |j| kept[j] != 0);
        Ok(parted.map(|parted| parted.bounds(outline)).unwrap_or_default())
    };
    let found = by_head(scores, values, threads, outlined, bound)?;
    let mut all = OutputError::default();
    for bounds in found {
        all.push(&bounds);
    }
    Ok(all)
}

impl OutputError {
    fn push(&mut self, bounds: &Bounds) {
        use OutputBound::{Ball, Diameter, Exact, Spectral, Variance};
        let candidates = [
            (bounds.exact, Exact),
            (bounds.diameter, Diameter),
            (bounds.ball, Ball),
            (bounds.spectral, Spectral),
            (bounds.variance, Variance),
        ];
        let mut best = candidates[0];
        for candidate in candidates {
            best = if candidate.0 < best.0 { candidate } else { best };
        }
        self.exact.push(bounds.exact);
        self.diameter.push(bounds.diameter);
        self.farthest_pair.push(bounds.farthest_pair);
        self.ball.push(bounds.ball);
        self.spectral.push(bounds.spectral);
        self.variance.push(bounds.variance);
        self.best.push(best.0);
        self.which.push(best.1);
        self.norm.push(bounds.norm);
        self.chi_square.push(bounds.chi_square);
    }
}

/// Keeps, in each row, the fewest of the best keys whose output error is proven to be at most `out_tol`. The budget is
/// in the units of the values, one per row or one for all. At least one key is kept in a row that has one.
///
/// The error is not monotone in the number of keys, so a longer prefix may exceed the budget that this one meets. In a
/// long row, rounding may leave many shorter prefixes open. Then only the first of them are certified one by one (at
/// least eight, and as many as 2^22 components hold), and `minimal` is `false`.
///
/// ```
/// use certk_rs::{OutputOptions, Scores, Values, select_output};
/// let scores = Scores::new(&[2.0_f64, 0.0, -2.0], &[1, 3])?;
/// let values = Values::new(&[0.0_f64, 1.0, 0.0], &[3, 1])?;
/// assert_eq!(select_output(&scores, &values, &[0.2], &OutputOptions::new())?.indices, [0]);
/// let closer = select_output(&scores, &values, &[0.05], &OutputOptions::new())?;
/// assert_eq!(closer.row(0), [0, 1]);
/// assert!(closer.error_upper[0] <= 0.05);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// As [`output_error`]; [`Error::Tolerance`].
pub fn select_output(
    scores: &Scores<'_>,
    values: &Values<'_>,
    out_tol: &[f64],
    options: &OutputOptions,
) -> Result<OutputSelection, Error> {
    let threads = options.threads;
    let _modes = threads::default_floats();
    let out_tol = scores.tolerances(out_tol)?;
    let choose = |cloud: &Cloud, row: usize| {
        let weighed = Weighed::read(scores, row, cloud, Vec::new())?;
        check_memory("scores", weighed.keys.len(), SIDES + PREFIXES)?;
        prefix::shortest(cloud, &weighed, out_tol.of(row))
    };
    let found: Vec<Found> = by_head(scores, values, threads, |cloud| cloud, choose)?;
    let mut all = OutputSelection { indptr: vec![0], ..OutputSelection::default() };
    room("scores", &mut all.indices, found.iter().map(|row| row.kept.len()).sum())?;
    for row in found {
        all.indices.extend(&row.kept);
        all.indptr.push(all.indices.len() as i64);
        all.error_upper.push(row.error);
        all.tail_mass_upper.push(row.tail_mass.0);
        all.tail_mass_lower.push(row.tail_mass.1);
        all.minimal.push(row.minimal);
    }
    Ok(all)
}

/// Centres the values head by head, prepares them, and maps the rows of each head. Results are in row order.
fn by_head<P: Send + Sync, R: Send + Clone + Default>(
    scores: &Scores<'_>,
    values: &Values<'_>,
    threads: Option<usize>,
    prepare: impl Fn(Cloud) -> P + Sync + Send,
    work: impl Fn(&P, usize) -> Result<R, Error> + Sync + Send,
) -> Result<Vec<R>, Error> {
    // Per row its result, its number and its task; kept positions are counted row by row.
    let row = size_of::<R>() + size_of::<(&P, usize)>() + 32;
    check_memory("scores", scores.rows(), row.saturating_add(ROW))?;
    let served = values.rows_by_head(scores)?;
    let (n, d) = (scores.longest().max(1), values.components().max(1));
    let size = n.saturating_mul(d);
    let threads = threads::count(threads, scores.rows().saturating_mul(size) > SERIAL)?;
    check_memory_in_each("values", threads, (served.len(), size), size_of::<f64>())?;
    let _environment = threads::default_floats();
    let mut results = vec![R::default(); scores.rows()];
    let heads = (HELD / size.max(LEAST)).max(1);
    for start in (0..served.len()).step_by(heads) {
        let end = (start + heads).min(served.len());
        let clouds = threads::map(threads, start..end, 1, |head| {
            if served[head].is_empty() {
                return Ok(None);
            }
            cloud(scores, values, head, &served[head]).map(|cloud| Some(prepare(cloud)))
        })?;
        interrupt::check()?;
        let clouds = clouds.into_iter().collect::<Result<Vec<_>, Error>>()?;
        let tasks: Vec<(&P, usize)> = (clouds.iter().zip(&served[start..end]))
            .filter_map(|(cloud, rows)| Some((cloud.as_ref()?, rows)))
            .flat_map(|(cloud, rows)| rows.iter().map(move |&row| (cloud, row)))
            .collect();
        for portion in tasks.chunks((PORTION / size.max(LEAST)).max(1)) {
            let one = |i: usize| work(portion[i].0, portion[i].1);
            let least = (SERIAL / size).max(1);
            let found = threads::map(threads, 0..portion.len(), least, one)?;
            for (&(_, row), found) in portion.iter().zip(found) {
                results[row] = found?;
            }
            interrupt::check()?;
        }
    }
    Ok(results)
}

/// Returns the values of one head, around the mean of those that any of its rows sees.
fn cloud(
    scores: &Scores<'_>,
    values: &Values<'_>,
    head: usize,
    rows: &[usize],
) -> Result<Cloud, Error> {
    let (mut seen, mut keys) = (filled("scores", scores.longest(), false)?, Vec::new());
    for &row in rows {
        scores.wide_scores(row, &mut keys)?;
        for (seen, key) in asked(seen.iter_mut().zip(&keys)) {
            *seen |= *key > f64::NEG_INFINITY;
        }
    }
    let mut wide = Vec::new();
    values.widen(head, &seen, &mut wide)?;
    // Lengths of the points, and a few vectors.
    check_memory("values", seen.len().saturating_add(values.components().saturating_mul(8)), 8)?;
    Ok(Cloud::new(wide, seen, values.components()))
}
