//! Rows of a head that are there exactly, beside codes of all.

use std::ops::Range;

use crate::kernels::{Element, Keys};

/// Rows that are looked up at a time.
const BLOCK: usize = 256;

/// Keys or values of a head at listed positions, ascending, and at all positions from one on.
#[derive(Clone, Copy)]
pub(super) struct ExactRows<'a, E> {
    pub(super) listed: Keys<'a, E>,
    pub(super) positions: &'a [u32],
    pub(super) tail: Keys<'a, E>,
    pub(super) first: usize,
}

impl<'a, E: Element> ExactRows<'a, E> {
    /// Takes all rows of a head.
    pub(super) fn all(rows: Keys<'a, E>) -> Self {
        ExactRows { listed: rows, positions: &[], tail: rows, first: 0 }
    }

    /// Returns `true` if a position's row is there.
    pub(super) fn has(&self, position: u32) -> bool {
        position as usize >= self.first || self.positions.binary_search(&position).is_ok()
    }

    /// Hands the rows of the first `count` of a list of positions that are there, ascending, to `work`: rows, numbers of some of
    /// them, and which part of the list these are. Numbers may go on behind the part: those of rows that will be asked for next.
    pub(super) fn by_parts(
        &self,
        (list, count): (&[u32], usize),
        mut work: impl FnMut(Keys<'a, E>, &[u32], Range<usize>),
    ) {
        if self.first == 0 {
            return work(self.tail, list, 0..count);
        }
        let list = &list[..count];
        let split = list.partition_point(|&position| (position as usize) < self.first);
        let mut numbers = [0; BLOCK];
        for (part, rows) in [(0..split, self.listed), (split..list.len(), self.tail)] {
            for from in part.clone().step_by(BLOCK) {
                let here = from..part.end.min(from + BLOCK);
                let numbers = &mut numbers[..here.len()];
                for (number, &position) in numbers.iter_mut().zip(&list[here.clone()]) {
                    *number = match (position as usize).checked_sub(self.first) {
                        Some(behind) => behind as u32,
                        None => self.positions.partition_point(|&at| at < position) as u32,
                    };
                }
                work(rows, numbers, here);
            }
        }
    }
}
