//! Some rows by their codes at a time: the keys that each may keep are listed in one walk over the codes. Its threshold is found
//! among them (`listed_search`).
//!
//! Where a row's list begins is guessed from a sample of its keys, which decides nothing: a row whose guess was too high, or lists
//! too many, is searched alone.

use super::codes::{Codes, SEGMENT};
use super::gram::CodeError;
use super::prepared::Prepared;
use super::query::RowVisibility;
use crate::error::Error;
use crate::kernels::{Above, Coarse, EDGES, Exp, LANES, LINE, Passing, SPLIT_KEYS, STEP, Simd};
use crate::runtime::held::Held;
use crate::runtime::memory::room;
use crate::runtime::scratch::with_scratch;
use crate::runtime::threads;
use half::bf16;

/// Rows of fewer keys are searched alone.
pub(crate) const FROM: usize = 512;
/// Groups of keys in a sample.
const SAMPLE: usize = 16;
/// Factor by which the mass below the edge, estimated by the sample, stays below the allowed mass.
const SAFELY: f64 = 1.6;
/// The heaviest weight that stands for others in a sample.
const HEAVY: f64 = 1.0 / 16.0;
/// Of a larger share of a sample above the edge nothing is listed: little can be dropped.
const FLAT: f64 = 0.75;
/// Largest distance of the edge below the largest score of a sample, in nats.
const DEPTH: f32 = 32.0;
/// Distance of a list's edge below the lowest threshold of other rows, in deviations, and least number of such rows.
const MARGIN: f32 = 0.25;
const ENOUGH: usize = 4;

/// A row of a panel: its query, the keys before a position that it sees, what it may lose, and where its list goes.
pub(crate) struct PanelRow<'a> {
    pub(crate) numbers: Coarse<'a>,
    pub(crate) prefix: usize,
    pub(crate) eps: f64,
    pub(crate) above: &'a mut Above,
}

/// Thresholds of earlier rows, in deviations above the mean of each row's scores: a guess for similar rows.
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

impl Held for Parts {
    fn held(&self) -> usize {
        self.0.held() + self.0.iter().map(Above::held).sum::<usize>()
    }
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
    let (sum, squares) = simd.sums(sample);
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
        let last = sums.iter().rposition(|below| below.weights() <= limit).unwrap_or(0);
        low = edges[last];
        step /= EDGES as f32;
    }
    let above_edge = sample.iter().filter(|score| **score >= low).count();
    above.flat = above_edge as f64 > FLAT * sample.len() as f64;
    (largest, low)
}

impl Codes<'_> {
    /// Returns `true` if a row's keys can be listed.
    pub(crate) fn can_split(code_error: &CodeError, sees: RowVisibility<'_>) -> bool {
        let RowVisibility { prefix, allowed } = sees;
        allowed.is_none() && prefix >= FROM && code_error.says_something()
    }

    /// Returns the estimated share of the keys before a position that a row keeps, from a sample of codes.
    pub(crate) fn seems_to_keep(
        &self,
        simd: Simd,
        prepared: &Prepared,
        (prefix, eps): (usize, f64),
    ) -> f64 {
        let (groups, mut sample) = (prefix / LANES, [0.0; SAMPLE * LANES]);
        for (i, to) in sample.chunks_exact_mut(LANES).enumerate() {
            let (lines, scales) = self.group(i * groups / SAMPLE);
            simd.scan_codes(lines, scales, [prepared.coarse()], [to]);
        }
        let (guess, mut above) = (Guess::default(), Above::default());
        let (_, low) = edge(simd, &sample, (groups, eps), &guess, &mut above);
        sample.iter().filter(|score| **score >= low).count() as f64 / sample.len() as f64
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
        let queries = rows.each_ref().map(|row| row.numbers);
        let prefixes = rows.each_ref().map(|row| row.prefix);
        let mut samples = [[0.0f32; SAMPLE * LANES]; Q];
        let mut to = rows.map(|row| (row.above, row.eps));
        let again = to.iter().all(|(above, _)| above.again);
        // Groups as far from each other as can be.
        for i in (0..SAMPLE).filter(|_| !again) {
            let (lines, scales) = self.group(i * groups / SAMPLE);
            let to = samples.each_mut().map(|sample| &mut sample[i * LANES..][..LANES]);
            simd.scan_codes(lines, scales, queries, to);
        }
        for ((above, eps), sample) in to.iter_mut().zip(&samples) {
            let edges = if again {
                (above.shift, above.edge)
            } else {
                edge(simd, sample, (groups, *eps), guess, above)
            };
            // Of scores that are no numbers nothing is listed.
            let ordered = edges.1 <= edges.0;
            above.flat |= !ordered;
            above.begin(if ordered { edges } else { (0.0, 0.0) });
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
                if Q == 1 {
                    simd.split_codes::<Q, 8>(piece, queries, prefixes, passing, to);
                } else {
                    simd.split_codes::<Q, 2>(piece, queries, prefixes, passing, to);
                }
            }
        };
        let segments = || self.pieces(longest.div_ceil(LANES), SEGMENT / LANES);
        let count = segments().count();
        if threads == 1 || count < 2 {
            for one in segments() {
                segment(one, to.each_mut().map(|(above, _)| &mut **above));
                for (above, _) in &mut to {
                    above.end_segment();
                }
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
