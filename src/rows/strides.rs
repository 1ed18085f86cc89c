//! Layout of the rows of an array in its buffer.

use crate::error::Error;
use crate::runtime::memory::product;

/// Returns the C-contiguous strides of the batch axes, in elements. They saturate: too large a stride fits no buffer.
pub(crate) fn contiguous(batch: &[usize], n: usize) -> Vec<usize> {
    let mut strides = vec![0; batch.len()];
    let mut step = n;
    for (stride, &len) in strides.iter_mut().zip(batch).rev() {
        *stride = step;
        step = step.saturating_mul(len);
    }
    strides
}

/// Returns the offset of the `row`-th row, in C order of the batch axes.
pub(crate) fn offset(batch: &[usize], strides: &[usize], row: usize) -> usize {
    let mut rest = row;
    let mut offset = 0;
    for (&len, &stride) in batch.iter().zip(strides).rev() {
        offset += rest % len.max(1) * stride;
        rest /= len.max(1);
    }
    offset
}

/// Returns the index one past the last element that a strided block of rows touches; `None` if it overflows.
fn reach(batch: &[usize], n: usize, strides: &[usize]) -> Option<usize> {
    if n == 0 || batch.contains(&0) {
        return Some(0);
    }
    let mut end = n;
    for (&len, &stride) in batch.iter().zip(strides) {
        end = end.checked_add((len - 1).checked_mul(stride)?)?;
    }
    Some(end)
}

pub(crate) fn check_strides(
    argument: &'static str,
    len: usize,
    batch: &[usize],
    n: usize,
    strides: &[usize],
) -> Result<(), Error> {
    // Also checked beside an axis of length 0, so that the number of rows does not overflow.
    if batch.contains(&0) {
        let axes: Vec<usize> = batch.iter().map(|&axis| axis.max(1)).collect();
        product(argument, &axes)?;
    } else {
        product(argument, batch)?;
    }
    let fits =
        strides.len() == batch.len() && reach(batch, n, strides).is_some_and(|end| end <= len);
    if fits {
        return Ok(());
    }
    Err(misfit(argument, len, batch, n, strides))
}

/// Returns the error for rows that do not fit their buffer.
pub(super) fn misfit(
    argument: &'static str,
    len: usize,
    batch: &[usize],
    n: usize,
    strides: &[usize],
) -> Error {
    let mut shape = batch.to_vec();
    shape.push(n);
    let problem = format!(
        "with strides {strides:?} (elements, batch axes) it does not fit a buffer of {len}; \
         shape and strides must stay inside the buffer"
    );
    Error::Shape { argument, shape, problem }
}
