//! Search by mass: the fewest keys, scored exactly, that with the codes of all others prove the budget.

use super::codes::Codes;
use super::found::{Found, Rung};
use super::gram::Sums;
use super::parts::mass_upper_in_parts;
use super::prepared::Prepared;
use super::query::{BLURRED, Query, RowVisibility};
use super::threshold_state::{Chosen, Cut, QueryScratch, Step, ThresholdState, merged};
use crate::error::Error;
use crate::kernels::{Element, Exp, Keys, LANES, Picked, Positions, Simd};
use crate::numerics::certified_sums::{self, SplitSums};
use crate::numerics::log_mass::LogMass;
use crate::rows::Scores;
use crate::runtime::memory;
use crate::runtime::reused::Reused;
use crate::select::Options;

/// Rounds of choosing an edge.
const ROUNDS: usize = 8;
/// Sufficient share of the allowed loss, and most attempts at it: to score few keys, or to save time.
const TIGHT: (f64, usize) = (0.998, 3);
const QUICK: (f64, usize) = (0.98, 1);
/// A row that keeps a larger share of its keys is scored in full, which is faster.
pub(crate) const DENSE: f64 = 0.6;
/// The same where few scored keys matter more than time.
const ALMOST_ALL: f64 = 0.96;
/// Relative error of products and of short sums in f64, generously.
pub(super) const SUM_ROUNDING: f64 = 1e-11;
/// Of a smallest weight that matters, in f64.
pub(super) const NOTHING: f64 = 1e-290;

/// One row of a search.
#[derive(Clone, Copy)]
pub(crate) struct ThresholdSearch<'a, E> {
    pub(crate) simd: Simd,
    pub(crate) codes: &'a Codes<'a>,
    pub(crate) keys: Option<Keys<'a, E>>,
    pub(crate) query: &'a Query,
    pub(crate) prepared: &'a Prepared,
    pub(crate) row_visibility: RowVisibility<'a>,
    pub(crate) eps: f64,
    /// `true` if keys that were scored may be dropped again.
    pub(crate) trim: bool,
    /// Mass of the row's keys kept elsewhere, if there are such. Codes alone decide then, and keys without one are
    /// kept.
    pub(crate) beside: Option<LogMass>,
}

