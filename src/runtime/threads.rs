//! Threads: the number that a call uses, and their source.
//!
//! The process-wide rayon pool is never used: a library must not resize a pool that its host shares. The crate has one
//! pool per process, with one thread fewer than the machine grants: the caller works too. A call takes free workers, at
//! most as many as it may use, and never queues behind another call. If none is free it does all work itself. The bits
//! do not depend on the number.
//!
//! A caller may name another pool in a [`Context`](crate::Context). Workers of any pool enter through a gate, which
//! closes when the caller has no work left to hand out. The caller waits for workers that have entered by then, and for
//! no others, so a busy pool delays nothing. The waiting thread runs no other task. If it ran tasks of its pool on top
//! of the waiting call, they could need a lock that the host holds around the call, and the stack would grow without
//! end. On a worker of any pool the default is one thread: its other workers are busy with similar calls.
//!
//! Beside PyTorch another pool would share cores with threads that spin. There calls may use PyTorch's own OpenMP
//! threads, at the price that they wait for all of them.
//!
//! A forked child inherits the memory of its parent's pool but none of its threads, and makes its own pool. Finding a
//! pool takes no lock: another thread could hold the lock at the moment of the fork, and it would never be released in
//! the child.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Error;
use crate::kernels::{self, Gate};
use crate::runtime::ambient::{self, Ambient, Executor};
use crate::runtime::interrupt;

/// Largest valid number of threads: more exceed any machine's cores, and starting them could exhaust the system.
const MOST_THREADS: usize = 4096;

/// Returns the number of threads of a call, by the first rule that applies: one for work not worth sharing or a serial
/// context; the argument; the number of the context; the size of the context's pool; one on a worker of a rayon pool;
/// `RAYON_NUM_THREADS`; the number that the operating system grants (affinity and CPU quota included). Asking the
/// system takes longer than a short row does.
///
/// # Errors
/// [`Error::Option`] if the argument or the number of the context is 0 or above 4096.
pub(crate) fn count(argument: Option<usize>, worth_sharing: bool) -> Result<usize, Error> {
    let argument = argument.or_else(ambient::threads);
    if let Some(threads) = argument
        && !(1..=MOST_THREADS).contains(&threads)
    {
        return Err(Error::Option {
            argument: "threads",
            value: threads.to_string(),
            problem: "it must lie between 1 and 4096, or be left out for all available",
        });
    }
    if !worth_sharing {
        return Ok(1);
    }
    Ok(match (ambient::executor(), argument) {
        (Executor::Serial, _) => 1,
        (_, Some(threads)) => threads,
        (Executor::Own | Executor::OpenMp, None) => {
            if on_a_worker() {
                1
            } else {
                available()
            }
        }
        (Executor::Pool(pool), None) => pool.current_num_threads(),
        (Executor::Current, None) => rayon::current_num_threads(),
    })
}

/// Starts to count forks: a child must not use threads that only its parent has.
pub fn count_forks() {
    kernels::forks();
}

/// Runs `work` with the threads of the OpenMP runtime that this process has loaded (libgomp, as in PyTorch's wheels for
/// Linux), if there is one and the context names no other threads. For bindings that are called between parallel parts
/// of such a host.
pub fn beside_openmp<R>(work: impl FnOnce() -> R) -> R {
    let change = |ambient: &mut Ambient| {
        if matches!(ambient.executor, Executor::Own) {
            ambient.executor = Executor::OpenMp;
        }
    };
    under_changed(change, work)
}

/// Runs `work` with a limit on the threads of calls that give no number themselves; `None` changes nothing. For
/// bindings that take the number as an argument of each call.
pub fn with_threads<R>(threads: Option<usize>, work: impl FnOnce() -> R) -> R {
    match threads {
        Some(_) => under_changed(|ambient| ambient.threads = threads, work),
        None => work(),
    }
}

/// Runs `work` in a changed copy of this thread's context.
fn under_changed<R>(change: impl FnOnce(&mut Ambient), work: impl FnOnce() -> R) -> R {
    let mut ambient =
        ambient::current().map(|ambient| Ambient::clone(&ambient)).unwrap_or_default();
    change(&mut ambient);
    ambient::under(Some(Arc::new(ambient)), work)
}

/// Returns `RAYON_NUM_THREADS`, else the number of CPUs that the system grants to this process.
fn available() -> usize {
    let wanted = std::env::var("RAYON_NUM_THREADS").ok().and_then(|v| v.trim().parse().ok());
    match wanted {
        Some(threads) if (1..=MOST_THREADS).contains(&threads) => threads,
        _ => std::thread::available_parallelism().map_or(1, NonZero::get),
    }
}

/// Returns `true` if this thread belongs to a rayon pool, ours or a host's.
fn on_a_worker() -> bool {
    rayon::current_thread_index().is_some()
}

