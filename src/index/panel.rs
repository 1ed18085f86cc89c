//! Some rows by their codes at a time: the keys that each may keep are listed in one walk over the codes, and its threshold is
//! found among them.
//!
//! Where a row's list begins is guessed from a sample of its keys, which decides nothing: a row whose guess was too high, or lists
//! too many, is searched alone.

use super::codes::{Codes, SEGMENT};
use super::gram::Sums;
use super::prepared::Prepared;
use super::query::RowVisibility;
use super::threshold_search::{DENSE, SUM_ROUNDING, ThresholdSearch, weight};
use super::threshold_state::{Chosen, Cut, QueryScratch, Step, ThresholdState, merged};
use crate::certified_sums::exp;
use crate::error::Error;
use crate::kernels::{
    Above, EDGES, Element, Exp, LANES, LINE, Passing, Picked, Positions, SPLIT_KEYS, STEP, Simd,
};
use crate::memory::room;
use crate::recycled::held;
use crate::scratch::with_scratch;
use crate::threads;
use crate::workspace::Scratch;
use half::bf16;

/// Rows of fewer keys are searched alone.
const FROM: usize = 1024;
/// Groups of keys in a sample.
const SAMPLE: usize = 16;
/// How many times less than allowed is to lie below the edge, as far as the sample knows.
const SAFELY: f64 = 1.6;
/// The heaviest weight that stands for others in a sample.
const HEAVY: f64 = 1.0 / 16.0;
/// Of a larger share of a sample above the edge nothing is listed: little can be dropped.
const FLAT: f64 = 0.75;
/// How far below the largest score of a sample the edge may be, in nats.
const DEPTH: f32 = 32.0;
/// How far below the lowest threshold of other rows a list begins, in deviations, and of how many rows.
const MARGIN: f32 = 0.25;
const ENOUGH: usize = 4;
/// How close to the budget a threshold is looked for.
const CLOSE: f64 = 0.985;
/// How often it is looked for.
const TRIES: usize = 4;
/// Rounds of looking for it, each among so many edges.
const ROUNDS: usize = 3;

/// A row of a panel: its query, the keys before a position that it sees, what it may lose, and where its list goes.
pub(crate) struct PanelRow<'a> {
    /// None for a row that takes no part.
    pub(crate) prepared: Option<&'a Prepared>,
    pub(crate) prefix: usize,
    pub(crate) eps: f64,
    pub(crate) above: &'a mut Above,
}

/// Where thresholds of rows were, in deviations above the mean of each row's scores: a guess for rows that are like them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Guess {
    least: f32,
    rows: usize,
}

impl Guess {
    /// Takes note of a row whose threshold was found in its list.
    pub(crate) fn learn(&mut self, above: &Above) {
        let height = (above.found - above.mean) / above.deviation;
        if height.is_finite() {
            self.least = if self.rows == 0 { height } else { self.least.min(height) };
            self.rows += 1;
        }
    }

    /// An edge for a row, if enough others are known.
    fn edge(&self, above: &Above) -> Option<f32> {
        let edge = above.mean + (self.least - MARGIN) * above.deviation;
        (self.rows >= ENOUGH && edge.is_finite()).then_some(edge)
    }
}

/// Lists of rows in segments of keys, which threads share.
#[derive(Default)]
struct Parts(Vec<Above>);

impl Scratch for Parts {
    fn bytes(&self) -> usize {
        let lists = |part: &Above| held(&part.positions) + held(&part.scores);
        held(&self.0) + self.0.iter().map(lists).sum::<usize>()
    }
}

/// The sum of scores in whole groups, and of their squares, roughly, in lanes that compilers see.
fn moments(scores: &[f32]) -> (f32, f32) {
    let (mut sums, mut squares) = ([0.0f32; LANES], [0.0f32; LANES]);
    for group in scores.as_chunks::<LANES>().0 {
        for ((sum, square), score) in sums.iter_mut().zip(&mut squares).zip(group) {
            *sum += score;
            *square += score * score;
        }
    }
    (sums.iter().sum(), squares.iter().sum())
}

