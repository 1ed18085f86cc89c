//! Products of shapes, and requests for memory of a caller's sizes.
//!
//! A failed allocation of a plain vector aborts the process. So memory that grows with rows, keys or entries is
//! requested here, and a refusal is an error. A shape costs its caller nothing: axes of length 0 and strides of 0 make
//! arrays of a few bytes with more rows than there is memory for answers.

use std::hint::black_box;
use std::num::NonZero;
use std::sync::OnceLock;

use crate::error::Error;
use crate::kernels::address_space_left;
use crate::runtime::ambient;
use crate::runtime::threads;

/// Bytes below which memory is not checked beforehand: the small allocations of every call would not fit either.
const LITTLE: usize = 1 << 16;
/// The same in a pool, whose threads run already, and check row by row.
const LITTLE_IN_POOL: usize = 1 << 20;
/// Bytes that a thread needs beside the request: its stack, its locals, and the address space that an allocator
/// reserves for it. Threads without it abort the process at their first small allocation. It also exceeds the freed
/// memory that an allocator may hold back from other threads.
const SPARE: usize = 1 << 26;
/// Most threads that are likely to start at the same time.
const STARTING: usize = 16;
/// Bytes written between two checks.
const FILLED_AT_ONCE: usize = 1 << 20;
/// Multiple of the machine's memory above which a request is refused, even if the system promises any address space.
const BEYOND: usize = 4;

/// Returns the product of axes.
///
/// # Errors
/// [`Error::Shape`] if it overflows.
pub fn product(argument: &'static str, shape: &[usize]) -> Result<usize, Error> {
    if shape.contains(&0) {
        return Ok(0);
    }
    shape.iter().try_fold(1usize, |all, &axis| all.checked_mul(axis)).ok_or_else(|| Error::Shape {
        argument,
        shape: shape.to_vec(),
        problem: "it has more entries than can be counted; pass less at a time".into(),
    })
}

/// Checks that the system would give `count` times `each` bytes, for allocations about `argument` whose failure cannot
/// be reported.
///
/// # Errors
/// [`Error::NoMemory`].
pub fn check_memory(argument: &'static str, count: usize, each: usize) -> Result<(), Error> {
    let bytes = count.saturating_mul(each);
    let little = if rayon::current_thread_index().is_some() { LITTLE_IN_POOL } else { LITTLE };
    if within_limit(bytes) && (bytes < little || can_be_had(bytes)) {
        return Ok(());
    }
    Err(Error::NoMemory { argument, bytes })
}

/// Checks the memory that each of several threads needs per row, before they start.
///
/// # Errors
/// [`Error::NoMemory`].
pub(crate) fn check_memory_in_each(
    argument: &'static str,
    threads: usize,
    (rows, n): (usize, usize),
    each: usize,
) -> Result<(), Error> {
    if threads > 1 {
        check_memory(argument, threads.min(rows).saturating_mul(n), each)
    } else {
        Ok(())
    }
}

/// Checks the memory of matrices of `d` times `d` numbers of `each` bytes, d being the last axis of a shape `(..., n,
/// d)`.
///
/// # Errors
/// [`Error::Shape`], whose message asks whether the array is transposed.
pub(crate) fn check_memory_square(
    argument: &'static str,
    shape: &[usize],
    each: usize,
) -> Result<(), Error> {
    let d = shape.last().copied().unwrap_or(0);
    let bytes = d.saturating_mul(d).saturating_mul(each);
    check_memory(argument, bytes, 1).map_err(|_| Error::Shape {
        argument,
        shape: shape.to_vec(),
        problem: format!(
            "matrices of d x d numbers (d = {d}, the last axis) take {bytes} bytes at once, more than there is; \
             vectors lie along the last axis (..., n, d): pass the transpose if they do not"
        ),
    })
}

/// Makes room in a vector for `more` entries.
///
/// # Errors
/// [`Error::NoMemory`]; the vector is unchanged.
pub(crate) fn room<T>(argument: &'static str, to: &mut Vec<T>, more: usize) -> Result<(), Error> {
    if to.capacity() - to.len() >= more {
        return Ok(());
    }
    let bytes = more.saturating_add(to.len()).saturating_mul(size_of::<T>());
    // Twice the length, so that growing lists are not copied each time.
    let enough =
        there_is(bytes) && (to.try_reserve(more).is_ok() || to.try_reserve_exact(more).is_ok());
    if enough { Ok(()) } else { Err(Error::NoMemory { argument, bytes }) }
}

/// Returns an empty vector with room for exactly `count` entries.
///
/// # Errors
/// [`Error::NoMemory`].
pub fn list<T>(argument: &'static str, count: usize) -> Result<Vec<T>, Error> {
    let (bytes, mut list) = (count.saturating_mul(size_of::<T>()), Vec::new());
    if there_is(bytes) && list.try_reserve_exact(count).is_ok() {
        return Ok(list);
    }
    Err(Error::NoMemory { argument, bytes })
}

/// Returns a copy of a slice.
///
/// # Errors
/// [`Error::NoMemory`].
pub fn copied<T: Copy>(argument: &'static str, from: &[T]) -> Result<Vec<T>, Error> {
    let mut copy = list(argument, from.len())?;
    copy.extend_from_slice(from);
    Ok(copy)
}

