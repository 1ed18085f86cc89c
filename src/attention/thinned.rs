//! Many rows thinned by codes, in f32, as `pruned` thins a few in f64.
//!
//! Four rows at a time list the keys that they may keep. A row keeps those above the highest edge that codes allow,
//! scores them in f32, and so bounds the mass of the others.

use super::error_bound::sum_error;
use super::job::{Answer, AttentionJob, GROUP, RowBudget, Unit};
use super::narrow::{FINE, append_narrow};
use super::sink::Sunk;
use super::tile::{U, WEIGHT, length};
use crate::error::Error;
use crate::index::{
    CodeError, Coded, Codes, Cut, DENSE, FROM, Guess, ListedSearch, PanelRow, PreparedRows, Query,
    Rung, TRIES, begin_list, for_coded_dtype, matrix,
};
use crate::kernels::{Above, Exp, Keys, LANES, Picked};
use crate::runtime::held::held;
use crate::runtime::memory::room;
use crate::runtime::reused::{Reused, filled_again};
use crate::runtime::scratch::with_scratch;
use half::{bf16, f16};

/// Least number of rows that are worth a scan of all codes.
const ENOUGH: usize = 2 * GROUP;
/// Keys that are scored to see whether rows keep many, of how many rows; and the first and the last of them, which often weigh most.
const LOOKED_AT: usize = 128;
const LOOKS: usize = 2;
const ENDS: usize = 16;
/// A share of those, above which nothing else is looked at: a few keys know little of the heaviest.
pub(super) const FLAT: f64 = 0.25;
/// Factor by which a row aims below its budget, by its codes, so that exact scores seldom prove too little.
const CAREFUL: f64 = 1.015;
/// Sums of weights run so deep in f32, and a rounding more.
const SUMS: f64 = 17.0 * U;

/// Costs of thinning a row, and of answering it beside others with all keys, in nanoseconds on a Zen 4 at 2.6 GHz with AVX-512, of
/// which only the ratios matter: for a row, a key that it sees and an entry of that, and a key that it keeps and an entry of its
/// key and value.
struct Costs {
    row: f64,
    key: f64,
    entry: f64,
    kept: f64,
    kept_entry: f64,
}

const THINNED: Costs = Costs { row: 2000.0, key: 0.12, entry: 0.0065, kept: 8.0, kept_entry: 0.11 };
const TOGETHER: Costs = Costs { row: 0.0, key: 0.25, entry: 0.04, kept: 0.0, kept_entry: 0.0 };

impl Costs {
    /// Of rows that see so many keys together and keep so many of them, with keys of `dim` entries.
    fn of(&self, rows: usize, (seen, kept): (usize, usize), dim: usize) -> f64 {
        let &Costs { row, key, entry, kept: each, kept_entry } = self;
        let (rows, seen, kept, dim) = (rows as f64, seen as f64, kept as f64, dim as f64);
        rows * row + seen * (key + entry * dim) + kept * (each + kept_entry * 2.0 * dim)
    }
}

/// A row on its way.
struct Row {
    /// Place in its unit.
    at: usize,
    number: usize,
    prefix: usize,
    eps: f64,
    /// Bounds on the error of scores, in nats: of those in f32, and of the offset of codes.
    error: f64,
    offset_error: f64,
}

/// Rows of a head, and their queries in f32, in whole groups.
struct Thinnable {
    rows: Reused<Row>,
    queries: Reused<f32>,
    width: usize,
}

impl Thinnable {
    fn query(&self, row: usize) -> &[f32] {
        &self.queries[row * self.width..][..self.width]
    }
}

/// The keys that a row keeps, their scores, and their weights.
#[derive(Default)]
struct Lists {
    kept: Vec<u32>,
    scores: Vec<f32>,
    weights: Vec<f32>,
}

