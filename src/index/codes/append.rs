//! Codes of more keys, and the sums of what these lose.

use super::super::chunks::{Chunks, Out, Room, TASK};
use super::super::content::Content;
use super::super::element::Coded;
use super::super::fingerprint::Fingerprint;
use super::super::gram::{Gram, radius};
use super::super::spread::{Spread, add_decoded};
use super::{Codes, Refused};
use crate::kernels::{BIAS, Encoded, Keys, LANES, PANEL, Packed, STEP, Simd, low_step, pack_low};
use crate::runtime::threads;
use half::bf16;

/// Half a step of low codes, which is the most that they leave, up to rounding: as a share of the largest whole number.
const LEFT: f32 = 0.51 / 127.0;
/// One key in so many may be left without a code.
const SPARED: usize = 64;

/// Keys `from ..` of those that are appended; the first goes to place `at` of where codes are written.
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    count: usize,
    at: usize,
}

/// A part of the keys, encoded by one task.
struct Part<'a> {
    gram: Gram<'a>,
    spread: Option<Gram<'a>>,
    low: Option<Gram<'a>>,
    uncoded: Vec<u32>,
    largest: f32,
    fingerprint: Fingerprint,
    bad: Option<usize>,
}

impl<'a> Part<'a> {
    fn new(width: usize, content: Content) -> Self {
        let more = |wanted: bool| wanted.then(|| Gram::new(width));
        Part::on(Gram::new(width), more(content.of_values()), more(content.low_bits() > 0))
    }

    /// Returns a part that is added to sums of others.
    fn on(gram: Gram<'a>, spread: Option<Gram<'a>>, low: Option<Gram<'a>>) -> Self {
        let fingerprint = Fingerprint::default();
        Part { gram, spread, low, uncoded: Vec::new(), largest: 0.0, fingerprint, bad: None }
    }

    /// Takes up what follows.
    fn join(&mut self, other: Part<'_>) {
        self.gram.join(&other.gram);
        if let (Some(spread), Some(other)) = (&mut self.spread, &other.spread) {
            spread.join(other);
        }
        if let (Some(low), Some(other)) = (&mut self.low, &other.low) {
            low.join(other);
        }
        self.uncoded.extend(other.uncoded);
        self.largest = self.largest.max(other.largest);
        self.fingerprint.join(other.fingerprint);
        self.bad = self.bad.or(other.bad);
    }
}

