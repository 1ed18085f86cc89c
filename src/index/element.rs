//! Types in which indexed keys may be stored.

use half::{bf16, f16};

use crate::kernels::{Element, Keys, Strided};
use crate::rows::{Stored, Vectors};

/// Keys that an index can be built of.
pub(crate) trait Coded: Element<Scalar = f32> + bytemuck::NoUninit {
    const NAME: &'static str;

    fn of<'s, 'a>(stored: &'s Stored<'a>) -> Option<&'s Strided<'a, Self>>;
}

macro_rules! coded {
    ($($type:ty => $variant:ident, $name:literal);*) => {$(
        impl Coded for $type {
            const NAME: &'static str = $name;

            fn of<'s, 'a>(stored: &'s Stored<'a>) -> Option<&'s Strided<'a, Self>> {
                match stored {
                    Stored::$variant(rows) => Some(rows),
                    _ => None,
                }
            }
        }
    )*};
}

coded!(f32 => F32, "float32"; f16 => F16, "float16"; bf16 => Bf16, "bfloat16");

/// Runs generic code for the stored type of keys.
macro_rules! for_coded_dtype {
    ($vectors:expr, $type:ident => $work:expr) => {
        match $vectors.data {
            $crate::rows::Stored::F32(_) => {
                type $type = f32;
                $work
            }
            $crate::rows::Stored::F16(_) => {
                type $type = f16;
                $work
            }
            $crate::rows::Stored::Bf16(_) => {
                type $type = bf16;
                $work
            }
            $crate::rows::Stored::F64(_) => Err($vectors.misfit(
                "float64 cannot be indexed: convert it to float32, or attend without an index"
                    .into(),
            )),
        }
    };
}

pub(crate) use for_coded_dtype;

/// One matrix of keys.
pub(crate) fn matrix<'a, E: Coded>(keys: &Vectors<'a>, head: usize) -> Keys<'a, E> {
    E::of(&keys.data).map_or_else(|| Keys::new(&[], 0, keys.dim()), |rows| rows.matrix(head))
}
