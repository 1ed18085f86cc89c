//! Error type of the crate, with one variant per cause.
//!
//! Every message is one line: the argument, the place (full multi-index of the row or entry) and the remedy. The Python
//! package and the command line show it unchanged.

mod class;
mod place;

pub use class::ErrorClass;
pub use place::Place;
use place::Plain;

/// Reason for a failed call. Nothing is computed from a rejected input.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A score is NaN at a position that is not masked.
    #[error("scores{place} is NaN; mask the entry, set it to -inf, or repair the input")]
    #[non_exhaustive]
    ScoreNan {
        /// Place of the entry.
        place: Place,
    },
    /// A score is +inf at a position that is not masked.
    #[error(
        "scores{place} is +inf; scores must be finite, or -inf for a masked entry: repair the input"
    )]
    #[non_exhaustive]
    ScoreInfinite {
        /// Place of the entry.
        place: Place,
    },
    /// A probability is negative, NaN or infinite.
    #[error(
        "scores{place} is {value}, which is not a probability; kind \"probs\" needs finite weights >= 0 \
         (use \"logits\" for scores)",
        value = Plain(*.value)
    )]
    #[non_exhaustive]
    Probability {
        /// Place of the entry.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// The weights of a row given as probabilities sum to more than a float64 can hold.
    #[error(
        "scores{place} sums to more than float64 can hold; divide the row by its largest entry"
    )]
    #[non_exhaustive]
    ProbabilityTotal {
        /// The row.
        place: Place,
    },
    /// A value vector holds NaN or an infinity at a key that is not masked.
    #[error(
        "values{place} is {value} at a key that is not masked; mask the key, set its score to -inf, or repair \
         the input",
        value = Plain(*.value)
    )]
    #[non_exhaustive]
    Value {
        /// Place of the entry in the values.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// A budget on the output error is negative, NaN or infinite.
    #[error(
        "out_tol{place} is {value}; a budget on the output is a finite number >= 0",
        value = Plain(*.value)
    )]
    #[non_exhaustive]
    Tolerance {
        /// The row, empty for a single budget.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// A budget on the output error is below what rounding alone may cost.
    #[error(
        "out_tol{place} is {value:?}, but the output in full is proven to {bound:?} only (rounding); \
         raise out_tol, or pass q, k and v in a wider precision"
    )]
    #[non_exhaustive]
    Unreachable {
        /// The row.
        place: Place,
        /// The budget.
        value: f64,
        /// Proven bound on the output error with every key kept.
        bound: f64,
    },
    /// An additive mask entry is NaN or +inf.
    #[error(
        "mask{place} is {value}; an additive mask holds finite biases, or -inf to mask an entry",
        value = Plain(*.value)
    )]
    #[non_exhaustive]
    MaskValue {
        /// Place of the entry.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// `scale * score + mask` is too large for the rounding of the sum to be covered.
    #[error(
        "scores{place} times scale plus mask reaches {value:e}, beyond 2^60 in size, where even double-double \
         arithmetic cannot tell scores apart; subtract a constant per row from the scores or from the mask"
    )]
    #[non_exhaustive]
    MaskedScore {
        /// The row or entry.
        place: Place,
        /// The offending sum.
        value: f64,
    },
    /// Another thread wrote to the scores while they were read.
    #[error("scores{place} changed while they were read; do not write to an array during a call")]
    #[non_exhaustive]
    Changed {
        /// The row.
        place: Place,
    },
    /// A budget is NaN or outside [0, 1).
    #[error("eps{place} is {value}; a budget must lie in [0, 1)", value = Plain(*.value))]
    #[non_exhaustive]
    Eps {
        /// The row, empty for a single budget.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// A scale is NaN or infinite.
    #[error("scale is {value}; it must be a finite number", value = Plain(*.value))]
    #[non_exhaustive]
    Scale {
        /// The offending value.
        value: f64,
    },
    /// A scale other than 1 with probabilities.
    #[error(
        "scale is {value}, but kind \"probs\" takes no scale; leave it at 1, or pass logits",
        value = Plain(*.value)
    )]
    #[non_exhaustive]
    ScaleWithProbs {
        /// The offending value.
        value: f64,
    },
    /// An additive mask with probabilities.
    #[error(
        "mask is additive, but kind \"probs\" takes only a boolean mask; pass mask != 0 or logits"
    )]
    MaskWithProbs,
    /// A score radius is NaN or outside [0, 300].
    #[error(
        "radius{place} is {value}; a score radius must lie in [0, 300]",
        value = Plain(*.value)
    )]
    #[non_exhaustive]
    Radius {
        /// The row.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// A score radius with probabilities.
    #[error("radius is given, but kind \"probs\" takes none; pass logits")]
    RadiusWithProbs,
    /// An array has the wrong number of entries for the scores.
    #[error("{argument} has {got} entries but {expected} are needed ({remedy})")]
    #[non_exhaustive]
    Length {
        /// The argument's name.
        argument: &'static str,
        /// Number of entries given.
        got: usize,
        /// Number of entries needed.
        expected: usize,
        /// Remedy.
        remedy: &'static str,
    },
    /// A shape, or shape and strides, reach outside the buffer, or have no axis.
    #[error("{argument} has shape {shape:?}: {problem}")]
    #[non_exhaustive]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The shape given.
        shape: Vec<usize>,
        /// Description of the problem.
        problem: String,
    },
    /// A call needs more memory than the system or a limit allows.
    #[error(
        "what is made of {argument} takes {bytes} bytes at once, more than there is or a limit allows; pass less at a time, or \
         raise the limit"
    )]
    #[non_exhaustive]
    NoMemory {
        /// The argument's name.
        argument: &'static str,
        /// Bytes needed.
        bytes: usize,
    },
    /// A valid prefix length is negative or longer than the row.
    #[error("lengths{place} is {value}; it must lie between 0 and n = {n}")]
    #[non_exhaustive]
    RowLength {
        /// The row.
        place: Place,
        /// The offending value.
        value: i64,
        /// The row's length.
        n: usize,
    },
    /// `indptr` does not start at 0, decreases, or does not end at the buffer's length.
    #[error("indptr[{position}] is {value}: {problem}")]
    #[non_exhaustive]
    Indptr {
        /// Position of the entry.
        position: usize,
        /// Its value.
        value: i64,
        /// Description of the problem.
        problem: &'static str,
    },
    /// Two options that exclude each other.
    #[error("{first} cannot be combined with {second}: {remedy}")]
    #[non_exhaustive]
    Conflict {
        /// The first option.
        first: &'static str,
        /// The second option.
        second: &'static str,
        /// Remedy.
        remedy: &'static str,
    },
    /// An option has a value outside its range.
    #[error("{argument} is {value}: {problem}")]
    #[non_exhaustive]
    Option {
        /// The argument's name.
        argument: &'static str,
        /// The offending value.
        value: String,
        /// Description of the problem.
        problem: &'static str,
    },
    /// `keep_first` and `keep_last` force more keys into a row than `max_keep` allows.
    #[error(
        "keep_first and keep_last force {forced} keys into {row}, more than max_keep = {max_keep}; \
         raise max_keep or force fewer",
        row = .place.row()
    )]
    #[non_exhaustive]
    ForcedOverMax {
        /// The row.
        place: Place,
        /// Number of forced keys.
        forced: usize,
        /// Largest number of keys that may be kept.
        max_keep: usize,
    },
    /// `max_keep`, as a fraction or in whole blocks, allows fewer keys of a row than `min_keep` asks for.
    #[error(
        "min_keep is {min_keep}, but max_keep allows {most} keys of {row}; raise max_keep or lower min_keep",
        row = .place.row()
    )]
    #[non_exhaustive]
    MinOverMax {
        /// The row.
        place: Place,
        /// Number of keys asked for, capped at the number of visible keys.
        min_keep: usize,
        /// Largest number of keys that may be kept.
        most: usize,
    },
    /// The best block alone holds more keys than `max_keep` allows.
    #[error(
        "block_size is {block_size}, but max_keep = {max_keep} keys cannot hold one whole block of {row}; \
         raise max_keep or make the blocks smaller",
        row = .place.row()
    )]
    #[non_exhaustive]
    BlockOverMax {
        /// The row.
        place: Place,
        /// Length of a block, in keys.
        block_size: usize,
        /// Largest number of keys that may be kept.
        max_keep: usize,
    },
    /// A kept index is not a position of its row.
    #[error("keep: index {value} in {row} is out of range; positions run from 0 to n - 1 = {last}",
        row = .place.row(),
        last = *.n as i64 - 1)]
    #[non_exhaustive]
    KeepRange {
        /// The row.
        place: Place,
        /// The offending index.
        value: i64,
        /// The row's length.
        n: usize,
    },
    /// A kept index is listed twice in its row.
    #[error(
        "keep: index {value} stands twice in {row}; list every kept position once",
        row = .place.row()
    )]
    #[non_exhaustive]
    KeepTwice {
        /// The row.
        place: Place,
        /// The offending index.
        value: i64,
    },
    /// A tail mass is NaN or outside [0, 1].
    #[error("tail_mass{place} is {value}; a tail mass lies in [0, 1]", value = Plain(*.value))]
    #[non_exhaustive]
    TailMass {
        /// Place of the entry.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// A divergence is NaN or negative.
    #[error(
        "kl{place} is {value}; a divergence is a number of nats >= 0, or inf",
        value = Plain(*.value)
    )]
    #[non_exhaustive]
    Divergence {
        /// Place of the entry.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// A number of scores is negative.
    #[error("n{place} is {value}; a row has 0 scores or more")]
    #[non_exhaustive]
    RowCount {
        /// Place of the entry.
        place: Place,
        /// The offending value.
        value: i64,
    },
    /// More keys are kept than a row has, or fewer than none.
    #[error(
        "k is {value} for {row}, which has n = {n} scores that are not masked; pass 0 <= k <= n",
        row = .place.row()
    )]
    #[non_exhaustive]
    KeptCount {
        /// The row.
        place: Place,
        /// The offending value.
        value: i64,
        /// The row's unmasked scores.
        n: usize,
    },
    /// A cut is out of order, outside its row, or at k.
    #[error("cuts[{position}] is {value}: {problem}")]
    #[non_exhaustive]
    Cut {
        /// Position of the entry.
        position: usize,
        /// Its value.
        value: i64,
        /// Description of the problem.
        problem: String,
    },
    /// A block has a negative size or an invalid bound.
    #[error("{argument}{place} is {value}: {problem}", value = Plain(*.value))]
    #[non_exhaustive]
    Block {
        /// The argument's name.
        argument: &'static str,
        /// Place of the block.
        place: Place,
        /// The offending value.
        value: f64,
        /// Description of the problem.
        problem: &'static str,
    },
    /// A number has a value outside its range.
    #[error("{argument}{place} is {value}: {problem}", value = Plain(*.value))]
    #[non_exhaustive]
    Number {
        /// The argument's name.
        argument: &'static str,
        /// Place of the number, empty for a single one.
        place: Place,
        /// The offending value.
        value: f64,
        /// Description of the problem, and the remedy.
        problem: &'static str,
    },
    /// A row has more entries than 32-bit positions can count.
    #[error("scores has rows of {n} entries; at most 4294967295 are supported: split the row")]
    #[non_exhaustive]
    RowTooLong {
        /// The row's length.
        n: usize,
    },
    /// A SIMD level that is not known, or that this CPU cannot run.
    #[error(
        "SIMD level {level:?} {problem} (from CERTK_LEVEL or the caller); known: portable, avx2, avx512, amx, neon"
    )]
    #[non_exhaustive]
    Level {
        /// Level asked for.
        level: String,
        /// Description of the problem.
        problem: &'static str,
    },
    /// More draws without replacement than there are items in a row's tail.
    #[error(
        "draws is {draws}, but the tail of {row} has only {items} keys to draw without replacement; \
         draw at most that many, or certify the row",
        row = .place.row()
    )]
    #[non_exhaustive]
    Draws {
        /// The row.
        place: Place,
        /// Number of draws asked for.
        draws: usize,
        /// Number of keys in the tail.
        items: usize,
    },
    /// An upper bound of a score is NaN or +inf.
    #[error(
        "upper_bounds{place} is {value}; a bound must be finite, or -inf for a key that weighs nothing",
        value = Plain(*.value)
    )]
    #[non_exhaustive]
    UpperBound {
        /// Place of the entry.
        place: Place,
        /// The offending value.
        value: f64,
    },
    /// A drawn score exceeds its upper bound.
    #[error(
        "upper_bounds{place} is {bound}, but the score there is {score}; pass bounds that no score exceeds",
        score = Plain(*.score),
        bound = Plain(*.bound)
    )]
    #[non_exhaustive]
    UpperBoundBroken {
        /// Place of the entry.
        place: Place,
        /// The score.
        score: f64,
        /// Upper bound given for it.
        bound: f64,
    },
    /// A query or a key has an entry that is NaN or infinite.
    #[error("{argument}{place} is not finite; repair the input")]
    #[non_exhaustive]
    KeyNotFinite {
        /// The argument's name.
        argument: &'static str,
        /// Place of the entry.
        place: Place,
    },
    /// Keys differ from those that an index was built of.
    #[error(
        "{argument}{place} {problem}: an index proves nothing about other keys; pass those that it was built of, or build \
         it anew"
    )]
    #[non_exhaustive]
    OtherKeys {
        /// The argument's name.
        argument: &'static str,
        /// The head, empty if there is only one.
        place: Place,
        /// Description of the difference.
        problem: String,
    },
    /// Stored parts of an index are inconsistent.
    #[error(
        "{problem} of head {head} cannot be those of an index of such keys: it is damaged, or of other keys; build the index again"
    )]
    #[non_exhaustive]
    Damaged {
        /// Damaged part.
        problem: &'static str,
        /// Head that the part belongs to.
        head: usize,
    },
    /// Bytes are not a readable index.
    #[error("no index that can be used: {problem}; build the index again and write it")]
    #[non_exhaustive]
    IndexFile {
        /// Description of the problem.
        problem: String,
    },
    /// A file could not be read or written.
    #[error("the file could not be read or written: {problem}")]
    #[non_exhaustive]
    File {
        /// Kind of the [`std::io::Error`].
        kind: std::io::ErrorKind,
        /// Message of the reader or the writer.
        problem: String,
    },
    /// A search needs the keys, but none were passed.
    #[error(
        "keys are needed: the index holds codes only, and they do not decide this query; pass the keys that it was built of"
    )]
    KeysNeeded,
    /// The caller asked to stop ([`CancelToken`](crate::CancelToken), [`interruptible`](crate::interruptible)). No
    /// result is returned.
    #[error("interrupted")]
    Interrupted,
    /// The deadline of the caller's [`Context`](crate::Context) passed. No result is returned.
    #[error(
        "the deadline passed before there was an answer; give more time, or ask for less at a time"
    )]
    DeadlineExceeded,
}

