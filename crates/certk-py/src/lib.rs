//! The Python extension module: a list of what it exports.
//!
//! Every function borrows its arrays, releases the interpreter (unless the work is brief), calls the crate, and translates the
//! result.

// PyO3 passes arguments by value.
#![allow(clippy::needless_pass_by_value)]

mod arguments;
mod arrays;
mod attention;
mod bounds;
mod cancellation;
mod errors;
mod floats;
mod keepset;
mod key_index;
mod mapped;
mod montecarlo;
mod openmp;
mod output;
mod products;
mod results;
mod select;
mod value_index;
mod visible;

use pyo3::prelude::*;

/// Replaces the system's allocator, which returns memory of worker threads after every call: touching new pages took
/// longer than the work of two threads. A Rust service that depends on this crate brings its own allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

// Classes are frozen, and what changes in them has a lock, so that no call needs the lock of the interpreter.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::attention::{
        Attended, ValueBall, attention, attention_from_codes, attention_of_ragged,
    };
    #[pymodule_export]
    use super::bounds::{
        best_cuts, blockwise, bretagnolle_huber, kl_from_tail_mass, multi_gap, pinsker,
        required_gap, score_gap, single_gap, smallest_k, tail_mass_from_kl,
    };
    #[pymodule_export]
    use super::cancellation::Cancellation;
    #[pymodule_export]
    use super::floats::{DefaultFloats, nearest_rsqrt};
    #[pymodule_export]
    use super::keepset::{keep_set, keep_set_of_queries};
    #[pymodule_export]
    use super::key_index::{KeyIndex, Recalled};
    #[pymodule_export]
    use super::mapped::MappedPieces;
    #[pymodule_export]
    use super::montecarlo::{mean_bounds, tail_mass};
    #[pymodule_export]
    use super::openmp::OpenMpTeam;
    #[pymodule_export]
    use super::output::{output_error, select_output};
    #[pymodule_export]
    use super::products::products;
    #[pymodule_export]
    use super::results::{
        Certified, Estimated, Kept, OutputBounds, OutputSelected, Searched, Selected,
    };
    #[pymodule_export]
    use super::select::{certify, select, set_simd_level, simd_level};
    #[pymodule_export]
    use super::value_index::ValueIndex;
    #[pymodule_export]
    use super::visible::visible_rows;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        certk_rs::bindings::count_forks();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
