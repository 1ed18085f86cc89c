//! The keys of one head as bytes, and what is known of what the bytes leave out.

mod append;
mod low;
pub(crate) mod saved;
mod shrink;

use super::chunks::{Chunks, Part as Stretch, Room};
use super::content::Content;
use super::element::Coded;
use super::fingerprint::Fingerprint;
use super::frame::{MOVED, OwnFrame, sign};
use super::gram::Gram;
use super::spread::{Spread, Tops, ValueBounds};
use crate::error::Error;
use crate::kernels::{Keys, LANES, PANEL};
use crate::runtime::memory::check_memory;
use half::bf16;

/// Tasks per thread that are encoded before their sums are added up.
const WAVE: usize = 4;
/// Keys whose mean is taken to choose a frame, and about how many of them are tried in it.
const SAMPLE: usize = 1024;
const FRAMED: usize = 256;
/// A key whose code loses so many times as much as that of the median key is left without one.
const OUTLYING: f64 = 4.0;
/// Keys of a head whose codes one thread reads at a time, where several share it.
pub(crate) const SEGMENT: usize = 1 << 13;

/// One head's keys, or values, in codes. What grows with them is owned, or lent by somebody who keeps the index as arrays.
#[derive(Debug, Clone)]
pub(crate) struct Codes<'a> {
    dim: usize,
    /// Keys.
    n: usize,
    frame: OwnFrame<'a>,
    chunks: Chunks<'a>,
    gram: Gram<'a>,
    /// More sums, of values.
    spread: Option<Spread<'a>>,
    /// Sums of what codes and low plane together lose, of keys with one.
    low: Option<Gram<'a>>,
    /// The largest loss that still gets a code.
    spared: f64,
    /// Lower bound on the part of the Gram form of removed keys.
    stale: f64,
    /// The largest absolute entry of any key.
    largest: f32,
    fingerprint: Fingerprint,
}

impl PartialEq for Codes<'_> {
    /// Ignores `stale`, which is only a bound.
    fn eq(&self, other: &Self) -> bool {
        let Codes { dim, n, frame, chunks, gram, spread, low, .. } = self;
        let Codes { spared, stale: _, largest, fingerprint, .. } = self;
        (dim, n, spared, largest) == (&other.dim, &other.n, &other.spared, &other.largest)
            && (frame, gram, fingerprint) == (&other.frame, &other.gram, &other.fingerprint)
            && (spread, low, chunks) == (&other.spread, &other.low, &other.chunks)
    }
}

