//! Read-ahead of mapped files.
//!
//! A page that is not in memory costs a reader a whole disk access, one page after another, and the system also reads
//! the surroundings on speculation. Codes tell in advance which keys will be read.

use super::job::AttentionJob;
use crate::kernels::{ask_for_pages, page_size};
use crate::rows::{Vectors, for_dtype};

/// Rows of a head, in bytes: the first row, the distance of rows, and their length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rows {
    at: usize,
    step: usize,
    len: usize,
}

impl Rows {
    fn of(vectors: &Vectors<'_>, head: usize) -> Option<Self> {
        let (at, step, len) = for_dtype!(vectors.data, stored => stored.matrix(head).place())?;
        Some(Rows { at, step, len })
    }

    /// Returns keys and values of a position as one row, if they are adjacent.
    fn with(self, other: Rows) -> Option<Rows> {
        let at = self.at.min(other.at);
        let end = (self.at + self.len).max(other.at + other.len);
        (self.step == other.step && end - at <= self.step).then_some(Rows {
            at,
            step: self.step,
            len: end - at,
        })
    }

    /// Requests listed rows; each list is ascending.
    fn ask_for(self, lists: &[&[u32]], page: usize) {
        let ends = lists.iter().filter_map(|list| Some((*list.first()?, *list.last()?)));
        let (low, high) =
            ends.fold((u32::MAX, 0), |(low, high), (first, last)| (low.min(first), high.max(last)));
        if low > high || self.len == 0 {
            return;
        }
        let pages = |row: u32| {
            let from = self.at + row as usize * self.step;
            (from / page, (from + self.len - 1) / page)
        };
        let (first, last) = (pages(low).0, pages(high).1);
        let mut wanted = vec![false; last - first + 1];
        for row in lists.iter().copied().flatten() {
            let (from, to) = pages(*row);
            wanted[from - first..=to - first].fill(true);
        }
        ask_for_pages(first, &wanted);
    }
}

impl AttentionJob<'_> {
    /// Requests the keys and the values of a head at listed positions, if they lie in mapped files.
    pub(super) fn ask_for(&self, head: usize, lists: &[&[u32]]) {
        if !self.query_rows.options.mapped || self.values.dim() == 0 {
            return;
        }
        let Some(page) = page_size() else { return };
        let (Some(keys), Some(values)) = (Rows::of(self.keys, head), Rows::of(self.values, head))
        else {
            return;
        };
        match keys.with(values) {
            Some(both) => both.ask_for(lists, page),
            None => [keys, values].into_iter().for_each(|rows| rows.ask_for(lists, page)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_row() {
        let row = |at, len| Rows { at, step: 96, len };
        assert_eq!(row(1000, 32).with(row(1032, 64)), Some(row(1000, 96)));
        assert_eq!(row(1064, 32).with(row(1000, 64)), Some(row(1000, 96)));
        assert_eq!(row(1000, 32).with(row(1000, 32)), Some(row(1000, 32)));
        assert_eq!(row(1000, 32).with(row(1100, 32)), None);
        assert_eq!(row(1000, 32).with(Rows { at: 1032, step: 97, len: 32 }), None);
    }

    /// A key that is repeated by a stride of zero, no key, keys across pages.
    #[test]
    fn any_list_may_be_asked_for() {
        let data = vec![7u8; 100_000];
        for (step, len) in [(96, 64), (0, 8), (5000, 5000), (8192, 4096)] {
            let rows = Rows { at: data.as_ptr() as usize, step, len };
            rows.ask_for(&[], 4096);
            rows.ask_for(&[&[], &[]], 4096);
            rows.ask_for(&[&[0, 3, 9], &[], &[9, 10]], 4096);
        }
        assert!(data.iter().all(|&byte| byte == 7));
    }
}
