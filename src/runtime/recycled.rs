//! Results whose memory the next call of the same kind reuses.

use crate::runtime::held::Held;
use crate::runtime::scratch::with_scratch;

/// Result that can be emptied without freeing its memory.
pub(crate) trait Recycled: Default + Send + Held + 'static {
    /// Empties the result.
    fn clear(&mut self);
}

impl<T: Send + 'static> Recycled for Vec<T> {
    fn clear(&mut self) {
        self.clear();
    }
}

impl<T: Recycled> Recycled for Option<T> {
    fn clear(&mut self) {
        self.iter_mut().for_each(T::clear);
    }
}

/// Implements [`Recycled`] for a struct of buffers. All fields are named: after a semicolon those to reset.
macro_rules! recycled {
    ($name:ident { $($field:ident),* $(; $($plain:ident),*)? }) => {
        $crate::runtime::held::held!($name { $($field),* $(; $($plain),*)? });
        impl $crate::runtime::recycled::Recycled for $name {
            fn clear(&mut self) {
                let $name { $($field,)* $($($plain),*)? } = self;
                $($crate::runtime::recycled::Recycled::clear($field);)*
                $($(*$plain = Default::default();)*)?
            }
        }
    };
}
pub(crate) use recycled;

/// Most results of a kind held in one place: more are not requested at a time.
const MOST: usize = 4;

/// Results held for reuse.
struct Waiting<T>(Vec<T>);

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Waiting(Vec::new())
    }
}

impl<T: Recycled> Held for Waiting<T> {
    fn held(&self) -> usize {
        self.0.held() + self.0.iter().map(T::held).sum::<usize>()
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
