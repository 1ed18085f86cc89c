//! Attention from codes of keys and values, with exact rows of some or of none.

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
/// Of the options `scale`, `causal`, `lengths`, `mask`, `sinks`, `soft_cap`, `bias`, `precision` and `threads` are used.
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
    all.within = Some(all.bounds_by_codes());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Outputs, Precision};
    use crate::index::IndexOptions;

    const DIM: usize = 8;

    /// Numbers that look random, from -1 to 1.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            (self.0 >> 33) as f64 / (1u64 << 30) as f64 - 1.0
        }

        fn numbers(&mut self, count: usize, size: f64) -> Vec<f32> {
            (0..count).map(|_| (size * self.next()) as f32).collect()
        }
    }

    /// Values that codes lose nothing of, and that show weights: each adds to one entry and takes from the next.
    fn showing(n: usize) -> Vec<f32> {
        let mut values = vec![0.0; n * n];
        for i in 0..n {
            values[i * n + i] += 127.0;
            values[i * n + (i + 1) % n] -= 127.0;
        }
        values
    }

    /// Keys of two heads, rows of some of them, and queries.
    struct Case {
        n: usize,
        keys: Vec<f32>,
        queries: Vec<f32>,
        positions: [Vec<u32>; 2],
        /// Of so many keys at the end of each head.
        tail: usize,
        sinks: Option<[f64; 2]>,
        mask: Vec<u8>,
        /// Values of both heads; those that show weights if there are none.
        values: Vec<f32>,
    }

    impl Case {
        fn key(&self, head: usize, key: usize) -> &[f32] {
            &self.keys[(head * self.n + key) * DIM..][..DIM]
        }

        /// Returns where the entries of a key of the first head are.
        fn key_range(key: usize) -> std::ops::Range<usize> {
            key * DIM..(key + 1) * DIM
        }

        /// Returns the shares that keys have of a row's mass, and its logarithm.
        fn real(&self, row: usize) -> (Vec<f64>, f64) {
            let query = &self.queries[row * DIM..][..DIM];
            let score = |key: usize| -> f64 {
                let row = self.key(row, key).iter().zip(query);
                row.map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
            };
            let sees = |key: usize| self.mask[row * self.n + key] != 0;
            let scores: Vec<f64> = (0..self.n)
                .map(|key| if sees(key) { score(key) } else { f64::NEG_INFINITY })
                .collect();
            let sink = self.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[row]);
            let top = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
            let total = weights.iter().sum::<f64>() + (sink - top).exp();
            (weights.iter().map(|weight| weight / total).collect(), top + total.ln())
        }

        /// Attends, and checks what is said of each row; returns the shares of claims that are true.
        fn judge(&self, bits: u32, eps: f64) -> Result<Attention, Error> {
            let n = self.n;
            let (shape, rows) = ([2, n, DIM], [2, 1, DIM]);
            let keys = Vectors::new("keys", &self.keys[..], &shape)?;
            let index = KeyIndex::with_bits(&keys, bits, &IndexOptions::new().rotate(Some(false)))?;
            let shows = self.values.is_empty();
            let one = if shows { showing(n) } else { self.values.clone() };
            let d_v = one.len() / n;
            let both = [&one[..], &one[..]].concat();
            let shape = [2, n, d_v];
            let values = ValueIndex::build(&Vectors::new("values", &both[..], &shape)?)?;
            let listed = |head: usize| self.positions[head].iter().map(|key| *key as usize);
            let of_keys = |head: usize, keys: Vec<usize>| -> Vec<f32> {
                keys.iter().flat_map(|key| self.key(head, *key).to_vec()).collect()
            };
            let of_values = |keys: Vec<usize>| -> Vec<f32> {
                keys.iter().flat_map(|key| one[key * d_v..][..d_v].to_vec()).collect()
            };
            let some = [0, 1].map(|head| of_keys(head, listed(head).collect())).concat();
            let beside = [0, 1].map(|head| of_values(listed(head).collect())).concat();
            let positions = self.positions.concat();
            let starts = [0, self.positions[0].len(), positions.len()];
            let shape = ([positions.len(), DIM], [positions.len(), d_v]);
            let some = Vectors::new("rows", &some[..], &shape.0)?;
            let beside = Vectors::new("rows", &beside[..], &shape.1)?;
            let mut kept = KeptRows::new(&some, &beside, &positions, &starts)?;
            let end = || (n - self.tail..n).collect::<Vec<usize>>();
            let ends = (
                [0, 1].map(|head| of_keys(head, end())).concat(),
                [of_values(end()), of_values(end())].concat(),
            );
            let shape = ([2, self.tail, DIM], [2, self.tail, d_v]);
            if self.tail > 0 {
                let last = Vectors::new("tail", &ends.0[..], &shape.0)?;
                kept = kept.with_tail(&last, &Vectors::new("tail", &ends.1[..], &shape.1)?);
            }
            let queries = Vectors::new("q", &self.queries[..], &rows)?;
            let mut options = AttentionOptions::new().scale(1.0).precision(Precision::F64);
            if let Some(sinks) = &self.sinks {
                options = options.sinks(&sinks[..]);
            }
            let strides = [n, n];
            let options = options.mask(&self.mask, &strides);
            let found = attention_from_codes(&queries, &index, &values, &kept, &[eps], &options)?;
            let Outputs::F64(out) = &found.out else { unreachable!() };
            for (row, out) in out.chunks_exact(d_v).enumerate() {
                let (real, log_mass) = self.real(row);
                let claimed = found.tail_mass_upper[row];
                // Sums of weights show, and then each.
                let mut used: Vec<f64> = out.to_vec();
                used.resize(n, 0.0);
                for at in 1..n {
                    used[at] += used[at - 1];
                }
                let apart = |all: f64| {
                    let off: f64 =
                        used.iter().zip(&real).map(|(u, r)| (u / 127.0 + all - r).abs()).sum();
                    0.5 * off
                };
                let share: f64 = real.iter().sum();
                let sum: f64 = used.iter().sum::<f64>() / 127.0;
                let mut away = apart((share - sum) / n as f64);
                if self.sinks.is_some() {
                    // The sum is not known: the least of all that it may be.
                    let all = used.iter().zip(&real).map(|(u, r)| r - u / 127.0);
                    away = all.map(apart).fold(away, f64::min);
                }
                let seen =
                    self.mask[row * n..][..n].iter().map(|seen| f64::from(*seen)).sum::<f64>();
                // Weights are whole numbers of sixteen bits where they multiply codes.
                let rounded =
                    seen * 1.6e-5 * (real.iter().copied().fold(0.0, f64::max) + claimed) + 2e-6;
                assert!(
                    !shows || away <= claimed + rounded,
                    "{bits} {eps} {row}: {away} {claimed} {rounded}"
                );
                let mass = found.log_mass[row];
                assert!(
                    mass.lower <= log_mass + 1e-9 && log_mass - 1e-9 <= mass.upper,
                    "{mass:?} {log_mass}"
                );
                let average = |at: usize| -> f64 {
                    (0..n).map(|key| real[key] * f64::from(one[key * d_v + at])).sum()
                };
                let off: f64 = (0..d_v).map(|at| (out[at] - average(at)).powi(2)).sum();
                let within = found.within.as_ref().unwrap()[row];
                assert!(off.sqrt() <= within * (1.0 + 1e-9), "{bits} {eps} {row}: {off} {within}");
            }
            Ok(found)
        }
    }

    /// Returns a case without exact rows, whose rows see all.
    fn plain(random: &mut Random, n: usize, sharp: f64) -> Case {
        Case {
            n,
            keys: random.numbers(2 * n * DIM, 1.0),
            queries: random.numbers(2 * DIM, sharp),
            positions: [vec![], vec![]],
            tail: 0,
            sinks: None,
            mask: vec![1; 2 * n],
            values: Vec::new(),
        }
    }

    fn case(random: &mut Random, sharp: f64) -> Case {
        let mut below = |most: usize| {
            ((f64::midpoint(random.next(), 1.0) * most as f64) as i64).unsigned_abs() as usize
        };
        let n = [16, 17, 40, 70][below(4)];
        let tail = [0, 1, n / 3, n - 1, n][below(5)];
        let every = [1, 2, 5, n][below(4)];
        let positions = [every, 3].map(|every| (0..(n - tail) as u32).step_by(every).collect());
        let sinks = (below(3) == 0).then(|| [0.5, if below(2) == 0 { 3.0 } else { 90.0 }]);
        let mask = (0..2 * n).map(|at| u8::from(at % n == n / 2 || below(4) > 0)).collect();
        Case { positions, tail, sinks, mask, ..plain(random, n, sharp) }
    }

    #[test]
    fn what_is_said_of_rows_is_true() {
        let mut random = Random(1);
        let mut least = [1.0f64; 3];
        for round in 0..180 {
            let case = case(&mut random, [0.5, 3.0, 15.0][round % 3]);
            for (at, bits) in [8, 12, 16].into_iter().enumerate() {
                for eps in [0.0, 0.01, 0.2] {
                    let found = case.judge(bits, eps).unwrap();
                    least[at] = found.tail_mass_upper.iter().copied().fold(least[at], f64::min);
                    if case.tail == case.n && round % 3 < 2 {
                        // Nothing is missing.
                        assert!(found.tail_mass_upper.iter().all(|claim| *claim <= eps.max(1e-3)));
                    }
                }
            }
        }
        assert!(least.iter().all(|claim| *claim < 1e-3), "{least:?}");
    }

    /// Keys far from the others have no code: theirs are the scores that f32 may not even hold apart.
    #[test]
    fn rows_of_keys_without_codes() {
        let sizes = [30.0, 300.0, 1e4, 1e9].into_iter();
        // Some of them are hundreds of nats below the nearest f32, some above.
        for size in sizes.chain((0..12).map(|i| (1.0 + 1e-8 * f64::from(i)) * 1e11)) {
            for bits in [8, 16] {
                let mut random = Random(2);
                let mut case = plain(&mut random, 40, 1.0);
                let query = case.queries[..DIM].to_vec();
                let square: f64 = query.iter().map(|&q| f64::from(q) * f64::from(q)).sum();
                let key = case.keys[3 * DIM..4 * DIM].iter_mut().zip(query);
                key.for_each(|(key, query)| *key = (f64::from(query) * size / square) as f32);
                (case.tail, case.positions) = (1, [vec![3], vec![]]);
                match case.judge(bits, 0.01) {
                    Ok(found) => assert!(found.scored[0] > 0),
                    Err(error) => assert!(size > 1e10, "{size}: {error}"),
                }
                case.positions[0].clear();
                let refused = case.judge(bits, 0.01);
                assert!(matches!(refused, Err(Error::Shape { argument: "index", .. })));
            }
        }
    }

    /// Where no key has a code, all scores are exact, and may lie thousands of nats below the nearest f32.
    #[test]
    fn scores_that_f32_rounds_up_by_far() {
        let mut below = 0;
        for seed in 1..30 {
            let mut random = Random(seed);
            let mut case = plain(&mut random, 20, 3.0);
            case.keys.iter_mut().for_each(|entry| *entry *= 1e30);
            case.queries.iter_mut().for_each(|entry| *entry *= 1e-20);
            case.positions = [(0..20).collect(), (0..20).collect()];
            let top = case.real(0).1;
            below += usize::from(f64::from(top as f32) > top + 600.0);
            // Or nothing is said.
            if let Ok(found) = case.judge(8, 0.01) {
                assert_eq!(found.scored[0], 20);
            }
        }
        assert!(below > 3, "{below}");
    }

    /// Of three heavy keys the two at the end are scored exactly, and the other, before them, has an exact value as well.
    #[test]
    fn exact_values_of_heavy_keys_that_are_scored_in_two_ways() {
        let mut alone = 0;
        for seed in 1..20 {
            let mut random = Random(seed);
            let (n, mut case) = (40, plain(&mut random, 40, 3.0));
            (case.tail, case.positions) = (2, [vec![2], vec![]]);
            let query = case.queries[..DIM].to_vec();
            let square: f64 = query.iter().map(|&q| f64::from(q) * f64::from(q)).sum();
            for (key, score) in [(2, 18.3), (n - 2, 20.0), (n - 1, 20.2)] {
                let at = Case::key_range(key);
                for (entry, query) in case.keys[at].iter_mut().zip(&query) {
                    *entry = 0.1 * *entry + (f64::from(*query) * score / square) as f32;
                }
            }
            for step in 0..24 {
                let found = case.judge(12, 2e-4 * 1.35f64.powi(step)).unwrap();
                alone += usize::from(found.scored[0] == 2);
            }
        }
        assert!(alone > 10, "{alone}");
    }

    /// All values lose the same by their codes, and no weight comes from codes.
    #[test]
    fn values_by_codes_of_keys_that_are_scored_exactly() {
        let mut random = Random(3);
        let (n, mut case) = (200, plain(&mut random, 200, 1.0));
        case.tail = n;
        let value = |key: usize| {
            let sign = if key.is_multiple_of(2) { 1.0 } else { -1.0 };
            [127.0 * sign, 0.45, if (key / 2).is_multiple_of(2) { 0.45 } else { -0.45 }]
        };
        case.values = (0..n).flat_map(value).collect();
        // Only keys that lose the same.
        case.mask = (0..2 * n).map(|at| u8::from((at % n / 2).is_multiple_of(2))).collect();
        for bits in [8, 12, 16] {
            let found = case.judge(bits, 0.0).unwrap();
            let seen = case.mask[..n].iter().filter(|seen| **seen != 0).count();
            let (scored, within) = (found.scored[0], found.within.unwrap()[0]);
            assert!(
                2 * scored.unsigned_abs() as usize > seen && within > 0.25,
                "{bits} {scored} {within}"
            );
        }
    }

    /// Where codes lose nothing, roundings are all that is claimed: a low plane has two more.
    #[test]
    fn both_planes_round_more_often() {
        let mut random = Random(4);
        let mut case = plain(&mut random, 16, 1.0);
        for (at, key) in case.keys.chunks_exact_mut(DIM).enumerate() {
            key.fill(if at % 2 == 0 { 127.0 } else { -127.0 });
        }
        // Whole numbers of the unit of their form in sixteen bits.
        let query = [32_639.0, -32_639.0, 4.0, -3.0, 0.0, 0.0, 0.0, 0.0];
        case.queries = [query, query].concat().iter().map(|q| q / 8192.0).collect();
        let claims = [8, 12, 16].map(|bits| case.judge(bits, 0.0).unwrap().tail_mass_upper[0]);
        assert!(claims[1] > 1.2 * claims[0] && claims[2] > 1.2 * claims[0], "{claims:?}");
    }
}
