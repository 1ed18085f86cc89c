//! A few rows of which most weights come from codes of keys, and most values from codes of values.
//!
//! All rows that share reads scan the codes together. Keys that weigh too much for their codes are scored by their low plane,
//! if there is one, and else exactly. What was done is then certified as it stands (`coded_bound`).

use half::{bf16, f16};

use super::coded_bound::{Outputs, Roundings};
use super::error_bound::{sum_error, summing};
use super::exact_rows::ExactRows;
use super::f32_error::{U, WEIGHT, length};
use super::few::side_by_side;
use super::heavy_keys::Candidates;
use super::job::{Answer, AttentionJob, RowBudget, Unit};
use super::listed::Listed;
use super::narrow::append_narrow;
use super::pending::{PendingRow, grow};
use super::stretches::by_stretches;
use super::weighed::{FINELY, HIGHEST, Weighed};
use crate::error::Error;
use crate::index::{
    CodeError, Codes, FROM, Prepared, QueryScratch, Rung, SEGMENT, for_coded_dtype, matrix,
};
use crate::kernels::{CodedSums, Element, LANES, LIGHTEST, Picked, WeightSums};
use crate::numerics::certified_sums::exp;
use crate::numerics::finite::all_finite;
use crate::numerics::log_mass::LogMass;
use crate::runtime::ambient;
use crate::runtime::reused::{Reused, filled_again};
use crate::runtime::threads;

/// Most rows that scan the codes together.
pub(super) const TOGETHER: usize = 8;
/// Share of a sample above a careful edge below which rows keep the heaviest keys and drop the others: about a thirtieth
/// of their keys.
const SPARSE: f64 = 0.2;
/// Keys that are scored exactly at a time.
const BLOCK: usize = 256;
/// Most attempts at a row's exact keys.
const ATTEMPTS: usize = 6;
/// Largest share of its keys that a row scores exactly beside codes.
const MOST: f64 = 0.5;
/// Largest share of the budget that an error of exact scores in f32 may take.
const FINE: f64 = 0.125;
/// Share of the budget that is aimed at before any key is scored by both planes.
const BEFORE: f64 = 0.85;
/// Share of the budget up to which keys without weights from codes alone leave enough of it to these.
const REACH: f64 = 0.95;
/// Factor from the least that can be proven to what is aimed at, where that is more than the budget.
const NEAR: f64 = 1.5;
/// Length of a code, at most, in the root of its entries.
const LONGEST: f64 = 127.0;
/// Relative error of sums of weights in f32, of an exact weight in f32, of products of weights and scales, and of blocks of their
/// sums.
const SUMS: f64 = 25.0 * U;
/// Factor for sums and products of a few bounds.
const ROUND: f64 = 1.0 + 1e-9;
/// Distance of a sink above all scores, in nats, from which weights are relative to its own.
const FAR: f64 = 60.0;

/// Sums what `work` finds in each segment of a list.
fn in_segments(
    threads: usize,
    list: &mut [f32],
    work: impl Fn(&mut [f32]) -> WeightSums + Sync,
) -> Result<WeightSums, Error> {
    let mut all = WeightSums::default();
    if threads == 1 || list.len() <= SEGMENT {
        for segment in list.chunks_mut(SEGMENT) {
            ambient::check()?;
            all.join(&work(segment));
        }
    } else {
        let found = threads::map(threads, list.chunks_mut(SEGMENT), 1, work)?;
        for sums in &found {
            all.join(sums);
        }
    }
    Ok(all)
}

