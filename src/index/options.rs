//! Options of an index.

use crate::builders::builders_of_defaults;

/// Options of building an index.
///
/// ```
/// use certk_rs::IndexOptions;
/// let options = IndexOptions::new().rotate(true).threads(2);
/// assert_eq!((options.rotate, IndexOptions::new().rotate), (Some(true), None));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct IndexOptions {
    /// `Some(true)` to rotate keys by a Hadamard matrix before they are rounded, which helps if few entries are large;
    /// `None` decides for each head by a sample.
    pub rotate: Option<bool>,
    /// Number of threads; `None` for all available. The index does not depend on it.
    pub threads: Option<usize>,
}

/// Options of a search.
///
/// ```
/// use certk_rs::{Rule, SearchOptions};
/// let lengths = [100, 200];
/// let options = SearchOptions::new().rule(Rule::TopK(8)).lengths(&lengths[..]);
/// assert_eq!(options.lengths, Some(&lengths[..]));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct SearchOptions<'a> {
    /// Factor from products to scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Rule that ends a search.
    pub rule: Rule,
    /// Largest number of keys of a row that are scored exactly. If it does not suffice, the partial result is returned
    /// with an interval that holds.
    pub max_scored: Option<usize>,
    /// Causal mask: query i of m sees keys up to i + n - m.
    pub causal: bool,
    /// Number of keys that a row sees, from the first; one for all rows or one per row.
    pub lengths: Option<&'a [i64]>,
    /// A byte per key and row, zero where it is masked, and the strides of the rows' axes in it.
    pub mask: Option<(&'a [u8], &'a [usize])>,
    /// Number of threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

/// Options of weighing keys by their codes.
///
/// ```
/// use certk_rs::RecallOptions;
/// let options = RecallOptions::new().scale(0.25).threads(1);
/// assert_eq!((options.scale, options.lengths), (Some(0.25), None));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct RecallOptions<'a> {
    /// Factor from products to scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Number of keys that a row sees, from the first; one for all rows or one per row.
    pub lengths: Option<&'a [i64]>,
    /// A byte per key and row, zero where it is masked, and the strides of the rows' axes in it.
    pub mask: Option<(&'a [u8], &'a [usize])>,
    /// Number of threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

builders_of_defaults! { IndexOptions {
    /// Rotates keys, or does not; `None` decides by a sample.
    rotate(rotate: impl Into<Option<bool>>) = rotate.into();
    /// Sets the number of threads; `None` for all available.
    threads(threads: impl Into<Option<usize>>) = threads.into();
} }

builders_of_defaults! { SearchOptions<'a> {
    /// Sets the factor from products to scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    scale(scale: impl Into<Option<f64>>) = scale.into();
    /// Sets the rule that ends a search.
    rule(rule: Rule) = rule;
    /// Limits the keys of a row that are scored exactly.
    max_scored(most: impl Into<Option<usize>>) = most.into();
    /// Sets the causal mask: query i of m sees keys up to i + n - m.
    causal(causal: bool) = causal;
    /// Sets the number of keys that a row sees, from the first; one for all rows or one per row.
    lengths(lengths: impl Into<Option<&'a [i64]>>) = lengths.into();
    /// Masks keys by a byte per key and row, zero where it is masked; `strides` are those of the rows' axes in it.
    mask(mask: &'a [u8], strides: &'a [usize]) = Some((mask, strides));
    /// Sets the number of threads; `None` for all available.
    threads(threads: impl Into<Option<usize>>) = threads.into();
} }

builders_of_defaults! { RecallOptions<'a> {
    /// Sets the factor from products to scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    scale(scale: impl Into<Option<f64>>) = scale.into();
    /// Sets the number of keys that a row sees, from the first; one for all rows or one per row.
    lengths(lengths: impl Into<Option<&'a [i64]>>) = lengths.into();
    /// Masks keys by a byte per key and row, zero where it is masked; `strides` are those of the rows' axes in it.
    mask(mask: &'a [u8], strides: &'a [usize]) = Some((mask, strides));
    /// Sets the number of threads; `None` for all available.
    threads(threads: impl Into<Option<usize>>) = threads.into();
} }

/// Rule that ends a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Rule {
    /// Sums of weights are within the budget.
    #[default]
    Mass,
    /// One gap between two scores proves the budget.
    Gap,
    /// That many best keys are known.
    TopK(usize),
}
