//! Kept sets as arrays of `ndarray`.

use ndarray::Array2;

use super::selection::Selection;

impl Selection {
    /// Returns a row of `n` booleans per row of scores, `true` for a kept key. Positions beyond `n` are left out.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    ///
    /// let scores = ndarray::array![[4.0_f32, 0.0, 3.0], [1.0, 1.0, 9.0]];
    /// let found = select(&Scores::of(scores.view())?, &[0.1], &Options::new())?;
    /// assert_eq!(found.to_mask(3), ndarray::array![[true, false, true], [false, false, true]]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn to_mask(&self, n: usize) -> Array2<bool> {
        let mut mask = Array2::default((self.k.len(), n));
        for (row, mut kept) in mask.outer_iter_mut().enumerate() {
            for &position in self.row(row) {
                if let Some(kept) = kept.get_mut(position as usize) {
                    *kept = true;
                }
            }
        }
        mask
    }
}
