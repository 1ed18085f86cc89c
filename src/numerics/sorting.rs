//! Sorting of long lists, with cancellation.

use std::cmp::Ordering;

use crate::runtime::ambient::{self, PIECE};

/// Entries sampled to partition a list.
const SAMPLE: usize = 31;
/// Number of partitions, after which the rest is sorted by the standard library: no order of entries makes this slow.
const DEPTH: usize = 64;

/// Sorts as `sort_unstable_by` does. If the calls of this thread are to end, it ends early with an arbitrary order
/// ([`asked`](crate::runtime::ambient::asked)).
pub(crate) fn sort<T: Copy>(list: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    // Each partition leaves one part for later.
    let mut left = [(0, 0, 0); DEPTH + 1];
    left[0] = (0, list.len(), DEPTH);
    let mut waiting = 1;
    while waiting > 0 {
        waiting -= 1;
        let (from, to, depth) = left[waiting];
        let part = &mut list[from..to];
        if ambient::check().is_err() {
            return;
        }
        if part.len() <= PIECE || depth == 0 {
            part.sort_unstable_by(&compare);
            continue;
        }
        let pivot = middle(part, &compare);
        let less = from + part_by(part, |entry| compare(entry, &pivot).is_lt());
        // Entries equal to it are in place.
        let more = less + part_by(&mut list[less..to], |entry| compare(entry, &pivot).is_eq());
        left[waiting] = (more, to, depth - 1);
        left[waiting + 1] = (from, less, depth - 1);
        waiting += 2;
    }
}

/// Moves entries so that `nth` holds the entry that sorting would put there, with only entries that sort no later
/// before it. It ends early like [`sort`].
pub(crate) fn place<T: Copy>(list: &mut [T], nth: usize, compare: impl Fn(&T, &T) -> Ordering) {
    let (mut from, mut to) = (0, list.len());
    for depth in 0.. {
        let part = &mut list[from..to];
        if ambient::check().is_err() || part.is_empty() {
            return;
        }
        if part.len() <= PIECE || depth == DEPTH {
            part.select_nth_unstable_by(nth - from, &compare);
            return;
        }
        let pivot = middle(part, &compare);
        let less = from + part_by(part, |entry| compare(entry, &pivot).is_lt());
        if nth < less {
            to = less;
            continue;
        }
        let more = less + part_by(&mut list[less..to], |entry| compare(entry, &pivot).is_eq());
        if nth < more {
            return;
        }
        from = more;
    }
}

/// Returns the median of a sample of the entries.
fn middle<T: Copy>(list: &[T], compare: &impl Fn(&T, &T) -> Ordering) -> T {
    let mut some = [list[0]; SAMPLE];
    for (i, entry) in some.iter_mut().enumerate() {
        // At unequal distances, because patterns may repeat at equal ones.
        *entry = list[(i * list.len() / SAMPLE + i * 7919) % list.len()];
    }
    some.sort_unstable_by(compare);
    some[SAMPLE / 2]
}

/// Moves the matching entries to the front, and returns their number.
fn part_by<T: Copy>(list: &mut [T], belongs: impl Fn(&T) -> bool) -> usize {
    let mut front = 0;
    for from in (0..list.len()).step_by(PIECE) {
        if ambient::check().is_err() {
            break;
        }
        for at in from..list.len().min(from + PIECE) {
            // Swapped in any case: a branch would be mispredicted every other time.
            let belongs = belongs(&list[at]);
            list.swap(front, at);
            front += usize::from(belongs);
        }
    }
    front
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CancelToken, Context};

    #[test]
    fn sorts_as_the_standard_library_does() {
        let n = 5 * PIECE + 7;
        let stirred = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as u32;
        let orders: [&dyn Fn(usize) -> u32; 8] = [
            &stirred,
            &|i| i as u32,
            &|i| (n - i) as u32,
            &|_| 3,
            &|i| stirred(i) % 3,
            &|i| (i % 100) as u32,
            &|i| i.min(n - i) as u32,
            &|i| if stirred(i) % 1000 == 0 { 0 } else { u32::MAX },
        ];
        for order in orders {
            for len in [0, 1, 2, PIECE, PIECE + 1, n] {
                let list: Vec<u32> = (0..len).map(order).collect();
                let (mut ours, mut theirs) = (list.clone(), list);
                sort(&mut ours, |a, b| b.cmp(a));
                theirs.sort_unstable_by(|a, b| b.cmp(a));
                assert_eq!(ours, theirs);
                for nth in [0, len / 3, len.saturating_sub(1)].into_iter().filter(|nth| *nth < len)
                {
                    let mut ours: Vec<u32> = (0..len).map(order).collect();
                    place(&mut ours, nth, |a, b| b.cmp(a));
                    assert_eq!(ours[nth], theirs[nth]);
                    assert!(ours[..nth].iter().all(|entry| *entry >= theirs[nth]));
                    assert!(ours[nth..].iter().all(|entry| *entry <= theirs[nth]));
                }
            }
        }
    }

    #[test]
    fn ends_once_it_shall() {
        let token = CancelToken::new();
        token.cancel();
        let list: Vec<u32> = (0..4 * PIECE as u32).rev().collect();
        let mut ours = list.clone();
        Context::new().cancel(&token).run(|| {
            sort(&mut ours, Ord::cmp);
            place(&mut ours, 5, Ord::cmp);
        });
        assert_eq!(ours, list);
    }
}
