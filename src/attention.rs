//! Certified sparse attention: scores a few keys exactly, and proves what the others carry.

use half::{bf16, f16};

use crate::error::{Error, Place};
use crate::kernels::{Element, Keys, LANES, Picked, Shifted, Simd};
use crate::keys::{
    Coded, Codes, KeyIndex, Prepared, Query, Room, Rung, Search, Sight, by_type, matrix,
};
use crate::scores::{Data, Scores, Vectors};
use crate::select::Options;
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

/// Rows that are worked on together.
const GROUP: usize = 4;
/// Keys whose rows stay in a cache while a group uses them.
const BLOCK: usize = 64;
/// A row that keeps a larger share of its keys keeps all.
const ALL: f64 = 0.5;

/// Runs generic code for the stored type of some vectors.
macro_rules! stored {
    ($data:expr, $slice:ident => $work:expr) => {
        match $data {
            Data::F32($slice) => $work,
            Data::F64($slice) => $work,
            Data::F16($slice) => $work,
            Data::Bf16($slice) => $work,
        }
    };
}

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
    let portion = (1 << 28) / (GROUP * keys.len() * keys.dim()).max(1) + threads;
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
}

/// Rows that share a head's keys.
struct Unit {
    head: usize,
    rows: Vec<usize>,
}

/// One row's answer.
struct Answer {
    out: Vec<f64>,
    upper: f64,
    kept: usize,
    scored: usize,
    rung: Rung,
    weight_error: f64,
}

