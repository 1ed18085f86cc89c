//! Where the bytes of vectors lie: in groups of sixteen, in lines of 64 bytes.
//!
//! A line of keys holds four entries of each of sixteen keys, a key's four behind each other. A line of values holds sixteen entries
//! of four values, an entry's four behind each other, so that a weighted sum of values is the same integer product as a score.
//! In four bits, the high half of a byte, lines of the first eight values are the low halves of those of the other eight.
//!
//! Keys may have a low plane beside: four or eight more bits of each entry, a row a key, as few of them are read.

use crate::kernels::{BIAS, LANES, LINE, STEP};

/// Kind of vectors that an index holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    Keys,
    /// Keys with a low plane: in twelve bits an entry together, and in sixteen.
    Keys12,
    Keys16,
    Values,
    /// Values in four bits an entry.
    HalfValues,
}

/// Values that share bytes with as many others.
const HALF: usize = LANES / 2;

impl Content {
    /// Returns the name of what is held.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Content::Keys | Content::Keys12 | Content::Keys16 => "keys",
            Content::Values | Content::HalfValues => "values",
        }
    }

    /// Returns `true` for values.
    pub(super) fn of_values(self) -> bool {
        matches!(self, Content::Values | Content::HalfValues)
    }

    /// Returns the bits of an entry in the low plane.
    pub(super) fn low_bits(self) -> usize {
        match self {
            Content::Keys12 => 4,
            Content::Keys16 => 8,
            Content::Keys | Content::Values | Content::HalfValues => 0,
        }
    }

    /// Returns the bytes of a key of that many entries in the low plane.
    pub(super) fn low_row(self, dim: usize) -> usize {
        dim.next_multiple_of(LANES) * self.low_bits() / 8
    }

    /// Returns what all codes are multiples of.
    pub(super) fn unit(self) -> f32 {
        if self == Content::HalfValues { 16.0 } else { 1.0 }
    }

    /// Returns the number of Gram matrices of a head.
    pub(super) fn matrices(self) -> usize {
        if self == Content::Keys { 1 } else { 2 }
    }

    /// Returns a byte that stands for 0 in all its codes.
    pub(super) fn blank(self) -> u8 {
        if self == Content::HalfValues { BIAS | BIAS >> 4 } else { BIAS }
    }

    /// Returns the bytes of a group of vectors of that many entries.
    pub(super) fn block(self, dim: usize) -> usize {
        match self {
            Content::Keys | Content::Keys12 | Content::Keys16 => dim.div_ceil(STEP) * LINE,
            Content::Values => dim.next_multiple_of(LANES) * LANES,
            Content::HalfValues => dim.next_multiple_of(LANES) * HALF,
        }
    }

    /// Writes the bytes of a vector, in whole groups of entries, to its place in a block.
    pub(super) fn put(self, bytes: &[u8], (block, lane): (&mut [u8], usize)) {
        let fours = block.as_chunks_mut::<STEP>().0;
        match self {
            Content::Keys | Content::Keys12 | Content::Keys16 => {
                let bytes = bytes.as_chunks::<STEP>().0;
                fours
                    .chunks_exact_mut(LANES)
                    .zip(bytes)
                    .for_each(|(line, four)| line[lane] = *four);
            }
            Content::Values => {
                let fours = fours.iter_mut().skip(lane / STEP * bytes.len());
                fours.zip(bytes).for_each(|(four, byte)| four[lane % STEP] = *byte);
            }
            Content::HalfValues => {
                let fours = fours.iter_mut().skip(lane % HALF / STEP * bytes.len());
                fours
                    .zip(bytes)
                    .for_each(|(four, byte)| put_half(&mut four[lane % STEP], lane, *byte));
            }
        }
    }

    /// Copies the bytes of a vector from its place in a block to one in another.
    pub(super) fn carry(self, (from, lane): (&[u8], usize), (to, place): (&mut [u8], usize)) {
        let (from, to) = (from.as_chunks::<STEP>().0, to.as_chunks_mut::<STEP>().0);
        match self {
            Content::Keys | Content::Keys12 | Content::Keys16 => {
                let lines = to.chunks_exact_mut(LANES).zip(from.chunks_exact(LANES));
                lines.for_each(|(to, from)| to[place] = from[lane]);
            }
            Content::Values => {
                let width = from.len() / STEP;
                let from = &from[lane / STEP * width..];
                let to = &mut to[place / STEP * width..][..width];
                to.iter_mut().zip(from).for_each(|(to, from)| to[place % STEP] = from[lane % STEP]);
            }
            Content::HalfValues => {
                let width = from.len() / (HALF / STEP);
                let from = &from[lane % HALF / STEP * width..];
                let to = &mut to[place % HALF / STEP * width..][..width];
                for (to, from) in to.iter_mut().zip(from) {
                    let half = from[lane % STEP] << if lane < HALF { 4 } else { 0 };
                    put_half(&mut to[place % STEP], place, half);
                }
            }
        }
    }

    /// Empties the places in a block from one on.
    pub(super) fn clear(self, block: &mut [u8], from: usize) {
        let width = block.len() / if self == Content::HalfValues { HALF } else { LANES };
        for (at, byte) in block.iter_mut().enumerate() {
            let lane = match self {
                Content::Keys | Content::Keys12 | Content::Keys16 => at % LINE / STEP,
                Content::Values | Content::HalfValues => at / (STEP * width) * STEP + at % STEP,
            };
            if lane >= from {
                *byte = BIAS;
            } else if self == Content::HalfValues && lane + HALF >= from {
                put_half(byte, HALF, BIAS);
            }
        }
    }
}

/// Writes the high half of a byte to a place's half of another byte.
fn put_half(to: &mut u8, place: usize, byte: u8) {
    *to = if place < HALF { (*to & 0xf0) | (byte >> 4) } else { (*to & 0x0f) | (byte & 0xf0) };
}