/// Returns a row whose list is to be made.
fn listed<'a>(
    (rows, prepared): (&Thinnable, &'a PreparedRows),
    at: usize,
    above: &'a mut Above,
) -> PanelRow<'a> {
    let Row { prefix, eps, .. } = rows.rows[at];
    PanelRow { numbers: prepared.numbers(at), prefix, eps, above }
}

/// Scratch of the rows.
#[derive(Default)]
struct RowsScratch {
    above: [Above; GROUP],
    lists: [Lists; GROUP],
}

held!(RowsScratch { above, lists });
held!(Lists { kept, scores, weights });

/// End of a row's list, given its largest score by codes.
struct Chosen {
    largest: f32,
    cut: Cut,
    excess: f64,
}

/// Weight of the kept keys relative to a score, and a bound on the others' share of the whole.
#[derive(Clone, Copy)]
struct Weighed {
    top: f64,
    total: f64,
    upper: f64,
}

/// A head's keys and values.
#[derive(Clone, Copy)]
struct Head<'a, K, V> {
    number: usize,
    codes: &'a Codes<'a>,
    keys: Keys<'a, K>,
    values: Keys<'a, V>,
    /// Keys without a code.
    uncoded: &'a [u32],
}

impl<'a, K, V> Head<'a, K, V> {
    fn uncoded_before(&self, position: usize) -> &'a [u32] {
        &self.uncoded[..self.uncoded.partition_point(|&key| (key as usize) < position)]
    }
}

