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
