//! One number for all rows, or one per row, checked on construction.

use crate::error::{Error, Place};

/// One number for all rows, or one per row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PerRow<'a, T>(&'a [T]);

impl<'a, T: Copy> PerRow<'a, T> {
    /// Takes one number for all rows, or one per row.
    ///
    /// # Errors
    /// [`Error::Length`] for any other count.
    pub(crate) fn new(
        argument: &'static str,
        numbers: &'a [T],
        rows: usize,
        remedy: &'static str,
    ) -> Result<Self, Error> {
        if numbers.len() == 1 || numbers.len() == rows {
            return Ok(PerRow(numbers));
        }
        Err(Error::Length { argument, got: numbers.len(), expected: rows, remedy })
    }

    /// Checks every number.
    ///
    /// # Errors
    /// `error` of the first bad number and its place in `shape`; the place is empty for a single number.
    pub(crate) fn all(
        self,
        shape: &[usize],
        good: impl Fn(T) -> bool,
        error: impl FnOnce(Place, T) -> Error,
    ) -> Result<Self, Error> {
        let Some(at) = self.0.iter().position(|&number| !good(number)) else { return Ok(self) };
        let place = if self.0.len() == 1 { Place(vec![]) } else { Place::unravel(shape, at) };
        Err(error(place, self.0[at]))
    }

    /// Returns `true` if any number passes the test.
    pub(crate) fn any(self, test: impl Fn(T) -> bool) -> bool {
        self.0.iter().any(|&number| test(number))
    }

    /// Returns a row's number.
    pub(crate) fn of(self, row: usize) -> T {
        self.0[if self.0.len() == 1 { 0 } else { row }]
    }
}

impl PerRow<'_, f64> {
    /// Checks that every budget of tail mass is in [0, 1).
    ///
    /// # Errors
    /// [`Error::Eps`].
    pub(crate) fn budgets(self, shape: &[usize]) -> Result<Self, Error> {
        self.all(shape, |eps| (0.0..1.0).contains(&eps), |place, value| Error::Eps { place, value })
    }

    /// Checks that every error budget is finite and not negative.
    ///
    /// # Errors
    /// [`Error::Tolerance`].
    pub(crate) fn tolerances(self, shape: &[usize]) -> Result<Self, Error> {
        let good = |tolerance| (0.0..f64::INFINITY).contains(&tolerance);
        self.all(shape, good, |place, value| Error::Tolerance { place, value })
    }
}
