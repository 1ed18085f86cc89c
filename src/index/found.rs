//! Result of a search for a row.

use crate::names::names;
use crate::runtime::reused::Reused;

/// Method by which a row was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Rung {
    /// By codes alone: no key was scored exactly.
    Codes = 0,
    /// Codes selected the keys to score exactly, and bounded the others.
    Rescored = 1,
    /// All visible keys were scored exactly.
    #[default]
    Dense = 2,
    /// Most keys were weighed by their codes, and most values taken from theirs.
    Coded = 3,
}

names! { Rung, "rung", "use \"codes\", \"rescored\", \"dense\" or \"coded\"", {
    "codes" => Rung::Codes,
    "rescored" => Rung::Rescored,
    "dense" => Rung::Dense,
    "coded" => Rung::Coded,
} }

/// Result for a row.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Found {
    /// Positions kept, ascending.
    pub(crate) kept: Reused<u32>,
    /// Visible keys.
    pub(crate) visible: usize,
    /// Number of keys scored exactly.
    pub(crate) scored: usize,
    pub(crate) upper: f64,
    pub(crate) lower: f64,
    pub(crate) minimal: bool,
    pub(crate) rung: Rung,
}
