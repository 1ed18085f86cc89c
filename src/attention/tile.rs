//! Many rows that keep everything, in f32.

use half::{bf16, f16};

use super::ball::norm_of_square;
use super::f32_error::{
    LONGEST, Measured, ROUGH, SHORT_VALUE, SHORT_WEIGHT, TWO_PIECES, U, WEIGHT, weight_error,
};
use super::job::{Answer, AttentionJob, RowBudget, UNIT_ROWS};
use super::sink::Sunk;
use crate::error::Error;
use crate::index::{RowVisibility, Rung, for_coded_dtype, matrix};
use crate::kernels::{
    BlockMask, BlockScratch, Cutting, Element, Keys, LANES, PANEL_KEYS, PANEL_ROWS, PANEL_RUN,
    PanelRows, Precise, WeightScratch,
};
use crate::numerics::finite::all_finite;
use crate::rows::{Stored, Vectors, for_dtype};
use crate::runtime::ambient::asked_each;
use crate::runtime::held::held;
use crate::runtime::reused::Reused;
use crate::runtime::scratch::with_scratch;

/// Relative error of a block's sum of weights, and of one of weighted values.
const SUMS: f64 = 2.0 * (PANEL_KEYS as f64 + 2.0) * U;
/// A row to be answered together with others.
struct Row {
    /// Place among the rows that were asked for.
    at: usize,
    /// Bound on the error of scores, in nats.
    error: f64,
    /// Bound on the total variation distance of short weights; else 0.
    upper: f64,
}

/// Scratch of a block.
#[derive(Default)]
struct TileScratch {
    of_block: BlockScratch,
    of_weights: WeightScratch,
}

held!(TileScratch { of_block, of_weights });