/// An edge of sampled scores below which lie about so many times less than `share` of all that `groups` groups weigh, and a shift
/// that it does not exceed.
fn edge(
    simd: Simd,
    sample: &[f32],
    (groups, share): (usize, f64),
    guess: &Guess,
    above: &mut Above,
) -> (f32, f32) {
    let (largest, _) = simd.top(sample);
    let (sum, squares) = moments(sample);
    let count = sample.len() as f32;
    above.mean = sum / count;
    above.deviation = (squares / count - above.mean * above.mean).max(0.0).sqrt();
    above.flat = false;
    if let Some(low) = guess.edge(above) {
        return (largest.max(low), low);
    }
    let mut weights = [0.0; SAMPLE * LANES];
    simd.weights(sample, Exp(largest), &mut weights[..]);
    let each = groups as f64 / SAMPLE as f64;
    let light: f64 = weights.iter().map(|&weight| f64::from(weight).min(HEAVY)).sum();
    let limit = share * (1.0 + each * light) / (SAFELY * each);
    let (mut low, mut step) = (largest - DEPTH, DEPTH / EDGES as f32);
    for _ in 0..2 {
        let edges: [f32; EDGES] = std::array::from_fn(|i| low + step * i as f32);
        let sums = simd.below_each(sample, &weights, edges);
        let last = sums.iter().rposition(|&(sum, _)| sum <= limit).unwrap_or(0);
        low = edges[last];
        step /= EDGES as f32;
    }
    let above_edge = sample.iter().filter(|score| **score >= low).count();
    above.flat = above_edge as f64 > FLAT * sample.len() as f64;
    (largest, low)
}

impl Codes<'_> {
    /// Whether a row's keys can be listed.
    pub(crate) fn can_split(prepared: &Prepared, sees: RowVisibility<'_>) -> bool {
        let RowVisibility { prefix, allowed } = sees;
        allowed.is_none() && prefix >= FROM && prepared.code_error.says_something()
    }

    /// Lists, for each row, the keys with codes above an edge of its own; it sees at least [`FROM`] keys.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn split<const Q: usize>(
        &self,
        simd: Simd,
        rows: [PanelRow<'_>; Q],
        guess: &Guess,
        threads: usize,
    ) -> Result<(), Error> {
        let least = rows.iter().map(|row| row.prefix).min().unwrap_or(0);
        let longest = rows.iter().map(|row| row.prefix).max().unwrap_or(0).min(self.len());
        let groups = least / LANES;
        let Some(first) = rows.iter().find_map(|row| row.prepared) else { return Ok(()) };
        let in_bytes = rows.each_ref().map(|row| row.prepared.unwrap_or(first).coarse_bytes());
        let queries = rows.each_ref().map(|row| row.prepared.unwrap_or(first).coarse());
        let bytes = in_bytes.iter().all(|query| !query.steps.is_empty());
        let prefixes = rows.each_ref().map(|row| row.prefix);
        let mut samples = [[0.0f32; SAMPLE * LANES]; Q];
        let mut to = rows.map(|row| (row.above, row.eps));
        let again = to.iter().all(|(above, _)| above.again);
        // Groups as far from each other as can be.
        for i in (0..SAMPLE).filter(|_| !again) {
            let (lines, scales) = self.group(i * groups / SAMPLE);
            let to = samples.each_mut().map(|sample| &mut sample[i * LANES..][..LANES]);
            if bytes {
                simd.scan_codes(lines, scales, in_bytes, to);
            } else {
                simd.scan_codes(lines, scales, queries, to);
            }
        }
        for ((above, eps), sample) in to.iter_mut().zip(&samples) {
            let edges = if again {
                (above.shift, above.edge)
            } else {
                edge(simd, sample, (groups, *eps), guess, above)
            };
            above.begin(edges);
            room("keys", &mut above.positions, longest + 2 * LANES)?;
            room("keys", &mut above.scores, longest + 2 * LANES)?;
        }
        if to.iter().all(|(above, _)| above.flat) {
            return Ok(());
        }
        let block = self.widths().0.div_ceil(STEP) * LINE;
        let segment = |(lines, scales, first): (&[u8], &[bf16], usize), to: [&mut Above; Q]| {
            let (mut to, mut passing) = (to, [[[0.0; LANES]; SPLIT_KEYS / LANES]; Q]);
            let passing: &mut Passing<Q> = &mut passing;
            let pieces = lines.chunks(SPLIT_KEYS / LANES * block).zip(scales.chunks(SPLIT_KEYS));
            for (i, (lines, scales)) in pieces.enumerate() {
                let to = to.each_mut().map(|above| &mut **above);
                let piece = (lines, scales, first + i * SPLIT_KEYS);
                if bytes {
                    simd.split_codes::<_, Q, 4>(piece, in_bytes, prefixes, passing, to);
                } else if Q == 1 {
                    simd.split_codes::<_, Q, 8>(piece, queries, prefixes, passing, to);
                } else {
                    simd.split_codes::<_, Q, 2>(piece, queries, prefixes, passing, to);
                }
            }
        };
        let segments = || self.pieces(longest.div_ceil(LANES), SEGMENT / LANES);
        let count = segments().count();
        if threads == 1 || count < 2 {
            for one in segments() {
                segment(one, to.each_mut().map(|(above, _)| &mut **above));
                to.iter_mut().for_each(|(above, _)| above.end_segment());
            }
            return Ok(());
        }
        with_scratch(|parts: &mut Parts| {
            let Parts(parts) = parts;
            parts.resize_with(parts.len().max(count * Q), Above::default);
            for parts in parts.chunks_exact_mut(Q).take(count) {
                for (part, (above, _)) in parts.iter_mut().zip(&to) {
                    part.begin((above.shift, above.edge));
                    room("keys", &mut part.positions, SEGMENT + 2 * LANES)?;
                    room("keys", &mut part.scores, SEGMENT + 2 * LANES)?;
                }
            }
            threads::map(
                threads,
                segments().zip(parts.chunks_exact_mut(Q)).collect::<Vec<_>>(),
                1,
                |(one, parts)| {
                    if let Ok(parts) = <&mut [Above; Q]>::try_from(parts) {
                        segment(one, parts.each_mut());
                    }
                },
            )?;
            for parts in parts.chunks_exact(Q).take(count) {
                to.iter_mut().zip(parts).for_each(|((above, _), part)| above.join(part));
            }
            Ok(())
        })
    }
}