impl AttentionJob<'_> {
    /// Answers those rows of a unit that can be thinned in f32, if that is faster than all together. Returns the rows
    /// of other kinds.
    pub(super) fn attend_thinned(
        &self,
        unit: &Unit,
        budget: RowBudget<'_>,
        answers: &mut [Option<Answer>],
    ) -> Result<Reused<usize>, Error> {
        let mut left: Reused<usize> = Reused::with_hint(unit.rows.len());
        let Some(codes) = self.index.map(|index| index.head(unit.head)) else { return Ok(left) };
        let rows = self.rows_in_f32(unit, budget, f64::from(codes.largest()), &mut left)?;
        if rows.rows.len() < ENOUGH {
            return Ok(left);
        }
        for_coded_dtype!(self.keys, K => {
            let keys = matrix::<K>(self.keys, unit.head);
            if self.looks_flat(keys, &rows) {
                return Ok(left);
            }
            for_coded_dtype!(self.values, V => {
                let values = matrix::<V>(self.values, unit.head);
                let uncoded: Reused<u32> = codes.uncoded().collect();
                let head = Head { number: unit.head, codes, keys, values, uncoded: &uncoded };
                self.thin(head, &rows, answers)
            })
        })?;
        Ok(left)
    }

    /// Returns the rows that can be thinned in f32. Others are left, except those that see few keys, which are faster
    /// together.
    fn rows_in_f32(
        &self,
        unit: &Unit,
        budget: RowBudget<'_>,
        largest: f64,
        left: &mut Reused<usize>,
    ) -> Result<Thinnable, Error> {
        let norm = self.norm(unit.head)?;
        let width = self.keys.dim().next_multiple_of(LANES);
        let mut rows: Reused<Row> = Reused::with_hint(unit.rows.len());
        let mut queries: Reused<f32> = Reused::with_hint(unit.rows.len() * width);
        for (at, &number) in unit.rows.iter().enumerate() {
            let visibility = self.query_rows.row_visibility(number);
            let (eps, prefix) = (budget.eps.of(number), visibility.prefix);
            let short = prefix < FROM || !self.is_faster(1, (prefix, 1));
            if visibility.allowed.is_none() && (short || eps == 0.0) {
                continue;
            }
            let wide = self.query(number)?;
            let error = self.error_in_lanes(&wide, norm);
            // Others are thinned in f64.
            let error = error.filter(|error| error + WEIGHT <= eps * FINE);
            let (None, Some(error)) = (visibility.allowed, error) else {
                left.push(at);
                continue;
            };
            // Entries add up to at most the root of their number times the norm.
            let sum = length(&wide) * (wide.len() as f64).sqrt() * (1.0 + 1e-12);
            let offset_error = Query::error_of(wide.len(), sum, self.scale, largest);
            rows.push(Row { at, number, prefix, eps, error, offset_error });
            append_narrow(&mut queries, &wide);
        }
        Ok(Thinnable { rows, queries, width })
    }

    /// Returns `true` if rows that see and keep these numbers of keys are answered faster one by one.
    fn is_faster(&self, rows: usize, keys: (usize, usize)) -> bool {
        let (seen, dim) = ((keys.0, 0), self.keys.dim().midpoint(self.values.dim()));
        self.query_rows.options.even_if_slower
            || THINNED.of(rows, keys, dim) < TOGETHER.of(rows, seen, dim)
    }

    /// Returns `true` if a sample of keys suggests that some rows keep many of theirs. It decides only on time.
    fn looks_flat<K: Coded>(&self, keys: Keys<'_, K>, rows: &Thinnable) -> bool {
        let kept = |look: usize| {
            let at = (2 * look + 1) * rows.rows.len() / (2 * LOOKS);
            let &Row { prefix, eps, .. } = &rows.rows[at];
            self.seems_to_keep(keys, (rows.query(at), prefix), eps)
        };
        (0..LOOKS).map(kept).sum::<f64>() > FLAT * LOOKS as f64
    }

    /// Returns the estimated share of the keys before a position that a row keeps, from a sample.
    pub(super) fn seems_to_keep<K: Coded>(
        &self,
        keys: Keys<'_, K>,
        (query, prefix): (&[f32], usize),
        eps: f64,
    ) -> f64 {
        let between = LOOKED_AT - 2 * ENDS;
        let list: [u32; LOOKED_AT] = std::array::from_fn(|i| {
            let key = match i.checked_sub(ENDS) {
                None => i,
                Some(i) if i < between => ENDS + i * (prefix - 2 * ENDS) / between,
                Some(_) => prefix + i - LOOKED_AT,
            };
            key as u32
        });
        let (mut scores, mut weights) = ([0.0; LOOKED_AT], [0.0; LOOKED_AT]);
        self.simd.scores_listed(keys, &list, (query, self.scale as f32), &mut scores);
        let total = self.simd.weights(&scores[..], Exp(self.simd.top(&scores).0), &mut weights);
        weights.sort_unstable_by(f32::total_cmp);
        let mut sum = 0.0;
        let dropped = weights.iter().take_while(|&&weight| {
            sum += f64::from(weight);
            sum <= eps * total
        });
        1.0 - dropped.count() as f64 / LOOKED_AT as f64
    }

    /// Answers rows, four at a time: first a few spread ones, then all others, if these keep few keys.
    fn thin<K: Coded, V: Coded>(
        &self,
        head: Head<'_, K, V>,
        rows: &Thinnable,
        answers: &mut [Option<Answer>],
    ) -> Result<(), Error> {
        let forms = self.forms(head.number, head.codes)?;
        let prepared = PreparedRows::new(self.simd, head.codes, forms, &rows.queries, self.scale)?;
        let usable = |&at: &usize| prepared.code_error(at).says_something();
        let step = rows.rows.len() / GROUP;
        let first = |at: &usize| at.is_multiple_of(step) && at / step < GROUP;
        let apart = (0..rows.rows.len()).filter(first);
        let others = (0..rows.rows.len()).filter(|at| !first(at));
        let order: Reused<usize> = apart.chain(others).filter(usable).collect();
        let mut guess = Guess::default();
        let (mut done, mut kept, mut seen) = (0, 0, 0);
        with_scratch(|scratch: &mut RowsScratch| {
            for four in order.chunks(GROUP) {
                self.thin_some(head, (rows, &prepared), four, scratch, (&mut guess, answers))?;
                for &at in four {
                    let Row { at, prefix, .. } = rows.rows[at];
                    kept += answers[at].as_ref().map_or(prefix, |answer| answer.kept);
                    seen += prefix;
                }
                done += four.len();
                if !self.is_faster(done, (seen, kept)) {
                    break;
                }
            }
            Ok(())
        })
    }

    /// Lists the keys that a few rows may keep, and answers the rows that can be.
    fn thin_some<K: Coded, V: Coded>(
        &self,
        head: Head<'_, K, V>,
        (rows, prepared): (&Thinnable, &PreparedRows),
        some: &[usize],
        scratch: &mut RowsScratch,
        (guess, answers): (&mut Guess, &mut [Option<Answer>]),
    ) -> Result<(), Error> {
        let (simd, codes) = (self.simd, head.codes);
        let RowsScratch { above, lists } = scratch;
        above.iter_mut().for_each(Above::forget);
        let of = (rows, prepared);
        if let &[a, b, c, d] = some {
            let [above_a, above_b, above_c, above_d] = &mut *above;
            let four = [(a, above_a), (b, above_b), (c, above_c), (d, above_d)];
            codes.split(simd, four.map(|(at, above)| listed(of, at, above)), guess, 1)?;
        } else {
            for (&at, above) in some.iter().zip(&mut *above) {
                codes.split(simd, [listed(of, at, above)], guess, 1)?;
            }
        }
        // What rows read next is asked for while others are looked at.
        let mut chosen = [const { None }; GROUP];
        for (i, &at) in some.iter().enumerate() {
            let room = (&mut above[i], &mut lists[i]);
            chosen[i] = self.choose(head, of, at, room, CAREFUL)?;
            simd.fetch_listed(head.keys, &lists[i].kept);
        }
        let mut weighed = [None; GROUP];
        for (i, &at) in some.iter().enumerate() {
            let room = (&mut above[i], &mut lists[i]);
            weighed[i] = self.weigh(head, of, at, room, chosen[i].take())?;
            while weighed[i].is_none() && above[i].again && !above[i].flat {
                // Its list began too high.
                codes.split(simd, [listed(of, at, &mut above[i])], guess, 1)?;
                let room = (&mut above[i], &mut lists[i]);
                let chosen = self.choose(head, of, at, room, CAREFUL)?;
                weighed[i] = self.weigh(head, of, at, (&mut above[i], &mut lists[i]), chosen)?;
            }
            simd.fetch_listed(head.values, &lists[i].kept);
        }
        for (i, &at) in some.iter().enumerate() {
            let Some(weighed) = weighed[i] else { continue };
            guess.learn(&above[i]);
            let row = &rows.rows[at];
            answers[row.at] = self.answer(head.values, row, &lists[i], weighed)?;
        }
        Ok(())
    }

    /// Selects the keys to keep of a listed row, if bounds exceed the scores by this factor; `None` if there are none.
    fn choose<K: Coded, V: Coded>(
        &self,
        head: Head<'_, K, V>,
        (rows, prepared): (&Thinnable, &PreparedRows),
        at: usize,
        (above, lists): (&mut Above, &mut Lists),
        excess: f64,
    ) -> Result<Option<Chosen>, Error> {
        lists.kept.clear();
        let row = &rows.rows[at];
        let uncoded = head.uncoded_before(row.prefix);
        let Some(largest) = begin_list(self.simd, above, uncoded) else { return Ok(None) };
        let search = self.search(row, prepared.code_error(at), uncoded.len());
        let Some(cut) = search.cut(above, &mut lists.weights, largest, excess)? else {
            return Ok(None);
        };
        search.keep(above, &cut, &mut lists.kept);
        if !uncoded.is_empty() {
            lists.kept.extend_from_slice(uncoded);
            lists.kept.sort_unstable();
        }
        Ok(Some(Chosen { largest, cut, excess }))
    }

    fn search<'a>(&self, row: &Row, code_error: &'a CodeError, uncoded: usize) -> ListedSearch<'a> {
        // What keys without a code weigh is kept, and counts once it is known.
        let (coded, uncoded_mass) = (row.prefix - uncoded, 0.0);
        ListedSearch { simd: self.simd, code_error, eps: row.eps, coded, uncoded_mass }
    }

    /// Weighs the keys that a row keeps, and adds more until the others provably weigh little.
    fn weigh<K: Coded, V: Coded>(
        &self,
        head: Head<'_, K, V>,
        of: (&Thinnable, &PreparedRows),
        at: usize,
        (above, lists): (&mut Above, &mut Lists),
        mut chosen: Option<Chosen>,
    ) -> Result<Option<Weighed>, Error> {
        let (simd, (rows, prepared)) = (self.simd, of);
        let row = &rows.rows[at];
        // Of the weights of what is kept, and of what codes bound relative to them.
        let relative = (WEIGHT + SUMS) * 1.001;
        let error = row.error + 2.0 * row.offset_error;
        let slack = error.exp_m1() * (1.0 + relative) + relative;
        let mut more = CAREFUL;
        for _ in 0..TRIES {
            let Some(Chosen { largest, cut, excess }) = chosen else { break };
            let Lists { kept, scores, weights } = lists;
            let count = kept.len();
            if count as f64 > DENSE * row.prefix as f64 {
                break;
            }
            self.ask_for(head.number, &[kept]);
            let padded = count.next_multiple_of(LANES);
            for list in [&mut *scores, &mut *weights] {
                room("k", list, padded.saturating_sub(list.len()))?;
                list.resize(padded, 0.0);
            }
            scores[count..].fill(f32::NEG_INFINITY);
            let by = (rows.query(at), self.scale as f32);
            simd.scores_listed(head.keys, kept, by, &mut scores[..count]);
            let (top, nan) = simd.top(scores);
            if nan || !top.is_finite() {
                break;
            }
            let total = simd.weights(&scores[..], Exp(top), &mut weights[..]);
            let (from, top) = ((largest, prepared.offset(at)), f64::from(top));
            let upper = cut.tail_upper(from, (top, total, count), slack);
            if upper <= row.eps {
                return Ok(Some(Weighed { top, total, upper }));
            }
            let miss = upper * (1.0 - row.eps) / (1.0 - upper) / row.eps;
            let miss = if miss.is_nan() { 4.0 } else { (miss * more).clamp(1.001, 4.0) };
            more *= more;
            chosen = self.choose(head, of, at, (above, lists), excess * miss)?;
        }
        Ok(None)
    }

    /// Averages the values of kept keys.
    fn answer<V: Coded>(
        &self,
        values: Keys<'_, V>,
        row: &Row,
        Lists { kept, weights, .. }: &Lists,
        Weighed { top, total, upper }: Weighed,
    ) -> Result<Option<Answer>, Error> {
        let mut out = filled_again("v", values.dim().next_multiple_of(LANES), 0.0)?;
        self.simd.average(values, Picked::Listed(kept), &weights[..kept.len()], &mut out);
        let sunk = self.with_sink(row.number, total, (top, 0.0), (row.error, upper));
        let upper = sunk.of_whole(upper);
        let Sunk { total, slip, .. } = sunk;
        let share = 1.0 / total;
        for entry in &mut out {
            *entry *= share;
        }
        // Values that f32 cannot add are for more careful hands.
        if out.iter().any(|entry| !entry.is_finite()) {
            return Ok(None);
        }
        let error = row.error + slip;
        let grown = error.exp_m1();
        Ok(Some(Answer {
            out,
            upper,
            kept: kept.len(),
            scored: kept.len(),
            rung: Rung::Rescored,
            weight_error: grown + WEIGHT * (1.0 + grown),
            // Weights are summed in f32, too, and that sum divides the values themselves.
            sum_error: sum_error(&self.values.data) + SUMS,
            coded_error: 0.0,
            log_mass: sunk.log_mass(SUMS + WEIGHT, top, error),
        }))
    }
}
