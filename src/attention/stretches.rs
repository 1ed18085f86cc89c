//! Ascending lists of keys, read side by side.

use crate::runtime::reused::Reused;

/// Keys of a stretch.
const SPARSE: usize = 1024;

/// Returns the number of keys in a stretch: a single list has nothing to share.
fn stretch(lists: &[&[u32]]) -> usize {
    if lists.len() > 1 { SPARSE } else { usize::MAX }
}

/// Returns the end, in a list, of the stretch that contains one of its places.
pub(super) fn end_of_stretch(lists: &[&[u32]], list: usize, from: usize) -> usize {
    let (list, stretch) = (lists[list], stretch(lists));
    let edge = (list[from] as usize / stretch).saturating_add(1).saturating_mul(stretch);
    from + list[from..].partition_point(|&key| (key as usize) < edge)
}

/// Visits ascending lists of keys side by side: the part of each in one stretch of keys, then in the next.
pub(super) fn by_stretches(lists: &[&[u32]], mut each: impl FnMut(usize, &[u32], (usize, usize))) {
    let last = lists.iter().filter_map(|list| list.last()).max().map_or(0, |&key| key as usize + 1);
    let stretch = stretch(lists);
    let mut done: Reused<usize> = std::iter::repeat_n(0, lists.len()).collect();
    let mut edge = 0usize;
    while edge < last {
        edge = edge.saturating_add(stretch);
        for (row, (list, done)) in lists.iter().zip(&mut done).enumerate() {
            let from = *done;
            let count = list[from..].partition_point(|&key| (key as usize) < edge);
            if count > 0 {
                each(row, list, (from, from + count));
                *done += count;
            }
        }
    }
}
