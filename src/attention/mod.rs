//! Certified sparse attention: scores a few keys exactly, and proves what the others carry.

mod ball;
mod bound;
mod sight;
mod work;

use crate::error::Error;
use crate::kernels::Simd;
use crate::keys::{KeyIndex, Rung};
use crate::scores::Vectors;
use crate::threads::{self, Hook};

pub use ball::ValueBall;
use bound::Balls;
pub use bound::Precision;
use sight::Sights;

/// How attention is to be computed.
#[derive(Debug, Clone, Default)]
pub struct AttentionOptions<'a> {
    /// What products are multiplied by to be scores; `None` for `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Query i of m sees keys up to i + n - m.
    pub causal: bool,
    /// How many keys a row sees, from the first; one for all rows or one per row.
    pub lengths: Option<&'a [i64]>,
    /// A byte per key and row, zero where it is masked, and the strides of the rows' axes in it.
    pub mask: Option<(&'a [u8], &'a [usize])>,
    /// What the output is rounded to.
    pub precision: Precision,
    /// A ball around the values, so that they need not be read for a bound of the output's error.
    pub ball: Option<&'a ValueBall>,
    /// How many threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

/// What a row may lose. One number for all rows, or one per row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget<'a> {
    /// Its tail mass is to be at most this, at least 0 and below 1; 0 is plain attention.
    TailMass(&'a [f64]),
    /// Its output is to be off by at most this in the Euclidean norm, all rounding included; finite and not negative.
    Output(&'a [f64]),
}

/// Attention's output, a row for each query, and what is proven of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Attention {
    /// Weighted averages of values, one vector after another, rounded to the precision asked for.
    pub out: Vec<f64>,
    /// The real tail mass of a row is at most this.
    pub tail_mass_upper: Vec<f64>,
    /// Keys that went into each average.
    pub k: Vec<i64>,
    /// Keys that were scored exactly.
    pub scored: Vec<i64>,
    /// Which way each row was answered.
    pub rung: Vec<Rung>,
    /// A bound of the relative error of the weights of each row's average, before they are rounded to the precision that values
    /// are summed in.
    pub weight_error: Vec<f64>,
    /// How far rounding to the precision asked for moved each row.
    pub rounding: Vec<f64>,
}

/// Rows that are worked on together.
const GROUP: usize = 4;
/// How often a row is computed at most for a budget on its output, before it is computed in full.
const ATTEMPTS: usize = 2;

/// Softmax attention of queries `(..., heads, m, d)` over keys `(..., kv_heads, n, d)` and values `(..., kv_heads, n, d_v)`, `heads` a
/// multiple of `kv_heads`, that drops from each row no more than its budget allows, proven for the real numbers stored.
///
/// With an index of the keys, most keys are judged by their codes. A row that cannot be thinned is computed in full. A row that
/// sees no key gives zeros. Keys and values that no row sees may hold anything.
///
/// # Errors
/// [`Error::Shape`] where arguments do not fit each other, [`Error::Eps`], [`Error::Tolerance`] also where rounding alone exceeds
/// the budget, [`Error::Scale`], [`Error::Length`], [`Error::RowLength`], [`Error::KeyNotFinite`] for a query, or a key or value
/// that is used, [`Error::Number`] where a score or an output overflows.
pub fn attention(
    queries: &Vectors<'_>,
    keys: &Vectors<'_>,
    values: &Vectors<'_>,
    budget: Budget<'_>,
    index: Option<&KeyIndex>,
    options: &AttentionOptions<'_>,
) -> Result<Attention, Error> {
    attention_with(queries, keys, values, budget, index, options, &mut || Ok(()))
        .map(|(all, _)| all)
}

