//! Results whose memory the next call of a kind uses again.

use crate::runtime::scratch::with_scratch;
use crate::runtime::workspace::Scratch;

/// A result that can be emptied without giving its memory back.
pub(crate) trait Recycled: Default + Send + 'static {
    /// Empties it.
    fn clear(&mut self);

    /// The memory that it holds.
    fn bytes(&self) -> usize;
}

/// So many results of a kind wait in one place at most: more are not asked for at a time.
const MOST: usize = 4;

/// Results that wait.
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

/// An empty result, with the memory of one that was given back if there is one.
pub(crate) fn empty<T: Recycled>() -> T {
    with_scratch(|waiting: &mut Waiting<T>| waiting.0.pop()).unwrap_or_default()
}

/// Keeps the memory of a result for [`empty`].
pub(crate) fn recycle<T: Recycled>(mut result: T) {
    result.clear();
    with_scratch(|waiting: &mut Waiting<T>| {
        if waiting.0.len() < MOST {
            waiting.0.push(result);
        }
    });
}

/// The memory that a vector holds.
pub(crate) fn held<T>(list: &Vec<T>) -> usize {
    list.capacity() * size_of::<T>()
}