impl Codes<'_> {
    /// Codes of no keys, in a frame chosen by looking at some.
    pub(crate) fn new<E: Coded>(
        content: Content,
        dim: usize,
        keys: Keys<'_, E>,
        n: usize,
        rotate: Option<bool>,
    ) -> Self {
        let mut codes = Codes::plain(content, dim, keys, n);
        let (count, frame) = (n.min(SAMPLE), &mut codes.frame);
        // What a median needs is less than what a mean does.
        let row = |i: usize| keys.row(i * n / count).iter().map(|&entry| entry.widen().into());
        let sample: Vec<Vec<f64>> =
            (0..count).step_by((count / FRAMED).max(1)).map(|i| row(i).collect()).collect();
        let norm_of_loss = |frame: &OwnFrame| -> Vec<f64> {
            let loss = |key: &Vec<f64>| {
                let centred: Vec<f64> =
                    key.iter().zip(&*frame.mean).map(|(k, m)| k - f64::from(*m)).collect();
                let (moved, size) = frame.query(&centred);
                let reach = moved.iter().fold(0.0, |top: f64, entry| top.max(entry.abs()));
                // The norm of rounding errors spread evenly over the step between codes, in the frame of the keys.
                reach / 127.0 * (dim as f64 / 12.0 / size).sqrt()
            };
            let mut losses: Vec<f64> = sample.iter().map(loss).collect();
            losses.sort_by(f64::total_cmp);
            losses
        };
        let plain = norm_of_loss(frame);
        let block = 1 << dim.trailing_zeros();
        frame.block = block;
        let rotated = norm_of_loss(frame);
        let middle =
            |losses: &[f64]| losses.get(losses.len() / 2).copied().unwrap_or(f64::INFINITY);
        // Turning keys costs some time when they are encoded; it must be worth it.
        let better = middle(&rotated) < 0.8 * middle(&plain);
        let mut spared = OUTLYING * middle(&rotated) * (block as f64).sqrt();
        if block == 1 || !rotate.unwrap_or(better) {
            frame.block = 1;
            spared = OUTLYING * middle(&plain);
        }
        codes.spared = if spared > 0.0 { spared } else { f64::INFINITY };
        codes
    }

    /// Codes of nothing, around the mean of some rows. None is spared.
    pub(crate) fn plain<E: Coded>(
        content: Content,
        dim: usize,
        rows: Keys<'_, E>,
        n: usize,
    ) -> Self {
        let width = dim.next_multiple_of(LANES);
        let count = n.min(SAMPLE);
        let mut totals = vec![0.0f64; dim];
        for i in 0..count {
            let row = rows.row(i * n / count).iter().map(|&entry| entry.widen().into());
            totals.iter_mut().zip(row).for_each(|(total, entry): (_, f64)| *total += entry);
        }
        let mut mean = vec![0.0; width];
        for (mean, total) in mean.iter_mut().zip(totals) {
            let value = total / count.max(1) as f64;
            // Of rows that are not finite, or overflow together, none is worth moving.
            *mean = if value.abs() < 1e30 { value as f32 } else { 0.0 };
        }
        let signs = (0..width).map(|j| if sign(j) { -1.0 } else { 1.0 }).collect();
        let gram = Gram::new(width);
        let spread = content.of_values().then(|| Spread::new(Gram::new(width), &gram, None));
        Codes {
            dim,
            n: 0,
            frame: OwnFrame { mean: mean.into(), block: 1, signs },
            chunks: Chunks::new(content, dim),
            gram,
            spread,
            low: (content.low_bits() > 0).then(|| Gram::new(width)),
            spared: f64::INFINITY,
            stale: 0.0,
            largest: 0.0,
            fingerprint: Fingerprint::default(),
        }
    }

    /// Tasks that are encoded before their sums are joined.
    fn wave(threads: usize) -> usize {
        if threads == 1 { 1 } else { WAVE.saturating_mul(threads) }
    }

    /// Makes room for that many more keys, so that appending them does not fail for want of it.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; the codes are as they were.
    pub(crate) fn make_room(&mut self, count: usize, threads: usize) -> Result<Room, Error> {
        // What the parts sum, and their scratch.
        let width = self.frame.mean.len();
        let part = (self.content().matrices() * width).saturating_add(16 * PANEL);
        let part = part.saturating_mul(width);
        check_memory("keys", part, Self::together(threads).saturating_mul(size_of::<f64>()))?;
        let groups = self.n.saturating_add(count).div_ceil(LANES) - self.chunks.groups();
        self.chunks.make_room(count > 0 && !self.n.is_multiple_of(LANES), groups)
    }

    /// Returns the number of sums held while keys are encoded, beside the index's own.
    pub(crate) fn together(threads: usize) -> usize {
        Self::wave(threads) + 2
    }

    pub(crate) fn len(&self) -> usize {
        self.n
    }

    /// Bytes that grow with the number of keys.
    pub(crate) fn bytes(&self) -> usize {
        self.chunks.bytes()
    }

    /// Keys without a code, in ascending order: they must be scored.
    pub(crate) fn uncoded(&self) -> impl Iterator<Item = u32> {
        self.chunks.uncoded()
    }

    /// Upper bounds of the norms of what codes lose, key by key.
    pub(crate) fn radii(&self) -> impl Iterator<Item = f64> {
        let radii = self.chunks.parts().flat_map(|part| part.radii);
        radii.take(self.n).map(|radius| f64::from(*radius))
    }

    /// Returns the fingerprint of the keys.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The largest absolute entry of any key.
    pub(crate) fn largest(&self) -> f32 {
        self.largest
    }

    /// Returns an upper bound of the norms of all keys.
    pub(crate) fn longest(&self) -> f64 {
        let by_entries = (self.dim as f64).sqrt() * f64::from(self.largest) * MOVED;
        let by_codes = self.longest_coded();
        if self.uncoded().next().is_some() { by_entries } else { by_entries.min(by_codes) }
    }

    /// Returns an upper bound of the norms of keys with a code, and of what codes stand for.
    pub(crate) fn longest_coded(&self) -> f64 {
        let (_, residual, coded) = self.gram.bounds();
        self.frame.longest(residual + coded)
    }

    fn content(&self) -> Content {
        self.chunks.content()
    }

    /// Returns bounds of values, and of what their codes lose; infinite ones of keys.
    pub(crate) fn value_bounds(&self) -> ValueBounds {
        self.spread.as_ref().map_or(ValueBounds::NOTHING, |spread| spread.bounds(&self.gram))
    }

    pub(super) fn tops(&self) -> Tops {
        self.spread.as_ref().map_or([[0.0; 3]; 2], Spread::tops)
    }

    /// Entries of a key in codes, and the same in whole groups.
    pub(crate) fn widths(&self) -> (usize, usize) {
        (self.dim, self.frame.mean.len())
    }

    /// Returns what is subtracted from all of them, in whole groups of entries.
    pub(crate) fn mean(&self) -> &[f32] {
        &self.frame.mean
    }

    /// Puts another mean in place of that of no keys.
    #[cfg(test)]
    pub(super) fn move_mean(&mut self, mean: &[f32]) {
        self.frame.mean.to_mut()[..mean.len()].copy_from_slice(mean);
    }

    pub(super) fn frame(&self) -> &OwnFrame<'_> {
        &self.frame
    }

    /// Returns the sums of what codes lose, and of what both planes together lose.
    pub(super) fn grams(&self) -> (&Gram<'_>, Option<&Gram<'_>>) {
        (&self.gram, self.low.as_ref())
    }

    /// The codes of a group of keys, and their scales.
    pub(crate) fn group(&self, group: usize) -> (&[u8], &[bf16]) {
        let block = self.content().block(self.dim);
        let mut first = 0;
        for Stretch { lines, scales, .. } in self.chunks.parts() {
            let groups = scales.len() / LANES;
            if group < first + groups {
                let at = group - first;
                return (&lines[at * block..][..block], &scales[at * LANES..][..LANES]);
            }
            first += groups;
        }
        (&[], &[])
    }

    /// The codes of the first groups, at most so many at a time; with their scales and the position of their first key.
    pub(crate) fn pieces(
        &self,
        groups: usize,
        most: usize,
    ) -> impl Iterator<Item = (&[u8], &[bf16], usize)> {
        let block = self.content().block(self.dim);
        let mut first = 0;
        self.chunks.parts().flat_map(move |Stretch { lines, scales, .. }| {
            let (begin, here) = (first, (scales.len() / LANES).min(groups.saturating_sub(first)));
            first += here;
            (0..here).step_by(most).map(move |at| {
                let count = most.min(here - at);
                let lines = &lines[at * block..][..count * block];
                (lines, &scales[at * LANES..][..count * LANES], (begin + at) * LANES)
            })
        })
    }
}

