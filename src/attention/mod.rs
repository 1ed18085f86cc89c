//! Certified sparse attention: scores a few keys exactly, and proves what the others carry.

mod together;
mod work;

use std::sync::OnceLock;

use crate::error::{Error, Place};
use crate::kernels::{PANEL_ROWS, Simd};
use crate::keys::{KeyIndex, Rung, Sight};
use crate::scores::Vectors;
use crate::threads::{self, Hook};

/// How attention is to be computed.
#[derive(Debug, Clone, Default)]
pub struct AttentionOptions<'a> {
    /// What products are multiplied by to be scores; `None` for `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Query i of m sees keys up to i + n - m.
    pub causal: bool,
    /// How many keys each row sees, from the first; one per row.
    pub lengths: Option<&'a [i64]>,
    /// A byte per key and row, zero where it is masked, and the strides of the rows' axes in it.
    pub mask: Option<(&'a [u8], &'a [usize])>,
    /// How many threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

/// Attention's output, a row for each query, and what is proven of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Attention {
    /// Weighted averages of values, one vector after another.
    pub out: Vec<f64>,
    /// The real tail mass of a row is at most this.
    pub tail_mass_upper: Vec<f64>,
    /// Keys that went into each average.
    pub k: Vec<i64>,
    /// Keys that were scored exactly.
    pub scored: Vec<i64>,
    /// Which way each row was answered.
    pub rung: Vec<Rung>,
    /// A bound of the relative error of the weights of each row's average.
    pub weight_error: Vec<f64>,
}

/// Rows that share a scan of the codes.
const GROUP: usize = 4;
/// Rows that are many: they are worked on together, in f32 where nothing can be dropped.
const MANY: usize = 16;

/// Softmax attention of queries `(..., heads, m, d)` over keys `(..., kv_heads, n, d)` and values `(..., kv_heads, n, d_v)`, `heads` a
/// multiple of `kv_heads`, with a dropped mass of at most `eps` in each row, proven for the real numbers stored.
///
/// With an index of the keys, most keys are judged by their codes. A row that cannot be thinned is computed in full. A row that
/// sees no key gives zeros.
///
/// # Errors
/// [`Error::Shape`] where arguments do not fit each other, [`Error::Eps`], [`Error::Scale`], [`Error::Length`],
/// [`Error::RowLength`], [`Error::KeyNotFinite`] for a query, or a key or value that is used.
pub fn attention(
    queries: &Vectors<'_>,
    keys: &Vectors<'_>,
    values: &Vectors<'_>,
    eps: &[f64],
    index: Option<&KeyIndex>,
    options: &AttentionOptions<'_>,
) -> Result<Attention, Error> {
    attention_with(queries, keys, values, eps, index, options, &mut || Ok(()))
}

pub(crate) fn attention_with(
    queries: &Vectors<'_>,
    keys: &Vectors<'_>,
    values: &Vectors<'_>,
    eps: &[f64],
    index: Option<&KeyIndex>,
    options: &AttentionOptions<'_>,
    hook: Hook<'_>,
) -> Result<Attention, Error> {
    let job = Job::new(queries, keys, values, eps, index, options)?;
    let rows = queries.heads() * queries.len();
    let dim = values.dim();
    let work = rows.saturating_mul(keys.len()).saturating_mul(keys.dim());
    let threads = threads::count(options.threads, work > 1 << 20)?;
    let units = job.units();
    let mut all = Attention {
        out: vec![0.0; rows * dim],
        tail_mass_upper: vec![0.0; rows],
        k: vec![0; rows],
        scored: vec![0; rows],
        rung: vec![Rung::Dense; rows],
        weight_error: vec![0.0; rows],
    };
    let portion = (1 << 28) / (PANEL_ROWS * keys.len() * keys.dim()).max(1) + threads;
    let mut at = 0;
    let one = |unit: usize| job.unit(&units[unit]);
    threads::in_portions(threads, units.len(), (portion, 1), hook, one, |answers| {
        for (&row, answer) in units[at].rows.iter().zip(answers) {
            all.out[row * dim..][..dim].copy_from_slice(&answer.out[..dim]);
            all.tail_mass_upper[row] = answer.upper;
            all.k[row] = answer.kept as i64;
            all.scored[row] = answer.scored as i64;
            all.rung[row] = answer.rung;
            all.weight_error[row] = answer.weight_error;
        }
        at += 1;
    })?;
    Ok(all)
}

