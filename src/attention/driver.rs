//! Groups of rows that share keys, over threads, and repeated attempts for rows over an output budget.

use std::ops::Range;

use super::error_bound::{self, Balls};
use super::job::{AttentionJob, RowBudget, UNIT_ROWS, Unit};
use super::options::{AttentionOptions, Budget, Weights};
use super::query_rows::QueryRows;
use super::result::Attention;
use crate::error::Error;
use crate::index::KeyIndex;
use crate::numerics::finite::all_finite;
use crate::rows::{PerRow, Ragged, Vectors};
use crate::runtime::memory::{check_memory, check_memory_in_each};
use crate::runtime::reused::Reused;
use crate::runtime::threads;

/// Most attempts at a row for a budget on its output, before it is computed in full.
const ATTEMPTS: usize = 2;

/// Computes softmax attention that drops from each row no more than its budget allows, proven for the real numbers
/// stored.
///
/// Shapes: queries `(..., heads, m, d)`, keys `(..., kv_heads, n, d)`, values `(..., kv_heads, n, d_v)`, with `heads` a
/// multiple of `kv_heads`.
///
/// With an index of the keys, most keys are judged by their codes. A row from which little can be dropped is computed
/// in full. A row that sees no key gives zeros. Keys and values that no row sees may hold anything.
///
/// With sinks, tail masses are shares of the whole softmax, the sink's share included. The choice of dropped keys
/// ignores the sink, so it keeps some more than necessary.
///
/// ```
/// use certk_rs::{AttentionOptions, Budget, Vectors, attention};
/// let q = Vectors::new("q", &[4.0_f32, 0.0], &[1, 1, 2])?;
/// let k = Vectors::new("k", &[3.0_f32, 0.0, 0.0, 3.0, -3.0, 0.0], &[1, 3, 2])?;
/// let v = Vectors::new("v", &[10.0_f32, 20.0, 30.0], &[1, 3, 1])?;
/// let options = AttentionOptions::new().scale(1.0); // the scores are 12, 0 and -12
/// let found = attention(&q, &k, &v, Budget::TailMass(&[0.01]), None, &options)?;
/// let (middle, last) = ((-12f64).exp(), (-24f64).exp());
/// let plain = (10.0 + 20.0 * middle + 30.0 * last) / (1.0 + middle + last);
/// assert!((found.row(0)[0] - plain).abs() <= found.error_bound(&q, &v, &options)?[0] + 1e-12);
/// assert!(found.tail_mass_upper[0] <= 0.01);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] where arguments do not fit each other; [`Error::Eps`]; [`Error::Tolerance`], also where rounding
/// alone exceeds the budget; [`Error::Scale`], [`Error::Length`], [`Error::RowLength`]; [`Error::KeyNotFinite`] for a
/// query, or a key or value that is used; [`Error::Number`] where a score or an output overflows, or a sink is NaN or
/// positive infinity.
pub fn attention(
    queries: &Vectors<'_>,
    keys: &Vectors<'_>,
    values: &Vectors<'_>,
    budget: Budget<'_>,
    index: Option<&KeyIndex>,
    options: &AttentionOptions<'_>,
) -> Result<Attention, Error> {
    attend(queries, keys, values, budget, index, options)
}

/// Computes attention as [`attention`] does, over keys and values of which each head has another number.
///
/// A causal mask shows query i of m the keys up to i + n - m, with the n of its head. A mask has an entry for each key of the
/// longest head, and `lengths` count from the first.
///
/// ```
/// use certk_rs::{AttentionOptions, Budget, Ragged, Vectors, attention_of_ragged};
/// let q = Vectors::new("q", &[4.0_f32, 4.0], &[2, 1, 1])?;
/// let rows = [1.0_f32, 2.0, 3.0];
/// let (k, v) = (Ragged::new("k", &rows, &[2], 1, &[0, 2], &[2, 1])?, Ragged::new("v", &rows, &[2], 1, &[0, 2], &[2, 1])?);
/// let found = attention_of_ragged(&q, &k, &v, Budget::TailMass(&[0.0]), &AttentionOptions::new())?;
/// assert_eq!((found.row(1), &found.k[..]), (vec![3.0], &[2, 1][..]));
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// As [`attention`]; [`Error::Shape`] also where a head has another number of values than of keys.
pub fn attention_of_ragged(
    queries: &Vectors<'_>,
    keys: &Ragged<'_>,
    values: &Ragged<'_>,
    budget: Budget<'_>,
    options: &AttentionOptions<'_>,
) -> Result<Attention, Error> {
    let (keys, values) = (keys.vectors(), values.vectors());
    let options = AttentionOptions { value_index: None, ..options.clone() };
    attend(queries, keys, values, budget, None, &options)
}

