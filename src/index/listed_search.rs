//! A row's threshold among the keys that were listed for it.

use super::gram::{CodeError, FLUSH, Sums};
use super::threshold_search::{DENSE, SUM_ROUNDING, ThresholdSearch, weight};
use super::threshold_state::{Chosen, Cut, QueryScratch, Step, ThresholdState, merged};
use crate::error::Error;
use crate::kernels::{Above, EDGES, Element, Exp, LANES, Picked, Positions, Simd};
use crate::numerics::certified_sums::exp;
use crate::runtime::memory::room;

/// Share of the budget at which the search for a threshold stops.
const CLOSE: f64 = 0.985;
/// Most searches for a threshold.
pub(crate) const TRIES: usize = 4;
/// Number of times that a list with too high an edge is made anew.
pub(crate) const MISSES: u32 = 3;
/// Rounds of looking for it, each among so many edges.
const ROUNDS: usize = 3;

/// A row whose list is there.
#[derive(Clone, Copy)]
pub(crate) struct ListedSearch<'a> {
    pub(crate) simd: Simd,
    pub(crate) code_error: &'a CodeError,
    pub(crate) eps: f64,
    /// Keys with a code that it sees.
    pub(crate) coded: usize,
    /// Mass of the keys without a code, relative to the largest score of the list.
    pub(crate) uncoded_mass: f64,
}

/// Takes keys without a code out of a row's list, fills up its last group, and finds its largest score; `None` if there is none.
pub(crate) fn begin_list(simd: Simd, above: &mut Above, uncoded: &[u32]) -> Option<f32> {
    if above.flat {
        return None;
    }
    // It may have been filled up before.
    above.positions.truncate(above.count);
    above.scores.truncate(above.count);
    if !uncoded.is_empty() {
        // They have codes of nothing, which were scored, too.
        let coded = |key: u32| uncoded.binary_search(&key).is_err();
        let mut left = 0;
        for at in 0..above.positions.len() {
            if coded(above.positions[at]) {
                above.positions[left] = above.positions[at];
                above.scores[left] = above.scores[at];
                left += 1;
            }
        }
        above.positions.truncate(left);
        above.scores.truncate(left);
    }
    let count = above.positions.len();
    above.count = count;
    above.scores.resize(count.next_multiple_of(LANES), f32::NEG_INFINITY);
    above.positions.resize(count.next_multiple_of(LANES), 0);
    let (largest, nan) = simd.top(&above.scores);
    (!nan && largest.is_finite()).then_some(largest)
}

/// About the weight of a key, and not less: between powers of two it is on a chord.
fn chord(key: f32, shift: f32) -> f64 {
    let exponent = (key - shift) * std::f32::consts::LOG2_E;
    let bits = (exponent + 127.0).max(0.0) * (1u32 << 23) as f32;
    f64::from(f32::from_bits((bits as i32).cast_unsigned()))
}

/// The last of so many places that fits, if all before it do, too.
fn highest(count: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = usize::midpoint(low, high);
        if fits(middle) { low = middle + 1 } else { high = middle }
    }
    low.checked_sub(1)
}

