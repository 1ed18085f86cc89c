//! Sorting long lists so that it can be stopped.

use std::cmp::Ordering;

use crate::runtime::ambient::{self, PIECE};

/// Entries of which some are looked at to part a list.
const SAMPLE: usize = 31;
/// So often a list is parted, and the rest is sorted whatever it takes: nobody's order can make this slow.
const DEPTH: usize = 64;

/// Sorts as `sort_unstable_by` does. Once the calls of this thread shall end it ends early, and the order is any
/// ([`asked`](crate::runtime::ambient::asked)).
pub(crate) fn sort<T: Copy>(list: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    // Each parting leaves one part for later.
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
        // Those that are equal to it are where they belong.
        let more = less + part_by(&mut list[less..to], |entry| compare(entry, &pivot).is_eq());
        left[waiting] = (more, to, depth - 1);
        left[waiting + 1] = (from, less, depth - 1);
        waiting += 2;
    }
}

/// Moves entries so that the one at `nth` is the one that sorting would put there, and none before it comes behind it. It ends as
/// [`sort`] does.
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

/// The middle of some entries.
fn middle<T: Copy>(list: &[T], compare: &impl Fn(&T, &T) -> Ordering) -> T {
    let mut some = [list[0]; SAMPLE];
    for (i, entry) in some.iter_mut().enumerate() {
        // Not at equal distances, which orders that repeat would meet.
        *entry = list[(i * list.len() / SAMPLE + i * 7919) % list.len()];
    }
    some.sort_unstable_by(compare);
    some[SAMPLE / 2]
}

/// Moves those to the front that belong there, and says how many they are.
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
