//! Attention from codes of keys and values, with exact rows of some or of none.

use super::ball::UP;
use super::coded::TOGETHER;
use super::job::{Answer, AttentionJob, RowBudget, Unit};
use super::kept_rows::KeptRows;
use super::options::AttentionOptions;
use super::query_rows::QueryRows;
use super::result::Attention;
use crate::error::{Error, Place};
use crate::index::{Coded, Codes, KeyIndex, Rung, ValueIndex, for_coded_dtype};
use crate::numerics::log_mass::LogMass;
use crate::rows::{PerRow, Vectors};
use crate::runtime::memory::{check_memory, filled};
use crate::runtime::reused::{Reused, filled_again};
use crate::runtime::threads;
use half::{bf16, f16};

/// Smallest budget that is aimed at: codes prove no less.
const LEAST: f64 = 1.0 / 16_384.0;

/// Computes softmax attention over keys and values of which only codes and some exact rows are there.
///
/// Shapes: queries `(..., heads, m, d)`, `index` and `values` of `(..., kv_heads, n, d)` and `(..., kv_heads, n, d_v)`, with
/// `heads` a multiple of `kv_heads`.
///
/// Weights come from codes, those of heavy keys from the low plane (`KeyIndex::with_bits`) and from exact rows as far as `eps`
/// asks for it. Results say what is proven: `tail_mass_upper` is an upper bound of the total variation distance between the
/// attention that was computed and that over the stored keys and values, and `within` of the error of each output. The former
/// may be more than `eps`, where codes and the rows at hand prove no less.
///
/// Of the options `scale`, `causal`, `lengths`, `mask`, `sinks`, `precision` and `threads` are used.
///
/// ```
/// use certk_rs::{AttentionOptions, IndexOptions, KeptRows, KeyIndex, ValueIndex, Vectors, attention_from_codes};
/// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
/// let keys = Vectors::new("keys", &data, &[1, 50, 4])?;
/// let index = KeyIndex::with_bits(&keys, 16, &IndexOptions::new())?;
/// let values = ValueIndex::build(&keys)?;
/// let query = Vectors::new("q", &data[..4], &[1, 1, 4])?;
/// let none = Vectors::new("rows", &data[..0], &[0, 4])?;
/// let kept = KeptRows::new(&none, &none, &[], &[0, 0])?;
/// let found = attention_from_codes(&query, &index, &values, &kept, &[0.01], &AttentionOptions::new())?;
/// assert!(found.tail_mass_upper[0] <= 0.01 && found.within.unwrap()[0] < 0.1);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] where arguments do not fit each other, or a key that has no code has no exact row; [`Error::OtherKeys`] for
/// rows of another type; [`Error::Eps`]; [`Error::Scale`], [`Error::Length`], [`Error::RowLength`]; [`Error::KeyNotFinite`] for a
/// query; [`Error::Number`] where a score or an output overflows, or a sink is NaN or positive infinity.
pub fn attention_from_codes(
    queries: &Vectors<'_>,
    index: &KeyIndex<'_>,
    values: &ValueIndex<'_>,
    kept: &KeptRows<'_>,
    eps: &[f64],
    options: &AttentionOptions<'_>,
) -> Result<Attention, Error> {
    let _modes = threads::default_floats();
    check_memory("v", values.dim(), TOGETHER * 24)?;
    let rows = queries.heads().saturating_mul(queries.len());
    check_memory("q", rows, values.dim().saturating_mul(8).saturating_add(192))?;
    if values.batch_shape() != index.batch_shape() || values.len() != index.len() {
        let shape = [values.batch_shape(), &[values.len(), values.dim()]].concat();
        let problem = format!(
            "codes of keys have shape {:?} and {} keys a head: pass codes of the values beside them",
            index.batch_shape(),
            index.len()
        );
        return Err(Error::Shape { argument: "values", shape, problem });
    }
    let shapes = [(index.dtype(), index.dim()), (values.dtype(), values.dim())];
    kept.check((index.batch_shape(), index.len()), shapes)?;
    let query_rows = QueryRows::new(queries, (index.batch_shape(), index.len(), None), options)?;
    let job = AttentionJob::from_codes(queries, (index, values), kept, &query_rows)?;
    let mut aims = filled("eps", query_rows.rows(), 0.0)?;
    let eps = query_rows.per_row("eps", eps)?.budgets(query_rows.shape)?;
    for (row, aim) in aims.iter_mut().enumerate() {
        *aim = eps.of(row).max(LEAST);
    }
    let aims: PerRow<'_, f64> = query_rows.per_row("eps", &aims)?;
    let mut all = Attention::empty(query_rows.rows(), values.dim(), options.precision);
    job.run(RowBudget { eps: aims, short: false, careful: false }, |_| true, &mut all)?;
    let errors = all.coded_error.iter().zip(&all.rounding).zip(&all.k);
    all.within = Some(
        errors
            .map(|((error, moved), k)| if *k == 0 { 0.0 } else { (error + moved) * UP })
            .collect(),
    );
    Ok(all)
}