/// The same, with the bounds of the output's error where the budget is one.
pub(crate) fn attention_with(
    queries: &Vectors<'_>,
    keys: &Vectors<'_>,
    values: &Vectors<'_>,
    budget: Budget<'_>,
    index: Option<&KeyIndex>,
    options: &AttentionOptions<'_>,
    hook: Hook<'_>,
) -> Result<(Attention, Option<Vec<f64>>), Error> {
    let sights = Sights::new(queries, keys, options)?;
    let job = Job::new(queries, keys, values, index, &sights)?;
    let mut all = Attention::empty(sights.rows(), values.dim());
    match budget {
        Budget::TailMass(eps) => {
            sights.per_row("eps", eps.len())?;
            if let Some(row) = eps.iter().position(|eps| !(0.0..1.0).contains(eps)) {
                return Err(Error::Eps { place: sights.place(row, eps.len()), value: eps[row] });
            }
            job.run(eps, |_| true, &mut all, hook)?;
            Ok((all, None))
        }
        Budget::Output(tolerance) => {
            sights.per_row("out_tol", tolerance.len())?;
            if let Some(row) = tolerance.iter().position(|t| !(0.0..f64::INFINITY).contains(t)) {
                let place = sights.place(row, tolerance.len());
                return Err(Error::Tolerance { place, value: tolerance[row] });
            }
            let bounds = job.within(tolerance, &mut all, hook)?;
            Ok((all, Some(bounds)))
        }
    }
}

impl Attention {
    fn empty(rows: usize, dim: usize) -> Self {
        Attention {
            out: vec![0.0; rows * dim],
            tail_mass_upper: vec![0.0; rows],
            k: vec![0; rows],
            scored: vec![0; rows],
            rung: vec![Rung::Dense; rows],
            weight_error: vec![0.0; rows],
            rounding: vec![0.0; rows],
        }
    }
}

/// One call.
struct Job<'a> {
    queries: &'a Vectors<'a>,
    keys: &'a Vectors<'a>,
    values: &'a Vectors<'a>,
    index: Option<&'a KeyIndex>,
    sights: &'a Sights<'a>,
    scale: f64,
    simd: Simd,
}

/// Rows that share a head's keys, and what each may lose.
struct Unit {
    head: usize,
    rows: Vec<usize>,
    eps: Vec<f64>,
}

impl<'a> Job<'a> {
    fn new(
        queries: &'a Vectors<'a>,
        keys: &'a Vectors<'a>,
        values: &'a Vectors<'a>,
        index: Option<&'a KeyIndex>,
        sights: &'a Sights<'a>,
    ) -> Result<Self, Error> {
        let scale = sights.options.scale.unwrap_or(1.0 / (keys.dim() as f64).sqrt());
        if !scale.is_finite() {
            return Err(Error::Scale { value: scale });
        }
        if queries.dim() != keys.dim() {
            return Err(queries.misfit(format!(
                "keys have {} entries; queries and keys need as many as each other",
                keys.dim()
            )));
        }
        if values.batch() != keys.batch() || values.len() != keys.len() {
            return Err(values.misfit(format!(
                "there must be a value for each key; keys have shape {:?}",
                keys.shape()
            )));
        }
        if let Some(ball) = sights.options.ball {
            ball.check(values)?;
        }
        if let Some(index) = index
            && (index.batch_shape() != keys.batch()
                || index.len() != keys.len()
                || index.dim() != keys.dim())
        {
            return Err(keys.misfit(format!(
                "the index was built of {} keys of {} entries for axes {:?}; build it of these, or append what is new",
                index.len(),
                index.dim(),
                index.batch_shape()
            )));
        }
        Ok(Job { queries, keys, values, index, sights, scale, simd: Simd::current()? })
    }

