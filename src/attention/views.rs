//! Results of attention as arrays of `ndarray`.

use ndarray::ArrayView2;

use super::result::Attention;
use crate::rows::Number;

impl Attention {
    /// Returns the outputs, a row of `d_v` numbers for each query; `None` if they are stored as another type than `T`.
    ///
    /// ```
    /// use certk_rs::{AttentionOptions, Budget, Values, Vectors, attention};
    /// use ndarray::Array2;
    ///
    /// let tokens = Array2::<f32>::from_shape_fn((50, 4), |(i, j)| ((3 * i + j) % 5) as f32);
    /// let (q, k) = (Vectors::of("q", tokens.view())?, Vectors::of("k", tokens.view())?);
    /// let v = Vectors::of("v", tokens.view())?;
    /// let found = attention(&q, &k, &v, Budget::TailMass(&[0.01]), None, &AttentionOptions::default())?;
    /// assert_eq!(found.outputs::<f64>().expect("f64 is the default").dim(), (50, 4));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn outputs<T: Number>(&self) -> Option<ArrayView2<'_, T>> {
        let rows = self.k.len();
        let shape = (rows, self.out.len().checked_div(rows).unwrap_or(0));
        ArrayView2::from_shape(shape, self.out.as_slice()?).ok()
    }
}
