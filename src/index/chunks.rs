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
use crate::kernels::{BIAS, LANES, PANEL, ask_for_huge_pages};
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
    /// Bytes of a group's codes.
    block: usize,
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

/// Destination of codes.
pub(super) struct Out<'a> {
    pub(super) lines: &'a mut [u8],
    pub(super) scales: &'a mut [bf16],
    pub(super) radii: &'a mut [bf16],
}

impl Chunk {
    fn with_room(block: usize, groups: usize) -> Result<Self, Error> {
        let mut chunk = Chunk::default();
        chunk.make_room(block, groups)?;
        Ok(chunk)
    }

    fn make_room(&mut self, block: usize, more: usize) -> Result<(), Error> {
        room("keys", &mut self.lines, more.saturating_mul(block))?;
        ask_for_huge_pages(&mut self.lines);
        room("keys", &mut self.scales, more.saturating_mul(LANES))?;
        room("keys", &mut self.radii, more.saturating_mul(LANES))
    }

    /// A copy of the first groups with room for more.
    fn copied(part: Part<'_>, block: usize, more: usize) -> Result<Self, Error> {
        let groups = part.scales.len() / LANES;
        let mut chunk = Chunk::with_room(block, groups.saturating_add(more))?;
        chunk.lines.extend_from_slice(part.lines);
        chunk.scales.extend_from_slice(part.scales);
        chunk.radii.extend_from_slice(part.radii);
        chunk.uncoded = list("keys", part.uncoded.len())?;
        chunk.uncoded.extend_from_slice(part.uncoded);
        Ok(chunk)
    }

    fn resize(&mut self, block: usize, groups: usize) {
        self.lines.resize(groups * block, BIAS);
        self.scales.resize(groups * LANES, bf16::ZERO);
        self.radii.resize(groups * LANES, bf16::ZERO);
    }
}

impl Piece<'_> {
    /// Returns the used part.
    fn part(&self, block: usize) -> Part<'_> {
        let part = match &self.stored {
            Stored::Lent(part) => *part,
            Stored::Own(chunk) => Part {
                lines: &chunk.lines,
                scales: &chunk.scales,
                radii: &chunk.radii,
                uncoded: &chunk.uncoded,
            },
        };
        part.first(block, self.from, self.groups)
    }

    /// The chunk, if it is ours alone, all of it that does not count cut off.
    fn chunk(&mut self, block: usize) -> Option<&mut Chunk> {
        let Stored::Own(chunk) = &mut self.stored else { return None };
        let chunk = Arc::get_mut(chunk)?;
        let end = (self.from + self.groups) * LANES;
        chunk.resize(block, self.groups);
        chunk.uncoded.truncate(chunk.uncoded.partition_point(|&key| (key as usize) < end));
        Some(chunk)
    }
}

impl Part<'_> {
    /// The first groups, of which the first is one of all.
    fn first(self, block: usize, from: usize, groups: usize) -> Self {
        let end = (from + groups) * LANES;
        Part {
            lines: &self.lines[..groups * block],
            scales: &self.scales[..groups * LANES],
            radii: &self.radii[..groups * LANES],
            uncoded: &self.uncoded[..self.uncoded.partition_point(|&key| (key as usize) < end)],
        }
    }

    /// The last groups, of which the last ends at a group of all.
    fn last(self, block: usize, end: usize, groups: usize) -> Self {
        let (begins, first) = (self.scales.len() - groups * LANES, (end - groups) * LANES);
        Part {
            lines: &self.lines[self.lines.len() - groups * block..],
            scales: &self.scales[begins..],
            radii: &self.radii[begins..],
            uncoded: &self.uncoded[self.uncoded.partition_point(|&key| (key as usize) < first)..],
        }
    }
}

impl PartialEq for Chunks<'_> {
    /// Whatever chunks they are in.
    fn eq(&self, other: &Self) -> bool {
        let alike =
            (self.block, self.groups(), self.bare) == (other.block, other.groups(), other.bare);
        alike
            && self.uncoded().eq(other.uncoded())
            && self
                .parts()
                .flat_map(|part| part.lines)
                .eq(other.parts().flat_map(|part| part.lines))
            && self
                .parts()
                .flat_map(|part| part.scales)
                .eq(other.parts().flat_map(|part| part.scales))
            && self
                .parts()
                .flat_map(|part| part.radii)
                .eq(other.parts().flat_map(|part| part.radii))
    }
}

impl<'a> Chunks<'a> {
    /// Of no keys or values of that many entries.
    pub(super) fn new(content: Content, dim: usize) -> Self {
        Chunks { content, block: content.block(dim), pieces: Vec::new(), bare: 0 }
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
        lines: Vec<u8>,
        [scales, radii]: [Vec<bf16>; 2],
        uncoded: Vec<u32>,
    ) -> Self {
        let (groups, bare) = (scales.len() / LANES, uncoded.len());
        let chunk = Chunk { lines, scales, radii, uncoded };
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
        self.pieces.iter().map(|piece| piece.part(self.block))
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
        self.groups() * (self.block + 4 * LANES) + 4 * self.bare
    }