    /// Computes some rows.
    fn run(
        &self,
        eps: &[f64],
        wanted: impl Fn(usize) -> bool,
        all: &mut Attention,
        hook: Hook<'_>,
    ) -> Result<(), Error> {
        let units = self.units(eps, wanted);
        let dim = self.values.dim();
        let each = self.keys.len().saturating_mul(self.keys.dim());
        let rows: usize = units.iter().map(|unit| unit.rows.len()).sum();
        let threads =
            threads::count(self.sights.options.threads, rows.saturating_mul(each) > 1 << 20)?;
        let portion = (1 << 28) / GROUP.saturating_mul(each).max(1) + threads;
        let mut at = 0;
        let one = |unit: usize| {
            let mut answers = self.unit(&units[unit])?;
            let mut moved = Vec::with_capacity(answers.len());
            for (answer, &row) in answers.iter_mut().zip(&units[unit].rows) {
                moved.push(self.round(row, &mut answer.out[..dim])?);
            }
            Ok((answers, moved))
        };
        threads::in_portions(threads, units.len(), (portion, 1), hook, one, |(answers, moved)| {
            for ((&row, answer), moved) in units[at].rows.iter().zip(answers).zip(moved) {
                all.out[row * dim..][..dim].copy_from_slice(&answer.out[..dim]);
                all.tail_mass_upper[row] = answer.upper;
                all.k[row] = answer.kept as i64;
                all.scored[row] = answer.scored as i64;
                all.rung[row] = answer.rung;
                all.weight_error[row] = answer.weight_error;
                all.rounding[row] = moved;
            }
            at += 1;
        })
    }

    /// Rounds a row's output, and says how far that moved it.
    fn round(&self, row: usize, out: &mut [f64]) -> Result<f64, Error> {
        let moved = self.sights.options.precision.round(out);
        match out.iter().position(|entry| !entry.is_finite()) {
            None => Ok(moved),
            Some(entry) => {
                let mut place = self.sights.place(row, self.sights.rows());
                place.0.push(entry);
                let problem = "the output overflows the precision of q; pass q in a wider one, or values divided by a constant";
                Err(Error::Number { argument: "out", place, value: out[entry], problem })
            }
        }
    }

    /// Computes all rows so that their outputs are within budgets, and returns the bounds that prove it.
    fn within(
        &self,
        tolerance: &[f64],
        all: &mut Attention,
        hook: Hook<'_>,
    ) -> Result<Vec<f64>, Error> {
        let balls = Balls::new(self.sights, self.values, &self.sights.options, hook)?;
        let rows = self.sights.rows();
        let of = |row: usize| tolerance[if tolerance.len() == 1 { 0 } else { row }];
        let (mut eps, mut open) = (vec![0.0; rows], vec![true; rows]);
        for attempt in 0..=ATTEMPTS {
            for row in (0..rows).filter(|&row| open[row]) {
                let known = (self.sights.options.precision, all.weight_error[row]);
                eps[row] = if attempt < ATTEMPTS {
                    bound::allowed(&balls, self.values, row, of(row), known)
                } else {
                    0.0
                };
            }
            let per_row = if rows == 0 { &[0.0][..] } else { &eps };
            self.run(per_row, |row| open[row], all, hook)?;
            let bounds = all.bounds(&balls, self.values);
            let mut missed = None;
            for row in 0..rows {
                open[row] = bounds[row] > of(row);
                missed = missed.or(open[row].then_some(row));
            }
            let Some(row) = missed else { return Ok(bounds) };
            if attempt == ATTEMPTS {
                let place = self.sights.place(row, rows);
                return Err(Error::Unreachable { place, value: of(row), bound: bounds[row] });
            }
        }
        Ok(Vec::new())
    }

    /// Rows in groups that share keys.
    fn units(&self, eps: &[f64], wanted: impl Fn(usize) -> bool) -> Vec<Unit> {
        let mut rows_of = vec![Vec::new(); self.keys.heads()];
        for (row, &head) in self.sights.head_of.iter().enumerate() {
            if wanted(row) {
                rows_of[head].push(row);
            }
        }
        let mut units = Vec::new();
        for (head, rows) in rows_of.into_iter().enumerate() {
            units.extend(rows.chunks(GROUP).map(|rows| {
                let eps = rows.iter().map(|&row| eps[if eps.len() == 1 { 0 } else { row }]);
                Unit { head, rows: rows.to_vec(), eps: eps.collect() }
            }));
        }
        units
    }
}
