//! Slices over arrays that another runtime owns.

use ndarray::ArrayViewD;

/// The stretch of memory from the first to the last element of a view, and the strides of all axes but the last,
/// counted in elements. `None` unless the last axis is contiguous and no stride is negative.
pub fn extent<'a, T>(view: &ArrayViewD<'a, T>) -> Option<(&'a [T], Vec<usize>)> {
    let (&last, batch) = view.strides().split_last()?;
    let (&n, lens) = view.shape().split_last()?;
    let strides: Option<Vec<usize>> = batch.iter().map(|&s| usize::try_from(s).ok()).collect();
    let strides = strides?;
    if n > 1 && last != 1 {
        return None;
    }
    if view.is_empty() {
        return Some((&[], strides));
    }
    let reach =
        lens.iter().zip(&strides).map(|(len, stride)| (len - 1) * stride).sum::<usize>() + n;
    // SAFETY: the view's first and last elements lie in one allocation that lives for 'a, and with non-negative
    // strides the first is at the lowest address, so the stretch between them is inside that allocation. Another thread
    // of the host may write to it meanwhile, which its documentation forbids; the passes never use what they read as an
    // index or a length, every search ends after a limited number of rounds, and a list that does not agree with the sums
    // is an error.
    Some((unsafe { std::slice::from_raw_parts(view.as_ptr(), reach) }, strides))
}