impl Codes<'_> {
    /// Appends the codes of keys, for which there is room. On an error nothing has changed.
    ///
    /// # Errors
    /// [`Refused`].
    pub(crate) fn append<E: Coded>(
        &mut self,
        simd: Simd,
        keys: Keys<'_, E>,
        (count, room): (usize, Room),
        threads: usize,
    ) -> Result<(), Refused> {
        let finite = |entry: &E| Into::<f64>::into(entry.widen()).is_finite();
        let not_finite = |row: usize| {
            let entry = keys.row(row).iter().position(|entry| !finite(entry)).unwrap_or(0);
            Refused::NotFinite { row, entry }
        };
        // A few go to the sums of all at once, so that nothing may be wrong with them.
        let few = count <= PANEL;
        if few && let Some(row) = (0..count).find(|&row| !keys.row(row).iter().all(finite)) {
            return Err(not_finite(row));
        }
        let (first, end) = (self.n, self.n + count);
        // Up to a whole group first, then in tasks. What is behind the group's last key is put back on an error.
        let begun = (first.next_multiple_of(LANES) - first).min(count);
        let none = Chunks::new(self.content(), self.dim);
        let mut chunks = std::mem::replace(&mut self.chunks, none);
        let (before, bare) = (chunks.last_group(), chunks.bare());
        let groups = chunks.groups();
        let width = self.frame.mean.len();
        let mut part = if few {
            let spread = self.spread.as_mut().map(Spread::take_sums);
            Part::on(std::mem::replace(&mut self.gram, Gram::new(0)), spread, self.low.take())
        } else {
            Part::new(width, self.content())
        };
        let mut stopped = None;
        {
            let allowed = |keys: usize| (end / SPARED + 8).saturating_sub(bare).min(keys / 8 + 1);
            let (old, mut new) = chunks.grow(room, begun > 0);
            if let Some(mut out) = old {
                let span = Span { from: 0, count: begun, at: first % LANES };
                self.encode(simd, keys, span, &mut out, (allowed(begun), &mut part));
            }
            // A few tasks at a time: what they sum is a matrix each.
            let wave = Self::wave(threads);
            for (w, outs) in new.chunks_mut(wave).enumerate() {
                let span = |c: usize| {
                    let from = begun + (w * wave + c) * TASK;
                    Span { from, count: TASK.min(count - from), at: 0 }
                };
                if few {
                    for out in outs {
                        let allowed = allowed(span(0).count);
                        self.encode(simd, keys, span(0), out, (allowed, &mut part));
                    }
                    break;
                }
                let one = |(c, out): (usize, &mut Out<'_>)| {
                    let mut part = Part::new(width, self.content());
                    let allowed = allowed(span(c).count);
                    self.encode(simd, keys, span(c), out, (allowed, &mut part));
                    part
                };
                match threads::map(threads, outs.iter_mut().enumerate(), 1, one) {
                    Ok(parts) => parts.into_iter().for_each(|other| part.join(other)),
                    Err(error) => stopped = Some(error),
                }
                if part.bad.is_some() || stopped.is_some() {
                    break;
                }
            }
        }
        if let Some(refused) = part.bad.map(not_finite).or(stopped.map(Refused::Stopped)) {
            chunks.restore(groups, before.as_ref());
            self.chunks = chunks;
            return Err(refused);
        }
        chunks.spare(&part.uncoded);
        self.chunks = chunks;
        if few {
            (self.gram, self.low) = (part.gram, part.low);
        } else {
            self.gram.join(&part.gram);
            if let (Some(low), Some(more)) = (&mut self.low, &part.low) {
                low.join(more);
            }
        }
        match (&mut self.spread, part.spread) {
            (Some(spread), Some(sums)) if few => spread.put_sums(sums, &self.gram),
            (Some(spread), Some(more)) => spread.join(&more, &self.gram),
            _ => {}
        }
        self.largest = self.largest.max(part.largest);
        self.fingerprint.join(part.fingerprint);
        self.n = end;
        Ok(())
    }

    /// Encodes some keys into a part. `allowed` of them may be left without a code.
    fn encode<E: Coded>(
        &self,
        simd: Simd,
        keys: Keys<'_, E>,
        span: Span,
        out: &mut Out<'_>,
        (allowed, part): (usize, &mut Part<'_>),
    ) {
        let width = self.frame.mean.len();
        let (content, block) = (self.content(), self.content().block(self.dim));
        let most = PANEL.min(span.count);
        let mut bytes = vec![0; most * width];
        let mut residuals = vec![0.0; most.next_multiple_of(STEP) * width];
        let mut packed = Packed::default();
        let mut encoded = vec![Encoded::default(); most];
        for done in (0..span.count).step_by(PANEL) {
            let (from, len) = (span.from + done, PANEL.min(span.count - done));
            let bytes = &mut bytes[..len * width];
            let padded = len.next_multiple_of(STEP) * width;
            residuals[len * width..padded].fill(0.0);
            let encoded = &mut encoded[..len];
            simd.encode(
                keys,
                from,
                (self.frame.borrow(), content.unit()),
                bytes,
                &mut residuals[..len * width],
                encoded,
            );
            let (mut lost, mut norm, mut unit) = (0.0f32, 0.0f32, 0.0f32);
            for (r, key) in encoded.iter_mut().enumerate() {
                let at = span.at + done + r;
                if key.largest.is_nan() && part.bad.is_none() {
                    part.bad = Some(from + r);
                }
                part.largest = part.largest.max(key.largest);
                part.fingerprint.add(self.n + from + r, keys.row(from + r));
                let loss = f64::from(key.lost).sqrt();
                let uncodable = key.lost == f32::INFINITY;
                if uncodable || (loss > self.spared && part.uncoded.len() < allowed) {
                    part.uncoded.push((self.n + from + r) as u32);
                    key.scale = bf16::ZERO;
                    bytes[r * width..][..width].fill(BIAS);
                    residuals[r * width..][..width].fill(0.0);
                } else {
                    (lost, norm) = (lost.max(key.lost), norm.max(key.square));
                    // No residual is larger than half a step, up to rounding.
                    unit = unit.max(key.scale.to_f32());
                }
                out.scales[at] = key.scale;
                out.radii[at] = radius(loss, width);
                let to = &mut out.lines[at / LANES * block..][..block];
                content.put(&bytes[r * width..][..width], (to, at % LANES));
            }
            if unit > 0.0 {
                let step = unit * (content.unit() * 0.502 / 127.0);
                let rows = &residuals[..padded];
                let left = simd.outer(rows, width, step, &mut packed, part.gram.sums_mut());
                part.gram.note(len, left, lost, norm);
                if let Some(sums) = &mut part.low {
                    let (residuals, bits) = (&mut residuals[..padded], content.low_bits());
                    let lost = simd.refine(bits, encoded, bytes, &mut residuals[..len * width]);
                    let low = &mut out.low[(span.at + done) * content.low_row(self.dim)..];
                    let rows = low.chunks_exact_mut(content.low_row(self.dim));
                    bytes
                        .chunks_exact(width)
                        .zip(rows)
                        .for_each(|(bytes, to)| pack_low(bytes, bits, to));
                    let unit = low_step(unit, bits) * LEFT;
                    let left = simd.outer(residuals, width, unit, &mut packed, sums.sums_mut());
                    sums.note(len, left, lost, norm);
                }
                if let Some(spread) = &mut part.spread {
                    let rows = &mut residuals[..padded];
                    add_decoded(simd, (bytes, encoded), rows, &mut packed, spread);
                }
            }
        }
    }
}
