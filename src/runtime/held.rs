//! Bytes held by buffers.

/// Buffer, or struct of buffers, with a known size in memory.
pub(crate) trait Held {
    /// Returns the bytes that it holds.
    fn held(&self) -> usize;
}

impl<T> Held for Vec<T> {
    fn held(&self) -> usize {
        self.capacity() * size_of::<T>()
    }
}

impl<T: Held> Held for Option<T> {
    fn held(&self) -> usize {
        self.iter().map(T::held).sum()
    }
}

impl<T: Held, const N: usize> Held for [T; N] {
    fn held(&self) -> usize {
        self.iter().map(T::held).sum()
    }
}

/// Implements [`Held`] as the sum over a struct's fields. All are named: after a semicolon those without a buffer.
macro_rules! held {
    ($name:ident $(<$($of:ident),*>)? { $($field:ident),* $(; $($plain:ident),*)? }) => {
        impl $(<$($of),*>)? $crate::runtime::held::Held for $name $(<$($of),*>)? {
            fn held(&self) -> usize {
                let $name { $($field,)* $($($plain: _),*)? } = self;
                0 $(+ $crate::runtime::held::Held::held($field))*
            }
        }
    };
}
pub(crate) use held;
