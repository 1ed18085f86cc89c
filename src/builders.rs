//! What sets options one by one, so that a new one breaks nobody.

/// Declares them for public fields: what each says, what it takes and what is kept of that.
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

/// The same, and `new` for the defaults.
macro_rules! builders_of_defaults {
    ($of:ident $(<$life:lifetime>)? { $($rest:tt)* }) => {
        impl$(<$life>)? $of$(<$life>)? {
            /// The defaults.
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
