//! Lists of positions put one behind another.

use rayon::prelude::*;

use super::huge_pages;

/// From so many positions on, several threads copy faster than one.
const SHARED: usize = 1 << 15;

/// An address that threads may share because each writes its own part.
#[derive(Clone, Copy)]
struct Start(*mut u32);

// SAFETY: the only use is in `append_all`, where every thread writes another range.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}

impl Start {
    fn at(self, offset: usize) -> *mut u32 {
        self.0.wrapping_add(offset)
    }
}

/// Appends all parts in order, long ones by the threads of the pool that this runs on: touching new memory for the
/// first time costs more than filling it.
pub(crate) fn append_all(to: &mut Vec<u32>, parts: &[&[u32]]) {
    let total = parts.iter().map(|part| part.len()).sum();
    to.reserve(total);
    huge_pages::ask_for(to);
    if total < SHARED || parts.len() < 2 {
        for part in parts {
            to.extend_from_slice(part);
        }
        return;
    }
    let offsets = parts.iter().scan(0, |offset, part| {
        let here = *offset;
        *offset += part.len();
        Some(here)
    });
    let jobs: Vec<(usize, &[u32])> = offsets.zip(parts.iter().copied()).collect();
    let start = Start(to.spare_capacity_mut().as_mut_ptr().cast());
    jobs.par_iter().for_each(|&(offset, part)| {
        // SAFETY: the ranges `offset..offset + part.len()` are disjoint and end at `total`, which fits in the capacity
        // reserved; the parts are borrowed, so they do not overlap a list that is borrowed mutably.
        unsafe { start.at(offset).copy_from_nonoverlapping(part.as_ptr(), part.len()) };
    });
    // SAFETY: all `total` places behind the old end were written.
    unsafe { to.set_len(to.len() + total) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_in_order() {
        for scale in [1, 7000] {
            let parts: Vec<Vec<u32>> =
                (0..9).map(|i| (0..i * scale).map(|j| 1000 * i + j).collect()).collect();
            let lent: Vec<&[u32]> = parts.iter().map(Vec::as_slice).collect();
            let mut all = vec![5];
            append_all(&mut all, &lent);
            assert_eq!(all, [vec![5], parts.concat()].concat());
        }
    }
}
