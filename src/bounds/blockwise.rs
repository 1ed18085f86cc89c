//! The blockwise bound, from the sizes of blocks and bounds on their members.

use super::levels;
use super::measure::Measure;
use super::rows::in_portions;
use crate::error::{Error, Place};
use crate::runtime::memory::product;
use crate::runtime::threads;

/// Blocks of keys, in C order over an array of shape (..., blocks), with a kept flag each.
///
/// ```
/// use certk_rs::{Error, bounds::Blocks};
/// assert!(Blocks::new(&[2], &[10, 10], &[6.0, 0.0], &[5.0, -1.0], &[1, 0]).is_ok());
/// let wrong = Blocks::new(&[1], &[10], &[0.0], &[5.0], &[1]);
/// assert!(matches!(wrong, Err(Error::Block { argument: "lower", .. })));
/// ```
#[derive(Debug, Clone)]
pub struct Blocks<'a> {
    shape: Vec<usize>,
    sizes: &'a [i64],
    upper: &'a [f64],
    lower: &'a [f64],
    kept: &'a [u8],
}

impl<'a> Blocks<'a> {
    /// Returns blocks of `sizes` keys, each of whose scores (natural-log units) is at most `upper` and at least
    /// `lower`. Blocks with a non-zero byte in `kept` are kept. All four have the given shape, in C order; the last
    /// axis holds a row's blocks.
    ///
    /// Only the upper bounds of dropped blocks and the lower bounds of kept ones are used. A lower bound of -inf, or an
    /// upper bound of +inf, states nothing.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`]; [`Error::Block`] if a size is negative, a bound is NaN, or a lower bound is
    /// +inf or above the upper bound. The bounds of a block of size 0 are not checked.
    pub fn new(
        shape: &[usize],
        sizes: &'a [i64],
        upper: &'a [f64],
        lower: &'a [f64],
        kept: &'a [u8],
    ) -> Result<Self, Error> {
        let _modes = threads::default_floats();
        if shape.is_empty() {
            let problem = "at least one axis (the blocks) is needed".into();
            return Err(Error::Shape { argument: "sizes", shape: vec![], problem });
        }
        let expected = product("sizes", shape)?;
        let lengths = [
            ("sizes", sizes.len()),
            ("upper", upper.len()),
            ("lower", lower.len()),
            ("kept", kept.len()),
        ];
        for (argument, got) in lengths {
            if got != expected {
                let remedy = "one entry per block";
                return Err(Error::Length { argument, got, expected, remedy });
            }
        }
        let blocks = Blocks { shape: shape.to_vec(), sizes, upper, lower, kept };
        (0..expected).try_for_each(|i| blocks.judge(i))?;
        Ok(blocks)
    }

    fn judge(&self, i: usize) -> Result<(), Error> {
        let bad = |argument, value, problem| {
            Err(Error::Block { argument, place: Place::unravel(&self.shape, i), value, problem })
        };
        let (size, upper, lower) = (self.sizes[i], self.upper[i], self.lower[i]);
        if !(0..=1 << 40).contains(&size) {
            return bad("sizes", size as f64, "a block holds between 0 and 2^40 keys");
        }
        if size == 0 {
            return Ok(());
        }
        if upper.is_nan() {
            return bad("upper", upper, "give an upper bound of the block's scores, or +inf");
        }
        if lower.is_nan() || lower == f64::INFINITY {
            return bad("lower", lower, "give a lower bound of the block's scores, or -inf");
        }
        if lower > upper {
            return bad("lower", lower, "it is above the upper bound of the same block");
        }
        Ok(())
    }
}

/// Returns an upper bound of each row's tail mass, from sizes and bounds alone. Shape (...).
///
/// `sum_dropped n_b e^{M_b} / (sum_dropped n_b e^{M_b} + sum_kept n_b e^{m_b})`, rounded up. Exactly 0 if nothing is
/// dropped; else 1 if nothing is kept, or nothing is known of the kept blocks. Source: arXiv 2512.07647, the blockwise
/// bound.
///
/// ```
/// use certk_rs::bounds::{Blocks, blockwise};
/// // Ten keys with scores of at least 5 are kept, ten of at most 0 are not.
/// let blocks = Blocks::new(&[2], &[10, 10], &[6.0, 0.0], &[5.0, -1.0], &[1, 0])?;
/// let upper = blockwise(&blocks)?[0];
/// assert!((upper - 1.0 / (1.0 + 5f64.exp())).abs() < 1e-12);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Option`] for the threads of the context.
pub fn blockwise(blocks: &Blocks<'_>) -> Result<Vec<f64>, Error> {
    let (batch, count) = blocks.shape.split_at(blocks.shape.len() - 1);
    let (rows, count) = (product("sizes", batch)?, count[0]);
    let threads = threads::count(None, rows.saturating_mul(count) > 1 << 15)?;
    in_portions(threads, rows, count.max(1), |row| {
        let range = row * count..(row + 1) * count;
        let chosen = |kept| range.clone().filter(move |&i| (blocks.kept[i] != 0) == kept);
        let tail = chosen(false).map(|i| (blocks.sizes[i].unsigned_abs(), blocks.upper[i]));
        let head = chosen(true).map(|i| (blocks.sizes[i].unsigned_abs(), blocks.lower[i]));
        Ok(levels::tail_mass(Measure::LOGITS, tail, head))
    })
}
