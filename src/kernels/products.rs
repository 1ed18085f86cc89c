//! Inner products of stored vectors with a query, in f64.

use super::codes::Keys;
use super::dispatch::{Pass, Simd};
use super::lanes::{Element, LANES, Lanes, Level};

/// Rows that are fetched ahead of their use.
const AHEAD: usize = 16;

/// Which rows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Picked<'a> {
    /// Consecutive from here.
    From(usize),
    Listed(&'a [u32]),
}

impl Picked<'_> {
    #[inline(always)]
    pub(super) fn row(self, at: usize) -> usize {
        match self {
            Picked::From(first) => first + at,
            Picked::Listed(list) => list[at] as usize,
        }
    }
}

struct Products<'a, E> {
    keys: Keys<'a, E>,
    picked: Picked<'a>,
    /// In whole groups.
    query: &'a [f64],
    to: &'a mut [f64],
}

impl<E: Element> Pass for Products<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let count = self.to.len();
        for (at, to) in self.to.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the level; the query holds whole groups.
            unsafe {
                if let Picked::Listed(_) = self.picked
                    && at + AHEAD < count
                {
                    let ahead = self.keys.row(self.picked.row(at + AHEAD));
                    for line in 0..size_of_val(ahead).div_ceil(64) {
                        L::prefetch(ahead.as_ptr().cast::<u8>().wrapping_add(64 * line));
                    }
                }
                let row = self.keys.row(self.picked.row(at));
                let mut sum = L::F64::splat(0.0);
                for (g, query) in self.query.chunks_exact(LANES).enumerate() {
                    let key = Keys::group::<L>(row, g * LANES);
                    sum = E::double::<L>(key).mul_add(L::F64::load(query.as_ptr()), sum);
                }
                *to = sum.sum();
            }
        }
    }
}

impl Simd {
    /// The products of a query with some rows, each sum `width / 16` terms deep and then a tree over sixteen lanes.
    pub(crate) fn products_f64<E: Element>(
        self,
        keys: Keys<'_, E>,
        picked: Picked<'_>,
        query: &[f64],
        to: &mut [f64],
    ) {
        assert!(query.len() == keys.dim().next_multiple_of(LANES));
        if let Picked::Listed(list) = picked {
            assert_eq!(list.len(), to.len());
        }
        self.run(Products { keys, picked, query, to });
    }
}
