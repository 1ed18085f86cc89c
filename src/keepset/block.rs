//! Rows given as queries and keys, and their options.

use crate::builders::builders_of_defaults;
use crate::rows::Vectors;

/// Queries of some heads, the keys they are multiplied with, and the scale from products to scores.
///
/// ```
/// use certk_rs::{Block, Vectors};
/// let (queries, keys) = ([1.0_f32; 4 * 2 * 3], [1.0_f32; 2 * 5 * 3]);
/// let (queries, keys) =
///     (Vectors::new("q", &queries, &[4, 2, 3])?, Vectors::new("keys", &keys, &[2, 5, 3])?);
/// assert_eq!(Block::new(queries, keys, 0.5).keys(), 5);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Block<'a> {
    /// Queries of shape (heads, m, d), or (m, d).
    pub queries: Vectors<'a>,
    /// Keys of shape (`kv_heads`, n, d), or (n, d). The query heads are a multiple of these; adjacent heads share one.
    pub keys: Vectors<'a>,
    /// Factor from a product to its score.
    pub scale: f64,
}

impl<'a> Block<'a> {
    /// Returns a block of queries, keys and the scale of their products.
    #[must_use]
    pub fn new(queries: Vectors<'a>, keys: Vectors<'a>, scale: f64) -> Self {
        Block { queries, keys, scale }
    }

    /// Returns the number of keys of each head.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }
}

/// Options of rows given as queries.
///
/// ```
/// use certk_rs::QueryOptions;
/// let options = QueryOptions::new().causal_offset(0);
/// assert_eq!(options.causal_offset, Some(0));
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct QueryOptions<'a> {
    /// Causal offset: query i of any head sees the keys up to i + offset.
    pub causal_offset: Option<i64>,
    /// Rows that the set must serve. The other rows are certified only.
    pub counted: Option<&'a [bool]>,
    /// Kept keys, if they are given: no set is searched, and every row is certified. The options that choose keys must
    /// then be unset, and no lower bound is found.
    pub given: Option<&'a [bool]>,
    /// Radius added to that of each row.
    pub slack: f64,
    /// Roundings allowed to a caller that computes the scores again in f64. The radius of a row is `(3 d + roundings)
    /// 2^-53` times its reach, and a little more; d of these are for the products here.
    pub roundings: u32,
}

builders_of_defaults! { QueryOptions<'a> {
    /// Lets query i of any head see the keys up to i + offset.
    causal_offset(offset: impl Into<Option<i64>>) = offset.into();
    /// Sets the rows that the set must serve.
    counted(rows: impl Into<Option<&'a [bool]>>) = rows.into();
    /// Gives the kept keys, so that rows are certified only.
    given(keys: impl Into<Option<&'a [bool]>>) = keys.into();
    /// Sets the radius added to that of each row.
    slack(slack: f64) = slack;
    /// Sets the roundings, beside 3 d, of a caller that computes the rows again in f64.
    roundings(roundings: u32) = roundings;
} }

impl Default for QueryOptions<'_> {
    fn default() -> Self {
        QueryOptions { causal_offset: None, counted: None, given: None, slack: 0.0, roundings: 16 }
    }
}

/// Caller's additions to the rounding of f64 products.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rounding {
    pub(super) slack: f64,
    pub(super) roundings: f64,
}
