//! What bindings to another language need beside the public interface: memory that is asked for before it is used, floating-point
//! modes, and forms in which indexes and balls are stored.
//!
//! No promise is made of it: it may change with any version.

pub use crate::bounds::{kl_from_tail_masses, of_divergences, required_gaps};
pub use crate::index::{Saved, Trust, products};
pub use crate::kernels::{DefaultFloats, MappedPiece, MappedPieces};
pub use crate::numerics::scale::nearest_rsqrt;
pub use crate::runtime::memory::{check_memory, copied, list, product};
pub use crate::runtime::threads::{beside_openmp, count_forks, default_floats, with_threads};
#[cfg(feature = "ndarray")]
pub use crate::{kernels::with_bits, rows::whole_bytes};

/// That a number of a binding's own argument is outside its range.
pub fn bad_number(
    argument: &'static str,
    place: crate::Place,
    value: f64,
    problem: &'static str,
) -> crate::Error {
    crate::Error::Number { argument, place, value, problem }
}