fn attend(
    queries: &Vectors<'_>,
    keys: &Vectors<'_>,
    values: &Vectors<'_>,
    budget: Budget<'_>,
    index: Option<&KeyIndex>,
    options: &AttentionOptions<'_>,
) -> Result<Attention, Error> {
    let _modes = threads::default_floats();
    // Sums of values of rows that are worked on together.
    check_memory("v", values.dim(), UNIT_ROWS * 24)?;
    // Of each row its head, its output, its group and nine numbers, of each head a norm and its rows, and a mark for each
    // block of values.
    let rows = queries.heads().saturating_mul(queries.len());
    check_memory(
        "q",
        rows.max(queries.heads()),
        values.dim().saturating_mul(8).saturating_add(160),
    )?;
    check_memory("k", keys.heads(), keys.len() / 16 + 72)?;
    let query_rows = QueryRows::new(queries, (keys.batch(), keys.len(), keys.counts()), options)?;
    let job = AttentionJob::new(queries, keys, values, index, &query_rows)?;
    let mut all = Attention::empty(query_rows.rows(), values.dim(), options.precision);
    match budget {
        Budget::TailMass(eps) => {
            let eps = query_rows.per_row("eps", eps)?.budgets(query_rows.shape)?;
            let AttentionOptions { even_if_slower, weights, .. } = query_rows.options;
            let short = !even_if_slower && weights == Weights::Codes;
            job.run(RowBudget { eps, short, careful: false }, |_| true, &mut all)?;
            Ok(all)
        }
        Budget::Output(tolerance) => {
            let tolerance =
                query_rows.per_row("out_tol", tolerance)?.tolerances(query_rows.shape)?;
            all.within = Some(job.within(tolerance, &mut all)?);
            Ok(all)
        }
    }
}

/// Fewer products are computed before another thread has woken up: by codes or in f32, and in f64.
const FAST: usize = 1 << 21;
const SLOW: usize = 1 << 18;

/// Entries that a group of rows counts at least: its answers wait for the rest of the portion.
const LEAST: usize = 1 << 16;

