//! Places and numbers, as error messages print them.

use std::fmt;

/// Full multi-index of a place in an array. Prints as `[1, 0, 17]`, or as nothing where there is only one place.
///
/// ```
/// use certk_rs::Place;
/// assert_eq!(Place::unravel(&[2, 3], 4), Place::from(vec![1, 1]));
/// assert_eq!(Place::from(vec![1, 1]).to_string(), "[1, 1]");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place(pub Vec<usize>);

impl From<Vec<usize>> for Place {
    fn from(index: Vec<usize>) -> Self {
        Place(index)
    }
}

/// Number that prints very large and very small values with an exponent, not with hundreds of zeros.
pub(super) struct Plain(pub(super) f64);

impl fmt::Display for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.0.abs();
        if size != 0.0 && size.is_finite() && !(1e-5..1e17).contains(&size) {
            write!(f, "{:e}", self.0)
        } else {
            write!(f, "{}", self.0)
        }
    }
}

impl Place {
    /// Returns the place of entry number `flat` of an array in C order.
    pub fn unravel(shape: &[usize], flat: usize) -> Self {
        let (mut index, mut rest) = (vec![0; shape.len()], flat);
        for (i, &len) in index.iter_mut().zip(shape).rev() {
            *i = rest % len.max(1);
            rest /= len.max(1);
        }
        Place(index)
    }

    /// Returns the place as a row: `row [1, 0]`, or `the row` where there is only one.
    pub(crate) fn row(&self) -> String {
        if self.0.is_empty() { "the row".into() } else { format!("row {self}") }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { fmt::Debug::fmt(&self.0, f) }
    }
}
