//! What a caller can do about an error.

/// What a caller can do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// The input is wrong, and stays so: repair it.
    Input,
    /// There is not enough memory: try later, or with less.
    Resource,
    /// The caller ended the call.
    Cancelled,
    /// Reading or writing failed: see to the disk or the connection.
    File,
}