impl<E: Element<Scalar = f32>> ThresholdSearch<'_, E> {
    /// Answers from the scores by codes, which are in the scratch already, and from exact ones.
    ///
    /// # Errors
    /// [`Error::KeysNeeded`] if codes do not suffice and there are no keys.
    pub(crate) fn run(&self, scratch: &mut QueryScratch, threads: usize) -> Result<Found, Error> {
        let Some(keys) = self.keys else {
            return match self.choose(scratch, &mut None)? {
                Step::Done(found) => Ok(found),
                _ => Err(Error::KeysNeeded),
            };
        };
        let mut state = None;
        loop {
            let chosen = match self.choose(scratch, &mut state)? {
                Step::Done(found) => return Ok(found),
                Step::Dense { .. } => return self.dense(scratch),
                Step::Score(chosen) => chosen,
            };
            Self::make_room(scratch, &chosen)?;
            let (count, offset) = (chosen.kept.len(), self.prepared.offset);
            let (by, to) = ((self.simd, threads), &mut scratch.exact[..count]);
            self.query.score_listed(by, keys, &chosen.kept, offset, to)?;
            if let Some(found) = self.judge(scratch, &mut state, chosen)? {
                return Ok(found);
            }
        }
    }

    /// Returns the next step; at first there is no state. Scores by codes are in the scratch.
    ///
    /// # Errors
    /// As [`ThresholdSearch::run`].
    pub(crate) fn choose(
        &self,
        scratch: &mut QueryScratch,
        state: &mut Option<ThresholdState>,
    ) -> Result<Step, Error> {
        if state.is_none() {
            match self.begin(scratch)? {
                Ok(begun) => *state = Some(begun),
                Err(step) => return Ok(step),
            }
        }
        match state {
            Some(state) if state.listed => self.choose_above(scratch, state),
            Some(state) => self.advance(scratch, state),
            None => Ok(Step::Dense { flat: false }),
        }
    }

    /// Looks at the scores by codes; a step if there is no threshold to look for.
    fn begin(&self, scratch: &mut QueryScratch) -> Result<Result<ThresholdState, Step>, Error> {
        let RowVisibility { prefix, allowed } = self.row_visibility;
        let n = self.codes.len();
        scratch.scores[prefix.min(n)..].fill(f32::NEG_INFINITY);
        if let Some(allowed) = allowed {
            for (score, &allowed) in scratch.scores.iter_mut().zip(allowed) {
                if allowed == 0 {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        scratch.uncoded.clear();
        let sees = |key: &u32| self.row_visibility.sees(*key as usize);
        scratch.uncoded.extend(self.codes.uncoded().filter(sees));
        let usable = self.prepared.code_error.says_something();
        // Scores that overflowed to -inf look like masked ones.
        let coded = if usable { self.simd.count_visible(&scratch.scores) } else { 0 };
        let seen =
            if usable { coded + scratch.uncoded.len() } else { (0..n as u32).filter(sees).count() };
        if seen == 0 {
            let found = Found { minimal: true, rung: Rung::Codes, ..Found::default() };
            return Ok(Err(Step::Done(found)));
        }
        if self.eps == 0.0 {
            let kept = (0..n as u32).filter(sees).collect();
            let minimal = true;
            let found = Found { kept, visible: seen, minimal, ..Found::default() };
            return Ok(Err(Step::Done(Found { rung: Rung::Codes, ..found })));
        }
        let (survey, _) = self.simd.scan(&scratch.scores, None);
        if !(usable && survey.largest < f32::INFINITY && !survey.nan) {
            return Ok(Err(Step::Dense { flat: false }));
        }
        let largest = survey.largest;
        let offset = self.prepared.offset;
        scratch.uncoded_scores.resize(scratch.uncoded.len(), 0.0);
        match self.keys {
            Some(keys) => {
                let picked = Picked::Listed(&scratch.uncoded);
                self.query.score(self.simd, keys, picked, offset, &mut scratch.uncoded_scores);
            }
            None if !scratch.uncoded.is_empty() && self.beside.is_none() => {
                return Err(Error::KeysNeeded);
            }
            None => scratch.uncoded_scores.fill(f64::NEG_INFINITY),
        }
        let uncoded_top = scratch.uncoded_scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let top = f64::from(largest).max(uncoded_top);
        if coded == 0 || uncoded_top > f64::from(largest) + 600.0 {
            return Ok(Err(Step::Dense { flat: false }));
        }
        let shift = f64::from(largest);
        // Bare keys relative to the largest score by codes; what exceeds it is fine in f64.
        let uncoded_mass: f64 =
            scratch.uncoded_scores.iter().map(|score| (score - shift).exp()).sum();
        // Scores are known as near as their error once the offset is added again.
        let beside = self
            .beside
            .map_or((0.0, 0.0), |beside| beside.widened(self.query.error).weights(shift + offset));
        let more = uncoded_mass + beside.0;
        let budget = if more > 0.0 {
            let all = self.simd.below(&scratch.scores, largest, f32::NEG_INFINITY).rest;
            self.eps * (all + more) / all
        } else {
            self.eps
        };
        let excess = scratch.excess.unwrap_or(1.03);
        Ok(Ok(ThresholdState {
            listed: false,
            largest,
            coded,
            seen,
            top,
            uncoded_mass,
            beside,
            budget,
            excess,
            careful: 0,
            limit: 1.0,
            next: 1.0,
            rounds: 0,
        }))
    }

    /// The rungs below the dense one.
    fn advance(
        &self,
        scratch: &mut QueryScratch,
        state: &mut ThresholdState,
    ) -> Result<Step, Error> {
        let ThresholdState { largest, coded, seen, uncoded_mass, beside, budget, .. } = *state;
        let odds = self.eps / (1.0 - self.eps);
        while state.rounds < ROUNDS {
            state.rounds += 1;
            let ThresholdState { excess, careful, next, limit, .. } = state;
            let share = (budget / *excess).min(*limit);
            let edge = if share < 1.0 { self.edge(scratch, share)? } else { f32::INFINITY };
            let sums = self.simd.below(&scratch.scores, largest, edge);
            let below = Sums::computed(
                sums.weights,
                sums.squares,
                weight(sums.largest, largest),
                sums.count,
            );
            let cut = Cut {
                edge,
                upper: if sums.count == 0 {
                    0.0
                } else if self.beside.is_some() {
                    let (simd, error) = (self.simd, &self.prepared.code_error);
                    mass_upper_in_parts(simd, error, &scratch.scores, largest, &sums)
                } else {
                    self.prepared.code_error.mass_upper(&below)
                },
                lower: self.prepared.code_error.mass_lower(&below),
                below: sums.count,
            };
            let kept = coded - sums.count;
            // What is left below when the heaviest key there is kept, too: the least step to take.
            let lighter = (sums.weights - weight(sums.largest, largest)).max(0.0);
            *next = lighter / (sums.weights + sums.rest) * (1.0 + 1e-6);
            let dense = if self.trim { ALMOST_ALL } else { DENSE };
            if self.keys.is_some() && kept as f64 > dense * seen as f64 {
                return Ok(Step::Dense { flat: true });
            }
            // As far as codes know: how the bound stands to what it may be.
            let head = sums.rest + uncoded_mass;
            let ratio = cut.upper / (odds * head);
            if self.keys.is_none() {
                let above = Sums::computed(sums.rest, sums.rest_squares, 1.0, kept);
                let head = if self.beside.is_some() {
                    self.prepared.code_error.mass_lower_of_few(&above) + beside.0
                } else {
                    self.prepared.code_error.mass_lower(&above)
                };
                let high = self.prepared.code_error.mass_upper(&above) + beside.1;
                let kept = kept + usize::from(self.beside.is_some());
                let split = SplitSums { tail: cut.upper, dropped: cut.below, head, kept };
                let upper = split.upper(SUM_ROUNDING, 0.0);
                if upper <= self.eps {
                    let split = SplitSums { tail: cut.lower, dropped: cut.below, head: high, kept };
                    scratch.excess = Some(*excess);
                    let lower = split.lower(SUM_ROUNDING, 0.0).min(upper);
                    return Ok(Step::Done(Found {
                        kept: self.list(scratch, &cut),
                        visible: seen,
                        scored: 0,
                        upper,
                        // Keys without a code are kept, and may weigh anything.
                        lower: if scratch.uncoded.is_empty() { lower } else { 0.0 },
                        minimal: false,
                        rung: Rung::Codes,
                    }));
                }
                *excess *= (upper / self.eps).clamp(1.001, 4.0) * 1.001;
                *limit = *next;
                continue;
            }
            if ratio.is_nan() || ratio > 1.0 - 1e-6 {
                *excess *= if ratio.is_nan() { 4.0 } else { (ratio * 1.0005).min(4.0) };
                (*careful, *limit) = (usize::MAX, *next);
                continue;
            }
            let (enough, again) = if self.trim { TIGHT } else { QUICK };
            if ratio < enough && *careful < again {
                *excess *= ratio * (1.5 - 0.5 * enough); // too careful
                *careful += 1;
                continue;
            }
            return Ok(Step::Score(Chosen { kept: self.list(scratch, &cut), cut }));
        }
        Ok(Step::Dense { flat: false })
    }

    /// Makes scratch for the exact scores of chosen keys, which belong at its beginning.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn make_room(scratch: &mut QueryScratch, chosen: &Chosen) -> Result<(), Error> {
        let scored = chosen.kept.len();
        let more = scored.next_multiple_of(LANES).saturating_sub(scratch.exact.len());
        memory::room("keys", &mut scratch.exact, more)?;
        scratch.exact.resize(scored.next_multiple_of(LANES), 0.0);
        scratch.exact[scored..].fill(f64::NEG_INFINITY);
        Ok(())
    }

    /// Judges chosen keys by their exact scores less the codes' offset; `None` if they do not prove the budget.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn judge(
        &self,
        scratch: &mut QueryScratch,
        state: &mut Option<ThresholdState>,
        chosen: Chosen,
    ) -> Result<Option<Found>, Error> {
        let Some(state) = state.as_mut() else { return Ok(None) };
        let relative = (state.top, f64::from(state.largest));
        let found = self.rescore(scratch, chosen, relative, state.seen)?;
        if found.upper <= self.eps {
            scratch.excess = Some(state.excess);
            return Ok(Some(found));
        }
        let miss = found.upper * (1.0 - self.eps) / (1.0 - found.upper) / self.eps;
        state.excess *= if miss.is_nan() { 4.0 } else { (miss * 1.001).clamp(1.001, 4.0) };
        (state.careful, state.limit) = (usize::MAX, state.next);
        Ok(None)
    }

    /// The score by codes of the last key to keep if they were exact and keys of that share of the mass may go.
    fn edge(&self, scratch: &mut QueryScratch, share: f64) -> Result<f32, Error> {
        let n = self.codes.len();
        let scores = Scores::new(&scratch.scores[..n], &[n])?;
        let selection = scratch.workspace.select(&scores, &[share], &Options::new())?;
        let kept = selection.indices.iter().map(|&key| scratch.scores[key as usize]);
        let edge = kept.fold(f32::INFINITY, f32::min);
        selection.recycle();
        Ok(edge)
    }

    /// The coded keys from the edge upward and the bare ones, ascending.
    fn list(&self, scratch: &mut QueryScratch, cut: &Cut) -> Reused<u32> {
        let mut listed = std::mem::take(&mut scratch.listed);
        listed.clear();
        self.simd.emit(&scratch.scores, Positions::From(0), cut.edge, true, &mut listed);
        let kept = merged(&listed, &scratch.uncoded);
        scratch.listed = listed;
        kept
    }

    /// Certifies a row by the exact scores of the chosen keys, after dropping what the budget still allows.
    fn rescore(
        &self,
        scratch: &mut QueryScratch,
        chosen: Chosen,
        (top, shift): (f64, f64),
        seen: usize,
    ) -> Result<Found, Error> {
        let Chosen { mut kept, cut } = chosen;
        let scored = kept.len();
        let exact = &scratch.exact[..scored];
        let top = exact.iter().copied().fold(top, f64::max);
        // What codes bound, relative to the common shift.
        let down = (certified_sums::exp(shift - top) * (1.0 + SUM_ROUNDING)).max(NOTHING);
        let open = cut.upper * down;
        let odds = self.eps / (1.0 - self.eps);
        let head = self.simd.mass(&scratch.exact, Exp(top));
        // Sums over the keys that were scored are at most so many terms deep.
        let error = (2.0 * self.query.error).exp_m1() + SUM_ROUNDING + scored as f64 * f64::EPSILON;
        let mut closed = 0.0;
        let room_left = (odds * head * (1.0 - error) - open) / (1.0 + odds) * (1.0 - 1e-6);
        if self.trim && room_left > 0.0 {
            closed = Self::drop_scored(scratch, &mut kept, (room_left / head, top))?;
        }
        // What was dropped scores -inf by now.
        let head = if closed > 0.0 { self.simd.mass(&scratch.exact, Exp(top)) } else { head };
        let dropped = seen - kept.len();
        let split = SplitSums { tail: open + closed, dropped, head, kept: kept.len() };
        let low =
            SplitSums { tail: cut.lower * certified_sums::exp(shift - top) + closed, ..split };
        let upper = split.upper(error, NOTHING);
        Ok(Found {
            visible: seen,
            scored,
            upper,
            lower: low.lower(error, NOTHING).min(upper),
            minimal: false,
            rung: Rung::Rescored,
            kept,
        })
    }

    /// Drops from the scored keys those that weigh least, a share of their mass; returns what they weigh. Their scores
    /// become -inf.
    ///
    /// # Errors
    /// [`Error::NoMemory`]: a set that is larger for want of memory would differ from run to run.
    fn drop_scored(
        scratch: &mut QueryScratch,
        kept: &mut Reused<u32>,
        (share, top): (f64, f64),
    ) -> Result<f64, Error> {
        let scored = kept.len();
        let Ok(scores) = Scores::new(&scratch.exact[..scored], &[scored]) else { return Ok(0.0) };
        let selection =
            match scratch.workspace.select(&scores, &[share.min(0.999)], &Options::new()) {
                Ok(selection) => selection,
                Err(error @ Error::NoMemory { .. }) => return Err(error),
                Err(_) => return Ok(0.0),
            };
        if selection.indices.len() == scored {
            selection.recycle();
            return Ok(0.0);
        }
        let mut closed = 0.0;
        let mut next = selection.indices.iter().peekable();
        let mut left = 0;
        for (at, score) in scratch.exact.iter_mut().enumerate().take(scored) {
            if next.next_if(|&&index| index as usize == at).is_some() {
                kept[left] = kept[at];
                left += 1;
            } else {
                closed += certified_sums::exp(*score - top);
                *score = f64::NEG_INFINITY;
            }
        }
        kept.truncate(left);
        selection.recycle();
        Ok(closed)
    }

    /// Scores everything.
    fn dense(&self, scratch: &mut QueryScratch) -> Result<Found, Error> {
        let Some(keys) = self.keys else { return Err(Error::KeysNeeded) };
        let prefix = self.row_visibility.prefix.min(self.codes.len());
        let seen = (0..prefix).filter(|&key| self.row_visibility.sees(key)).count();
        // Also where the product of an infinite norm and a scale of 0 is not a number.
        if self.query.error.is_nan() || self.query.error > BLURRED {
            let kept =
                (0..prefix as u32).filter(|&key| self.row_visibility.sees(key as usize)).collect();
            return Ok(Found { kept, visible: seen, rung: Rung::Dense, ..Found::default() });
        }
        let more = prefix.saturating_sub(scratch.exact.len());
        memory::room("keys", &mut scratch.exact, more)?;
        scratch.exact.resize(prefix, 0.0);
        let offset = self.prepared.offset;
        self.query.score(self.simd, keys, Picked::From(0), offset, &mut scratch.exact);
        if let Some(allowed) = self.row_visibility.allowed {
            for (score, &allowed) in scratch.exact.iter_mut().zip(allowed) {
                if allowed == 0 {
                    *score = f64::NEG_INFINITY;
                }
            }
        }
        let error = [self.query.error];
        let scores = Scores::new(&scratch.exact[..], &[prefix])?.radius(&error)?;
        let selection = scratch.workspace.select(&scores, &[self.eps], &Options::new())?;
        let found = Found {
            visible: seen,
            scored: seen,
            upper: selection.tail_mass_upper[0],
            lower: selection.tail_mass_lower[0],
            minimal: selection.minimal[0],
            rung: Rung::Dense,
            kept: selection.indices.iter().copied().collect(),
        };
        selection.recycle();
        Ok(found)
    }
}

