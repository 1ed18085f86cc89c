//! Rows that are given as queries and keys, and what is asked of them.

use crate::builders::builders_of_defaults;
use crate::rows::Vectors;

/// Queries of some heads, the keys that they are multiplied with, and the factor that makes scores of their products.
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
    /// (heads, m, d), or (m, d).
    pub queries: Vectors<'a>,
    /// (`kv_heads`, n, d), or (n, d): the query heads are a multiple of these, and neighbours share one.
    pub keys: Vectors<'a>,
    /// Of a product, its score.
    pub scale: f64,
}

impl<'a> Block<'a> {
    /// Queries, keys, and what makes a score of their product.
    #[must_use]
    pub fn new(queries: Vectors<'a>, keys: Vectors<'a>, scale: f64) -> Self {
        Block { queries, keys, scale }
    }

    /// The number of keys of each head.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }
}

/// What is asked of rows that are given as queries.
///
/// ```
/// use certk_rs::QueryOptions;
/// let options = QueryOptions::new().causal_offset(0);
/// assert_eq!(options.causal_offset, Some(0));
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct QueryOptions<'a> {
    /// Query i of any head sees the keys up to i + offset.
    pub causal_offset: Option<i64>,
    /// The rows that the set must serve; of the others it is only certified what they lose.
    pub counted: Option<&'a [bool]>,
    /// The keys that are kept, where that is decided already: nothing is chosen, and every row is certified. Of the options that
    /// choose none may be set then, and no lower bound is found.
    pub given: Option<&'a [bool]>,
    /// Added to the radius of each row.
    pub slack: f64,
    /// The radius of a row is `(3 d + roundings) 2^-53` times its reach, and a little more: d of these for the products here, and the
    /// others for whoever computes them again in f64.
    pub roundings: u32,
}

builders_of_defaults! { QueryOptions<'a> {
    /// Query i of any head sees the keys up to i + offset.
    causal_offset(offset: impl Into<Option<i64>>) = offset.into();
    /// The rows that the set must serve.
    counted(rows: impl Into<Option<&'a [bool]>>) = rows.into();
    /// The keys that are kept, where that is decided already.
    given(keys: impl Into<Option<&'a [bool]>>) = keys.into();
    /// Added to the radius of each row.
    slack(slack: f64) = slack;
    /// Roundings of whoever computes the rows again in f64, beside 3 d.
    roundings(roundings: u32) = roundings;
} }

impl Default for QueryOptions<'_> {
    fn default() -> Self {
        QueryOptions { causal_offset: None, counted: None, given: None, slack: 0.0, roundings: 16 }
    }
}

/// What is added to what rounding in f64 may change.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rounding {
    pub(super) slack: f64,
    pub(super) roundings: f64,
}
