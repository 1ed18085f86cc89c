//! Index that a call builds for itself, if enough rows share keys.

use half::{bf16, f16};

use super::job::AttentionJob;
use super::narrow::append_narrow;
use super::thinned::FLAT;
use crate::error::{Error, ErrorClass};
use crate::index::{IndexOptions, KeyIndex, for_coded_dtype, matrix};

/// Number of keys below which scoring is faster than encoding.
const KEYS: usize = 2048;
/// Least number of rows: a key is encoded in the time in which that many rows score it, several times over.
const ROWS: usize = 256;
/// Rows examined, each with a few keys; one in so many must seem to drop much.
const LOOKS: usize = 8;
const SPARSE: usize = 2;

impl AttentionJob<'_> {
    /// Builds an index of the keys, if a sample of rows suggests that many rows drop enough for it. `None` also where
    /// keys cannot be encoded or memory is short.
    ///
    /// # Errors
    /// The error of a call that was ended, and [`Error::KeyNotFinite`] for a query.
    pub(super) fn own_index(&self, eps: &[f64]) -> Result<Option<KeyIndex<'static>>, Error> {
        let options = &self.query_rows.options;
        let (rows, heads) = (self.query_rows.rows(), self.keys.heads());
        let masked = options.mask.is_some() || options.mapped || options.even_if_slower;
        let many = self.keys.len() >= KEYS && heads > 0 && rows / heads >= ROWS;
        if masked || !many || !self.fit_together() || eps.iter().all(|&eps| eps == 0.0) {
            return Ok(None);
        }
        // What no row sees may be anything, and would be coded, too.
        let all = |head| -> usize {
            self.query_rows.seen_by_any(head).iter().map(ExactSizeIterator::len).sum()
        };
        if (0..heads).any(|head| all(head) < self.keys.len()) {
            return Ok(None);
        }
        let mut sparse = 0;
        for look in 0..LOOKS {
            let row = (2 * look + 1) * rows / (2 * LOOKS);
            let prefix = self.query_rows.row_visibility(row).prefix;
            let eps = if eps.len() == 1 { eps[0] } else { eps.get(row).copied().unwrap_or(0.0) };
            if prefix < KEYS / 4 || eps == 0.0 {
                continue;
            }
            let mut query = Vec::new();
            append_narrow(&mut query, &self.query(row)?);
            let kept = for_coded_dtype!(self.keys, K => {
                let keys = matrix::<K>(self.keys, self.query_rows.head_of(row));
                Ok(self.seems_to_keep(keys, (&query, prefix), eps))
            })?;
            sparse += usize::from(kept <= FLAT);
        }
        if sparse * SPARSE < LOOKS {
            return Ok(None);
        }
        let options = IndexOptions::new().threads(options.threads);
        match KeyIndex::build(self.keys, &options) {
            Ok(index) => Ok(Some(index)),
            Err(error) if error.class() == ErrorClass::Cancelled => Err(error),
            Err(_) => Ok(None),
        }
    }
}