impl ListedSearch<'_> {
    /// The highest edge in the list below which no more lies, as far as codes know, than may be lost, if bounds exceed what they
    /// bound `excess` times; `None` if there is none, and another list may be asked for.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn cut(
        &self,
        above: &mut Above,
        weights: &mut Vec<f32>,
        largest: f32,
        excess: f64,
    ) -> Result<Option<Cut>, Error> {
        let &ListedSearch { simd, code_error, eps, coded, uncoded_mass } = self;
        let odds = CLOSE * eps / (1.0 - eps) / excess;
        let scores = &above.scores[..];
        // What lies below the list, relative to the largest score.
        let rise = exp(f64::from(above.shift) - f64::from(largest)) * (1.0 + SUM_ROUNDING);
        let (below, below_squares) = above.below();
        let unlisted = coded.saturating_sub(above.count);
        // Their weights were flushed relative to the shift. The made-up score of a key without a code may have put that above the
        // largest score of the list, relative to which `Sums` counts what is flushed.
        let flushed = |rise: f64| (rise - 1.0).max(0.0) * FLUSH * unlisted as f64;
        let below = below * rise + flushed(rise);
        let below_squares = below_squares * rise * rise + flushed(rise * rise);
        let bound = code_error.bound();
        let upper = |(sum, squares): (f64, f64), top: f64, count: usize| {
            let sums = Sums::computed(below + sum, below_squares + squares, top, unlisted + count);
            bound.mass_upper(&sums)
        };
        room("keys", weights, scores.len().saturating_sub(weights.len()))?;
        weights.resize(scores.len(), 0.0);
        let total = simd.weights(scores, Exp(largest), &mut weights[..]) + uncoded_mass;
        let (mut low, mut high) = (above.edge, largest);
        for round in 0..ROUNDS {
            let step = (high - low) / EDGES as f32;
            let edges: [f32; EDGES] = std::array::from_fn(|i| low + step * i as f32);
            let sums = simd.below_each(scores, weights, edges);
            let fits = |i: usize| {
                let (weights, squares) = (sums[i].weights(), sums[i].squares());
                upper((weights, squares), chord(edges[i], largest), above.count)
                    <= odds * (total - weights)
            };
            // The lower an edge, the less lies below.
            match highest(EDGES, fits) {
                Some(last) => (low, high) = (edges[last], edges[last] + step),
                None if round == 0 => {
                    // It is found farther down, or nowhere.
                    let excess = upper((0.0, 0.0), chord(low, largest), 0) / (odds * total);
                    above.misses += 1;
                    // Where what lies below would fit alone, as at tiny budgets, no lower edge helps.
                    above.again = above.misses <= MISSES && (1.0..1e6).contains(&excess);
                    if above.again {
                        // Farther and farther: the list may be long, but there is one.
                        above.edge -= above.misses as f32 * (1.5 * excess.ln() + 0.5) as f32;
                    }
                    return Ok(None);
                }
                None => break,
            }
        }
        let sums = simd.below(scores, largest, low);
        (above.found, above.again) = (low, false);
        let top = weight(sums.largest.max(above.edge), largest);
        Ok(Some(Cut {
            edge: low,
            upper: upper((sums.weights, sums.squares), top, sums.count),
            lower: 0.0,
            below: unlisted + sums.count,
        }))
    }
}

impl ListedSearch<'_> {
    /// The keys of the list that a cut keeps, ascending, behind those that are there.
    pub(crate) fn keep(&self, above: &Above, cut: &Cut, to: &mut Vec<u32>) {
        self.simd.emit(&above.scores, Positions::Listed(&above.positions), cut.edge, true, to);
    }
}

impl<E: Element<Scalar = f32>> ThresholdSearch<'_, E> {
    /// The state of a row whose list is there, if it can be searched in it.
    pub(crate) fn begin_above(&self, scratch: &mut QueryScratch) -> Option<ThresholdState> {
        let QueryScratch { above, uncoded, uncoded_scores, .. } = scratch;
        let prefix = self.row_visibility.prefix;
        let keys = self.keys?;
        uncoded.clear();
        uncoded.extend(self.codes.uncoded().take_while(|&key| (key as usize) < prefix));
        let largest = begin_list(self.simd, above, uncoded)?;
        let offset = self.prepared.offset;
        uncoded_scores.resize(uncoded.len(), 0.0);
        let picked = Picked::Listed(uncoded);
        self.query.score(self.simd, keys, picked, offset, uncoded_scores);
        let uncoded_top = uncoded_scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let shift = f64::from(largest);
        if uncoded_top > shift + 600.0 {
            return None;
        }
        let uncoded_mass: f64 = uncoded_scores.iter().map(|score| (score - shift).exp()).sum();
        Some(ThresholdState {
            largest,
            listed: true,
            coded: prefix - uncoded.len(),
            seen: prefix,
            top: shift.max(uncoded_top),
            uncoded_mass,
            beside: (0.0, 0.0),
            budget: self.eps,
            excess: 1.0,
            careful: 0,
            limit: 1.0,
            next: 1.0,
            rounds: 0,
        })
    }

    /// The keys above the highest edge in the list that codes allow.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(super) fn choose_above(
        &self,
        scratch: &mut QueryScratch,
        state: &mut ThresholdState,
    ) -> Result<Step, Error> {
        state.rounds += 1;
        if state.rounds > TRIES {
            return Ok(Step::Dense { flat: false });
        }
        let QueryScratch { above, weights, listed, uncoded, .. } = scratch;
        let search = ListedSearch {
            simd: self.simd,
            code_error: &self.prepared.code_error,
            eps: self.eps,
            coded: state.coded,
            uncoded_mass: state.uncoded_mass,
        };
        let Some(cut) = search.cut(above, weights, state.largest, state.excess)? else {
            return Ok(Step::Dense { flat: false });
        };
        listed.clear();
        search.keep(above, &cut, listed);
        if listed.len() as f64 > DENSE * state.seen as f64 {
            return Ok(Step::Dense { flat: true });
        }
        Ok(Step::Score(Chosen { kept: merged(listed, uncoded), cut }))
    }
}
