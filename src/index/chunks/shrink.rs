//! Fewer keys: the first so many, or all but some.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::{Chunk, Chunks, Part, Piece, Sizes, Stored};
use crate::error::Error;
use crate::kernels::LANES;
use crate::runtime::ambient;
use crate::runtime::memory::list;

/// Memory for a group, for what is written to where a copy of the index has a part in the last one.
pub(in crate::index) struct Spare(Chunk);

impl Chunks<'_> {
    /// Memory for [`Chunks::cut`].
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(in crate::index) fn spare_group(&self) -> Result<Spare, Error> {
        let mut chunk = Chunk::with_room(self.size, 1)?;
        chunk.uncoded = list("keys", LANES)?;
        Ok(Spare(chunk))
    }

    /// Keeps the first keys. Nothing of the others is left in the last group.
    pub(in crate::index) fn cut(&mut self, len: usize, spare: Spare) {
        let size = self.size;
        self.truncate(len.div_ceil(LANES));
        let (lanes, end) = (len % LANES, self.groups());
        if lanes == 0 {
            return;
        }
        let Some(piece) = self.pieces.last_mut() else { return };
        if piece.chunk(size).is_none() {
            let part = piece.part(size).last(size, end, 1);
            let Spare(mut chunk) = spare;
            chunk.extend(part);
            piece.groups -= 1;
            let stored = Stored::Own(Arc::new(chunk));
            self.pieces.push(Piece { stored, from: end - 1, groups: 1 });
            self.pieces.retain(|piece| piece.groups > 0);
        }
        if let Some(chunk) = self.pieces.last_mut().and_then(|piece| piece.chunk(size)) {
            let (lines, keys) = (chunk.lines.len() - size.block, chunk.scales.len() - LANES);
            self.content.clear(&mut chunk.lines[lines..], lanes);
            chunk.scales[keys + lanes..].fill(bf16::ZERO);
            chunk.radii[keys + lanes..].fill(bf16::ZERO);
            let low = chunk.low.len() - size.low;
            chunk.low[low + lanes * size.low / LANES..].fill(0);
            chunk.uncoded.truncate(chunk.uncoded.partition_point(|&key| (key as usize) < len));
        }
        self.bare = self.parts().map(|part| part.uncoded.len()).sum();
    }

    /// Of all keys but some, ascending, of which there is one at least; `len` are left.
    ///
    /// # Errors
    /// [`Error::NoMemory`], or what stops the call.
    pub(in crate::index) fn without(&self, gone: &[u32], len: usize) -> Result<Self, Error> {
        // Whole groups before the first of them stay where they are.
        let whole = gone.first().map_or(0, |key| *key as usize) / LANES;
        let mut fewer = self.clone();
        fewer.truncate(whole);
        let room = fewer.make_room(false, len.div_ceil(LANES) - whole)?;
        let mut uncoded = list("keys", self.bare)?;
        let mut left = gone;
        let mut stay = self.places_behind(whole).filter(|(key, _)| {
            let goes = left.first().is_some_and(|gone| *gone as usize == *key);
            left = &left[usize::from(goes)..];
            !goes
        });
        let mut to = whole * LANES;
        let (_, new) = fewer.grow(room, false);
        for out in new {
            ambient::check()?;
            for (at, (_, from)) in (0..out.scales.len().min(len - to)).zip(&mut stay) {
                let (group, lane) = (at / LANES, at % LANES);
                let Sizes { block, low, .. } = self.size;
                let block = &mut out.lines[group * block..][..block];
                self.content.carry(from.block(), (block, lane));
                let row = low / LANES;
                out.low[at * row..][..row].copy_from_slice(&from.part.low[from.at * row..][..row]);
                out.scales[at] = from.part.scales[from.at];
                out.radii[at] = from.part.radii[from.at];
                if from.bare {
                    uncoded.push((to + at) as u32);
                }
            }
            to += out.scales.len();
        }
        fewer.spare(&uncoded);
        Ok(fewer)
    }

    /// Sums of squares of radii of keys that have codes; nothing for those that a code loses nothing of.
    pub(in crate::index) fn squares(&self, keys: Range<usize>) -> f64 {
        let mut sum = 0.0;
        for piece in &self.pieces {
            let (from, part) = (piece.from * LANES, piece.part(self.size));
            let begin = keys.start.clamp(from, from + part.radii.len()) - from;
            let end = keys.end.clamp(from, from + part.radii.len()) - from;
            for (at, radius) in (begin..).zip(&part.radii[begin.min(end)..end]) {
                if !part.is_bare(from + at) {
                    sum += f64::from(*radius).powi(2);
                }
            }
        }
        sum
    }

    /// Places of all keys from a group on, and of what is behind the last.
    fn places_behind(&self, group: usize) -> impl Iterator<Item = (usize, Place<'_>)> {
        self.pieces.iter().flat_map(move |piece| {
            let part = piece.part(self.size);
            let skipped = group.saturating_sub(piece.from).min(piece.groups) * LANES;
            (skipped..part.scales.len()).map(move |at| {
                let key = piece.from * LANES + at;
                (key, Place { part, block: self.size.block, at, bare: part.is_bare(key) })
            })
        })
    }
}

impl Part<'_> {
    /// Returns `true` if a key, by its position among all, has no code.
    fn is_bare(&self, key: usize) -> bool {
        self.uncoded.binary_search(&(key as u32)).is_ok()
    }
}

/// Place of a key.
struct Place<'p> {
    part: Part<'p>,
    block: usize,
    at: usize,
    bare: bool,
}

impl Place<'_> {
    /// The block that has its codes, and where in it.
    fn block(&self) -> (&[u8], usize) {
        (&self.part.lines[self.at / LANES * self.block..][..self.block], self.at % LANES)
    }
}