/// Sets default floating-point modes on the calling thread while the guard lives.
pub fn default_floats() -> kernels::DefaultFloats {
    kernels::DefaultFloats::set()
}

/// Returns the number of threads at work on calls that use several, at least 1.
pub(crate) fn at_work() -> usize {
    AT_WORK.load(Ordering::Relaxed).max(1)
}

static AT_WORK: AtomicUsize = AtomicUsize::new(0);

/// A thread that is counted until this is dropped, also by a panic.
struct AtWork;

impl AtWork {
    fn begin() -> Self {
        AT_WORK.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        AT_WORK.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Maps items, in order; the remaining ones are handed out in shares of at least `least`. The caller takes part. Every
/// thread checks after each item, and drops work that ended early ([`ambient::asked`]).
///
/// # Errors
/// The error of the context that ends the call; partial results are dropped.
pub(crate) fn map<T: Send, R: Send>(
    threads: usize,
    items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator + Send>,
    least: usize,
    work: impl Fn(T) -> R + Sync,
) -> Result<Vec<R>, Error> {
    map_dyn(threads, &mut items.into_iter(), least, &work)
}

/// Maps items behind dynamic references, so that it is compiled once per types of items and answers.
fn map_dyn<T: Send, R: Send>(
    threads: usize,
    items: &mut (dyn ExactSizeIterator<Item = T> + Send),
    least: usize,
    work: &(dyn Fn(T) -> R + Sync),
) -> Result<Vec<R>, Error> {
    let (all, least) = (items.len(), least.max(1));
    let lanes = threads.min(all.div_ceil(least));
    let mut answers = Vec::with_capacity(all);
    if lanes <= 1 {
        let _modes = default_floats();
        ambient::check()?;
        for item in items {
            let answer = work(item);
            ambient::check()?;
            answers.push(answer);
        }
        return Ok(answers);
    }
    let left = Mutex::new((0, items));
    let done: Mutex<Vec<(usize, Vec<R>)>> = Mutex::new(Vec::new());
    share_out(lanes, &|| {
        let mut share = Vec::new();
        let first = {
            let mut left = unpoisoned(&left);
            let (first, items) = (left.0, &mut left.1);
            let some = (items.len() / (2 * lanes)).max(least);
            while share.len() < some
                && let Some(item) = items.next()
            {
                share.push(item);
            }
            left.0 += share.len();
            first
        };
        let mut part = Vec::with_capacity(share.len());
        ambient::check()?;
        for item in share {
            let answer = work(item);
            ambient::check()?;
            part.push(answer);
        }
        if part.is_empty() {
            return Ok(false);
        }
        let mut done = unpoisoned(&done);
        let at = done.partition_point(|(other, _)| *other < first);
        done.insert(at, (first, part));
        Ok(true)
    })?;
    for (_, mut part) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
        answers.append(&mut part);
    }
    Ok(answers)
}

/// Lets some threads do share after share, until none is left or one fails.
fn share_out(lanes: usize, share: &(dyn Fn() -> Result<bool, Error> + Sync)) -> Result<(), Error> {
    let stopped: OnceLock<Error> = OnceLock::new();
    beside_each_other(lanes, &|| {
        let _at_work = AtWork::begin();
        while stopped.get().is_none() {
            match share() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    stopped.set(error).ok();
                }
            }
        }
    });
    stopped.into_inner().map_or(Ok(()), Err)
}

/// Maps like [`map`] but to the end, even if the call is to end: this work must not stay half-done.
pub(crate) fn map_all<T: Send, R: Send>(
    threads: usize,
    items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator + Send>,
    least: usize,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    ambient::uninterrupted(|| map(threads, items, least, work)).unwrap_or_default()
}