impl Error {
    /// Returns the kind of failure, by what a caller can do about it. A service answers `Input` with 4xx, `Resource`
    /// with 503 and `Cancelled` with 504 or nothing.
    ///
    /// ```
    /// use certk_rs::{ErrorClass, Options, Scores, select};
    ///
    /// let row = [1.0_f32, f32::NAN];
    /// let error = select(&Scores::new(&row, &[2])?, &[0.1], &Options::new()).unwrap_err();
    /// assert_eq!(error.class(), ErrorClass::Input);
    /// assert!(error.to_string().starts_with("scores[1] is NaN"));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn class(&self) -> ErrorClass {
        match self {
            Error::NoMemory { .. } => ErrorClass::Resource,
            Error::File { .. } => ErrorClass::File,
            Error::Interrupted | Error::DeadlineExceeded => ErrorClass::Cancelled,
            Error::ScoreNan { .. }
            | Error::ScoreInfinite { .. }
            | Error::Probability { .. }
            | Error::ProbabilityTotal { .. }
            | Error::Value { .. }
            | Error::Tolerance { .. }
            | Error::Unreachable { .. }
            | Error::MaskValue { .. }
            | Error::MaskedScore { .. }
            | Error::Changed { .. }
            | Error::Eps { .. }
            | Error::Scale { .. }
            | Error::ScaleWithProbs { .. }
            | Error::MaskWithProbs
            | Error::Radius { .. }
            | Error::RadiusWithProbs
            | Error::Length { .. }
            | Error::Shape { .. }
            | Error::RowLength { .. }
            | Error::Indptr { .. }
            | Error::Conflict { .. }
            | Error::Option { .. }
            | Error::ForcedOverMax { .. }
            | Error::MinOverMax { .. }
            | Error::BlockOverMax { .. }
            | Error::KeepRange { .. }
            | Error::KeepTwice { .. }
            | Error::TailMass { .. }
            | Error::Divergence { .. }
            | Error::RowCount { .. }
            | Error::KeptCount { .. }
            | Error::Cut { .. }
            | Error::Block { .. }
            | Error::Number { .. }
            | Error::RowTooLong { .. }
            | Error::Level { .. }
            | Error::Draws { .. }
            | Error::UpperBound { .. }
            | Error::UpperBoundBroken { .. }
            | Error::KeyNotFinite { .. }
            | Error::OtherKeys { .. }
            | Error::Damaged { .. }
            | Error::IndexFile { .. }
            | Error::KeysNeeded => ErrorClass::Input,
        }
    }
}
