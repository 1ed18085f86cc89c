//! Certified selection: the smallest set of a row whose dropped mass is proven to be within a budget.
//!
//! `search_row` finds the set of one row, `search_blocks` whole blocks of keys, `search_batch` several short rows at a
//! time. `batch` distributes rows over threads, `decide` decides one row, and `certify` checks sets given by a caller.

mod batch;
mod candidates;
mod certify;
mod constraints;
mod curve;
mod decide;
mod job;
mod options;
mod partition;
mod read;
mod scratch;
mod search_batch;
mod search_blocks;
mod search_row;
mod selection;
mod settle;
#[cfg(feature = "ndarray")]
mod views;
mod weight_fn;
mod weights;

pub use batch::select;
pub use certify::{CertifyOptions, certify};
pub use options::{Effort, MaxKeep, Options};
pub(crate) use scratch::Workspace;
pub use selection::Selection;

pub(crate) use certify::certify_listed;
pub(crate) use options::allowed_keys;
pub(crate) use selection::Decision;
pub(crate) use weights::{HIDDEN, RowWeights, see_row, weigh_row};

use crate::error::Error;
use crate::kernels::Simd;

/// Returns the name of the instruction-set level in force: "portable", "avx2", "avx512", "amx" or "neon".
/// Results do not depend on it, but for last bits of outputs of attention.
///
/// ```
/// assert!(["portable", "avx2", "avx512", "amx", "neon"].contains(&certk_rs::simd_level()?));
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Level`] if the environment variable `CERTK_LEVEL` names a level that is unknown or cannot run here.
pub fn simd_level() -> Result<&'static str, Error> {
    Ok(Simd::current()?.name())
}

/// Forces an instruction-set level for the whole process; `None` returns to `CERTK_LEVEL` or the best available.
///
/// ```
/// certk_rs::force_simd_level(Some("portable"))?;
/// assert_eq!(certk_rs::simd_level()?, "portable");
/// certk_rs::force_simd_level(None)?;
/// assert!(certk_rs::force_simd_level(Some("mmx")).is_err());
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Level`] if the level is unknown or cannot run here.
pub fn force_simd_level(name: Option<&str>) -> Result<(), Error> {
    Simd::force(name)
}
