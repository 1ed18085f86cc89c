//! Arguments of one attention call, checked, with the budget and the answer of a row.

use std::sync::OnceLock;

use super::kept_rows::KeptRows;
use super::query_rows::QueryRows;
use crate::error::Error;
use crate::index::{KeyIndex, Rung, ValueIndex};
use crate::kernels::{PANEL_KEYS, PANEL_ROWS, Simd};
use crate::numerics::log_mass::LogMass;
use crate::numerics::scale::nearest_rsqrt;
use crate::rows::{PerRow, Vectors};
use crate::runtime::reused::Reused;

/// Rows that share a scan of the codes.
pub(super) const GROUP: usize = 4;

/// Number of rows that count as many: they are computed together, over all keys.
pub(super) const MANY: usize = 16;

/// Most rows of a unit: as many as the blocks of keys and values are laid out for at a time.
pub(super) const UNIT_ROWS: usize = 4 * PANEL_ROWS;

/// Arguments of one call.
pub(super) struct AttentionJob<'a> {
    pub(super) queries: &'a Vectors<'a>,
    pub(super) keys: &'a Vectors<'a>,
    pub(super) values: &'a Vectors<'a>,
    pub(super) index: Option<&'a KeyIndex<'a>>,
    /// Codes of values and kept rows, if the keys and the values themselves are not there.
    pub(super) from_codes: Option<(&'a ValueIndex<'a>, &'a KeptRows<'a>)>,
    pub(super) query_rows: &'a QueryRows<'a>,
    pub(super) scale: f64,
    pub(super) simd: Simd,
    /// Largest norm of each head's keys that some row sees.
    pub(super) norms: Reused<OnceLock<f64>>,
    /// Blocks of each head's values, `true` if f32 may add them.
    pub(super) blocks_fit: Reused<OnceLock<bool>>,
}

/// Budget of rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowBudget<'a> {
    /// Tail mass that a row may drop; one number for all rows, or one per row.
    pub(super) eps: PerRow<'a, f64>,
    /// `true` if weights may be rounded as far as `eps` allows.
    pub(super) short: bool,
    /// `true` if scores must be summed in f64, at any cost.
    pub(super) careful: bool,
}

/// Rows that share a head's keys.
pub(super) struct Unit<'a> {
    pub(super) head: usize,
    pub(super) rows: &'a [usize],
    /// Number of threads for a few rows.
    pub(super) threads: usize,
}

impl<'a> AttentionJob<'a> {
    pub(super) fn new(
        queries: &'a Vectors<'a>,
        keys: &'a Vectors<'a>,
        values: &'a Vectors<'a>,
        index: Option<&'a KeyIndex>,
        query_rows: &'a QueryRows<'a>,
    ) -> Result<Self, Error> {
        let alike = values.len() == keys.len() && values.counts() == keys.counts();
        if values.batch() != keys.batch() || !alike {
            return Err(values.misfit(format!(
                "there must be a value for each key; keys have shape {:?}",
                keys.shape()
            )));
        }
        if let Some(ball) = query_rows.options.ball {
            ball.check(values)?;
        }
        if let Some(index) = index {
            index.fits(keys)?;
        }
        if let Some(index) = query_rows.options.value_index {
            index.fits(values)?;
        }
        let job = Self::judged(queries, (keys, values), index, query_rows)?;
        let norms = std::iter::repeat_with(OnceLock::new).take(keys.heads()).collect();
        let blocks = keys.heads() * keys.len().div_ceil(PANEL_KEYS);
        let blocks_fit = std::iter::repeat_with(OnceLock::new).take(blocks).collect();
        Ok(AttentionJob { norms, blocks_fit, ..job })
    }

    /// Arguments without the keys and the values.
    pub(super) fn from_codes(
        queries: &'a Vectors<'a>,
        (index, values): (&'a KeyIndex<'a>, &'a ValueIndex<'a>),
        kept: &'a KeptRows<'a>,
        query_rows: &'a QueryRows<'a>,
    ) -> Result<Self, Error> {
        let job = Self::judged(queries, kept.some(), Some(index), query_rows)?;
        Ok(AttentionJob { from_codes: Some((values, kept)), ..job })
    }

    /// Judges queries and their scale.
    fn judged(
        queries: &'a Vectors<'a>,
        (keys, values): (&'a Vectors<'a>, &'a Vectors<'a>),
        index: Option<&'a KeyIndex>,
        query_rows: &'a QueryRows<'a>,
    ) -> Result<Self, Error> {
        let scale = query_rows.options.scale.unwrap_or_else(|| nearest_rsqrt(keys.dim()));
        if !scale.is_finite() {
            return Err(Error::Scale { value: scale });
        }
        if queries.dim() != keys.dim() {
            return Err(queries.misfit(format!(
                "keys have {} entries; queries and keys need as many as each other",
                keys.dim()
            )));
        }
        let (norms, blocks_fit) = (Reused::new(), Reused::new());
        let (from_codes, simd) = (None, Simd::current()?);
        Ok(AttentionJob {
            queries,
            keys,
            values,
            index,
            from_codes,
            query_rows,
            scale,
            simd,
            norms,
            blocks_fit,
        })
    }
}

/// One row's answer.
pub(super) struct Answer {
    pub(super) out: Reused<f64>,
    pub(super) upper: f64,
    pub(super) kept: usize,
    pub(super) scored: usize,
    pub(super) rung: Rung,
    /// Relative distance of the weights from a common multiple of the real ones.
    pub(super) weight_error: f64,
    /// Bound on the error of sums of weighted values, relative to their lengths.
    pub(super) sum_error: f64,
    /// Bound on the whole error of a row with weights from codes, but for its rounding to a precision.
    pub(super) coded_error: f64,
    /// Mass of the keys of the average, with the sink.
    pub(super) log_mass: LogMass,
}