/// An upper bound of the f32 kernels' weight of a key.
pub(super) fn weight(key: f32, shift: f32) -> f64 {
    f64::from(key - shift).exp() * (1.0 + 1e-5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::double_double::DoubleDouble;

    /// Products of whole numbers that nearly cancel, exact as integers: computed ones are as near as is said.
    #[test]
    fn computed_scores_are_as_near_as_is_said() {
        let mut state = 9u64;
        let mut whole = |bits: u32| -> i64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            (state as i64) >> (64 - bits)
        };
        let mut worst = 0.0f64;
        for dim in (1..40).chain([64, 100, 128, 257]) {
            for scale in [1.0, -0.125, 0.1] {
                let query: Vec<i64> = (0..dim).map(|_| whole(50)).collect();
                let mut keys: Vec<i64> = (0..5 * dim).map(|_| whole(24)).collect();
                for key in keys.chunks_mut(dim) {
                    // The second half undoes the first, nearly.
                    for i in 0..dim / 2 {
                        key[dim - 1 - i] = -key[i];
                    }
                }
                let mirrored: Vec<i64> =
                    (0..dim).map(|i| query[i.min(dim - 1 - i)] + (i as i64 & 3)).collect();
                let wide: Vec<f64> = mirrored.iter().map(|&q| q as f64).collect();
                let narrow: Vec<f32> = keys.iter().map(|&k| k as f32).collect();
                let largest = narrow.iter().fold(0.0f32, |top, k| top.max(k.abs()));
                let query = Query::new(&wide, scale, f64::from(largest));
                let offset = 0.1 * f64::from(largest) * wide[0] * scale;
                for (name, simd) in Simd::all() {
                    let mut scores = [0.0; 5];
                    let rows = Keys::new(&narrow[..], dim, dim);
                    query.score(*simd, rows, Picked::From(0), offset, &mut scores);
                    for (key, score) in keys.chunks(dim).zip(scores) {
                        let exact: i128 = (key.iter().zip(&mirrored))
                            .map(|(&k, &q)| i128::from(k) * i128::from(q))
                            .sum();
                        // Times an f64, less the offset: a float of 106 bits beside what is judged.
                        let product = DoubleDouble::from(exact as f64)
                            .plus((exact - exact as f64 as i128) as f64);
                        let real = product.times(scale).plus(-offset);
                        let off = real.plus(-score).high.abs();
                        assert!(off <= query.error, "{name} {dim} {scale}: {off:e}");
                        worst = worst.max(off / query.error);
                    }
                }
            }
        }
        assert!(worst > 0.02, "{worst}");
    }
}