impl AttentionJob<'_> {
    /// Computes some rows.
    pub(super) fn run(
        &self,
        budget: RowBudget<'_>,
        wanted: impl Fn(usize) -> bool,
        all: &mut Attention,
    ) -> Result<(), Error> {
        let listed: Reused<usize> =
            (0..self.query_rows.rows()).filter(|&row| wanted(row)).collect();
        let units = self.units(&listed);
        let dim = self.values.dim();
        let each = self.query_rows.keys.saturating_mul(self.keys.dim());
        let rows = listed.len();
        let worth = if self.fit_together() { FAST } else { SLOW };
        let threads =
            threads::count(self.query_rows.options.threads, rows.saturating_mul(each) > worth)?;
        check_memory_in_each("k", threads, (rows, self.query_rows.keys), size_of::<f32>())?;
        let most = units.iter().map(|(_, rows)| rows.len()).max().unwrap_or(0);
        let portion = (1 << 28) / most.saturating_mul(each.max(dim)).max(LEAST) + threads;
        let mut at = 0;
        let unit = |at: usize, threads: usize| {
            let (head, ref rows) = units[at];
            Unit { head, rows: &listed[rows.clone()], threads }
        };
        let one = |at: usize, threads: usize| {
            let unit = unit(at, threads);
            let mut answers = self.unit(&unit, budget)?;
            let mut moved: Reused<f64> = Reused::with_hint(answers.len());
            for (answer, &row) in answers.iter_mut().zip(unit.rows) {
                moved.push(self.round(row, &mut answer.out[..dim])?);
            }
            Ok((answers, moved))
        };
        threads::in_shared_portions(threads, units.len(), portion, one, |(answers, moved)| {
            for ((&row, answer), &moved) in unit(at, 1).rows.iter().zip(&answers).zip(&moved) {
                all.out.write(row * dim, &answer.out[..dim]);
                all.tail_mass_upper[row] = answer.upper;
                all.k[row] = answer.kept as i64;
                all.scored[row] = answer.scored as i64;
                all.rung[row] = answer.rung;
                all.weight_error[row] = answer.weight_error;
                all.sum_error[row] = answer.sum_error;
                all.coded_error[row] = answer.coded_error;
                all.rounding[row] = moved;
                all.log_mass[row] =
                    if answer.kept == 0 { self.sink_alone(row) } else { answer.log_mass };
            }
            at += 1;
        })
    }

    /// Rounds a row's output, and returns the distance.
    fn round(&self, row: usize, out: &mut [f64]) -> Result<f64, Error> {
        let moved = self.query_rows.options.precision.round(out);
        if all_finite(out) {
            return Ok(moved);
        }
        let entry = out.iter().position(|entry| !entry.is_finite()).unwrap_or(0);
        let mut place = self.query_rows.place(row);
        place.0.push(entry);
        let problem = "the output overflows the precision of q; pass q in a wider one, or values divided by a constant";
        Err(Error::Number { argument: "out", place, value: out[entry], problem })
    }

    /// Computes all rows so that their outputs are within budgets, and returns the bounds that prove it.
    fn within(&self, tolerance: PerRow<'_, f64>, all: &mut Attention) -> Result<Vec<f64>, Error> {
        let balls = Balls::new(self.query_rows, self.values)?;
        let rows = self.query_rows.rows();
        let (mut eps, mut open) = (vec![0.0; rows], vec![true; rows]);
        for attempt in 0..=ATTEMPTS {
            for row in (0..rows).filter(|&row| open[row]) {
                eps[row] = if attempt < ATTEMPTS {
                    let known = (all.weight_error[row], all.sum_error[row]);
                    let precision = self.query_rows.options.precision;
                    error_bound::allowed(
                        &balls,
                        self.values,
                        row,
                        tolerance.of(row),
                        precision,
                        known,
                    )
                } else {
                    0.0
                };
            }
            let budget = RowBudget {
                short: false,
                eps: self.query_rows.per_row("eps", &eps)?,
                careful: attempt == ATTEMPTS,
            };
            self.run(budget, |row| open[row], all)?;
            let bounds = all.bounds(&balls, self.values);
            let mut missed = None;
            for row in 0..rows {
                open[row] = bounds[row] > tolerance.of(row);
                missed = missed.or(open[row].then_some(row));
            }
            let Some(row) = missed else { return Ok(bounds) };
            if attempt == ATTEMPTS {
                let place = self.query_rows.place(row);
                return Err(Error::Unreachable {
                    place,
                    value: tolerance.of(row),
                    bound: bounds[row],
                });
            }
        }
        Ok(Vec::new())
    }

    /// Groups listed rows that share keys: a head, and a range of the list.
    fn units(&self, listed: &[usize]) -> Reused<(usize, Range<usize>)> {
        let mut units = Reused::with_hint(listed.len());
        let mut from = 0;
        for of_head in
            listed.chunk_by(|&a, &b| self.query_rows.head_of(a) == self.query_rows.head_of(b))
        {
            // How rows are put together depends on nothing but the shapes, so that answers do not depend on threads.
            // Parts are of about one size: a few rows that are left over would be answered another way.
            let (all, parts) = (of_head.len(), of_head.len().div_ceil(UNIT_ROWS));
            let head = self.query_rows.head_of(of_head[0]);
            units
                .extend((0..parts).map(|part| {
                    (head, from + part * all / parts..from + (part + 1) * all / parts)
                }));
            from += all;
        }
        units
    }
}