impl<E: Element<Scalar = f32>> ThresholdSearch<'_, E> {
    /// The state of a row whose list is there, if it can be searched in it.
    pub(crate) fn begin_above(&self, scratch: &mut QueryScratch) -> Option<ThresholdState> {
        let QueryScratch { above, uncoded, uncoded_scores, .. } = scratch;
        let prefix = self.row_visibility.prefix;
        let keys = self.keys.filter(|_| !above.flat)?;
        uncoded.clear();
        uncoded.extend(self.codes.uncoded().take_while(|&key| (key as usize) < prefix));
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
        let (largest, nan) = self.simd.top(&above.scores);
        if nan || !largest.is_finite() {
            return None;
        }
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

    /// The highest edge in the list below which no more lies, as far as codes know, than may be lost.
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
        let simd = self.simd;
        let odds = CLOSE * self.eps / (1.0 - self.eps) / state.excess;
        let QueryScratch { above, weights, listed, uncoded, .. } = scratch;
        let (scores, largest) = (&above.scores[..], state.largest);
        // What lies below the list, relative to the largest score.
        let rise = exp(f64::from(above.shift) - f64::from(largest)) * (1.0 + SUM_ROUNDING);
        let (below, below_squares) = above.below();
        let (below, below_squares) = (below * rise, below_squares * rise * rise);
        let unlisted = state.coded.saturating_sub(above.count);
        let error = &self.prepared.code_error;
        let upper = |(sum, squares): (f64, f64), top: f32, count: usize| {
            let top = weight(top.max(above.edge), largest);
            let sums = Sums::computed(below + sum, below_squares + squares, top, unlisted + count);
            error.mass_upper(&sums)
        };
        room("keys", weights, scores.len().saturating_sub(weights.len()))?;
        weights.resize(scores.len(), 0.0);
        let total = simd.weights(scores, Exp(largest), &mut weights[..]) + state.uncoded_mass;
        let (mut low, mut high) = (above.edge, largest);
        for round in 0..ROUNDS {
            let step = (high - low) / EDGES as f32;
            let edges: [f32; EDGES] = std::array::from_fn(|i| low + step * i as f32);
            let sums = simd.below_each(scores, weights, edges);
            let fits =
                |&i: &usize| upper(sums[i], edges[i], above.count) <= odds * (total - sums[i].0);
            match (0..EDGES).rev().find(fits) {
                Some(last) => (low, high) = (edges[last], edges[last] + step),
                None if round == 0 => {
                    // It is found farther down, or nowhere.
                    let excess = upper((0.0, 0.0), above.edge, 0) / (odds * total);
                    above.again = !above.again && excess < 1e6;
                    above.edge -= (1.5 * excess.ln() + 0.5) as f32;
                    return Ok(Step::Dense { flat: false });
                }
                None => break,
            }
        }
        let sums = simd.below(scores, largest, low);
        let cut = Cut {
            edge: low,
            upper: upper((sums.weights, sums.squares), sums.largest, sums.count),
            lower: 0.0,
            below: unlisted + sums.count,
        };
        above.found = low;
        listed.clear();
        simd.emit(scores, Positions::Listed(&above.positions), low, true, listed);
        if listed.len() as f64 > DENSE * state.seen as f64 {
            return Ok(Step::Dense { flat: true });
        }
        Ok(Step::Score(Chosen { kept: merged(listed, uncoded), cut }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::query::Query;
    use crate::kernels::Keys;

    /// Numbers that look normal.
    fn normal(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) as f64 + 0.5) / (1u64 << 31) as f64
        };
        (0..count)
            .map(|_| {
                let (u, v): (f64, f64) = (uniform(), uniform());
                ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
            })
            .collect()
    }

    /// Keys, some of which have no code, and some of which lie together.
    fn keys(n: usize, dim: usize, kind: usize) -> Vec<f32> {
        let mut data = normal(n * dim, 7 + kind as u64);
        for (i, key) in data.chunks_exact_mut(dim).enumerate() {
            match kind {
                1 if i % 97 == 5 => key.iter_mut().for_each(|entry| *entry *= 40.0),
                2 => key.iter_mut().for_each(|entry| *entry = 3.0 + *entry / 4.0),
                3 if i % 3 == 0 => key[0] += 9.0,
                _ => {}
            }
        }
        data
    }

    /// What is found for four rows, in words or bytes, together or alone: sets whose real tails are no larger than is said.
    #[test]
    fn tails_of_listed_rows_are_no_larger_than_is_said() {
        let simd = Simd::current().unwrap();
        let (mut answered, mut all) = (0, 0);
        for (n, dim, kind, sigma) in [
            (1100, 64, 0, 6.0),
            (2000, 40, 1, 5.0),
            (1500, 128, 2, 20.0),
            (1300, 64, 3, 4.0),
            (4096, 64, 0, 9.0),
            (1024, 16, 0, 2.0),
        ] {
            let data = keys(n, dim, kind);
            let stored = Keys::new(&data[..], dim, dim);
            let mut codes = Codes::new(dim, stored, n, None);
            let room = codes.make_room(n, 1).unwrap();
            codes.append(simd, stored, (n, room), 1).unwrap();
            assert_eq!(codes.uncoded().next().is_some(), kind == 1);
            let moments = codes.moments(simd).unwrap();
            let scale = sigma / (dim as f64).sqrt();
            let queries: Vec<Vec<f64>> = (0..4)
                .map(|q| normal(dim, 100 + q).iter().map(|&x| f64::from(x)).collect())
                .collect();
            let prefixes = [n, n - 3, n - n % 16, FROM.max(n / 2 + 1)];
            for (in_bytes, eps) in
                [(false, 0.1), (true, 0.1), (false, 0.001), (true, 0.01), (true, 1e-6)]
            {
                let prepared: Vec<Prepared> = queries
                    .iter()
                    .map(|query| {
                        if in_bytes {
                            codes.prepare_in_bytes(simd, query, scale, &moments)
                        } else {
                            codes.prepare(simd, query, scale)
                        }
                    })
                    .collect();
                // An edge from four rows for the next time, too.
                let mut guess = Guess::default();
                for _ in 0..2 {
                    let mut scratch: Vec<QueryScratch> =
                        (0..4).map(|_| QueryScratch::default()).collect();
                    let [a, b, c, d] = &mut scratch[..] else { unreachable!() };
                    let rows = [(0, a), (1, b), (2, c), (3, d)].map(|(q, scratch)| {
                        let (prepared, prefix) = (Some(&prepared[q]), prefixes[q]);
                        PanelRow { prepared, prefix, eps, above: &mut scratch.above }
                    });
                    codes.split(simd, rows, &guess, 1).unwrap();
                    for q in 0..4 {
                        let query = Query::new(&queries[q], scale, f64::from(codes.largest()));
                        let row_visibility = RowVisibility { prefix: prefixes[q], allowed: None };
                        let search = ThresholdSearch {
                            simd,
                            codes: &codes,
                            keys: Some(stored),
                            query: &query,
                            prepared: &prepared[q],
                            row_visibility,
                            eps,
                            trim: false,
                            beside: None,
                        };
                        let scratch = &mut scratch[q];
                        all += 1;
                        let mut state = search.begin_above(scratch);
                        if state.is_none() {
                            continue;
                        }
                        let Ok(Some(found)) = listed(&search, scratch, &mut state) else {
                            continue;
                        };
                        answered += 1;
                        guess.learn(&scratch.above);
                        let scores: Vec<f64> = data
                            .chunks_exact(dim)
                            .take(prefixes[q])
                            .map(|key| {
                                let terms = key.iter().zip(&queries[q]);
                                terms.map(|(k, q)| f64::from(*k) * q).sum::<f64>() * scale
                            })
                            .collect();
                        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        let mut kept = vec![false; scores.len()];
                        found.kept.iter().for_each(|&key| kept[key as usize] = true);
                        assert!(
                            found.kept.is_sorted()
                                && found.kept.len() == kept.iter().filter(|kept| **kept).count()
                        );
                        let weight = |key: usize| (scores[key] - top).exp();
                        let total: f64 = (0..scores.len()).map(weight).sum();
                        let tail: f64 =
                            (0..scores.len()).filter(|&key| !kept[key]).map(weight).sum();
                        assert!(
                            tail / total <= found.upper * (1.0 + 1e-9) && found.upper <= eps,
                            "{n} {dim} {kind} {eps} {in_bytes}: {} {}",
                            tail / total,
                            found.upper
                        );
                    }
                }
            }
        }
        // Most rows are answered this way, or it would not be worth having.
        assert!(answered * 10 > all * 7, "{answered} of {all}");
    }

    /// A row's list to its end.
    fn listed(
        search: &ThresholdSearch<'_, f32>,
        scratch: &mut QueryScratch,
        state: &mut Option<ThresholdState>,
    ) -> Result<Option<crate::index::found::Found>, Error> {
        loop {
            let Step::Score(chosen) = search.choose(scratch, state)? else { return Ok(None) };
            ThresholdSearch::<f32>::make_room(scratch, &chosen)?;
            let (count, offset) = (chosen.kept.len(), search.prepared.offset);
            let picked = Picked::Listed(&chosen.kept);
            let keys = search.keys.unwrap();
            search.query.score(search.simd, keys, picked, offset, &mut scratch.exact[..count]);
            if let Some(found) = search.judge(scratch, state, chosen)? {
                return Ok(Some(found));
            }
        }
    }

    /// What codes of keys and bytes of a query lose is within what is said, for each key and for all together; and not by far.
    #[test]
    fn what_bytes_of_a_query_lose() {
        let simd = Simd::current().unwrap();
        let mut nearest = [0.0f64; 2];
        for (n, dim, kind) in [(300, 16, 0), (500, 64, 0), (400, 40, 3), (300, 128, 2)] {
            let data = keys(n, dim, kind);
            let stored = Keys::new(&data[..], dim, dim);
            for rotate in [false, true] {
                let mut codes = Codes::new(dim, stored, n, Some(rotate));
                let room = codes.make_room(n, 1).unwrap();
                codes.append(simd, stored, (n, room), 1).unwrap();
                let moments = codes.moments(simd).unwrap();
                for seed in 1..30 {
                    let mut query: Vec<f64> =
                        normal(dim, 50 + seed).iter().map(|&x| f64::from(x)).collect();
                    if seed % 3 == 0 {
                        // Beside it the others are a few units.
                        query[seed as usize % dim] = 40.0;
                    }
                    let scale = 0.3;
                    let prepared = codes.prepare_in_bytes(simd, &query, scale, &moments);
                    let doubt = Query::new(&query, scale, f64::from(codes.largest())).error;
                    let mut scores = vec![0.0; n.next_multiple_of(LANES)];
                    let queries = [prepared.coarse_bytes()];
                    for (lines, scales, first) in codes.pieces(n.div_ceil(LANES), usize::MAX) {
                        let to = &mut scores[first..first + scales.len()];
                        simd.scan_codes(lines, scales, queries, [to]);
                    }
                    let mut squares = 0.0;
                    let error = &prepared.code_error;
                    for (row, score) in data.chunks_exact(dim).zip(&scores) {
                        let product: f64 =
                            row.iter().zip(&query).map(|(k, q)| f64::from(*k) * q).sum();
                        let off =
                            (product * scale - prepared.offset - f64::from(*score)).abs() - doubt;
                        assert!(off <= error.each + error.rho, "{dim} {kind} {off}");
                        nearest[0] = nearest[0].max(off / (error.each + error.rho));
                        squares += (off - error.rho).max(0.0).powi(2);
                    }
                    assert!(squares.sqrt() <= error.total, "{dim} {kind}");
                    nearest[1] = nearest[1].max(squares.sqrt() / error.total);
                }
            }
        }
        assert!(nearest[0] > 0.2 && nearest[1] > 0.6, "{nearest:?}");
    }
}