impl AttentionJob<'_> {
    /// Returns `true` if rows of this call can be answered together at all.
    pub(super) fn fit_together(&self) -> bool {
        let wide = |data: &Stored<'_>| matches!(data, Stored::F64(_));
        !wide(&self.keys.data) && !wide(&self.values.data)
    }

    /// Answers rows in f32 over all that they see, but for those with numbers that f32 cannot hold.
    pub(super) fn attend_tile(
        &self,
        head: usize,
        rows: &[usize],
        budget: RowBudget<'_>,
        answers: &mut [Option<Answer>],
    ) -> Result<(), Error> {
        let dim = self.queries.dim();
        let mut queries: Reused<f64> = Reused::with_hint(rows.len() * dim);
        for &row in rows {
            self.add_query(row, &mut queries)?;
        }
        let norm = self.norm(head)?;
        let (mut short, mut whole) = (Reused::<Row>::new(), Reused::<Row>::new());
        for (at, query) in queries.chunks_exact(dim).enumerate() {
            // A run of fused terms, and the sums of runs.
            let biases = self.biases(rows[at])?;
            let most = self.most(query, norm);
            let changes = self.change_error(biases, most, true);
            let (deep, query) = (PANEL_RUN + dim / PANEL_RUN, Measured::of(query));
            let Some(error) = self.narrow_error(query, norm, deep) else { continue };
            let error = error + changes;
            if error == f64::INFINITY {
                continue;
            }
            let rounded = self.error_of_pieces(query, norm, true).map(|more| error + more);
            if let Some(error) = rounded.filter(|_| budget.short) {
                let upper = self.short_distance(rows[at], self.changed_size(biases, most), error);
                if upper <= budget.eps.of(rows[at]) {
                    short.push(Row { at, error, upper });
                    continue;
                }
            }
            let more = if self.stored_short() {
                self.error_of_pieces(query, norm, false)
            } else {
                Some(0.0)
            };
            // Of others the weights would be off by more than the budget.
            let eps = budget.eps.of(rows[at]);
            let fine = |more: &f64| eps == 0.0 || error + more <= eps.max(ROUGH);
            if let Some(more) = more.filter(fine) {
                whole.push(Row { at, error: error + more, upper: 0.0 });
            }
        }
        let given = (rows, &queries[..]);
        self.attend_alike(head, given, &short, true, answers)?;
        self.attend_alike(head, given, &whole, false, answers)
    }

    /// Returns `true` if queries, keys and values are bf16.
    fn stored_short(&self) -> bool {
        let stored = [&self.queries.data, &self.keys.data, &self.values.data];
        stored.iter().all(|data| matches!(data, Stored::Bf16(_)))
    }

    /// Answers rows of one precision.
    fn attend_alike(
        &self,
        head: usize,
        (rows, queries): (&[usize], &[f64]),
        chosen: &[Row],
        short: bool,
        answers: &mut [Option<Answer>],
    ) -> Result<(), Error> {
        if chosen.is_empty() {
            return Ok(());
        }
        let dim = self.values.dim();
        let shape = (self.keys.dim(), dim.next_multiple_of(LANES));
        let query = |row: &Row| &queries[row.at * shape.0..][..shape.0];
        let precise = Precise { short, stored_short: self.stored_short() };
        let cutting = self.simd.cutting(precise);
        let panel = |rows: &[Row]| {
            let scaling = (self.scale as f32, self.soft_cap());
            PanelRows::new(rows.iter().map(query), shape, scaling, cutting)
        };
        let mut panels: Reused<PanelRows> = chosen.chunks(PANEL_ROWS).map(panel).collect();
        let mut visibility = [RowVisibility { prefix: 0, allowed: None }; UNIT_ROWS];
        for (to, row) in visibility.iter_mut().zip(chosen) {
            *to = self.query_rows.row_visibility(rows[row.at]);
        }
        let visibility = &visibility[..chosen.len()];
        let mut fits = [true; UNIT_ROWS];
        for_coded_dtype!(self.keys, K => {
            let keys = matrix::<K>(self.keys, head);
            for_coded_dtype!(self.values, V => {
                let values = matrix::<V>(self.values, head);
                let of = |row: &Row| rows[row.at];
                let numbers: Reused<usize> = chosen.iter().map(of).collect();
                let seen = (&numbers[..], visibility);
                self.over((head, keys, values), seen, cutting, (&mut panels, &mut fits));
                Ok(())
            })
        })?;
        let errors = match precise {
            Precise { short: true, .. } => (SHORT_WEIGHT, SUMS + SHORT_VALUE * 1.01),
            Precise { stored_short: true, .. } => (TWO_PIECES, SUMS),
            Precise { .. } => (WEIGHT, SUMS),
        };
        for (i, row) in chosen.iter().enumerate().filter(|&(i, _)| fits[i]) {
            let mut sums: Reused<f64> = Reused::with_hint(shape.1);
            let (top, total) = panels[i / PANEL_ROWS].row(i % PANEL_ROWS, &mut sums);
            let found = (top, total, sums);
            let at = (rows[row.at], visibility[i]);
            answers[row.at] = self.answer_together(at, found, (row.error, row.upper), errors);
        }
        Ok(())
    }

    /// Returns the answer of a row that keeps all keys that it sees, by the largest score, the sum of weights and those of
    /// weighted values. Scores may be off by `error`, weights and sums relatively by `weights` and `sums`. `None` where values
    /// are not finite, or f32 cannot add them: they are for more careful hands.
    pub(super) fn answer_together(
        &self,
        (row, visibility): (usize, RowVisibility<'_>),
        (top, total, mut out): (f64, f64, Reused<f64>),
        (error, upper): (f64, f64),
        (weights, sums): (f64, f64),
    ) -> Option<Answer> {
        let sunk = self.with_sink(row, total, (top, 0.0), (error, 0.0));
        let seen = visibility.count();
        if seen > 0 && total == 0.0 {
            return None;
        }
        let Sunk { total, slip, .. } = sunk;
        let error = error + slip;
        let share = if total > 0.0 { 1.0 / total } else { 0.0 };
        out.iter_mut().for_each(|entry| *entry *= share);
        all_finite(&out[..self.values.dim()]).then(|| Answer {
            out,
            upper: if seen > 0 { upper } else { 0.0 },
            kept: seen,
            scored: seen,
            rung: Rung::Dense,
            weight_error: weight_error(error, weights),
            sum_error: sums,
            coded_error: 0.0,
            // A real weight may be larger by as much of a computed one.
            log_mass: sunk.log_mass(SUMS + weights * 1.01, top, error),
        })
    }

    /// Takes rows over the keys that they see, block by block, but for blocks with values that f32 may not add: rows that see
    /// any of such a block do not fit.
    fn over<K: Element<Scalar = f32>, V: Element<Scalar = f32>>(
        &self,
        (head, keys, values): (usize, Keys<'_, K>, Keys<'_, V>),
        (numbers, visibility): (&[usize], &[RowVisibility<'_>]),
        cutting: Option<Cutting>,
        (panels, fits): (&mut [PanelRows], &mut [bool]),
    ) {
        let longest =
            |rows: &[RowVisibility<'_>]| rows.iter().map(|row| row.prefix).max().unwrap_or(0);
        let end = longest(visibility);
        let mut limits = [0.0f32; PANEL_ROWS];
        let mut each = Reused::new();
        let origin: Reused<f64> =
            std::iter::repeat_n(0.0, values.dim().next_multiple_of(LANES)).collect();
        for from in asked_each((0..end).step_by(PANEL_KEYS)) {
            let place = (from, PANEL_KEYS.min(end - from));
            let sees = |row: &RowVisibility<'_>| (from..from + place.1).any(|key| row.sees(key));
            // What nobody sees is not touched.
            if !visibility.iter().any(sees) {
                continue;
            }
            if !self.fits_f32((head, values), place, &origin) {
                for (fits, row) in fits.iter_mut().zip(visibility) {
                    *fits &= !sees(row);
                }
                continue;
            }
            with_scratch(|scratch: &mut TileScratch| {
                let TileScratch { of_block, of_weights } = scratch;
                let block = self.simd.block(keys, values, place, cutting, of_block);
                let groups = visibility.chunks(PANEL_ROWS).zip(numbers.chunks(PANEL_ROWS));
                for (panel, (rows, numbers)) in panels.iter_mut().zip(groups) {
                    if longest(rows) <= from {
                        continue;
                    }
                    if let Some(bias) = self.query_rows.options.bias {
                        biased(bias, (numbers, rows), place, &mut each);
                        self.simd.attend(panel, block, BlockMask::Biased(&each), of_weights);
                        continue;
                    }
                    let sees = match masked(rows, place, &mut each) {
                        Masked::All => continue,
                        Masked::Some => BlockMask::Each(&each),
                        Masked::None => {
                            for (limit, row) in limits.iter_mut().zip(rows) {
                                *limit = row.prefix.saturating_sub(from).min(PANEL_KEYS) as f32;
                            }
                            BlockMask::First(&limits)
                        }
                    };
                    self.simd.attend(panel, block, sees, of_weights);
                }
            });
        }
    }

    /// Returns `true` if f32 may add the values of a block; of a whole block that is found once.
    fn fits_f32<V: Element<Scalar = f32>>(
        &self,
        (head, values): (usize, Keys<'_, V>),
        (from, count): (usize, usize),
        origin: &[f64],
    ) -> bool {
        let blocks = self.keys.len().div_ceil(PANEL_KEYS);
        let block = &self.blocks_fit[head * blocks + from / PANEL_KEYS];
        if let Some(&known) = block.get().filter(|_| count == PANEL_KEYS) {
            return known;
        }
        // The comparison is false for what is not a number.
        let fits = self.simd.farthest(values.behind(from), count, origin) < LONGEST * LONGEST;
        if count == PANEL_KEYS { *block.get_or_init(|| fits) } else { fits }
    }

    /// Returns the largest norm of a head's keys that some row of the head sees.
    pub(super) fn norm(&self, head: usize) -> Result<f64, Error> {
        if let Some(&norm) = self.norms[head].get() {
            return Ok(norm);
        }
        let norm = for_coded_dtype!(self.keys, K => {
            let keys = matrix::<K>(self.keys, head);
            let centre: Reused<f64> = std::iter::repeat_n(0.0, keys.dim().next_multiple_of(LANES)).collect();
            let mut most = 0.0f64;
            for seen in &self.query_rows.seen_by_any(head) {
                let square = self.simd.farthest(keys.behind(seen.start), seen.len(), &centre);
                if !square.is_finite() {
                    let finite = |entry: &K| Into::<f64>::into(entry.widen()).is_finite();
                    let bad = |&key: &usize| !keys.row(key).iter().all(finite);
                    let key = seen.clone().find(bad).unwrap_or(seen.start);
                    return Err(self.bad_key(head, key, square));
                }
                most = most.max(square);
            }
            Ok(norm_of_square(most, keys.dim()))
        })?;
        Ok(*self.norms[head].get_or_init(|| norm))
    }
}

/// Writes per key of a block the bias of each row: negative infinity where the row does not see the key.
fn biased(
    bias: &Vectors<'_>,
    (numbers, visibility): (&[usize], &[RowVisibility<'_>]),
    (from, count): (usize, usize),
    each: &mut Vec<f32>,
) {
    each.clear();
    each.resize(count * PANEL_ROWS, f32::NEG_INFINITY);
    for_dtype!(bias.data, rows => {
        let mut biases = [&[][..]; PANEL_ROWS];
        for (biases, &number) in biases.iter_mut().zip(numbers) {
            *biases = &rows.row(number)[from..from + count];
        }
        // So few keys at a time that what is written stays in the cache.
        for (first, to) in each.chunks_mut(LANES * PANEL_ROWS).enumerate() {
            for (at, biases) in biases[..numbers.len()].iter().enumerate() {
                let to = to[at..].iter_mut().step_by(PANEL_ROWS);
                for (to, bias) in to.zip(&biases[first * LANES..]) {
                    // Finite, so that it is not taken for a mask.
                    *to = (Into::<f64>::into(bias.widen()) as f32).max(f32::MIN);
                }
            }
        }
    });
    for (at, sees) in visibility.iter().enumerate() {
        let first = if sees.allowed.is_some() { from } else { sees.prefix.max(from) };
        for key in (first..from + count).filter(|&key| !sees.sees(key)) {
            each[(key - from) * PANEL_ROWS + at] = f32::NEG_INFINITY;
        }
    }
}

/// Extent of the mask in a block of keys, for rows that would see all of it.
enum Masked {
    None,
    Some,
    All,
}

/// Checks the masks of rows over a block. For `Some`, writes per key a number for each row, positive if it sees the
/// key.
fn masked(
    visibility: &[RowVisibility<'_>],
    (from, count): (usize, usize),
    each: &mut Vec<f32>,
) -> Masked {
    let part = |&RowVisibility { prefix, allowed }: &RowVisibility<'_>| -> (usize, usize) {
        let Some(allowed) = allowed else { return (1, 0) };
        let of = allowed.get(from..prefix.min(from + count)).unwrap_or(&[]);
        (of.iter().map(|&byte| usize::from(byte != 0)).sum(), of.len())
    };
    let (mut none, mut all) = (true, true);
    for (seen, of) in visibility.iter().map(part) {
        none &= seen == 0;
        all &= seen >= of;
    }
    if none {
        return Masked::All;
    }
    if all {
        return Masked::None;
    }
    each.clear();
    each.resize(count * PANEL_ROWS, 0.0);
    for (row, row_visibility) in visibility.iter().enumerate() {
        let &RowVisibility { prefix, allowed } = row_visibility;
        let end = prefix.min(from + count);
        let allowed = allowed.and_then(|allowed| allowed.get(from..end)).unwrap_or(&[]);
        for (to, &byte) in each.iter_mut().skip(row).step_by(PANEL_ROWS).zip(allowed) {
            *to = f32::from(u8::from(byte != 0));
        }
    }
    Masked::Some
}