/// Locks, ignoring poison: a panic of `work` reaches the caller anyway, and the locked data stay consistent.
fn unpoisoned<T>(lock: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` here, and at the same time on workers that start in time, on at most `lanes` threads in all.
fn beside_each_other(lanes: usize, work: &(dyn Fn() + Sync)) {
    let ambient = ambient::current();
    let executor = ambient.as_ref().map(|ambient| ambient.executor.clone()).unwrap_or_default();
    let work = || {
        let _modes = default_floats();
        // Every thread of the call hears of its cancellation.
        ambient::under(ambient.clone(), work);
    };
    let spawn: &dyn Fn(Arc<Gate>) = match &executor {
        Executor::Serial => return work(),
        Executor::Own => return with_own_workers(lanes, &work),
        Executor::OpenMp => {
            if !kernels::with_openmp_team(lanes, &work) {
                with_own_workers(lanes, &work);
            }
            return;
        }
        Executor::Pool(pool) => &|gate| pool.spawn(move || gate.enter()),
        Executor::Current => &|gate| rayon::spawn(move || gate.enter()),
    };
    kernels::lend(&work, |gate| (1..lanes).for_each(|_| spawn(Arc::clone(gate))));
}

fn with_own_workers(lanes: usize, work: &(dyn Fn() + Sync)) {
    let Some(pool) = pool() else { return work() };
    let take = |free: usize| Some(free - free.min(lanes - 1));
    let before = pool.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
    let helpers = before.map_or(0, |free| free.min(lanes - 1));
    if helpers == 0 {
        return work();
    }
    kernels::lend(work, |gate| call_in(pool, gate, 0, helpers));
}

/// Wakes a helper, who wakes two more before it begins. Waking a thread takes as long as a short row, and in sequence
/// they would come too late.
fn call_in(pool: &'static Pool, gate: &Arc<Gate>, number: usize, all: usize) {
    let gate = Arc::clone(gate);
    pool.workers.spawn(move || {
        let _free_again = Freed(&pool.free);
        for next in [2 * number + 1, 2 * number + 2] {
            if next < all && gate.is_open() {
                call_in(pool, &gate, next, all);
            } else {
                pool.free.fetch_add(behind(next, all), Ordering::Relaxed);
            }
        }
        gate.enter();
    });
}

/// Returns the number of helpers that a helper wakes, itself included, directly or indirectly.
fn behind(number: usize, all: usize) -> usize {
    let (mut first, mut many, mut count) = (number, 1, 0);
    while first < all {
        count += many.min(all - first);
        (first, many) = (2 * first + 1, 2 * many);
    }
    count
}

/// A worker that becomes free when this is dropped, also by a panic.
struct Freed(&'static AtomicUsize);

impl Drop for Freed {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Maps `0..count` in portions, with checks between them, each divided into tasks of at least `least`. Results are
/// taken in order, up to the first error.
///
/// # Errors
/// The error of the work, or of the caller's check (`interrupt`).
pub(crate) fn in_portions<R: Send>(
    threads: usize,
    count: usize,
    (portion, least): (usize, usize),
    work: impl Fn(usize) -> Result<R, Error> + Sync + Send,
    mut take: impl FnMut(R),
) -> Result<(), Error> {
    if threads == 1 {
        let _modes = default_floats();
        ambient::check()?;
        for at in 0..count {
            let answer = work(at);
            ambient::check()?;
            take(answer?);
            if (at + 1).is_multiple_of(portion) || at + 1 == count {
                interrupt::check()?;
            }
        }
        return Ok(());
    }
    for start in (0..count).step_by(portion) {
        let end = (start + portion).min(count);
        for found in map(threads, start..end, least, &work)? {
            take(found?);
        }
        interrupt::check()?;
    }
    Ok(())
}

/// Maps a few pieces of work over many threads; `work` gets the number of threads that it may use itself. While there
/// are enough pieces each thread does one; the threads share the remaining pieces.
///
/// # Errors
/// As [`in_portions`].
pub(crate) fn in_shared_portions<R: Send>(
    threads: usize,
    count: usize,
    portion: usize,
    work: impl Fn(usize, usize) -> Result<R, Error> + Sync + Send,
    mut take: impl FnMut(R),
) -> Result<(), Error> {
    let left = count % threads;
    let whole = count - left;
    in_portions(threads, whole, (portion, 1), |at| work(at, 1), &mut take)?;
    if let Some(each) = threads.checked_div(left) {
        in_portions(left, left, (portion, 1), |at| work(whole + at, each), take)?;
    }
    Ok(())
}

/// Returns the number of `len` entries, in whole chunks, per task of `threads` threads.
pub(crate) fn share(len: usize, chunk: usize, threads: usize) -> usize {
    len.div_ceil(chunk).div_ceil(2 * threads).max(1) * chunk
}

/// Workers of a process.
struct Pool {
    process: (u32, usize),
    workers: ThreadPool,
    /// Number of workers that no call uses.
    free: AtomicUsize,
    /// Pool of a forked child, or of a child of that one.
    next: OnceLock<Box<Pool>>,
}

/// Returns the pool of this process, made on first use. `None` on a machine of one thread, or if the system refuses
/// threads.
fn pool() -> Option<&'static Pool> {
    static FIRST: OnceLock<Box<Pool>> = OnceLock::new();
    // The id of a process may equal its parent's, in another namespace.
    let process = (std::process::id(), kernels::forks());
    let mut slot = &FIRST;
    loop {
        if slot.get().is_none() {
            // Another thread may be faster; then this one's workers end.
            slot.set(Box::new(build(process)?)).ok();
        }
        let pool = slot.get()?;
        if pool.process == process {
            return Some(pool);
        }
        slot = &pool.next;
    }
}

fn build(process: (u32, usize)) -> Option<Pool> {
    let helpers = NonZero::new(available() - 1)?.get();
    let workers = ThreadPoolBuilder::new()
        .num_threads(helpers)
        .thread_name(|i| format!("certk-{i}"))
        // A thread inherits the floating-point modes of its creator, and torch may have set flush-to-zero there.
        .start_handler(|_| std::mem::forget(kernels::DefaultFloats::set()))
        .build()
        .ok()?;
    Some(Pool { process, workers, free: AtomicUsize::new(helpers), next: OnceLock::new() })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{CancelToken, Context};

    #[test]
    fn one_thread_is_the_callers() {
        let caller = std::thread::current().id();
        let ids = map(1, 0..5, 1, |_| std::thread::current().id()).unwrap();
        assert!(ids.iter().all(|id| *id == caller));
    }

    #[test]
    fn work_that_must_be_whole_heeds_neither_flag_nor_deadline() {
        let token = CancelToken::new();
        token.cancel();
        for ended in [Context::new().cancel(&token), Context::new().deadline(Instant::now())] {
            for threads in [1, 3] {
                let all = || map_all(threads, 0..9, 1, |item| item);
                assert_eq!(ended.run(all), (0..9).collect::<Vec<_>>());
                assert!(ended.run(|| map(threads, 0..9, 1, |item| item)).is_err());
            }
        }
    }

    #[test]
    fn every_helper_is_called_in_once() {
        for all in 0..100 {
            let direct = |number: usize| [2 * number + 1, 2 * number + 2];
            let calls =
                |number| direct(number).into_iter().map(|next| behind(next, all)).sum::<usize>();
            assert_eq!(behind(0, all), all);
            for number in 0..all {
                assert_eq!(behind(number, all), 1 + calls(number), "{number} of {all}");
            }
        }
    }

    #[test]
    fn answers_come_in_order() {
        for (threads, len, least) in [(1, 100, 1), (3, 100, 7), (2, 1, 1), (5, 0, 1), (64, 65, 0)] {
            let squares: Vec<usize> = (0..len).map(|i| i * i).collect();
            assert_eq!(map(threads, 0..len, least, |i| i * i).unwrap(), squares);
        }
        let mut places = vec![0; 1000];
        let parts = places.chunks_mut(7).enumerate();
        let sizes = map(4, parts, 3, |(i, part)| {
            part.fill(i);
            part.len()
        })
        .unwrap();
        assert_eq!(sizes.iter().sum::<usize>(), 1000);
        assert!(places.iter().enumerate().all(|(at, i)| at / 7 == *i));
    }

    #[test]
    fn a_call_that_finds_no_worker_free_does_not_wait() {
        // Occupies all workers while another call comes and goes.
        let (begun, ended) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let first = AtomicUsize::new(0);
                map(MOST_THREADS, 0..MOST_THREADS, 1, |_| {
                    if first.fetch_add(1, Ordering::Relaxed) == 0 {
                        begun.wait();
                        ended.wait();
                    } else {
                        std::thread::sleep(Duration::from_micros(10));
                    }
                })
                .unwrap();
            });
            begun.wait();
            assert_eq!(map(2, 0..9, 1, |i| i).unwrap().len(), 9);
            ended.wait();
        });
    }

    #[test]
    fn workers_are_free_again_after_a_panic() {
        for _ in 0..20 {
            let work = |i: usize| assert_ne!(i, 50, "as it should be");
            let panic = std::panic::catch_unwind(|| map(8, 0..100, 1, work));
            assert!(panic.is_err());
        }
        if let Some(pool) = pool() {
            let all = pool.workers.current_num_threads();
            let mut waited = 0;
            while pool.free.load(Ordering::Relaxed) < all && waited < 10_000 {
                std::thread::sleep(Duration::from_millis(1));
                waited += 1;
            }
            assert!(waited < 10_000, "workers are lost");
        }
    }

    #[test]
    fn zero_threads_is_an_error() {
        assert!(count(Some(0), false).is_err());
        assert!(count(Some(5000), true).is_err());
        assert_eq!(count(Some(7), true).unwrap(), 7);
        assert_eq!(count(None, false).unwrap(), 1);
    }

    #[test]
    fn a_context_says_how_many_threads() {
        with_threads(Some(7), || {
            assert_eq!(count(None, true).unwrap(), 7);
            assert_eq!(count(None, false).unwrap(), 1);
            assert_eq!(count(Some(3), true).unwrap(), 3);
            with_threads(None, || assert_eq!(count(None, true).unwrap(), 7));
            with_threads(Some(2), || assert_eq!(count(None, true).unwrap(), 2));
            beside_openmp(|| assert_eq!(count(None, true).unwrap(), 7));
            ambient::under(None, || assert_eq!(count(None, true).unwrap(), available()));
        });
        assert_eq!(count(None, true).unwrap(), available());
    }
}
