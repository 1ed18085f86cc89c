//! Support for bindings to other languages: memory checks before use, floating-point modes, scores in f64, and stored
//! forms of indexes and balls.
//!
//! Not part of the stable interface: it may change with any version.

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

/// Returns the error for a number of a binding's own argument that is out of range.
pub fn bad_number(
    argument: &'static str,
    place: crate::Place,
    value: f64,
    problem: &'static str,
) -> crate::Error {
    crate::Error::Number { argument, place, value, problem }
}

/// Visible scores of some rows in f64, row after row.
#[derive(Default)]
pub struct VisibleRows {
    /// Scores, larger is better; none is infinite.
    pub scores: Vec<f64>,
    /// Number of scores of each row.
    pub counts: Vec<i64>,
    /// Factor from `scores` to natural-log units; 0 for a row whose scores are weights.
    pub scales: Vec<f64>,
    /// Bound on the distance of a stored score from the real one, in natural-log units.
    pub radii: Vec<f64>,
}

/// Reads rows from `first` on, until some 2^20 scores or 2^16 rows are read.
///
/// # Errors
/// The errors of the scores; [`crate::Error::NoMemory`] also if the answers for all rows would not fit.
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
