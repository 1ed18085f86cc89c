//! A list that copies share until one of them is written to, or that somebody lends.

use std::ops::Deref;
use std::sync::Arc;

#[derive(Debug, Clone)]
pub(super) enum Shared<'a, T> {
    Own(Arc<Vec<T>>),
    Lent(&'a [T]),
}

impl<T: Clone> Shared<'_, T> {
    /// The list as ours alone: a copy of it, if it is not.
    pub(super) fn to_mut(&mut self) -> &mut [T] {
        if let Shared::Lent(lent) = *self {
            *self = lent.to_vec().into();
        }
        match self {
            Shared::Own(list) => Arc::make_mut(list).as_mut_slice(),
            Shared::Lent(_) => &mut [],
        }
    }
}

impl<T> Deref for Shared<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Shared::Own(list) => list,
            Shared::Lent(list) => list,
        }
    }
}

impl<T: PartialEq> PartialEq for Shared<'_, T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T> From<Vec<T>> for Shared<'_, T> {
    fn from(list: Vec<T>) -> Self {
        Shared::Own(Arc::new(list))
    }
}
