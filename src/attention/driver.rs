//! Groups of rows that share keys, over threads, and repeated attempts for rows over an output budget.

use std::ops::Range;

use super::error_bound::{self, Balls};
use super::job::{AttentionJob, MANY, RowBudget, Unit};
use super::options::{AttentionOptions, Budget};
use super::query_rows::QueryRows;
use super::result::Attention;
use crate::error::Error;
use crate::index::KeyIndex;
use crate::kernels::PANEL_ROWS;
use crate::rows::{PerRow, Vectors};
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
    let _modes = threads::default_floats();
    // Sums of values of rows that are worked on together.
    check_memory("v", values.dim(), PANEL_ROWS * 24)?;
    // Of each row its head, its output, its group and nine numbers, of each head a norm and its rows.
    let rows = queries.heads().saturating_mul(queries.len());
    check_memory(
        "q",
        rows.max(queries.heads()),
        values.dim().saturating_mul(8).saturating_add(160),
    )?;
    check_memory("k", keys.heads(), 64)?;
    let query_rows = QueryRows::new(queries, keys, options)?;
    let own;
    let mut job = AttentionJob::new(queries, keys, values, index, &query_rows)?;
    own = match budget {
        Budget::TailMass(eps) if index.is_none() => job.own_index(eps)?,
        _ => None,
    };
    job.index = index.or(own.as_ref());
    let mut all = Attention::empty(query_rows.rows(), values.dim(), options.precision);
    match budget {
        Budget::TailMass(eps) => {
            let eps = query_rows.per_row("eps", eps)?.budgets(query_rows.shape)?;
            job.run(RowBudget { eps, careful: false }, |_| true, &mut all)?;
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

/// Fewer products are computed before another thread has woken up: by codes or many rows together, and in f64.
const FAST: usize = 1 << 21;
const SLOW: usize = 1 << 18;

/// Entries that a group of rows counts at least: its answers wait for the rest of the portion.
const LEAST: usize = 1 << 16;

impl AttentionJob<'_> {
    /// Computes some rows.
    fn run(
        &self,
        budget: RowBudget<'_>,
        wanted: impl Fn(usize) -> bool,
        all: &mut Attention,
    ) -> Result<(), Error> {
        let listed: Reused<usize> =
            (0..self.query_rows.rows()).filter(|&row| wanted(row)).collect();
        let units = self.units(&listed);
        let dim = self.values.dim();
        let each = self.keys.len().saturating_mul(self.keys.dim());
        let rows = listed.len();
        let worth = if self.index.is_some() || self.queries.len() >= MANY { FAST } else { SLOW };
        let threads =
            threads::count(self.query_rows.options.threads, rows.saturating_mul(each) > worth)?;
        check_memory_in_each("k", threads, (rows, self.keys.len()), size_of::<f32>())?;
        let portion = (1 << 28) / PANEL_ROWS.saturating_mul(each.max(dim)).max(LEAST) + threads;
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
        match out.iter().position(|entry| !entry.is_finite()) {
            None => Ok(moved),
            Some(entry) => {
                let mut place = self.query_rows.place(row);
                place.0.push(entry);
                let problem = "the output overflows the precision of q; pass q in a wider one, or values divided by a constant";
                Err(Error::Number { argument: "out", place, value: out[entry], problem })
            }
        }
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
            for rows in of_head.chunks(PANEL_ROWS) {
                units.push((self.query_rows.head_of(rows[0]), from..from + rows.len()));
                from += rows.len();
            }
        }
        units
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::IndexOptions;
    use crate::kernels::Simd;
    use crate::numerics::scale::nearest_rsqrt;

    /// Numbers that look normal.
    fn normal(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / (1u64 << 31) as f64 - 0.5
        };
        (0..count).map(|_| ((0..12).map(|_| uniform()).sum::<f64>()) as f32).collect()
    }

    struct Case {
        shape: (usize, usize, usize, usize),
        causal: bool,
        index: bool,
        eps: f64,
        sigma: f32,
    }

    /// The real output of a row within f64 roundings, and the largest distance of a value of it from there.
    fn real(
        query: &[f32],
        (keys, dim): (&[f32], usize),
        (values, width): (&[f32], usize),
    ) -> (Vec<f64>, f64) {
        let product = |key: &[f32]| {
            let terms = key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q));
            terms.sum::<f64>() * nearest_rsqrt(dim)
        };
        let scores: Vec<f64> = keys.chunks_exact(dim).map(product).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0.0; width];
        let mut total = 0.0;
        for (score, value) in scores.iter().zip(values.chunks_exact(width)) {
            let weight = (score - top).exp();
            total += weight;
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * f64::from(*v));
        }
        for out in &mut out {
            *out /= total;
        }
        let away = |value: &[f32]| {
            let squares = value.iter().zip(&out).map(|(v, out)| (f64::from(*v) - out).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let most = values.chunks_exact(width).map(away).fold(0.0, f64::max);
        (out, most)
    }

    /// Whatever the level and the threads: the same bits; and as near to the real output as is claimed.
    #[test]
    fn attention_is_as_near_as_it_says_and_the_same_everywhere() {
        let case = |shape, causal, index, eps, sigma| Case { shape, causal, index, eps, sigma };
        let cases = [
            case((70, 300, 33, 40), false, false, 0.0, 1.0),
            case((20, 129, 128, 7), true, false, 0.01, 2.0),
            case((66, 400, 64, 64), true, true, 0.02, 4.0),
            case((16, 1000, 32, 80), false, true, 0.01, 0.3),
            case((4, 700, 40, 20), false, true, 0.01, 4.0),
            case((4, 700, 40, 20), false, false, 0.01, 0.5),
            case((3, 200, 16, 16), false, false, 0.1, 6.0),
            // Rows that are searched by panels, of many and of few, of which little can be dropped, and alone.
            case((40, 1500, 64, 16), true, true, 0.02, 7.0),
            case((64, 1200, 40, 24), false, true, 0.1, 9.0),
            case((5, 1100, 64, 20), true, true, 0.01, 6.0),
            case((4, 1100, 32, 20), false, true, 0.01, 0.5),
            case((1, 1040, 48, 16), false, true, 0.05, 5.0),
            // Rows that are thinned in f32, in units that are whole and not.
            case((130, 2500, 64, 24), true, true, 0.05, 8.0),
            case((70, 2100, 128, 130), false, true, 0.01, 10.0),
            // The same with an index of their own.
            case((300, 2304, 32, 16), false, false, 0.1, 9.0),
            // Few rows of so many keys that threads share them, from 2^21 products on, or 2^18: by lists, in full, and with parts of lists.
            case((1, 40_000, 64, 16), false, true, 0.05, 5.0),
            case((4, 40_000, 16, 20), true, true, 0.1, 2.5),
            case((1, 9000, 128, 16), false, false, 0.01, 0.5),
            case((5, 9000, 32, 16), true, false, 0.2, 3.0),
        ];
        for Case { shape: (m, n, dim, width), causal, index, eps, sigma } in cases {
            let queries: Vec<f32> = normal(m * dim, 1).iter().map(|x| sigma * x).collect();
            let (keys, values) = (normal(n * dim, 2), normal(n * width, 3));
            let q = Vectors::new("q", &queries[..], &[m, dim]).unwrap();
            let k = Vectors::new("k", &keys[..], &[n, dim]).unwrap();
            let v = Vectors::new("v", &values[..], &[n, width]).unwrap();
            let index = index.then(|| KeyIndex::build(&k, &IndexOptions::default()).unwrap());
            let options = AttentionOptions { causal, ..AttentionOptions::default() };
            let eps = [eps];
            let by_level = |simd: Simd| {
                let query_rows = QueryRows::new(&q, &k, &options).unwrap();
                let mut job = AttentionJob::new(&q, &k, &v, index.as_ref(), &query_rows).unwrap();
                job.simd = simd;
                let eps = PerRow::new("eps", &eps, 1, "").unwrap();
                let budget = RowBudget { eps, careful: false };
                let listed: Vec<usize> = (0..m).collect();
                let mut bits: Vec<u64> = Vec::new();
                for &(head, ref rows) in &job.units(&listed) {
                    for row in &job
                        .unit(&Unit { head, rows: &listed[rows.clone()], threads: 1 }, budget)
                        .unwrap()
                    {
                        let numbers = [row.upper, row.kept as f64, row.weight_error, row.sum_error];
                        bits.extend(row.out[..width].iter().chain(&numbers).map(|x| x.to_bits()));
                    }
                }
                bits
            };
            let bits = by_level(Simd::all()[0].1);
            for &(name, simd) in &Simd::all()[1..] {
                assert!(by_level(simd) == bits, "{name} {m} {n} {dim}");
            }
            let by_threads = |threads| {
                let options = AttentionOptions { threads: Some(threads), ..options.clone() };
                attention(&q, &k, &v, Budget::TailMass(&eps), index.as_ref(), &options).unwrap()
            };
            let found = by_threads(1);
            assert_eq!(found, by_threads(3));
            assert_eq!(found, by_threads(16));
            for row in 0..m {
                let seen = if causal { row + 1 + n - m } else { n };
                let query = &queries[row * dim..][..dim];
                let of = (&values[..seen * width], width);
                let (want, most) = real(query, (&keys[..seen * dim], dim), of);
                let got = found.row(row);
                let squares = got.iter().zip(&want).map(|(a, b)| (a - b).powi(2));
                let off = squares.sum::<f64>().sqrt();
                // What is dropped moves the rest, and every weight may be off; sums of values round, too.
                let slack = found.tail_mass_upper[row] + 2.0 * found.weight_error[row];
                assert!(off <= 1.001 * slack * most + 1e-5, "{m} {n} {dim} {row}: {off} {slack}");
                assert!(found.tail_mass_upper[row] <= eps[0]);
            }
        }
    }

    /// A sink that outweighs its row by hundreds of nats leaves something of what was dropped.
    #[test]
    fn a_sink_makes_no_loss_nothing() {
        let queries = [1.0f32];
        let (keys, values) = ([0.0f32, -600.0, -600.0, -600.0], [1.0f32; 4]);
        let q = Vectors::new("q", &queries[..], &[1, 1]).unwrap();
        let k = Vectors::new("k", &keys[..], &[4, 1]).unwrap();
        let v = Vectors::new("v", &values[..], &[4, 1]).unwrap();
        let index = KeyIndex::build(&k, &IndexOptions::default()).unwrap();
        for sink in [-900.0, 0.0, 200.0, 400.0, 700.0, 1e300] {
            for index in [None, Some(&index)] {
                let sinks = [sink];
                let options = AttentionOptions {
                    sinks: Some(&sinks),
                    even_if_slower: true,
                    ..AttentionOptions::default()
                };
                let budget = Budget::TailMass(&[0.1]);
                let found = attention(&q, &k, &v, budget, index, &options).unwrap();
                let real = 3.0 * (-600.0 - f64::max(sink, 0.0)).exp();
                assert_eq!(found.tail_mass_upper[0] > 0.0, found.k[0] < 4, "{sink}");
                assert!(found.k[0] == 4 || found.tail_mass_upper[0] >= real * 0.5);
                assert!(found.tail_mass_upper[0] <= 1e-250);
            }
        }
    }

    /// Masked keys, and keys behind a row's length, may hold anything.
    #[test]
    fn what_is_not_seen_is_not_touched() {
        let (m, n, dim) = (20, 300, 24);
        let queries = normal(m * dim, 5);
        let (mut keys, mut values) = (normal(n * dim, 6), normal(n * dim, 7));
        let lengths = vec![200i64; m];
        let clean = (keys.clone(), values.clone());
        keys[200 * dim..].fill(f32::NAN);
        values[200 * dim..].fill(f32::INFINITY);
        let run = |keys: &[f32], values: &[f32], options: &AttentionOptions<'_>| {
            let q = Vectors::new("q", &queries[..], &[m, dim]).unwrap();
            let k = Vectors::new("k", keys, &[n, dim]).unwrap();
            let v = Vectors::new("v", values, &[n, dim]).unwrap();
            attention(&q, &k, &v, Budget::TailMass(&[0.0]), None, options)
        };
        let options = AttentionOptions { lengths: Some(&lengths), ..AttentionOptions::default() };
        let found = run(&keys, &values, &options).unwrap();
        assert_eq!(found, run(&clean.0, &clean.1, &options).unwrap());
        let bytes: Vec<u8> = (0..n).map(|key| u8::from(key < 200)).collect();
        let masked = AttentionOptions { mask: Some((&bytes, &[0])), ..AttentionOptions::default() };
        let again = run(&keys, &values, &masked).unwrap();
        assert_eq!(again.k, vec![200; m]);
        for (a, b) in again.out.to_f64().iter().zip(found.out.to_f64()) {
            assert!((a - b).abs() < 1e-5);
        }
        let error = run(&keys, &values, &AttentionOptions::default()).unwrap_err();
        assert!(matches!(error, Error::KeyNotFinite { argument: "k", .. }), "{error}");
    }
}
