//! Macros for builder methods, so that a new option breaks no caller.

/// Declares a builder method per public field: its documentation, its arguments and the value stored.
macro_rules! builders {
    ($of:ident $(<$life:lifetime>)? {
        $($(#[$doc:meta])* $name:ident($($taken:ident: $type:ty),+) = $kept:expr;)*
    }) => {
        impl$(<$life>)? $of$(<$life>)? {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(mut self, $($taken: $type),+) -> Self {
                    self.$name = $kept;
                    self
                }
            )*
        }
    };
}

/// Declares the same, and `new` for the defaults.
macro_rules! builders_of_defaults {
    ($of:ident $(<$life:lifetime>)? { $($rest:tt)* }) => {
        impl$(<$life>)? $of$(<$life>)? {
            /// Returns the defaults.
            #[must_use]
            pub fn new() -> Self {
                Self::default()
            }
        }

        $crate::builders::builders! { $of $(<$life>)? { $($rest)* } }
    };
}

pub(crate) use builders;
pub(crate) use builders_of_defaults;
