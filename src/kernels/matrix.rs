//! Rows of vectors in memory, and the product of two matrices in registers.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions, and for slices of whole groups; of the
//! room behind a raw pointer it says what it asks for. All rows of a [`Keys`] or a [`Lent`] are borrowed for its lifetime; what
//! lies between them is not.

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::isa::{Element, LANES, Lanes, LanesOf, Level};
use super::simd::{Pass, Simd};

/// Listed rows that are prefetched ahead of their use.
pub(super) const AHEAD: usize = 16;

/// Rows of keys in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys<'a, E> {
    start: NonNull<E>,
    count: usize,
    stride: usize,
    dim: usize,
    /// The pages in which rows lie `stride` apart, if they lie in pages.
    pages: Option<Pages<'a>>,
    rows: PhantomData<&'a [E]>,
}

/// Pages of as many rows each, a power of two.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages<'a> {
    /// Number of each page.
    pub(super) table: &'a [u32],
    /// Distance of pages, in elements.
    pub(super) stride: usize,
    /// Logarithm of the rows of a page.
    pub(super) log_rows: u32,
    /// Rows before the first.
    pub(super) before: usize,
}

impl Pages<'_> {
    /// Returns the offset of a row, where rows of a page are so far apart.
    #[inline(always)]
    pub(super) fn offset(&self, at: usize, stride: usize) -> usize {
        let at = self.before + at;
        let within = at & ((1 << self.log_rows) - 1);
        self.table[at >> self.log_rows] as usize * self.stride + within * stride
    }

    /// Returns `true` if rows lie in one page.
    fn are_together(&self, from: usize, count: usize) -> bool {
        let page = |at: usize| (self.before + at) >> self.log_rows;
        page(from) == page(from + count - 1)
    }
}

// SAFETY: it is read only, like the references that it stands for.
unsafe impl<E: Sync> Send for Keys<'_, E> {}
// SAFETY: likewise.
unsafe impl<E: Sync> Sync for Keys<'_, E> {}

impl<'a, E: Element> Keys<'a, E> {
    /// Takes rows of `dim` entries, `stride` apart; `data` starts with the first row and ends with the last.
    pub(crate) fn new(data: &'a [E], stride: usize, dim: usize) -> Self {
        let count = match data.len().checked_sub(dim) {
            None => 0,
            Some(rest) => rest.checked_div(stride).map_or(usize::MAX, |whole| whole + 1),
        };
        let start = NonNull::from(data).cast();
        Keys { start, count, stride, dim, pages: None, rows: PhantomData }
    }

    /// Asks for that many rows from a place on, in pages or not, borrowed for the lifetime.
    pub(super) unsafe fn at(
        start: NonNull<E>,
        count: usize,
        stride: usize,
        dim: usize,
        pages: Option<Pages<'a>>,
    ) -> Self {
        Keys { start, count, stride, dim, pages, rows: PhantomData }
    }

    #[inline(always)]
    fn offset(&self, at: usize) -> usize {
        match &self.pages {
            None => at * self.stride,
            Some(pages) => pages.offset(at, self.stride),
        }
    }

    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    #[inline(always)]
    pub(crate) fn row(&self, at: usize) -> &'a [E] {
        assert!(at < self.count, "a row that is not there");
        // SAFETY: that of the file: the row is there.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(self.offset(at)), self.dim) }
    }

    /// Returns `true` if rows are whole groups.
    #[inline(always)]
    pub(super) fn in_groups(&self) -> bool {
        self.dim.is_multiple_of(LANES)
    }

    /// Returns the rows from number `at` on.
    pub(crate) fn behind(self, at: usize) -> Self {
        match self.count.checked_sub(at) {
            None | Some(0) => Keys { count: 0, ..self },
            Some(count) => {
                if let Some(pages) = self.pages {
                    let pages = Some(Pages { before: pages.before + at, ..pages });
                    return Keys { count, pages, ..self };
                }
                // SAFETY: that of the file: the row is there.
                let start = unsafe { self.start.add(at * self.stride) };
                Keys { start, count, ..self }
            }
        }
    }

    /// Prefetches all cache lines of a row, at any alignment.
    #[inline(always)]
    pub(super) unsafe fn fetch<L: Level>(&self, at: usize) {
        let row = self.row(at);
        let (start, bytes) = (row.as_ptr().cast::<u8>(), size_of_val(row));
        // A prefetch never faults.
        for at in (0..bytes).step_by(64) {
            L::prefetch_far(start.wrapping_add(at));
        }
        L::prefetch_far(start.wrapping_add(bytes - 1));
    }

    /// Prefetches a row if it is there.
    #[inline(always)]
    pub(super) unsafe fn ask_for<L: Level>(&self, at: usize) {
        if at < self.count {
            self.fetch::<L>(at);
        }
    }

    /// Returns how far behind a row that row is which comes so many later, in elements; 0 if rows lie in pages.
    #[inline(always)]
    pub(super) fn distance(&self, rows: usize) -> usize {
        if self.pages.is_none() { rows * self.stride } else { 0 }
    }

    /// Returns consecutive rows in place, if they are f32, and of one page if there are pages.
    pub(super) fn lend(&self, from: usize, count: usize) -> Option<Lent<'a>>
    where
        E: Element<Scalar = f32>,
    {
        assert!(count > 0 && from < self.count && count <= self.count - from);
        E::scalars(self.row(from))?;
        if self.pages.is_some_and(|pages| !pages.are_together(from, count)) {
            return None;
        }
        // SAFETY: that of the file: the row is there. A slice of it would not reach the next.
        let start = unsafe { self.start.as_ptr().add(self.offset(from)) }.cast();
        Some(Lent { start, count, width: self.dim, stride: self.stride, rows: PhantomData })
    }

    /// Returns the address of the first row, the distance of rows and their length, in bytes; `None` for rows in pages.
    pub(crate) fn place(&self) -> Option<(usize, usize, usize)> {
        let (stride, len) = (self.stride * size_of::<E>(), self.dim * size_of::<E>());
        self.pages.is_none().then_some((self.start.as_ptr() as usize, stride, len))
    }

    /// Loads the sixteen entries from `at` on, with zeros behind the last.
    #[inline(always)]
    pub(super) unsafe fn group<L: Level>(row: &[E], at: usize) -> LanesOf<L, E> {
        let rest = &row[at..];
        if rest.len() >= LANES {
            return E::load::<L>(rest.as_ptr());
        }
        E::load::<L>(padded(rest).as_ptr())
    }
}

