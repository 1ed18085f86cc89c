//! Codes of consecutive keys, in chunks that copies of an index share.
//!
//! A chunk that is shared, or full, is never written to: what is appended goes to a chunk that is ours alone. Only a chunk of
//! fewer than [`OPEN`] keys is copied in order to be written to, so that a copy of an index, and the append that follows it, take
//! no time that grows with the keys.

pub(super) mod shrink;

use std::sync::Arc;

use half::bf16;

use super::content::Content;
use crate::error::Error;
use crate::kernels::{LANES, PANEL, ask_for_huge_pages};
use crate::runtime::memory::{list, room};

/// Keys that are encoded by one task, whole panels; chunks that are full are whole tasks.
pub(super) const TASK: usize = 16 * PANEL;
/// A chunk of fewer keys is filled up by what is appended.
pub(super) const OPEN: usize = 2048;
/// Bytes of codes in a chunk, about: from so many on the system backs them with large pages.
const FULL: usize = 1 << 22;

/// Data of some keys, in whole groups.
#[derive(Debug, Clone, Default)]
struct Chunk {
    /// Bytes, sixteen keys or values to a block (`content`).
    lines: Vec<u8>,
    /// Factor of each key's codes.
    scales: Vec<bf16>,
    /// An upper bound of the norm of what each code loses.
    radii: Vec<bf16>,
    /// The low plane of keys that have one.
    low: Vec<u8>,
    /// Positions of keys without a code, in ascending order: they must be scored.
    uncoded: Vec<u32>,
}

/// A chunk's parts, or those that somebody lends who keeps an index as arrays.
#[derive(Debug, Clone)]
enum Stored<'a> {
    Own(Arc<Chunk>),
    Lent(Part<'a>),
}

/// Some groups of keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) lines: &'a [u8],
    pub(super) scales: &'a [bf16],
    pub(super) radii: &'a [bf16],
    pub(super) low: &'a [u8],
    pub(super) uncoded: &'a [u32],
}

#[derive(Debug, Clone)]
struct Piece<'a> {
    stored: Stored<'a>,
    /// The group it begins with, of all, and how many of its groups count.
    from: usize,
    groups: usize,
}

/// Chunks, one behind the other.
#[derive(Debug, Clone)]
pub(super) struct Chunks<'a> {
    content: Content,
    size: Sizes,
    pieces: Vec<Piece<'a>>,
    /// Keys without a code.
    bare: usize,
}

/// Memory for what is to be appended: nothing that follows can fail.
pub(crate) struct Room {
    /// Groups for the last chunk.
    last: usize,
    /// Chunks behind it, and how many groups each is for.
    more: Vec<(Chunk, usize)>,
}

/// A copy of a group.
pub(super) struct LastGroup(Chunk);

/// Destination of codes.
pub(super) struct Out<'a> {
    pub(super) lines: &'a mut [u8],
    pub(super) scales: &'a mut [bf16],
    pub(super) radii: &'a mut [bf16],
    pub(super) low: &'a mut [u8],
}

/// Bytes of a group's codes, and of its low plane; and the byte that fills codes of nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sizes {
    block: usize,
    low: usize,
    blank: u8,
}

impl Chunk {
    fn with_room(size: Sizes, groups: usize) -> Result<Self, Error> {
        let mut chunk = Chunk::default();
        chunk.make_room(size, groups)?;
        Ok(chunk)
    }

    fn make_room(&mut self, size: Sizes, more: usize) -> Result<(), Error> {
        room("keys", &mut self.lines, more.saturating_mul(size.block))?;
        room("keys", &mut self.low, more.saturating_mul(size.low))?;
        ask_for_huge_pages(&mut self.lines);
        room("keys", &mut self.scales, more.saturating_mul(LANES))?;
        room("keys", &mut self.radii, more.saturating_mul(LANES))
    }

    /// A copy of the first groups with room for more.
    fn copied(part: Part<'_>, size: Sizes, more: usize) -> Result<Self, Error> {
        let groups = part.scales.len() / LANES;
        let mut chunk = Chunk::with_room(size, groups.saturating_add(more))?;
        chunk.uncoded = list("keys", part.uncoded.len())?;
        chunk.extend(part);
        Ok(chunk)
    }

    /// Appends what there is room for.
    fn extend(&mut self, part: Part<'_>) {
        self.lines.extend_from_slice(part.lines);
        self.scales.extend_from_slice(part.scales);
        self.radii.extend_from_slice(part.radii);
        self.low.extend_from_slice(part.low);
        self.uncoded.extend_from_slice(part.uncoded);
    }

    fn resize(&mut self, size: Sizes, groups: usize) {
        self.lines.resize(groups * size.block, size.blank);
        self.scales.resize(groups * LANES, bf16::ZERO);
        self.radii.resize(groups * LANES, bf16::ZERO);
        self.low.resize(groups * size.low, 0);
    }
}

