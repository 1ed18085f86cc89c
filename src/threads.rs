//! Thread pools: how many threads, and which pool.
//!
//! The process-wide rayon pool is never used: a library must not resize what its host shares. Pools are made once
//! per (process id, size) and live as long as the process, because a forked child inherits the memory of its
//! parent's pools but none of their threads, and must make its own. Finding a pool takes no lock: a lock could be
//! held by another thread at the moment of the fork and would never be released in the child.

use std::num::NonZero;
use std::ops::Range;
use std::sync::OnceLock;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Error;
use crate::kernels;

struct Entry {
    process: u32,
    threads: usize,
    pool: ThreadPool,
}

/// More than the sizes and generations of forks that a process plausibly uses; beyond it pools are not shared.
static POOLS: [OnceLock<Entry>; 64] = [const { OnceLock::new() }; 64];

/// More threads than any machine has cores is a mistake, and starting them could exhaust the system.
const MOST_THREADS: usize = 4096;

/// How many threads a call uses: the argument, else `RAYON_NUM_THREADS`, else what the operating system lets this
/// process use (affinity and CPU quota included); one for work that is not worth sharing. Asking the system takes longer
/// than a short row does.
///
/// # Errors
/// [`Error::Option`] if the argument is 0 or above 4096.
pub(crate) fn count(argument: Option<usize>, worth_sharing: bool) -> Result<usize, Error> {
    if let Some(threads) = argument {
        if (1..=MOST_THREADS).contains(&threads) {
            return Ok(if worth_sharing { threads } else { 1 });
        }
        return Err(Error::Option {
            argument: "threads",
            value: threads.to_string(),
            problem: "it must lie between 1 and 4096, or be left out for all available",
        });
    }
    if !worth_sharing {
        return Ok(1);
    }
    let wanted = std::env::var("RAYON_NUM_THREADS").ok().and_then(|v| v.trim().parse().ok());
    Ok(match wanted {
        Some(threads) if (1..=MOST_THREADS).contains(&threads) => threads,
        _ => std::thread::available_parallelism().map_or(1, NonZero::get),
    })
}

/// Default floating-point modes on the calling thread while the guard lives.
pub(crate) fn default_floats() -> kernels::DefaultFloats {
    kernels::DefaultFloats::set()
}

/// Runs `work` on the pool of `threads` threads, or right here for a single thread.
///
/// # Errors
/// [`Error::Pool`] if the system refuses to start the threads.
pub(crate) fn run<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> Result<R, Error> {
    if threads == 1 {
        let _environment = default_floats();
        return Ok(work());
    }
    match pool(threads)? {
        Pool::Shared(pool) => Ok(pool.install(work)),
        Pool::Own(pool) => Ok(pool.install(work)),
    }
}

/// Maps a range on `threads` threads, in order; in portions of at least `least`.
///
/// # Errors
/// As [`run`].
pub(crate) fn map<R: Send>(
    threads: usize,
    range: Range<usize>,
    least: usize,
    work: impl Fn(usize) -> R + Sync + Send,
) -> Result<Vec<R>, Error> {
    run(threads, || {
        if threads == 1 {
            range.map(work).collect()
        } else {
            range.into_par_iter().with_min_len(least).map(work).collect()
        }
    })
}

/// Called between portions of the work, on the calling thread; an error stops the call.
pub(crate) type Hook<'a> = &'a mut dyn FnMut() -> Result<(), Error>;

/// Maps `0..count` in portions of a size, between which the hook is called, and those in tasks of at least another size.
/// What comes out is taken in order, up to the first error.
///
/// # Errors
/// As [`run`]; whatever the work or the hook returns.
pub(crate) fn in_portions<R: Send>(
    threads: usize,
    count: usize,
    (portion, least): (usize, usize),
    hook: Hook<'_>,
    work: impl Fn(usize) -> Result<R, Error> + Sync + Send,
    mut take: impl FnMut(R),
) -> Result<(), Error> {
    for start in (0..count).step_by(portion) {
        let end = (start + portion).min(count);
        for found in map(threads, start..end, least, &work)? {
            take(found?);
        }
        hook()?;
    }
    Ok(())
}

/// How many of `len` entries, in whole chunks, go to one task of the pool that this runs on.
pub(crate) fn share(len: usize, chunk: usize) -> usize {
    let tasks = 2 * rayon::current_num_threads();
    len.div_ceil(chunk).div_ceil(tasks).max(1) * chunk
}

enum Pool {
    Shared(&'static ThreadPool),
    Own(ThreadPool),
}

fn pool(threads: usize) -> Result<Pool, Error> {
    let process = std::process::id();
    let mut fresh = None;
    for slot in &POOLS {
        if slot.get().is_none() {
            let pool = match fresh.take() {
                Some(pool) => pool,
                None => build(threads)?,
            };
            // Another thread may be faster; keep ours for the next free slot, unless theirs fits.
            if let Err(entry) = slot.set(Entry { process, threads, pool }) {
                fresh = Some(entry.pool);
            }
        }
        if let Some(entry) = slot.get()
            && entry.process == process
            && entry.threads == threads
        {
            return Ok(Pool::Shared(&entry.pool));
        }
    }
    Ok(Pool::Own(match fresh {
        Some(pool) => pool,
        None => build(threads)?,
    }))
}

fn build(threads: usize) -> Result<ThreadPool, Error> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("certk-{i}"))
        // A thread inherits the floating-point modes of its creator, and torch may have set flush-to-zero there.
        .start_handler(|_| std::mem::forget(kernels::DefaultFloats::set()))
        .build()
        .map_err(|e| Error::Pool { threads, reason: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_shared_by_size() {
        let address = |threads| match pool(threads).unwrap() {
            Pool::Shared(pool) => std::ptr::from_ref(pool),
            Pool::Own(_) => panic!("there are free slots"),
        };
        let (a, b, c) = (address(3), address(3), address(2));
        assert_eq!(a, b);
        assert_ne!(a, c);
        assert_eq!(run(3, rayon::current_num_threads).unwrap(), 3);
    }

    #[test]
    fn one_thread_is_the_callers() {
        let caller = std::thread::current().id();
        let ids = map(1, 0..5, 1, |_| std::thread::current().id()).unwrap();
        assert!(ids.iter().all(|id| *id == caller));
        assert_eq!(
            map(3, 0..100, 7, |i| i * i).unwrap(),
            (0..100).map(|i| i * i).collect::<Vec<_>>()
        );
    }

    #[test]
    fn zero_threads_is_an_error() {
        assert!(count(Some(0), false).is_err());
        assert!(count(Some(1 << 40), true).is_err());
        assert_eq!(count(Some(7), true).unwrap(), 7);
        assert_eq!(count(None, false).unwrap(), 1);
    }
}