/// One call.
struct Job<'a> {
    queries: &'a Vectors<'a>,
    keys: &'a Vectors<'a>,
    values: &'a Vectors<'a>,
    eps: &'a [f64],
    index: Option<&'a KeyIndex>,
    options: &'a AttentionOptions<'a>,
    scale: f64,
    simd: Simd,
    /// Of each head's keys that some row sees: the largest norm.
    norms: Vec<OnceLock<f64>>,
}

/// Rows that share a head's keys.
struct Unit {
    head: usize,
    rows: Vec<usize>,
}

impl<'a> Job<'a> {
    fn new(
        queries: &'a Vectors<'a>,
        keys: &'a Vectors<'a>,
        values: &'a Vectors<'a>,
        eps: &'a [f64],
        index: Option<&'a KeyIndex>,
        options: &'a AttentionOptions<'a>,
    ) -> Result<Self, Error> {
        let scale = options.scale.unwrap_or(1.0 / (keys.dim() as f64).sqrt());
        if !scale.is_finite() {
            return Err(Error::Scale { value: scale });
        }
        if queries.dim() != keys.dim() {
            return Err(queries.misfit(format!("keys have {} entries", keys.dim())));
        }
        let (have, need) = (queries.batch(), keys.batch());
        let last = need.len().wrapping_sub(1);
        let fits = have.len() == need.len()
            && have.iter().zip(need).enumerate().all(|(axis, (&have, &need))| {
                have == need || axis == last && need > 0 && have % need == 0
            });
        if !fits {
            return Err(queries.misfit(format!(
                "the axes before the last two must be those of the keys, {need:?}, of which the last may be a multiple"
            )));
        }
        if values.batch() != need || values.len() != keys.len() {
            return Err(values.misfit(format!(
                "there must be a value for each key; keys have shape {:?}",
                keys.shape()
            )));
        }
        if let Some(index) = index
            && (index.batch_shape() != need
                || index.len() != keys.len()
                || index.dim() != keys.dim())
        {
            return Err(keys.misfit(format!(
                "the index was built of {} keys of {} entries for axes {:?}",
                index.len(),
                index.dim(),
                index.batch_shape()
            )));
        }
        let rows = queries.heads() * queries.len();
        let shape = &queries.shape()[..queries.shape().len() - 1];
        if eps.len() != 1 && eps.len() != rows {
            let remedy = "pass one budget, or one per row";
            return Err(Error::Length { argument: "eps", expected: rows, got: eps.len(), remedy });
        }
        for (row, &value) in eps.iter().enumerate() {
            if !(0.0..1.0).contains(&value) {
                let place = if eps.len() == 1 { Place(vec![]) } else { Place::unravel(shape, row) };
                return Err(Error::Eps { place, value });
            }
        }
        if let Some(lengths) = options.lengths {
            if lengths.len() != rows {
                let remedy = "pass one length per row";
                let got = lengths.len();
                return Err(Error::Length { argument: "lengths", expected: rows, got, remedy });
            }
            for (row, &value) in lengths.iter().enumerate() {
                if usize::try_from(value).is_ok_and(|value| value <= keys.len()) {
                    continue;
                }
                let place = Place::unravel(shape, row);
                return Err(Error::RowLength { place, value, n: keys.len() });
            }
        }
        let simd = Simd::current()?;
        let norms = vec![OnceLock::new(); keys.heads()];
        Ok(Job { queries, keys, values, eps, index, options, scale, simd, norms })
    }