impl Out<'_> {
    /// Returns the first groups, as many as there are, and those behind them.
    fn split(self, size: Sizes, groups: usize) -> (Self, Self) {
        let groups = groups.min(self.scales.len() / LANES);
        let (lines, more_lines) = self.lines.split_at_mut(groups * size.block);
        let (scales, more_scales) = self.scales.split_at_mut(groups * LANES);
        let (radii, more_radii) = self.radii.split_at_mut(groups * LANES);
        let (low, more_low) = self.low.split_at_mut(groups * size.low);
        let rest = Out { lines: more_lines, scales: more_scales, radii: more_radii, low: more_low };
        (Out { lines, scales, radii, low }, rest)
    }
}

impl Piece<'_> {
    /// Returns the used part.
    fn part(&self, size: Sizes) -> Part<'_> {
        let part = match &self.stored {
            Stored::Lent(part) => *part,
            Stored::Own(chunk) => Part {
                lines: &chunk.lines,
                scales: &chunk.scales,
                radii: &chunk.radii,
                low: &chunk.low,
                uncoded: &chunk.uncoded,
            },
        };
        part.first(size, self.from, self.groups)
    }

    /// The chunk, if it is ours alone, all of it that does not count cut off.
    fn chunk(&mut self, size: Sizes) -> Option<&mut Chunk> {
        let Stored::Own(chunk) = &mut self.stored else { return None };
        let chunk = Arc::get_mut(chunk)?;
        let end = (self.from + self.groups) * LANES;
        chunk.resize(size, self.groups);
        chunk.uncoded.truncate(chunk.uncoded.partition_point(|&key| (key as usize) < end));
        Some(chunk)
    }
}

impl Part<'_> {
    /// The first groups, of which the first is one of all.
    fn first(self, size: Sizes, from: usize, groups: usize) -> Self {
        let end = (from + groups) * LANES;
        Part {
            lines: &self.lines[..groups * size.block],
            scales: &self.scales[..groups * LANES],
            radii: &self.radii[..groups * LANES],
            low: &self.low[..groups * size.low],
            uncoded: &self.uncoded[..self.uncoded.partition_point(|&key| (key as usize) < end)],
        }
    }

    /// The last groups, of which the last ends at a group of all.
    fn last(self, size: Sizes, end: usize, groups: usize) -> Self {
        let (begins, first) = (self.scales.len() - groups * LANES, (end - groups) * LANES);
        Part {
            lines: &self.lines[self.lines.len() - groups * size.block..],
            scales: &self.scales[begins..],
            radii: &self.radii[begins..],
            low: &self.low[self.low.len() - groups * size.low..],
            uncoded: &self.uncoded[self.uncoded.partition_point(|&key| (key as usize) < first)..],
        }
    }
}

/// Returns the entries of all keys' lists, in order.
fn entries<'c, T>(
    chunks: &'c Chunks<'_>,
    list: fn(Part<'c>) -> &'c [T],
) -> impl Iterator<Item = &'c T> {
    chunks.parts().flat_map(list)
}

impl PartialEq for Chunks<'_> {
    /// Whatever chunks they are in.
    fn eq(&self, other: &Self) -> bool {
        let alike =
            (self.size, self.groups(), self.bare) == (other.size, other.groups(), other.bare);
        alike
            && self.uncoded().eq(other.uncoded())
            && entries(self, |part| part.lines).eq(entries(other, |part| part.lines))
            && entries(self, |part| part.scales).eq(entries(other, |part| part.scales))
            && entries(self, |part| part.radii).eq(entries(other, |part| part.radii))
            && entries(self, |part| part.low).eq(entries(other, |part| part.low))
    }
}

impl<'a> Chunks<'a> {
    /// Of no keys or values of that many entries.
    pub(super) fn new(content: Content, dim: usize) -> Self {
        let size = Sizes {
            block: content.block(dim),
            low: content.low_row(dim) * LANES,
            blank: content.blank(),
        };
        Chunks { content, size, pieces: Vec::new(), bare: 0 }
    }

    /// Lent ones.
    pub(super) fn lent((content, dim): (Content, usize), part: Part<'a>) -> Self {
        let groups = part.scales.len() / LANES;
        let piece = Piece { stored: Stored::Lent(part), from: 0, groups };
        let (pieces, bare) = (vec![piece], part.uncoded.len());
        Chunks { pieces, bare, ..Chunks::new(content, dim) }
    }