impl AttentionJob<'_> {
    /// Answers the rows of a unit by codes of keys and values; `None` if there are none, or where they do not suffice.
    pub(super) fn attend_coded(
        &self,
        unit: &Unit<'_>,
        budget: RowBudget<'_>,
    ) -> Result<Option<Reused<Answer>>, Error> {
        let (Some(index), Some(values)) = (self.index, self.query_rows.options.value_index) else {
            return Ok(None);
        };
        let (codes, values) = (index.head(unit.head), values.head(unit.head));
        let wanted = |&row: &usize| {
            budget.eps.of(row) > 0.0 && self.query_rows.row_visibility(row).prefix >= FROM
        };
        let usable = !budget.careful && values.uncoded().next().is_none();
        if !usable || !unit.rows.iter().all(wanted) {
            return Ok(None);
        }
        let longest = codes.longest();
        let mut share = None;
        let mut answers = Reused::with_hint(unit.rows.len());
        for list in unit.rows.chunks(TOGETHER) {
            let mut rows = self.rows(unit.head, list, budget)?;
            // Roundings alone may be more than a budget.
            let fine = |row: &PendingRow| {
                let error = row.prepared.as_ref().map_or(CodeError::NOTHING, |p| p.code_error);
                error.says_something() && error.rho + WEIGHT < row.eps
            };
            let fine = rows.iter().all(fine);
            let sparse = || !self.changes_scores() && self.seem_sparse(codes, &rows);
            if !fine || answers.is_empty() && sparse() {
                return Ok(None);
            }
            let by = (codes, values, longest);
            let found = for_coded_dtype!(self.keys, K => {
                let keys = matrix::<K>(self.keys, unit.head);
                for_coded_dtype!(self.values, V => {
                    let values = matrix::<V>(self.values, unit.head);
                    let of = (ExactRows::all(keys), ExactRows::all(values));
                    self.coded_rows(by, of, &mut rows, (&mut share, unit.threads))
                })
            })?;
            let Some(mut found) = found else { return Ok(None) };
            answers.extend(found.drain(..));
        }
        Ok(Some(answers))
    }

    /// Returns `true` if rows seem to keep so few keys that these alone are read sooner than all codes of values. It
    /// decides only on time.
    fn seem_sparse(&self, codes: &Codes<'_>, rows: &[PendingRow]) -> bool {
        let keeps = |row: &PendingRow| {
            let prepared = row.prepared.as_ref();
            prepared.map_or(1.0, |p| codes.seems_to_keep(self.simd, p, (row.prefix, row.eps)))
        };
        rows.iter().map(keeps).sum::<f64>() < SPARSE * rows.len() as f64
    }

    /// Answers rows that scan the codes together. Where codes do not suffice, `None`; or, if there is nothing but exact rows of
    /// some keys beside them, what they prove.
    pub(super) fn coded_rows<K: Element<Scalar = f32>, V: Element>(
        &self,
        (codes, values, longest): (&Codes<'_>, &Codes<'_>, f64),
        (keys, stored): (ExactRows<'_, K>, ExactRows<'_, V>),
        rows: &mut [PendingRow],
        (share, threads): (&mut Option<f64>, usize),
    ) -> Result<Option<Reused<Answer>>, Error> {
        let all = self.from_codes.is_none();
        self.scan(codes, rows, threads)?;
        let Some(mut weighed) = self.weigh_by_codes(rows, (codes, keys, longest), threads)? else {
            return Ok(None);
        };
        let mut named = Listed::with_hint(SEGMENT);
        for attempt in 0.. {
            self.add_exact(keys, rows, &mut weighed)?;
            let mut open = false;
            for (row, weighed) in rows.iter_mut().zip(&mut *weighed) {
                let certificate = weighed.certificate();
                let proven = certificate.total_variation();
                if proven <= row.eps {
                    continue;
                }
                let finely = weighed.fine.keys.len();
                // What is proven once no weight comes from codes alone. Where that is too much, those that do are not to add
                // much to it.
                let least = certificate.likely(0.0, 0.0);
                let near = all || least <= REACH * row.eps;
                let goal = if near { row.eps } else { row.eps.max(NEAR * least) };
                if attempt == ATTEMPTS {
                    // What is named would not be scored any more.
                } else if weighed.low.is_some()
                    && least > FINELY * row.eps
                    && weighed.score_exactly(row.eps, |key| keys.has(key))?
                {
                    // Some keys are to be scored exactly.
                } else if proven > goal {
                    let QueryScratch { scores: weights, listed, .. } = &mut row.scratch.query;
                    let sum = |weights: &mut [f32]| {
                        in_segments(threads, weights, |part| self.simd.sum_weights(part))
                    };
                    let first = weighed.low.is_some() && weighed.fine.keys.is_empty();
                    let aim = if first { BEFORE * goal } else { goal };
                    let known = (self.simd, &certificate, aim);
                    let candidates = &mut weighed.candidates;
                    weighed.sums =
                        candidates.name(known, (weights, listed), share, &mut named, sum)?;
                    match &row.prepared {
                        Some(prepared) if weighed.low.is_some() => {
                            weighed.add_fine(codes, (self.simd, prepared), &named)?;
                        }
                        _ => weighed.more.extend_from_slice(&named.keys),
                    }
                }
                let count = weighed.exact.keys.len() + weighed.more.len();
                let changed = !weighed.more.is_empty() || weighed.fine.keys.len() != finely;
                let too_many = count as f64 > MOST * weighed.seen as f64;
                if all && (!changed || too_many) {
                    return Ok(None);
                }
                open |= changed;
            }
            if !open || attempt == ATTEMPTS {
                break;
            }
        }
        self.coded_answers((values, stored), rows, &mut weighed, threads)
    }

    /// Returns what scores of a row are relative to: an offset that all of its codes share, unless scores are changed.
    fn offset(&self, row: &PendingRow) -> f64 {
        let prepared = row.prepared.as_ref().filter(|_| !self.changes_scores());
        prepared.map_or(0.0, |prepared| prepared.offset)
    }

    /// Scores all keys by their codes for all rows.
    fn scan(
        &self,
        codes: &Codes<'_>,
        rows: &mut [PendingRow],
        threads: usize,
    ) -> Result<(), Error> {
        let longest = rows.iter().map(|row| row.prefix).max().unwrap_or(0);
        let padded = longest.next_multiple_of(LANES);
        for row in rows.iter_mut() {
            let scores = &mut row.scratch.query.scores;
            grow(scores, padded)?;
            scores.resize(padded, 0.0);
        }
        side_by_side!(rows, some => {
            let mut scores = some.each_mut().map(|row| std::mem::take(&mut row.scratch.query.scores));
            let queries = some.each_ref().map(|row| row.prepared.as_ref().map(Prepared::coarse));
            let to = scores.each_mut().map(|scores| &mut scores[..]);
            codes.scan(self.simd, queries.map(Option::unwrap_or_default), to, threads)?;
            for (row, scores) in some.iter_mut().zip(scores) {
                row.scratch.query.scores = scores;
            }
        });
        Ok(())
    }

    /// Turns the scores of rows into weights; `None` where scores are no numbers, or codes are of no key that a row sees.
    fn weigh_by_codes<K: Element<Scalar = f32>>(
        &self,
        rows: &mut [PendingRow],
        (codes, keys, longest): (&Codes<'_>, ExactRows<'_, K>, f64),
        threads: usize,
    ) -> Result<Option<Reused<Weighed>>, Error> {
        let mut all = Reused::with_hint(rows.len());
        for row in rows {
            let visibility = self.query_rows.row_visibility(row.number);
            let (offset, changes) = (self.offset(row), self.changes_scores());
            let biases = self.biases(row.number)?;
            let scores = &mut row.scratch.query.scores[..];
            if changes && let Some(prepared) = &row.prepared {
                let scores = &mut scores[..visibility.prefix];
                for score in &mut *scores {
                    *score = (f64::from(*score) + prepared.offset) as f32;
                }
                self.change_single(row.number, 0, scores);
                // A cap made a score of the negative infinity of keys without a code.
                for key in codes.uncoded().take_while(|&key| (key as usize) < visibility.prefix) {
                    scores[key as usize] = f32::NEG_INFINITY;
                }
            }
            scores[visibility.prefix..].fill(f32::NEG_INFINITY);
            if let Some(allowed) = visibility.allowed {
                for (score, &allowed) in scores.iter_mut().zip(allowed) {
                    if allowed == 0 {
                        *score = f32::NEG_INFINITY;
                    }
                }
            }
            let (mut shift, nan) = self.simd.top(scores);
            let mut more = Reused::with_hint(SEGMENT);
            more.extend(codes.uncoded().filter(|&key| visibility.sees(key as usize)));
            // Few: of these there is no score by codes.
            let mut bare: Reused<f64> = std::iter::repeat_n(0.0, more.len()).collect();
            keys.by_parts((&more, more.len()), |rows, numbers, part| {
                row.query.score(self.simd, rows, Picked::Listed(numbers), offset, &mut bare[part]);
            });
            self.change(row.number, Picked::Listed(&more), &mut bare);
            shift = bare.iter().fold(shift, |top, &score| top.max(score as f32));
            if nan || !shift.is_finite() {
                return Ok(None);
            }
            let only = self.from_codes.is_some();
            let sink = self.sink(row.number);
            // Beside a sink far above all scores f32 holds their weights, but not its own relative to them.
            if only
                && let Some(sink) = sink
                && sink - offset > f64::from(shift) + FAR
            {
                shift = (sink - offset) as f32;
            }
            let at = f64::from(shift) + offset;
            let (sink, slip) = sink.map_or((0.0, 0.0), |sink| {
                let size = sink.abs() + f64::from(shift).abs() + offset.abs();
                ((sink - offset - f64::from(shift)).exp(), 2.0 * f64::EPSILON * size)
            });
            let error = row.prepared.as_ref().map_or(CodeError::NOTHING, |p| p.code_error);
            let mut narrow: Reused<f32> = Reused::with_hint(row.query.entries.len());
            let in_f32 = self.error_in_lanes(&row.wide, longest);
            let in_f32 = in_f32.filter(|error| *error <= row.eps * FINE);
            if in_f32.is_some() {
                append_narrow(&mut narrow, &row.wide);
            }
            // Scores by codes lack the offset, whose rounding exact scores share.
            let exact = row.query.error + in_f32.unwrap_or(0.0);
            let seen = visibility.count();
            // Sums of exact weights round as well.
            let summed = seen as f64 * f64::EPSILON;
            let low = row.prepared.as_ref().and_then(|prepared| prepared.fine_error);
            // What a low plane adds to a score cannot be added to what a cap makes of it.
            let has_plane = self.query_rows.options.soft_cap.is_none()
                && low.is_some_and(|low| low.says_something());
            let low = low.filter(|_| has_plane).or(only.then_some(error));
            let of_codes = low.map_or(error.rho, |low| low.rho.max(error.rho));
            let mut rho = of_codes + row.query.error + exact + WEIGHT + slip + summed;
            if changes {
                // Exact scores are of keys, the others of what codes stand for.
                let most = self.most(&row.wide, longest.max(codes.longest_coded()));
                // Adding the offset rounds as well.
                rho += self.change_error(biases, most, true) + U * most;
            }
            all.push(Weighed {
                shift,
                at,
                seen,
                sums: in_segments(threads, scores, |part| self.simd.weigh_codes(part, shift))?,
                exact: Listed::with_hint(SEGMENT),
                more,
                fine: Listed::with_hint(SEGMENT),
                candidates: Candidates::new(),
                heavy: Listed::with_hint(LANES),
                light: [0.0; 2],
                narrow,
                sink,
                roundings: Roundings::new(rho),
                code: error,
                low,
                has_plane,
                flushed: seen as f64 * f64::from(LIGHTEST) * (error.each + rho).exp(),
            });
        }
        Ok(Some(all))
    }

    /// Scores the keys exactly that rows have named.
    fn add_exact<K: Element<Scalar = f32>>(
        &self,
        keys: ExactRows<'_, K>,
        rows: &[PendingRow],
        all: &mut [Weighed],
    ) -> Result<(), Error> {
        ambient::check()?;
        let mut named = all.iter_mut().map(|weighed| std::mem::take(&mut weighed.more));
        let named: [Reused<u32>; TOGETHER] =
            std::array::from_fn(|_| named.next().unwrap_or_default());
        for (weighed, named) in all.iter_mut().zip(&named) {
            weighed.exact.reserve(named.len())?;
        }
        let (mut narrow, mut scores) = ([0.0; BLOCK], [0.0; BLOCK]);
        let lists = named.each_ref().map(|list| &list[..]);
        by_stretches(&lists[..rows.len()], |at, list, (from, end)| {
            let (row, weighed) = (&rows[at], &mut all[at]);
            let offset = self.offset(row);
            for first in (from..end).step_by(BLOCK) {
                let count = BLOCK.min(end - first);
                let found = &mut scores[..count];
                keys.by_parts((&list[first..], count), |keys, numbers, part| {
                    let found = &mut found[part];
                    if weighed.narrow.is_empty() {
                        row.query.score(self.simd, keys, Picked::Listed(numbers), offset, found);
                        return;
                    }
                    let narrow = &mut narrow[..found.len()];
                    let query = (&weighed.narrow[..], self.scale as f32);
                    self.simd.scores_listed(keys, numbers, query, narrow);
                    for (score, narrow) in found.iter_mut().zip(narrow) {
                        *score = f64::from(*narrow) - offset;
                    }
                });
                self.change(row.number, Picked::Listed(&list[first..first + count]), found);
                weighed.exact.weights.extend_from_slice(found);
            }
        });
        for (weighed, named) in all.iter_mut().zip(&named) {
            weighed.weigh_exact(self.simd, named);
        }
        Ok(())
    }

    /// Averages values by the weights of rows, and bounds the outputs.
    fn coded_answers<V: Element>(
        &self,
        (values, stored): (&Codes<'_>, ExactRows<'_, V>),
        rows: &mut [PendingRow],
        weighed: &mut [Weighed],
        threads: usize,
    ) -> Result<Option<Reused<Answer>>, Error> {
        let centre = values.mean();
        let width = centre.len();
        for (row, weighed) in rows.iter_mut().zip(&mut *weighed) {
            let weights = &mut row.scratch.query.scores[..];
            weighed.candidates.put_back(weights);
            if !weighed.code_light_values(weights, |key| stored.has(key)) {
                return Ok(None);
            }
        }
        let rows = &*rows;
        let longest = rows.iter().map(|row| row.prefix).max().unwrap_or(0);
        let piece = |(lines, scales, first): (&[u8], &[bf16], usize)| {
            let mut sums: Reused<f64> = filled_again("v", rows.len() * width, 0.0)?;
            let mut lost = [0.0; TOGETHER];
            let mut each = rows.iter().zip(sums.chunks_exact_mut(width));
            let mut to: [CodedSums<'_>; TOGETHER] = std::array::from_fn(|_| match each.next() {
                Some((row, sums)) => {
                    let weights = &row.scratch.query.scores[first..first + scales.len()];
                    CodedSums { weights, sums, lost: 0.0 }
                }
                None => CodedSums { weights: &[], sums: &mut [], lost: 0.0 },
            });
            side_by_side!(to[..rows.len()], some => self.simd.average_codes(lines, scales, some));
            lost.iter_mut().zip(&to).for_each(|(lost, to)| *lost = to.lost);
            Ok((sums, lost))
        };
        let pieces = values.pieces(longest.div_ceil(LANES), SEGMENT / LANES);
        let mut sums: Reused<f64> = filled_again("v", rows.len() * width, 0.0)?;
        let mut lost = [0.0; TOGETHER];
        let mut join = |(part, more): (Reused<f64>, [f64; TOGETHER])| {
            sums.iter_mut().zip(&part).for_each(|(sum, part)| *sum += part);
            lost.iter_mut().zip(more).for_each(|(lost, more)| *lost += more);
        };
        if threads == 1 {
            for one in pieces {
                ambient::check()?;
                join(piece(one)?);
            }
        } else {
            for found in threads::map(threads, pieces.collect::<Vec<_>>(), 1, piece)? {
                join(found?);
            }
        }
        let mut answers = Reused::with_hint(rows.len());
        for (weighed, sums) in weighed.iter().zip(sums.chunks_exact_mut(width)) {
            let Listed { keys, weights } = &weighed.heavy;
            stored.by_parts((keys, keys.len()), |values, numbers, part| {
                self.simd.average(values, Picked::Listed(numbers), &weights[part], sums);
            });
        }
        let bounds = values.value_bounds();
        for (((row, weighed), sums), lost) in
            rows.iter().zip(weighed).zip(sums.chunks_exact(width)).zip(lost)
        {
            let certificate = weighed.certificate();
            let total_variation = certificate.total_variation();
            let total = weighed.total();
            let exact = weighed.heavy.total();
            let mut out = filled_again("v", width, 0.0)?;
            let mut away = 0.0;
            for ((out, &sum), &centre) in out.iter_mut().zip(sums).zip(centre) {
                let centre = f64::from(centre);
                let apart = (sum - centre * (exact + weighed.sink)) / total;
                away += apart * apart;
                *out = centre + apart;
            }
            if !all_finite(&out) {
                return Ok(None);
            }
            let wide: Reused<f64> = centre.iter().map(|&entry| entry.into()).collect();
            let centre = length(&wide);
            let reach = centre + bounds.farthest + bounds.lost;
            // Of numbers for weights, of sums of weights, and of exact values.
            let rounding = lost * LONGEST * (width as f64).sqrt() / total
                + SUMS * (bounds.farthest + bounds.lost + away.sqrt())
                + summing(
                    reach,
                    (weighed.seen, self.values),
                    sum_error(&self.values.data) * (exact / total),
                );
            let away = (away.sqrt() + rounding) * ROUND;
            let outputs = Outputs { values: bounds, centre, away };
            let masses = certificate.masses();
            // Exact weights that are less were raised to that.
            let low = (masses.low - weighed.seen as f64 * exp(-HIGHEST)).max(0.0);
            answers.push(Answer {
                upper: total_variation,
                kept: weighed.seen,
                scored: weighed.exact.keys.len(),
                rung: Rung::Coded,
                weight_error: 0.0,
                sum_error: 0.0,
                coded_error: certificate.output(&outputs, weighed.light, total_variation)
                    + rounding * ROUND,
                log_mass: LogMass::of(low, masses.high, weighed.at, row.query.error),
                out,
            });
        }
        Ok(Some(answers))
    }
}