impl AttentionJob<'_> {
    /// Answers the rows of a unit from codes and kept rows.
    pub(super) fn attend_from_codes(
        &self,
        unit: &Unit<'_>,
        (values, kept): (&ValueIndex<'_>, &KeptRows<'_>),
        budget: RowBudget<'_>,
    ) -> Result<Reused<Answer>, Error> {
        let Some(index) = self.index else { return Ok(Reused::new()) };
        let (codes, values) = (index.head(unit.head), values.head(unit.head));
        for_coded_dtype!(self.keys, K => for_coded_dtype!(self.values, V => {
            self.codes_of::<K, V>(unit, (codes, values), kept, budget)
        }))
    }

    fn codes_of<K: Coded, V: Coded>(
        &self,
        unit: &Unit<'_>,
        (codes, values): (&Codes<'_>, &Codes<'_>),
        kept: &KeptRows<'_>,
        budget: RowBudget<'_>,
    ) -> Result<Reused<Answer>, Error> {
        let (keys, stored) = kept.of_head::<K, V>(unit.head, codes.len());
        let place = |key: u32| Place(vec![unit.head, key as usize]);
        let lacking = |argument, key, what| Error::Shape {
            argument,
            shape: place(key).0,
            problem: format!("{what} here has no code: keep its row"),
        };
        if let Some(key) = codes.uncoded().find(|&key| !keys.has(key)) {
            return Err(lacking("index", key, "the key"));
        }
        if let Some(value) = values.uncoded().next() {
            return Err(lacking("values", value, "the value"));
        }
        let (longest, mut share) = (codes.longest(), None);
        let sees = |row: &&usize| self.query_rows.row_visibility(**row).count() > 0;
        let seeing: Reused<usize> = unit.rows.iter().filter(sees).copied().collect();
        let mut found: Reused<Answer> = Reused::with_hint(seeing.len());
        for list in seeing.chunks(TOGETHER) {
            let mut rows = self.rows(unit.head, list, budget)?;
            let by = (codes, values, longest);
            let part =
                self.coded_rows(by, (keys, stored), &mut rows, (&mut share, unit.threads))?;
            let Some(mut part) = part else {
                let place = self.query_rows.place(list[0]);
                let problem = "scores by codes, or weights, overflow float32 here: pass smaller queries, a smaller scale or the keys themselves";
                let value = self.scale;
                return Err(Error::Number { argument: "q", place, value, problem });
            };
            found.extend(part.drain(..));
        }
        let (mut found, mut seeing) = (found.drain(..), seeing.iter().peekable());
        let answer = |row: &usize| match seeing.next_if_eq(&row).and_then(|_| found.next()) {
            Some(answer) => Ok(answer),
            None => self.of_nothing(),
        };
        unit.rows.iter().map(answer).collect()
    }

    /// Answers a row that sees no key.
    fn of_nothing(&self) -> Result<Answer, Error> {
        Ok(Answer {
            out: filled_again("v", self.values.dim(), 0.0)?,
            upper: 0.0,
            kept: 0,
            scored: 0,
            rung: Rung::Coded,
            weight_error: 0.0,
            sum_error: 0.0,
            coded_error: 0.0,
            log_mass: LogMass::NONE,
        })
    }
}
