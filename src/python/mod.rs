//! The Python extension module: a list of what it exports.
//!
//! Every function borrows its arrays, releases the interpreter (unless the work is brief), calls the crate, and translates the
//! result.

mod arguments;
mod arrays;
mod errors;
mod keepset;
mod montecarlo;
mod results;
mod select;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::keepset::keep_set;
    #[pymodule_export]
    use super::montecarlo::{mean_bounds, tail_mass, tail_mass_of_drawn};
    #[pymodule_export]
    use super::results::{Certified, Selected};
    #[pymodule_export]
    use super::select::{certify, select, set_simd_level, simd_level};

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
