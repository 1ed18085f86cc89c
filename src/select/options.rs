//! Options of a selection beside the budget.

use crate::error::Error;
use crate::rows::Scores;

/// Upper limit on the number of keys kept in a row.
///
/// ```
/// use certk_rs::{MaxKeep, Options, Scores, Status, select};
/// let scores = Scores::new(&[0.0_f32; 4], &[1, 4])?;
/// let half = Options::new().max_keep(MaxKeep::Fraction(0.5));
/// let found = select(&scores, &[0.1], &half)?;
/// assert_eq!((found.k[0], found.status[0]), (2, Status::OverBudget));
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum MaxKeep {
    /// Number of keys.
    Count(usize),
    /// Fraction of the row's visible keys, in (0, 1], rounded down, at least one key.
    Fraction(f64),
}

/// Declares each option in one place: documentation, type, default, and the argument of its builder.
macro_rules! options {
    ($(#[$of:meta])* of: $($(#[$doc:meta])* $name:ident($taken:ty): $kept:ty = $default:expr;)*) => {
        $(#[$of])*
        #[derive(Debug, Clone, PartialEq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
        pub struct Options {
            $(pub(crate) $name: $kept,)*
        }

        impl Default for Options {
            fn default() -> Self {
                Options { $($name: $default,)* }
            }
        }

        impl Options {
            /// Returns the defaults.
            #[must_use]
            pub fn new() -> Self {
                Self::default()
            }

            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(mut self, $name: $taken) -> Self {
                    self.$name = $name.into();
                    self
                }
            )*
        }
    };
}

options! {
    /// Options of a selection. The defaults select the smallest set on all available threads.
    ///
    /// ```
    /// use certk_rs::{Options, Scores, select};
    /// let scores = Scores::new(&[0.0_f32, 0.0, 9.0, 0.0, 0.0], &[1, 5])?;
    /// let options = Options::new().keep_first(1).keep_last(1).threads(1);
    /// assert_eq!(select(&scores, &[0.1], &options)?.row(0), [0, 2, 4]);
    /// assert_eq!(select(&scores, &[0.1], &Options::new().block_size(2))?.row(0), [2, 3]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    of:

    /// Keeps at least that many keys of a row, forced ones included (all keys of a shorter row). A number above
    /// `max_keep` is an error.
    min_keep(usize): usize = 1;
    /// Keeps at most that many keys; a row that would need more is reported as over budget.
    max_keep(impl Into<Option<MaxKeep>>): Option<MaxKeep> = None;
    /// Always keeps the first visible keys of a row, masked ones not counted.
    keep_first(usize): usize = 0;
    /// Always keeps the last visible keys of a row, masked ones not counted.
    keep_last(usize): usize = 0;
    /// Keeps whole blocks of that many consecutive positions, ranked by their mass; the last may be short.
    block_size(usize): usize = 1;
    /// Decides rows again in f64 where the fast arithmetic leaves open whether the set is the smallest.
    prove_minimal(bool): bool = false;
    /// Sets the length of the search for one set of many rows ([`keep_set`](crate::keep_set)); one row needs none.
    effort(Effort): Effort = Effort::Default;
    /// Limits the threads of a call, the caller included. `None` means all that are available, but the caller alone on
    /// a worker of a rayon pool. Results do not depend on it.
    threads(impl Into<Option<usize>>): Option<usize> = None;
}

/// Length of the search for one set of many rows. In any case the set is certified, and its distance from the smallest
/// bounded; results depend neither on time nor on threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Effort {
    /// To the first set within 2 % of the lower bound.
    Fast,
    /// To a set within .5 % of it, or until the bound of many keys hardly grows. A small set is searched to the end.
    #[default]
    Default,
    /// Until nothing improves the set or the bound: several times as long.
    Thorough,
}

impl Options {
    /// Checks the options that do not depend on a row.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let bad =
            |argument, value: String, problem| Err(Error::Option { argument, value, problem });
        if self.block_size == 0 {
            return bad("block_size", "0".into(), "a block holds at least one position");
        }
        match self.max_keep {
            Some(MaxKeep::Count(0)) => {
                bad("max_keep", "0".into(), "at least one key of a row is kept; give 1 or more")
            }
            Some(MaxKeep::Fraction(f)) if !(f > 0.0 && f <= 1.0) => {
                bad("max_keep", f.to_string(), "a fraction of the visible keys lies in (0, 1]")
            }
            Some(MaxKeep::Count(most)) if most < self.min_keep => {
                bad("max_keep", most.to_string(), "it is less than min_keep; make them agree")
            }
            _ => Ok(()),
        }
    }
}

/// Returns the number of keys of a row that may be kept, given its `visible` unmasked and `forced` keys.
///
/// # Errors
/// [`Error::ForcedOverMax`], [`Error::MinOverMax`].
pub(crate) fn allowed_keys(
    options: &Options,
    visible: usize,
    forced: usize,
    scores: &Scores<'_>,
    row: usize,
) -> Result<usize, Error> {
    let max_keep = match options.max_keep {
        None => return Ok(usize::MAX),
        Some(MaxKeep::Count(count)) => count,
        #[allow(clippy::cast_sign_loss)] // judged to be positive
        Some(MaxKeep::Fraction(fraction)) => ((visible as f64 * fraction) as usize).max(1),
    };
    if forced > max_keep {
        let place = scores.place(row, None);
        return Err(Error::ForcedOverMax { place, forced, max_keep });
    }
    let min_keep = options.min_keep.min(visible);
    if min_keep > max_keep {
        let place = scores.place(row, None);
        return Err(Error::MinOverMax { place, min_keep, most: max_keep });
    }
    Ok(max_keep)
}
