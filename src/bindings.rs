//! Items for bindings to another language, beside the public interface: checked allocation, floating-point modes, scores in f64,
//! and forms in which indexes and balls are stored.
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

use crate::rows::{Scores, WeightKind, drop_masked};
use crate::runtime::memory::room;

/// That a number of a binding's own argument is outside its range.
pub fn bad_number(
    argument: &'static str,
    place: crate::Place,
    value: f64,
    problem: &'static str,
) -> crate::Error {
    crate::Error::Number { argument, place, value, problem }
}

/// The visible scores of some rows in f64, row after row.
#[derive(Default)]
pub struct VisibleRows {
    /// Larger is better; none is infinite.
    pub scores: Vec<f64>,
    /// How many of them each row has.
    pub counts: Vec<i64>,
    /// A score in natural-log units is this times `scores`; 0 for a row whose scores are weights.
    pub scales: Vec<f64>,
    /// How far a stored score may lie from the real one, in natural-log units.
    pub radii: Vec<f64>,
}

/// Reads rows from `first` on, until some 2^20 scores or 2^16 rows are read.
///
/// # Errors
/// Those of the scores; [`crate::Error::NoMemory`] also where the answers for all rows would not fit.
pub fn visible_rows(scores: &Scores<'_>, first: usize) -> Result<VisibleRows, crate::Error> {
    const SCORES: usize = 1 << 20;
    const ROWS: usize = 1 << 16;
    const ANSWER: usize = 64;
    let _modes = default_floats();
    check_memory("scores", scores.rows(), ANSWER)?;
    let (mut found, mut row_scores) = (VisibleRows::default(), Vec::new());
    for row in (first..scores.rows()).take(ROWS) {
        let about = scores.wide_scores(row, &mut row_scores)?;
        drop_masked(&mut row_scores);
        room("scores", &mut found.scores, row_scores.len())?;
        found.scores.extend_from_slice(&row_scores);
        found.counts.push(row_scores.len() as i64);
        found.scales.push(match about.weight_kind {
            WeightKind::Exp { scale } => scale,
            WeightKind::Weight => 0.0,
        });
        found.radii.push(about.error);
        if found.scores.len() >= SCORES {
            break;
        }
    }
    Ok(found)
}
