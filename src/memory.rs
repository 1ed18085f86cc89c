//! Whether there is memory for what a call must hold at once. Where memory is refused to a vector, Rust ends the process.

use std::hint::black_box;

use crate::error::Error;

/// Less than this is not asked for beforehand.
const MUCH: usize = 1 << 28;

/// That the system would give `count` times `each` bytes, which what is made of `argument` takes.
///
/// # Errors
/// [`Error::NoMemory`].
pub(crate) fn afford(argument: &'static str, count: usize, each: usize) -> Result<(), Error> {
    let bytes = count.saturating_mul(each);
    let mut room = Vec::<u8>::new();
    // A compiler may leave out memory that nobody uses.
    if bytes < MUCH || black_box(&mut room).try_reserve_exact(bytes).is_ok() {
        return Ok(());
    }
    Err(Error::NoMemory { argument, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_there_is() {
        assert!(afford("q", 1 << 10, 1 << 10).is_ok());
        assert!(afford("q", 1 << 29, 1).is_ok());
        for (count, each) in [(1 << 45, 1 << 10), (usize::MAX, 2), (1, usize::MAX)] {
            let Err(error) = afford("q", count, each) else { panic!("{count} times {each}") };
            assert!(error.to_string().starts_with("what is made of q takes "), "{error}");
        }
    }
}