/// Reason why keys were not appended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Refused {
    /// A key's entry is not finite; it is the first.
    NotFinite { row: usize, entry: usize },
    /// The call was stopped.
    Stopped(Error),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::query::Query;
    use crate::kernels::Simd;

    /// Scores by codes against those that are exact in f64: the largest share that an error has of what it may be.
    fn share(data: &[f32], dim: usize, query: &[f64], scale: f64, rotate: bool) -> f64 {
        let (simd, n) = (Simd::current().unwrap(), data.len() / dim);
        let keys = Keys::new(data, dim, dim);
        let mut codes = Codes::new(Content::Keys, dim, keys, n, Some(rotate));
        let room = codes.make_room(n, 1).unwrap();
        codes.append(simd, keys, (n, room), 1).unwrap();
        let prepared = codes.prepare(simd, query, scale);
        let doubt = Query::new(query, scale, f64::from(codes.largest())).error;
        let mut scores = vec![0.0; n.next_multiple_of(LANES)];
        codes.scan(simd, [prepared.coarse()], [&mut scores], 1).unwrap();
        let mut worst = 0.0f64;
        let keys = data.chunks_exact(dim).zip(codes.radii());
        for ((row, radius), &score) in keys.zip(&scores) {
            if score == f32::NEG_INFINITY {
                continue;
            }
            let product: f64 = row.iter().zip(query).map(|(k, q)| f64::from(*k) * q).sum();
            let off = (product * scale - prepared.offset - f64::from(score)).abs();
            let reach = prepared.code_error.reach_of(radius) + doubt;
            assert!(off <= reach, "{dim} {scale} {rotate}: {off} > {reach}");
            worst = worst.max(off / reach);
        }
        worst
    }

    /// Whole numbers up to a size, which look random.
    fn whole(count: usize, size: i64, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            (state >> 33) as i64
        };
        (0..count).map(|_| (next() % (2 * size + 1) - size) as f32).collect()
    }

    /// Keys of whole numbers up to 127, one of which is 127, and their opposites: codes lose nothing, and the mean is 0.
    fn exactly_coded(n: usize, dim: usize, seed: u64) -> Vec<f32> {
        let mut keys = whole(n * dim, 127, seed);
        for (i, key) in keys.chunks_exact_mut(dim).enumerate() {
            key[i % dim] = 127.0;
        }
        let opposite: Vec<f32> = keys.iter().map(|k| -k).collect();
        keys.extend(opposite);
        keys
    }

    #[test]
    fn what_codes_of_keys_lose() {
        let mut worst = 0.0f64;
        for seed in 1..200 {
            let dim = [1, 2, 3, 16, 40][seed as usize % 5];
            let keys: Vec<f32> =
                whole(40 * dim, 100_000, seed).iter().map(|k| k / 1024.0).collect();
            let query: Vec<f64> = whole(dim, 30_000, seed + 1).iter().map(|&q| q.into()).collect();
            worst = worst.max(share(&keys, dim, &query, 1e-4, seed % 2 == 0));
        }
        assert!(worst > 0.6, "{worst}");
    }

    #[test]
    fn what_numbers_of_a_query_lose() {
        let mut worst = 0.0f64;
        for seed in 1..60 {
            let dim = [2, 4, 20][seed as usize % 3];
            let keys = exactly_coded(20, dim, seed);
            // Beside the first entry the others are less than half a unit.
            let mut query: Vec<f64> =
                whole(dim, 14_000, seed).iter().map(|&q| f64::from(q) * 1e-9).collect();
            query[0] = 1.0;
            for scale in [1.0, -3.0] {
                worst = worst.max(share(&keys, dim, &query, scale, false));
            }
        }
        assert!(worst > 0.3, "{worst}");
    }

    #[test]
    fn what_scores_by_codes_are_rounded_by() {
        let mut worst = 0.0f64;
        for seed in 1..300 {
            let dim = [1, 2, 8, 32][seed as usize % 4];
            let keys = exactly_coded(20, dim, seed);
            // Numbers of sixteen bits are what they are.
            let mut query: Vec<f64> = whole(dim, 3000, seed).iter().map(|&q| q.into()).collect();
            query[0] = 32_639.0;
            for scale in [1.0, 0.1, -0.3, 1e-3] {
                worst = worst.max(share(&keys, dim, &query, scale, false));
            }
        }
        assert!(worst > 0.1, "{worst}");
    }

    /// The factor of all scores is an f32 number: what its rounding moves them by is added to all else that may.
    #[test]
    fn what_rounding_the_factor_loses() {
        let simd = Simd::current().unwrap();
        for dim in [1, 2, 8, 32] {
            let data = exactly_coded(20, dim, 7);
            let keys = Keys::new(&data[..], dim, dim);
            let mut codes = Codes::new(Content::Keys, dim, keys, 40, Some(false));
            let room = codes.make_room(40, 1).unwrap();
            codes.append(simd, keys, (40, room), 1).unwrap();
            // Its numbers are what they are, so that the factor is the scale.
            let mut query: Vec<f64> = whole(dim, 3000, 8).iter().map(|&q| q.into()).collect();
            query[0] = 32_639.0;
            let length = |entries: &mut dyn Iterator<Item = f64>| -> f64 {
                entries.map(|entry| entry * entry).sum::<f64>().sqrt()
            };
            let longest = data
                .chunks_exact(dim)
                .map(|key| length(&mut key.iter().map(|&k| k.into())))
                .fold(0.0, f64::max);
            // Half a step of f32 above a float that ties go to.
            for scale in [1.0, 0.25, -4.0] {
                let exact = codes.prepare(simd, &query, scale);
                let tie = codes.prepare(simd, &query, scale * (1.0 + 2f64.powi(-24)));
                assert_eq!((exact.factor, tie.factor), (scale as f32, scale as f32));
                let moved = scale.abs() * 2f64.powi(-24) * length(&mut query.iter().copied());
                assert!(
                    tie.code_error.rho >= exact.code_error.rho + moved * longest,
                    "{dim} {scale}"
                );
            }
        }
    }

    #[test]
    fn what_moving_keys_loses() {
        for seed in 1..60 {
            let dim = [16, 64, 128][seed as usize % 3];
            let mut keys = whole(30 * dim, 1000, seed);
            // A mean far away, and its entries no floats of few digits.
            keys.iter_mut().enumerate().for_each(|(i, k)| *k = *k / 3.0 + (i % dim) as f32 * 100.1);
            let query: Vec<f64> = whole(dim, 30_000, seed + 1).iter().map(|&q| q.into()).collect();
            for rotate in [false, true] {
                share(&keys, dim, &query, 1e-3, rotate);
            }
        }
    }
}