/// One row on its way.
struct Row<'a> {
    query: Query,
    prepared: Option<Prepared>,
    sight: Sight<'a>,
    eps: f64,
    room: Room,
    /// What is kept, if not everything that is visible.
    kept: Option<Vec<u32>>,
    weights: Vec<f64>,
    upper: f64,
    scored: usize,
    rung: Rung,
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
        Ok(Job { queries, keys, values, eps, index, options, scale, simd: Simd::current()? })
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
            units.extend(rows.chunks(GROUP).map(|rows| Unit { head, rows: rows.to_vec() }));
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

    fn unit(&self, unit: &Unit) -> Result<Vec<Answer>, Error> {
        let m = self.queries.len();
        let codes = self.index.map(|index| index.head(unit.head));
        let largest = match codes {
            Some(codes) => f64::from(codes.largest()),
            None => self.largest(unit.head)?,
        };
        let mut rows = Vec::with_capacity(unit.rows.len());
        let mut wide = Vec::new();
        for &row in &unit.rows {
            self.queries.widen(row / m, row % m, &mut wide);
            if let Some(entry) = wide.iter().position(|entry| !entry.is_finite()) {
                return Err(Error::KeyNotFinite {
                    argument: self.queries.argument(),
                    place: self.queries.place(row / m, row % m, entry),
                });
            }
            let eps = self.eps[if self.eps.len() == 1 { 0 } else { row }];
            rows.push(Row {
                query: Query::new(&wide, self.scale, largest),
                prepared: codes.filter(|_| eps > 0.0).map(|codes| codes.prepare(&wide, self.scale)),
                sight: self.sight(row),
                eps,
                room: Room::default(),
                kept: None,
                weights: Vec::new(),
                upper: 0.0,
                scored: 0,
                rung: Rung::Dense,
            });
        }
        let mut open = vec![true; rows.len()];
        if let Some(codes) = codes {
            by_type!(self.keys, E => self.thin::<E>(unit.head, codes, &mut rows, &mut open))?;
        }
        let mut full: Vec<&mut Row<'_>> =
            rows.iter_mut().zip(&open).filter(|(_, open)| **open).map(|(row, _)| row).collect();
        stored!(self.keys.data, data => self.full(unit.head, data, &mut full))?;
        stored!(self.values.data, data => self.average(unit.head, data, &mut rows))
    }

    /// The largest absolute entry of a head's keys.
    fn largest(&self, head: usize) -> Result<f64, Error> {
        stored!(self.keys.data, data => {
            let (start, stride) = self.keys.matrix(head);
            let keys = Keys::new(data.get(start..).unwrap_or(&[]), stride, self.keys.dim());
            let mut most = 0.0f64;
            for i in 0..self.keys.len() {
                for &entry in keys.row(i) {
                    let entry: f64 = entry.widen().into();
                    most = most.max(entry.abs());
                }
            }
            Ok(most)
        })
    }

    /// Answers what codes and a few exact scores can answer, and closes those rows.
    fn thin<E: Coded>(
        &self,
        head: usize,
        codes: &Codes,
        rows: &mut [Row<'_>],
        open: &mut [bool],
    ) -> Result<(), Error> {
        let padded = codes.len().next_multiple_of(LANES);
        for row in rows.iter_mut() {
            row.room.scores.resize(padded, 0.0);
        }
        let mut asking: Vec<(&Prepared, &mut [f32])> = rows
            .iter_mut()
            .filter_map(|row| Some((row.prepared.as_ref()?, &mut row.room.scores[..])))
            .collect();
        let mut fours = asking.chunks_exact_mut(GROUP);
        for four in &mut fours {
            if let [(a, ra), (b, rb), (c, rc), (d, rd)] = four {
                codes.scan(self.simd, [*a, *b, *c, *d], [ra, rb, rc, rd].map(|to| &mut **to));
            }
        }
        for (prepared, to) in fours.into_remainder() {
            codes.scan(self.simd, [*prepared], [to]);
        }
        let keys = matrix::<E>(self.keys, head);
        for (row, open) in rows.iter_mut().zip(open) {
            let Row { query, prepared, sight, eps, room, .. } = row;
            let Some(prepared) = prepared else { continue };
            let search = Search {
                simd: self.simd,
                codes,
                keys: Some(keys),
                query,
                prepared,
                sight: *sight,
                eps: *eps,
                trim: false,
            };
            let Some(found) = search.thin(room)? else { continue };
            *open = false;
            (row.upper, row.scored, row.rung) = (found.upper, found.scored, found.rung);
            row.kept = Some(found.kept);
        }
        Ok(())
    }

    /// Scores everything that is visible for some rows, and drops what the budget allows if that is much.
    fn full<E: Element>(
        &self,
        head: usize,
        data: &[E],
        rows: &mut [&mut Row<'_>],
    ) -> Result<(), Error> {
        let (start, stride) = self.keys.matrix(head);
        let keys = Keys::new(data.get(start..).unwrap_or(&[]), stride, self.keys.dim());
        let longest = rows.iter().map(|row| row.sight.visible).max().unwrap_or(0);
        for row in rows.iter_mut() {
            row.room.exact.clear();
            row.room.exact.resize(row.sight.visible.next_multiple_of(LANES), f64::NEG_INFINITY);
        }
        for from in (0..longest).step_by(BLOCK) {
            for row in rows.iter_mut() {
                let end = row.sight.visible.min(from + BLOCK);
                if from < end {
                    let to = &mut row.room.exact[from..end];
                    row.query.score(self.simd, keys, Picked::From(from), 0.0, to);
                }
            }
        }
        for row in rows.iter_mut() {
            let visible = row.sight.visible;
            row.room.exact.truncate(visible);
            let mut seen = visible;
            if let Some(allowed) = row.sight.allowed {
                for (score, &allowed) in row.room.exact.iter_mut().zip(allowed) {
                    if allowed == 0 {
                        *score = f64::NEG_INFINITY;
                        seen -= 1;
                    }
                }
            }
            row.scored = seen;
            row.rung = Rung::Dense;
            // A key that is not finite scores what is no score.
            if let Some(bad) =
                row.room.exact.iter().position(|score| score.is_nan() || *score == f64::INFINITY)
            {
                return Err(Error::KeyNotFinite {
                    argument: self.keys.argument(),
                    place: self.keys.place(head, bad, 0),
                });
            }
            if row.eps > 0.0 && seen > 0 {
                let error = [row.query.error];
                let scores = Scores::new(&row.room.exact[..], &[visible])?.radius(&error)?;
                let found = row.room.workspace.select(&scores, &[row.eps], &Options::new())?;
                if (found.indices.len() as f64) < ALL * seen as f64 {
                    for (at, &key) in found.indices.iter().enumerate() {
                        row.room.exact[at] = row.room.exact[key as usize];
                    }
                    row.upper = found.tail_mass_upper[0];
                    row.room.exact.truncate(found.indices.len());
                    row.kept = Some(found.indices);
                }
            }
        }
        Ok(())
    }

    /// Averages values by the weights of exact scores.
    fn average<E: Element>(
        &self,
        head: usize,
        data: &[E],
        rows: &mut [Row<'_>],
    ) -> Result<Vec<Answer>, Error> {
        let (start, stride) = self.values.matrix(head);
        let dim = self.values.dim();
        let values = Keys::new(data.get(start..).unwrap_or(&[]), stride, dim);
        let width = dim.next_multiple_of(LANES);
        let mut answers = Vec::with_capacity(rows.len());
        for row in rows.iter_mut() {
            let count = row.kept.as_ref().map_or(row.sight.visible, Vec::len);
            let exact = &mut row.room.exact;
            exact.truncate(count);
            let top = exact.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            exact.resize(count.next_multiple_of(LANES), f64::NEG_INFINITY);
            row.weights.resize(exact.len(), 0.0);
            let total = if top > f64::NEG_INFINITY {
                self.simd.weights(&exact[..], Shifted(top), &mut row.weights)
            } else {
                0.0
            };
            row.weights.truncate(count);
            let kept = match &row.kept {
                Some(kept) => kept.len(),
                None => row.scored,
            };
            answers.push((vec![0.0; width], total, kept));
        }
        let blocks = rows.iter().map(|row| row.weights.len()).max().unwrap_or(0);
        for from in (0..blocks).step_by(BLOCK) {
            for (row, (out, total, _)) in rows.iter().zip(&mut answers) {
                if *total == 0.0 {
                    continue;
                }
                let all = row.weights.len();
                match &row.kept {
                    // Where everything is visible the rows of a group share what is read.
                    None if from < all => {
                        let weights = &row.weights[from..all.min(from + BLOCK)];
                        self.simd.average(values, Picked::From(from), weights, out);
                    }
                    Some(kept) if from == 0 => {
                        self.simd.average(values, Picked::Listed(kept), &row.weights, out);
                    }
                    _ => {}
                }
            }
        }
        let parts = rows.iter().zip(answers);
        parts
            .map(|(row, (mut out, total, kept))| {
                if total > 0.0 {
                    out.iter_mut().for_each(|entry| *entry /= total);
                }
                if let Some(entry) = out[..dim].iter().position(|entry| !entry.is_finite()) {
                    return Err(Error::KeyNotFinite {
                        argument: self.values.argument(),
                        place: self.values.place(head, 0, entry),
                    });
                }
                let weight_error = row.query.error.exp_m1() + 6.1e-8;
                let Row { upper, scored, rung, .. } = *row;
                Ok(Answer { out, upper, kept, scored, rung, weight_error })
            })
            .collect()
    }
}