/// Returns a vector of `count` copies of a value.
///
/// # Errors
/// [`Error::NoMemory`], or the error of a call that was ended.
pub(crate) fn filled<T: Clone>(
    argument: &'static str,
    count: usize,
    value: T,
) -> Result<Vec<T>, Error> {
    let mut filled = list(argument, count)?;
    fill(argument, &mut filled, count, value)?;
    Ok(filled)
}

/// Appends copies of a value until the vector holds `count` entries.
///
/// # Errors
/// As [`filled`].
pub(crate) fn fill<T: Clone>(
    argument: &'static str,
    to: &mut Vec<T>,
    count: usize,
    value: T,
) -> Result<(), Error> {
    room(argument, to, count.saturating_sub(to.len()))?;
    while to.len() < count {
        ambient::check()?;
        // The first write to new pages takes time.
        let more = (FILLED_AT_ONCE / size_of::<T>().max(1)).max(1);
        to.resize(count.min(to.len().saturating_add(more)), value.clone());
    }
    Ok(())
}

/// Returns `true` if that much memory could exist.
fn there_is(bytes: usize) -> bool {
    within_limit(bytes) && (bytes < LITTLE || installed().is_none_or(|all| bytes / BEYOND <= all))
}

/// Returns `true` if the request is within the caller's limit.
pub(crate) fn within_limit(bytes: usize) -> bool {
    ambient::memory_limit().is_none_or(|limit| bytes <= limit)
}

/// Returns `true` if every thread now at work could have that much, with the spare memory.
fn can_be_had(bytes: usize) -> bool {
    let wanted = bytes.saturating_mul(threads::at_work()).saturating_add(spare());
    // A trial allocation briefly takes the memory, which other threads may need. So there is none if the system reports
    // its free memory. The allocator may hold more, which was freed.
    if !there_is(bytes) {
        return false;
    }
    match address_space_left() {
        Some(left) if wanted <= left => return true,
        None if wanted <= installed().unwrap_or(0) / 8 && overcommits() => return true,
        _ => {}
    }
    let mut room = Vec::<u8>::new();
    // A compiler may remove an unused allocation.
    black_box(&mut room).try_reserve_exact(wanted).is_ok()
}

/// Returns the bytes that threads may need beside the request; running pool threads have most of them.
fn spare() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    if rayon::current_thread_index().is_some() {
        return SPARE / 4;
    }
    let threads = || std::thread::available_parallelism().map_or(1, NonZero::get);
    (1 + STARTING.min(*THREADS.get_or_init(threads))) * SPARE
}

/// Returns `true` if the system is known to promise address space without counting it. It then refuses only requests
/// far beyond its memory.
fn overcommits() -> bool {
    static OVERCOMMITS: OnceLock<bool> = OnceLock::new();
    let read = || {
        let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory");
        mode.is_ok_and(|mode| matches!(mode.trim(), "0" | "1"))
    };
    *OVERCOMMITS.get_or_init(read)
}

/// Returns the memory of the machine, if the system reports it in a file.
fn installed() -> Option<usize> {
    static INSTALLED: OnceLock<Option<usize>> = OnceLock::new();
    let read = || {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        let kibibytes: usize = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
        Some(kibibytes.saturating_mul(1024))
    };
    *INSTALLED.get_or_init(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More entries than any machine has room for.
    const ABSURD: usize = usize::MAX / 1024;

    fn refused<T: std::fmt::Debug>(found: Result<T, Error>) {
        let error = found.unwrap_err();
        assert!(error.to_string().starts_with("what is made of q takes "), "{error}");
    }

    #[test]
    fn more_than_there_is() {
        assert!(check_memory("q", 1 << 10, 1 << 10).is_ok());
        assert!(check_memory("q", 1 << 26, 1).is_ok());
        for (count, each) in [(ABSURD, 1 << 10), (usize::MAX, 2), (1, usize::MAX), (ABSURD, 1)] {
            refused(check_memory("q", count, each));
        }
        refused(list::<u64>("q", ABSURD));
        refused(filled("q", ABSURD, 0.0));
        let mut held = vec![1u64, 2];
        refused(room("q", &mut held, ABSURD));
        refused(room("q", &mut held, usize::MAX));
        assert_eq!(held, [1, 2]);
    }

    #[test]
    fn a_limit_holds_for_small_requests() {
        let limited = crate::Context::new().memory_limit(1000);
        for bytes in [1001, LITTLE - 1, LITTLE] {
            limited.run(|| refused(check_memory("q", bytes, 1)));
        }
        assert!(limited.run(|| check_memory("q", 10, 100)).is_ok());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_machine_has_memory() {
        assert!(installed().is_some_and(|all| all > LITTLE));
    }

    #[test]
    fn room_is_what_was_asked_for() {
        let mut held = vec![1u8];
        room("q", &mut held, 9).unwrap();
        assert!(held.capacity() >= 10 && held == [1]);
        assert_eq!(list::<u8>("q", 5).unwrap().capacity(), 5);
        assert_eq!(filled("q", 3, 7).unwrap(), [7; 3]);
    }
}