    /// Rows in groups that share keys.
    fn units(&self) -> Vec<Unit> {
        let m = self.queries.len();
        let mut rows_of = vec![Vec::new(); self.keys.heads()];
        for matrix in 0..self.queries.heads() {
            let place = Place::unravel(self.queries.batch(), matrix).0;
            let mut head = 0;
            for (axis, &have) in self.keys.batch().iter().enumerate() {
                head = head * have + place[axis] / (self.queries.batch()[axis] / have);
            }
            if let Some(rows) = rows_of.get_mut(head) {
                rows.extend(matrix * m..(matrix + 1) * m);
            }
        }
        let mut units = Vec::new();
        for (head, rows) in rows_of.into_iter().enumerate() {
            // How rows are put together depends on nothing but the shapes, so that answers do not depend on threads.
            let size = if rows.len() < MANY { GROUP } else { PANEL_ROWS };
            units.extend(rows.chunks(size).map(|rows| Unit { head, rows: rows.to_vec() }));
        }
        units
    }

    fn sight(&self, row: usize) -> Sight<'a> {
        let (m, n) = (self.queries.len(), self.keys.len());
        let mut visible = n;
        if let Some(lengths) = self.options.lengths {
            visible = visible.min(lengths[row].unsigned_abs() as usize);
        }
        if self.options.causal {
            visible = visible.min((row % m + 1 + n).saturating_sub(m));
        }
        let allowed = self.options.mask.map(|(mask, strides)| {
            let shape = &self.queries.shape()[..self.queries.shape().len() - 1];
            let place = Place::unravel(shape, row).0;
            let start: usize = place.iter().zip(strides).map(|(i, stride)| i * stride).sum();
            &mask[start..][..n]
        });
        Sight { visible, allowed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::IndexOptions;

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
            terms.sum::<f64>() / (dim as f64).sqrt()
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
        out.iter_mut().for_each(|out| *out /= total);
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
                let mut job = Job::new(&q, &k, &v, &eps, index.as_ref(), &options).unwrap();
                job.simd = simd;
                let answers = job.units().into_iter().flat_map(|unit| job.unit(&unit).unwrap());
                answers
                    .flat_map(|row| {
                        let numbers = [row.upper, row.kept as f64, row.weight_error];
                        row.out.into_iter().take(width).chain(numbers).map(f64::to_bits)
                    })
                    .collect::<Vec<u64>>()
            };
            let bits = by_level(Simd::all()[0].1);
            for &(name, simd) in &Simd::all()[1..] {
                assert!(by_level(simd) == bits, "{name} {m} {n} {dim}");
            }
            let by_threads = |threads| {
                let options = AttentionOptions { threads: Some(threads), ..options.clone() };
                attention(&q, &k, &v, &eps, index.as_ref(), &options).unwrap()
            };
            let found = by_threads(1);
            assert_eq!(found, by_threads(3));
            for row in 0..m {
                let seen = if causal { row + 1 + n - m } else { n };
                let query = &queries[row * dim..][..dim];
                let of = (&values[..seen * width], width);
                let (want, most) = real(query, (&keys[..seen * dim], dim), of);
                let got = &found.out[row * width..][..width];
                let squares = got.iter().zip(&want).map(|(a, b)| (a - b).powi(2));
                let off = squares.sum::<f64>().sqrt();
                // What is dropped moves the rest, and every weight may be off; sums of values round, too.
                let slack = found.tail_mass_upper[row] + 2.0 * found.weight_error[row];
                assert!(off <= 1.001 * slack * most + 1e-5, "{m} {n} {dim} {row}: {off} {slack}");
                assert!(found.tail_mass_upper[row] <= eps[0]);
            }
        }
    }

    /// What is masked, or behind a row's length, may be anything.
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
            attention(&q, &k, &v, &[0.0], None, options)
        };
        let options = AttentionOptions { lengths: Some(&lengths), ..AttentionOptions::default() };
        let found = run(&keys, &values, &options).unwrap();
        assert_eq!(found, run(&clean.0, &clean.1, &options).unwrap());
        let bytes: Vec<u8> = (0..n).map(|key| u8::from(key < 200)).collect();
        let masked = AttentionOptions { mask: Some((&bytes, &[0])), ..AttentionOptions::default() };
        let again = run(&keys, &values, &masked).unwrap();
        assert_eq!(again.k, vec![200; m]);
        for (a, b) in again.out.iter().zip(&found.out) {
            assert!((a - b).abs() < 1e-5);
        }
        let error = run(&keys, &values, &AttentionOptions::default()).unwrap_err();
        assert!(matches!(error, Error::KeyNotFinite { argument: "k", .. }), "{error}");
    }
}
