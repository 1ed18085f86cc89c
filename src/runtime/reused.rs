//! Lists whose memory the next list of their type reuses.

use std::fmt;
use std::ops::{Deref, DerefMut};

use crate::error::Error;
use crate::runtime::held::Held;
use crate::runtime::memory::fill;
use crate::runtime::scratch::at_once;

/// A vector that leaves its memory to the next one of its type, on this thread or under the same
/// [`Context`](crate::Context). It must not be part of scratch itself, which may be dropped where no scratch is
/// available.
pub(crate) struct Reused<T: Send + 'static>(Vec<T>);

/// Most lists of a type held in one place: more are in use at a time only if they come from other threads.
const MOST: usize = 1024;

/// Empty lists held for reuse, by the power of two of their capacity. The choice depends on sizes and not on the order
/// of returns, so that repeated calls soon allocate nothing.
struct Waiting<T> {
    by_power: [Vec<Vec<T>>; usize::BITS as usize],
    /// Bits of the powers with lists.
    powers: usize,
    count: usize,
    /// Bytes that the lists hold.
    bytes: usize,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Waiting { by_power: [const { Vec::new() }; _], powers: 0, count: 0, bytes: 0 }
    }
}

impl<T> Waiting<T> {
    /// Takes one of the smallest lists that hold `capacity`, or else of the largest.
    fn take(&mut self, capacity: usize) -> Option<Vec<T>> {
        let enough = match capacity.checked_next_power_of_two() {
            Some(power) => self.powers & !(power - 1),
            None => 0,
        };
        let power = match (enough, self.powers) {
            (0, 0) => return None,
            (0, powers) => powers.ilog2(),
            (enough, _) => enough.trailing_zeros(),
        };
        let lists = &mut self.by_power[power as usize];
        let list = lists.pop()?;
        if lists.is_empty() {
            self.powers &= !(1 << power);
        }
        self.count -= 1;
        self.bytes -= list.held();
        Some(list)
    }

    fn keep(&mut self, list: Vec<T>) {
        let Some(power) = list.capacity().checked_ilog2() else { return };
        if self.count < MOST {
            self.powers |= 1 << power;
            self.count += 1;
            self.bytes += list.held();
            self.by_power[power as usize].push(list);
        }
    }
}

impl<T: Send + 'static> Held for Waiting<T> {
    fn held(&self) -> usize {
        size_of::<Self>() + self.count * size_of::<Vec<T>>() + self.bytes
    }
}

impl<T: Send + 'static> Reused<T> {
    /// Returns an empty list of unknown length: the largest one held.
    pub(crate) fn new() -> Self {
        Self::with_hint(usize::MAX)
    }

    /// Returns an empty list for about `capacity` entries.
    pub(crate) fn with_hint(capacity: usize) -> Self {
        Reused(at_once(|waiting: &mut Waiting<T>| waiting.take(capacity)).unwrap_or_default())
    }
}

impl<T: Send + 'static> Drop for Reused<T> {
    fn drop(&mut self) {
        let mut list = std::mem::take(&mut self.0);
        // Before others are requested: entries may be such lists themselves.
        list.clear();
        if list.capacity() > 0 && !std::thread::panicking() {
            at_once(|waiting: &mut Waiting<T>| waiting.keep(list));
        }
    }
}

impl<T: Send + 'static> Default for Reused<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Send + 'static> Deref for Reused<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T: Send + 'static> DerefMut for Reused<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<'a, T: Send + 'static> IntoIterator for &'a Reused<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<'a, T: Send + 'static> IntoIterator for &'a mut Reused<T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter_mut()
    }
}

impl<T: Send + 'static> Extend<T> for Reused<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, items: I) {
        self.0.extend(items);
    }
}

impl<T: Send + 'static> FromIterator<T> for Reused<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let items = items.into_iter();
        let (_, most) = items.size_hint();
        let mut list = Self::with_hint(most.unwrap_or(usize::MAX));
        list.0.extend(items);
        list
    }
}

impl<T: Clone + Send + 'static> Clone for Reused<T> {
    fn clone(&self) -> Self {
        self.iter().cloned().collect()
    }
}

impl<T: PartialEq + Send + 'static> PartialEq for Reused<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T: fmt::Debug + Send + 'static> fmt::Debug for Reused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns a list of `count` copies of a value.
///
/// # Errors
/// [`Error::NoMemory`], or the error of a call that was ended.
pub(crate) fn filled_again<T: Clone + Send + 'static>(
    argument: &'static str,
    count: usize,
    value: T,
) -> Result<Reused<T>, Error> {
    let mut list = Reused::with_hint(count);
    fill(argument, &mut list, count, value)?;
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_and_what_was_in_it_is_not() {
        std::thread::spawn(|| {
            let first: Reused<u16> = (0..1000).collect();
            let at = first.as_ptr();
            drop(first);
            let again = Reused::<u16>::new();
            assert!(again.is_empty() && again.capacity() >= 1000 && again.as_ptr() == at);
            assert_eq!(Reused::<u16>::new().capacity(), 0);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn which_list_is_taken_depends_on_sizes_alone() {
        let mut waiting = Waiting::<u8>::default();
        for size in [40, 10, 30, 20] {
            waiting.keep(Vec::with_capacity(size));
        }
        let mut sizes = |hints: &[usize]| -> Vec<usize> {
            hints.iter().map(|&hint| waiting.take(hint).unwrap().capacity()).collect()
        };
        assert_eq!(sizes(&[usize::MAX, 16, 9, 0]), [40, 20, 30, 10]);
        assert!(waiting.take(0).is_none());
        assert_eq!((waiting.bytes, waiting.powers), (0, 0));
    }

    #[test]
    fn lists_of_lists_and_lists_in_statics_of_a_thread_end_well() {
        thread_local! {
            static LAST: std::cell::RefCell<Option<Reused<Reused<u16>>>> = const { std::cell::RefCell::new(None) };
        }
        std::thread::spawn(|| {
            let lists = || (0..3).map(|n| (0..n).collect()).collect();
            LAST.set(Some(lists()));
            drop::<Reused<Reused<u16>>>(lists());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn what_a_panic_drops_is_dropped() {
        let caught = std::panic::catch_unwind(|| {
            let _list: Reused<u16> = (0..9).collect();
            panic!("as it should be");
        });
        assert!(caught.is_err());
    }
}
