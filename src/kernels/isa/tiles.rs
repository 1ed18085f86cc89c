//! Interface of a unit that multiplies tiles of bf16, thirty-two rows and columns at a time, and the portable code that
//! defines it.
//!
//! SAFETY: all methods are `unsafe`: the CPU must have the unit, addresses must be those of whole tiles, and whoever calls
//! them has called `begin`, and calls `end`.

use super::lanes::{LANES, Level};
use super::portable::{Array, Portable};

/// Pairs of entries in a row of a tile, and rows of a tile.
pub(crate) const TILE: usize = 16;
/// Entries in a row of a tile.
pub(crate) const DEEP: usize = 2 * TILE;

/// A row of a tile: pairs of bf16, the first in the low half.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line(pub(crate) [u32; TILE]);

impl Line {
    pub(crate) const ZERO: Line = Line([0; TILE]);
}

/// A unit that multiplies two tiles of rows with two tiles of columns.
pub(crate) trait Tiles: Copy {
    type Level: Level;
    /// Sixteen words of two bf16.
    type Words: Copy;
    type Registers;

    unsafe fn begin() -> Self::Registers;
    unsafe fn end(registers: Self::Registers);
    /// Sets all sums to zero.
    unsafe fn clear(registers: &mut Self::Registers);
    /// Loads two tiles of rows that are `apart` lines apart.
    unsafe fn load_rows(registers: &mut Self::Registers, tiles: [*const Line; 2], apart: usize);
    /// Loads two tiles, a line for a pair of entries, a word for a column.
    unsafe fn load_columns(registers: &mut Self::Registers, tiles: [*const Line; 2]);
    /// Adds the products of the loaded rows and columns: first and second entries of pairs, one after another, then both sums.
    unsafe fn add(registers: &mut Self::Registers);
    /// Writes the sums to rows that are `apart` numbers apart.
    unsafe fn store(registers: &mut Self::Registers, to: *mut f32, apart: usize);

    /// Rounds numbers to bf16, ties away from zero, with zeros in the low halves, and returns what is left, exactly.
    unsafe fn piece(
        numbers: <Self::Level as Level>::F32,
    ) -> (Self::Words, <Self::Level as Level>::F32);
    unsafe fn zero() -> Self::Words;
    /// Lays two rows of pieces side by side, pair after pair.
    unsafe fn pairs(even: Self::Words, odd: Self::Words) -> Self::Words;
    /// Lays sixteen pieces behind sixteen others.
    unsafe fn beside(first: Self::Words, second: Self::Words) -> Self::Words;
    unsafe fn write(words: Self::Words, to: *mut Line);
    /// Turns a tile: row j of the result holds word j of each row.
    unsafe fn turn(rows: [Self::Words; TILE]) -> [Self::Words; TILE];
}

/// Tiles that are loaded, and sums.
pub(crate) struct Loaded {
    rows: [[Line; TILE]; 2],
    columns: [[Line; TILE]; 2],
    sums: [[f32; DEEP]; DEEP],
}

/// Returns the numbers of a pair.
fn both(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xFFFF_0000)]
}

impl Tiles for Portable {
    type Level = Portable;
    type Words = [u32; LANES];
    type Registers = Box<Loaded>;

    unsafe fn begin() -> Box<Loaded> {
        let tiles = [[Line::ZERO; TILE]; 2];
        Box::new(Loaded { rows: tiles, columns: tiles, sums: [[0.0; DEEP]; DEEP] })
    }
    unsafe fn end(_: Box<Loaded>) {}
    unsafe fn clear(registers: &mut Box<Loaded>) {
        registers.sums = [[0.0; DEEP]; DEEP];
    }
    unsafe fn load_rows(registers: &mut Box<Loaded>, tiles: [*const Line; 2], apart: usize) {
        for (to, from) in registers.rows.iter_mut().zip(tiles) {
            *to = std::array::from_fn(|row| *from.add(row * apart));
        }
    }
    unsafe fn load_columns(registers: &mut Box<Loaded>, tiles: [*const Line; 2]) {
        for (to, from) in registers.columns.iter_mut().zip(tiles) {
            *to = std::array::from_fn(|row| *from.add(row));
        }
    }
    unsafe fn add(registers: &mut Box<Loaded>) {
        let Loaded { rows, columns, sums } = &mut **registers;
        for (Line(row), sums) in rows.as_flattened().iter().zip(sums) {
            for (at, sum) in sums.iter_mut().enumerate() {
                let mut two = [0.0f32; 2];
                for (pair, Line(column)) in row.iter().zip(columns[at / TILE]) {
                    let pairs = both(*pair).into_iter().zip(both(column[at % TILE]));
                    two.iter_mut().zip(pairs).for_each(|(sum, (a, b))| *sum += a * b);
                }
                *sum += two[0] + two[1];
            }
        }
    }
    unsafe fn store(registers: &mut Box<Loaded>, to: *mut f32, apart: usize) {
        for (row, sums) in registers.sums.iter().enumerate() {
            to.add(row * apart).copy_from_nonoverlapping(sums.as_ptr(), DEEP);
        }
    }
    unsafe fn piece(numbers: Array<f32>) -> ([u32; LANES], Array<f32>) {
        let words = numbers.0.map(|number| number.to_bits().wrapping_add(0x8000) & 0xFFFF_0000);
        let rest = std::array::from_fn(|i| numbers.0[i] - f32::from_bits(words[i]));
        (words, Array(rest))
    }
    unsafe fn zero() -> [u32; LANES] {
        [0; LANES]
    }
    unsafe fn pairs(even: [u32; LANES], odd: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| even[i] >> 16 | odd[i])
    }
    unsafe fn beside(first: [u32; LANES], second: [u32; LANES]) -> [u32; LANES] {
        let all = [first, second];
        let words = all.as_flattened();
        std::array::from_fn(|i| words[2 * i] >> 16 | words[2 * i + 1])
    }
    unsafe fn write(words: [u32; LANES], to: *mut Line) {
        *to = Line(words);
    }
    unsafe fn turn(rows: [[u32; LANES]; TILE]) -> [[u32; LANES]; TILE] {
        std::array::from_fn(|j| rows.map(|row| row[j]))
    }
}
