//! Results whose memory the next call of the same kind reuses.

use crate::runtime::scratch::with_scratch;
use crate::runtime::workspace::Scratch;

/// Result that can be emptied without freeing its memory.
pub(crate) trait Recycled: Default + Send + 'static {
    /// Empties the result.
    fn clear(&mut self);

    /// Returns the bytes that it holds.
    fn bytes(&self) -> usize;
}

/// Most results of a kind held in one place: more are not requested at a time.
const MOST: usize = 4;

/// Results held for reuse.
struct Waiting<T>(Vec<T>);

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Waiting(Vec::new())
    }
}

impl<T: Recycled> Scratch for Waiting<T> {
    fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<T>() + self.0.iter().map(T::bytes).sum::<usize>()
    }
}

/// Returns an empty result, with the memory of a recycled one if there is one.
pub(crate) fn empty<T: Recycled>() -> T {
    with_scratch(|waiting: &mut Waiting<T>| waiting.0.pop()).unwrap_or_default()
}

/// Holds the memory of a result for [`empty`].
pub(crate) fn recycle<T: Recycled>(mut result: T) {
    result.clear();
    with_scratch(|waiting: &mut Waiting<T>| {
        if waiting.0.len() < MOST {
            waiting.0.push(result);
        }
    });
}

/// Returns the bytes that a vector holds.
pub(crate) fn held<T>(list: &Vec<T>) -> usize {
    list.capacity() * size_of::<T>()
}
