//! Classes of errors, by the caller's remedy.

/// Class of an error, by the caller's remedy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// The input is wrong and stays wrong: repair it.
    Input,
    /// Memory is short: try later, or with less.
    Resource,
    /// The caller ended the call.
    Cancelled,
    /// Reading or writing failed: check the disk or the connection.
    File,
}