    /// From lists of their own.
    pub(super) fn owned(
        (content, dim): (Content, usize),
        [lines, low]: [Vec<u8>; 2],
        [scales, radii]: [Vec<bf16>; 2],
        uncoded: Vec<u32>,
    ) -> Self {
        let (groups, bare) = (scales.len() / LANES, uncoded.len());
        let chunk = Chunk { lines, scales, radii, low, uncoded };
        let piece = Piece { stored: Stored::Own(Arc::new(chunk)), from: 0, groups };
        Chunks { pieces: vec![piece], bare, ..Chunks::new(content, dim) }
    }

    pub(super) fn content(&self) -> Content {
        self.content
    }

    pub(super) fn groups(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.from + piece.groups)
    }

    /// Stretches of groups, in order.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        self.pieces.iter().map(|piece| piece.part(self.size))
    }

    /// Positions of keys without a code, ascending.
    pub(super) fn uncoded(&self) -> impl Iterator<Item = u32> {
        self.parts().flat_map(|part| part.uncoded.iter().copied())
    }

    /// Returns the number of keys without a code.
    pub(super) fn bare(&self) -> usize {
        self.bare
    }

    /// Bytes of what counts.
    pub(super) fn bytes(&self) -> usize {
        self.groups() * (self.size.block + self.size.low + 4 * LANES) + 4 * self.bare
    }

    /// A copy of the group that ends at the last, nothing if there is none.
    pub(super) fn last_group(&self) -> Option<LastGroup> {
        let last = self.pieces.last().filter(|piece| piece.groups > 0);
        last.map(|piece| {
            let part = piece.part(self.size).last(self.size, piece.from + piece.groups, 1);
            let mut group = Chunk::default();
            group.extend(part);
            LastGroup(group)
        })
    }

    /// Memory for more groups; if `begun`, the last one may be written to as well.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; what is stored is as it was.
    pub(super) fn make_room(&mut self, begun: bool, more: usize) -> Result<Room, Error> {
        self.tidy();
        let (size, end) = (self.size, self.groups());
        // Whole tasks of encoding.
        let full = (FULL / size.block.max(1) * LANES).next_multiple_of(TASK) / LANES;
        let last = match self.pieces.last_mut() {
            Some(piece)
                if piece.groups * LANES < OPEN && matches!(piece.stored, Stored::Own(_)) =>
            {
                let fill = if piece.groups + more <= full { more } else { 0 };
                let written = begun || fill > 0;
                if let Some(chunk) = piece.chunk(size) {
                    chunk.make_room(size, fill)?;
                } else if written {
                    let chunk = Chunk::copied(piece.part(size), size, fill)?;
                    piece.stored = Stored::Own(Arc::new(chunk));
                }
                fill
            }
            Some(piece) if begun => {
                // What is full, or shared, or lent loses the group that was begun to a chunk of ours.
                let fill = if more < full { more } else { 0 };
                let part = piece.part(size).last(size, end, 1);
                let chunk = Chunk::copied(part, size, fill)?;
                piece.groups -= 1;
                let stored = Stored::Own(Arc::new(chunk));
                self.pieces.push(Piece { stored, from: end - 1, groups: 1 });
                self.pieces.retain(|piece| piece.groups > 0);
                fill
            }
            _ => 0,
        };
        let mut rest = more - last;
        let mut chunks = list("keys", rest.div_ceil(full))?;
        while rest > 0 {
            let groups = rest.min(full);
            chunks.push((Chunk::with_room(size, groups)?, groups));
            rest -= groups;
        }
        Ok(Room { last, more: chunks })
    }

    /// Adds the groups that there is room for, and lends them and the one that was begun, to be written task by task.
    pub(super) fn grow(&mut self, room: Room, begun: bool) -> (Option<Out<'_>>, Vec<Out<'_>>) {
        let (size, end, task) = (self.size, self.groups(), TASK / LANES);
        let first = self.pieces.len();
        if let Some(piece) = self.pieces.last_mut().filter(|_| room.last > 0) {
            let groups = piece.groups + room.last;
            if let Some(chunk) = piece.chunk(size) {
                chunk.resize(size, groups);
                piece.groups = groups;
            }
        }
        let mut from = end + room.last;
        for (mut chunk, groups) in room.more {
            chunk.resize(size, groups);
            self.pieces.push(Piece { stored: Stored::Own(Arc::new(chunk)), from, groups });
            from += groups;
        }
        let (mut old, mut new) = (None, Vec::new());
        for piece in self.pieces.iter_mut().skip(first.saturating_sub(1)) {
            let known = end.saturating_sub(piece.from).min(piece.groups);
            let Some(chunk) = piece.chunk(size) else { continue };
            let before = known - usize::from(begun && known > 0);
            let mut rest = Out {
                lines: &mut chunk.lines[before * size.block..],
                scales: &mut chunk.scales[before * LANES..],
                radii: &mut chunk.radii[before * LANES..],
                low: &mut chunk.low[before * size.low..],
            };
            let first;
            (first, rest) = rest.split(size, known - before);
            old = (known > before).then_some(first).or(old);
            while !rest.scales.is_empty() {
                let one;
                (one, rest) = rest.split(size, task);
                new.push(one);
            }
        }
        (old, new)
    }

    /// Takes note of keys without a code among those that were added last, ascending.
    pub(super) fn spare(&mut self, uncoded: &[u32]) {
        self.bare += uncoded.len();
        let mut rest = uncoded;
        for piece in self.pieces.iter_mut().rev() {
            let Some(&last) = rest.last() else { break };
            let from = piece.from * LANES;
            if (last as usize) < from {
                continue;
            }
            let (before, here) = rest.split_at(rest.partition_point(|&key| (key as usize) < from));
            if let Stored::Own(chunk) = &mut piece.stored {
                Arc::make_mut(chunk).uncoded.extend_from_slice(here);
            }
            rest = before;
        }
    }

    /// Keeps the first groups, of which the last is to be as it was.
    pub(super) fn restore(&mut self, groups: usize, last: Option<&LastGroup>) {
        self.truncate(groups);
        let size = self.size;
        if let Some(piece) = self.pieces.last_mut()
            && let Some(LastGroup(last)) = last
            && let Some(chunk) = piece.chunk(size)
        {
            let at = chunk.scales.len() - LANES;
            let (lines, low) = (chunk.lines.len() - size.block, chunk.low.len() - size.low);
            chunk.lines[lines..].copy_from_slice(&last.lines);
            chunk.scales[at..].copy_from_slice(&last.scales);
            chunk.radii[at..].copy_from_slice(&last.radii);
            chunk.low[low..].copy_from_slice(&last.low);
        }
    }

    /// Keeps the first groups, and gives back the memory of the others as far as no copy of the index has a part in it.
    pub(super) fn truncate(&mut self, groups: usize) {
        self.pieces.retain(|piece| piece.from < groups);
        if let Some(piece) = self.pieces.last_mut() {
            piece.groups = piece.groups.min(groups - piece.from);
        }
        self.bare = self.parts().map(|part| part.uncoded.len()).sum();
        self.tidy();
    }

    /// Gives back memory that does not count and is ours alone by now.
    fn tidy(&mut self) {
        let size = self.size;
        for piece in &mut self.pieces {
            let Stored::Own(chunk) = &piece.stored else { continue };
            if chunk.scales.len() > piece.groups * LANES + OPEN
                && let Some(chunk) = piece.chunk(size)
            {
                chunk.lines.shrink_to_fit();
                chunk.low.shrink_to_fit();
                chunk.scales.shrink_to_fit();
                chunk.radii.shrink_to_fit();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 64;

    /// Appends groups.
    fn append(chunks: &mut Chunks<'_>, begun: bool, more: usize) {
        let room = chunks.make_room(begun, more).unwrap();
        let from = chunks.groups();
        let (old, _) = chunks.grow(room, begun);
        assert_eq!(old.is_some(), begun);
        chunks.spare(&[]);
        assert_eq!(chunks.groups(), from + more);
    }

    #[test]
    fn what_a_copy_costs_is_bounded() {
        let mut chunks = Chunks::new(Content::Keys, 4);
        append(&mut chunks, false, 1 << 14);
        for _ in 0..3000 {
            let copy = chunks.clone();
            append(&mut chunks, true, 1);
            // All but a few chunks at the end are one with those of the copy.
            let shared = |(a, b): (Part<'_>, Part<'_>)| a.lines.as_ptr() == b.lines.as_ptr();
            let same = chunks.parts().zip(copy.parts()).take_while(|pair| shared(*pair));
            let groups: usize = same.map(|(part, _)| part.scales.len() / LANES).sum();
            assert!((chunks.groups() - groups) * LANES <= OPEN + 2 * LANES);
        }
        // Chunks are filled up nevertheless.
        assert!(chunks.pieces.len() <= 3000 * LANES / OPEN + 8, "{}", chunks.pieces.len());
    }

    #[test]
    fn memory_of_what_went_is_given_back() {
        let room = |chunks: &Chunks<'_>| -> usize {
            chunks
                .pieces
                .iter()
                .map(|piece| match &piece.stored {
                    Stored::Own(chunk) => chunk.lines.capacity(),
                    Stored::Lent(_) => 0,
                })
                .sum()
        };
        let mut chunks = Chunks::new(Content::Keys, 4);
        append(&mut chunks, false, 1 << 15);
        let copy = chunks.clone();
        chunks.truncate(100);
        assert!(room(&chunks) > 1 << 15);
        // Not before the copy is gone.
        drop(copy);
        append(&mut chunks, false, 1);
        assert!(room(&chunks) <= (101 + OPEN / LANES) * BLOCK * 2);
    }
}