    /// A copy of the group that ends at the last, nothing if there is none.
    pub(super) fn last_group(&self) -> (Vec<u8>, Vec<bf16>, Vec<bf16>) {
        let last = self.pieces.last().filter(|piece| piece.groups > 0);
        last.map_or_else(Default::default, |piece| {
            let part = piece.part(self.block).last(self.block, piece.from + piece.groups, 1);
            (part.lines.to_vec(), part.scales.to_vec(), part.radii.to_vec())
        })
    }

    /// Memory for more groups; if `begun`, the last one may be written to as well.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; what is stored is as it was.
    pub(super) fn make_room(&mut self, begun: bool, more: usize) -> Result<Room, Error> {
        self.tidy();
        let (block, end) = (self.block, self.groups());
        // Whole tasks of encoding.
        let full = (FULL / block.max(1) * LANES).next_multiple_of(TASK) / LANES;
        let last = match self.pieces.last_mut() {
            Some(piece)
                if piece.groups * LANES < OPEN && matches!(piece.stored, Stored::Own(_)) =>
            {
                let fill = if piece.groups + more <= full { more } else { 0 };
                let written = begun || fill > 0;
                if let Some(chunk) = piece.chunk(block) {
                    chunk.make_room(block, fill)?;
                } else if written {
                    let chunk = Chunk::copied(piece.part(block), block, fill)?;
                    piece.stored = Stored::Own(Arc::new(chunk));
                }
                fill
            }
            Some(piece) if begun => {
                // What is full, or shared, or lent loses the group that was begun to a chunk of ours.
                let fill = if more < full { more } else { 0 };
                let part = piece.part(block).last(block, end, 1);
                let chunk = Chunk::copied(part, block, fill)?;
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
            chunks.push((Chunk::with_room(block, groups)?, groups));
            rest -= groups;
        }
        Ok(Room { last, more: chunks })
    }

    /// Adds the groups that there is room for, and lends them and the one that was begun, to be written task by task.
    pub(super) fn grow(&mut self, room: Room, begun: bool) -> (Option<Out<'_>>, Vec<Out<'_>>) {
        let (block, end, size) = (self.block, self.groups(), TASK / LANES);
        let first = self.pieces.len();
        if let Some(piece) = self.pieces.last_mut().filter(|_| room.last > 0) {
            let groups = piece.groups + room.last;
            if let Some(chunk) = piece.chunk(block) {
                chunk.resize(block, groups);
                piece.groups = groups;
            }
        }
        let mut from = end + room.last;
        for (mut chunk, groups) in room.more {
            chunk.resize(block, groups);
            self.pieces.push(Piece { stored: Stored::Own(Arc::new(chunk)), from, groups });
            from += groups;
        }
        let (mut old, mut new) = (None, Vec::new());
        for piece in self.pieces.iter_mut().skip(first.saturating_sub(1)) {
            let known = end.saturating_sub(piece.from).min(piece.groups);
            let Some(chunk) = piece.chunk(block) else { continue };
            let before = known - usize::from(begun && known > 0);
            let (lines, scales) =
                (&mut chunk.lines[before * block..], &mut chunk.scales[before * LANES..]);
            let radii = &mut chunk.radii[before * LANES..];
            let (old_lines, lines) = lines.split_at_mut((known - before) * block);
            let (old_scales, scales) = scales.split_at_mut((known - before) * LANES);
            let (old_radii, radii) = radii.split_at_mut((known - before) * LANES);
            if known > before {
                old = Some(Out { lines: old_lines, scales: old_scales, radii: old_radii });
            }
            let tasks = lines.chunks_mut(size * block).zip(scales.chunks_mut(size * LANES));
            let tasks = tasks.zip(radii.chunks_mut(size * LANES));
            new.extend(tasks.map(|((lines, scales), radii)| Out { lines, scales, radii }));
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
    pub(super) fn restore(&mut self, groups: usize, last: &(Vec<u8>, Vec<bf16>, Vec<bf16>)) {
        self.truncate(groups);
        let block = self.block;
        if let Some(piece) = self.pieces.last_mut()
            && let Some(chunk) = piece.chunk(block)
            && !last.1.is_empty()
        {
            let (lines, scales) = (chunk.lines.len() - last.0.len(), chunk.scales.len() - LANES);
            chunk.lines[lines..].copy_from_slice(&last.0);
            chunk.scales[scales..].copy_from_slice(&last.1);
            chunk.radii[scales..].copy_from_slice(&last.2);
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
        let block = self.block;
        for piece in &mut self.pieces {
            let Stored::Own(chunk) = &piece.stored else { continue };
            if chunk.scales.len() > piece.groups * LANES + OPEN
                && let Some(chunk) = piece.chunk(block)
            {
                chunk.lines.shrink_to_fit();
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
