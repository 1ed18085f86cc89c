//! What may be asked of an index.

/// How an index is built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IndexOptions {
    /// Whether keys are turned by a Hadamard matrix before they are rounded, which helps where few entries are large; `None`
    /// decides for each head by a sample.
    pub rotate: Option<bool>,
    /// How many threads; `None` for all available. The index does not depend on it.
    pub threads: Option<usize>,
}

/// What is asked of a search.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SearchOptions {
    /// What products are multiplied by to be scores; `None` for the f64 nearest to `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// What ends a search.
    pub rule: Rule,
    /// What bounds the scores that are not computed.
    pub over: Over,
    /// The most keys of a row that are scored exactly. Where that is not enough, what was found until then is returned with
    /// an interval that holds.
    pub max_scored: Option<usize>,
    /// How many threads; `None` for all available. Results do not depend on it.
    pub threads: Option<usize>,
}

/// What ends a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rule {
    /// Sums of weights are within the budget.
    #[default]
    Mass,
    /// One gap between two scores proves the budget.
    Gap,
    /// So many best keys are known.
    TopK(usize),
}

/// What bounds scores that are not computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Over {
    /// The code of each key, and the Gram certificate over all of them.
    #[default]
    Codes,
    /// Balls and boxes around runs of keys, as in the paper.
    Cells,
    /// The smaller of both bounds, key by key.
    Both,
}