/// Returns entries padded with zeros. Not inlined, to save registers in the loops that load groups.
#[inline(never)]
fn padded<E: Element>(rest: &[E]) -> [E; LANES] {
    let mut padded = [E::default(); LANES];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

/// Choice of rows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Picked<'a> {
    /// Consecutive rows from this one.
    From(usize),
    Listed(&'a [u32]),
}

impl Picked<'_> {
    #[inline(always)]
    pub(crate) fn row(self, at: usize) -> usize {
        match self {
            Picked::From(first) => first + at,
            Picked::Listed(list) => list[at] as usize,
        }
    }
}

/// Consecutive rows of f32, `width` entries wide.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lent<'a> {
    start: *const f32,
    count: usize,
    width: usize,
    stride: usize,
    rows: PhantomData<&'a [f32]>,
}

impl Lent<'_> {
    /// Returns `true` if there are `count` rows of `width` entries.
    pub(super) fn holds(&self, count: usize, width: usize) -> bool {
        count <= self.count && width <= self.width
    }

    /// Returns the address of the first row, and the distance of rows.
    #[inline(always)]
    pub(super) fn place(&self) -> (*const f32, usize) {
        (self.start, self.stride)
    }
}

struct Widen<'a, E> {
    keys: Keys<'a, E>,
    from: usize,
    width: usize,
    to: &'a mut [f32],
}

impl<E: Element<Scalar = f32>> Pass for Widen<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        for (i, to) in self.to.chunks_exact_mut(self.width).enumerate() {
            let row = self.keys.row(self.from + i);
            for (g, to) in to.chunks_exact_mut(LANES).enumerate() {
                Keys::group::<L>(row, g * LANES).store(to.as_mut_ptr());
            }
        }
    }
}

impl Simd {
    /// Returns consecutive rows in f32: in place if they can be read `width` entries wide, else copied.
    pub(crate) fn lend<'a, E: Element<Scalar = f32>>(
        self,
        keys: Keys<'a, E>,
        (from, count): (usize, usize),
        width: usize,
        scratch: &'a mut Vec<f32>,
    ) -> Lent<'a> {
        assert!(count > 0 && width.is_multiple_of(LANES) && width >= keys.dim());
        if width == keys.dim()
            && let Some(lent) = keys.lend(from, count)
        {
            return lent;
        }
        scratch.resize(count * width, 0.0);
        self.run(Widen { keys, from, width, to: &mut scratch[..] });
        Lent { start: scratch.as_ptr(), count, width, stride: width, rows: PhantomData }
    }
}

/// Multiplies rows of one matrix with a few columns of another, in `R x C` groups of sums, `depth` terms one after
/// another.
#[inline(always)]
pub(super) unsafe fn product<L: Level, const R: usize, const C: usize>(
    (left, row, step): (*const f32, usize, usize),
    (right, right_step): (*const f32, usize),
    depth: usize,
) -> [[L::F32; C]; R] {
    let mut sums = [[L::F32::splat(0.0); C]; R];
    for k in 0..depth {
        let mut columns = [L::F32::splat(0.0); C];
        for (c, column) in columns.iter_mut().enumerate() {
            *column = L::F32::load(right.add(k * right_step + c * LANES));
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            let entry = L::F32::splat(*left.add(r * row + k * step));
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = column.mul_add(entry, *sum);
            }
        }
    }
    sums
}
