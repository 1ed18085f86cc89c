//! Threads: how many a call uses, and where they come from.
//!
//! The process-wide rayon pool is never used: a library must not resize what its host shares. There is one pool of our own
//! in a process, of as many threads as the machine lends, less one: the caller works too. A call takes as many of its
//! workers as are free, at most as many as it was allowed, and never queues behind another call; if none is free it does
//! everything itself. The bits do not depend on it.
//!
//! A caller may name another pool in a [`Context`](crate::Context). Whichever it is, its workers come through a gate that
//! closes when the caller has nothing left to hand out: whoever has begun by then is waited for, and nobody else, so that a
//! busy pool holds up nothing. The thread that waits is given no other work meanwhile. One that runs tasks of its pool on
//! top of a call that waits would meet the lock again that its host holds around the call, and its stack would grow without
//! end. On a worker of any pool the default is one thread: its other workers are busy with calls like this one.
//!
//! Beside PyTorch another pool would have to share cores with threads that wait without sleeping: there calls may have the
//! OpenMP threads that PyTorch uses itself, at the price that they wait for all of them.
//!
//! A forked child inherits the memory of its parent's pool but none of its threads, and makes its own. Finding a pool takes
//! no lock: a lock could be held by another thread at the moment of the fork and would never be released in the child.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Error;
use crate::kernels::{self, Gate};
use crate::runtime::ambient::{self, Ambient, Executor};
use crate::runtime::interrupt;

/// More threads than any machine has cores is a mistake, and starting them could exhaust the system.
const MOST_THREADS: usize = 4096;

/// Counts the threads that a call may use: the argument, else the number of its context, else `RAYON_NUM_THREADS`, else what the operating system lets this
/// process use (affinity and CPU quota included), or the number of workers of the pool that the context names; one for work
/// that is not worth sharing, and, unless the argument or the context says more, on a worker of a rayon pool. Asking the
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

/// Begins to count forks: their children do without threads that only their parents have.
pub fn count_forks() {
    kernels::forks();
}

/// Runs `work`, whose calls have the threads of the OpenMP runtime that this process has loaded (libgomp, as PyTorch's wheels for Linux
/// bring it along) where they use several, if there is one and the context names no other; for bindings that are called between
/// parallel parts of such a host.
pub fn beside_openmp<R>(work: impl FnOnce() -> R) -> R {
    let change = |ambient: &mut Ambient| {
        if matches!(ambient.executor, Executor::Own) {
            ambient.executor = Executor::OpenMp;
        }
    };
    under_changed(change, work)
}

/// Runs `work`, whose calls use at most so many threads where they name no number themselves, in the context that there is;
/// `None` changes nothing. For bindings that take the number as an argument of each call.
pub fn with_threads<R>(threads: Option<usize>, work: impl FnOnce() -> R) -> R {
    match threads {
        Some(_) => under_changed(|ambient| ambient.threads = threads, work),
        None => work(),
    }
}

/// Runs `work` in a copy of this thread's context with a change.
fn under_changed<R>(change: impl FnOnce(&mut Ambient), work: impl FnOnce() -> R) -> R {
    let mut ambient =
        ambient::current().map(|ambient| Ambient::clone(&ambient)).unwrap_or_default();
    change(&mut ambient);
    ambient::under(Some(Arc::new(ambient)), work)
}

/// What the host set aside for work like ours, else what the system lets this process use.
fn available() -> usize {
    let wanted = std::env::var("RAYON_NUM_THREADS").ok().and_then(|v| v.trim().parse().ok());
    match wanted {
        Some(threads) if (1..=MOST_THREADS).contains(&threads) => threads,
        _ => std::thread::available_parallelism().map_or(1, NonZero::get),
    }
}

/// Whether this thread belongs to a rayon pool, ours or a host's.
fn on_a_worker() -> bool {
    rayon::current_thread_index().is_some()
}

/// Default floating-point modes on the calling thread while the guard lives.
pub fn default_floats() -> kernels::DefaultFloats {
    kernels::DefaultFloats::set()
}

/// How many threads work on calls that use several, at least 1.
pub(crate) fn at_work() -> usize {
    AT_WORK.load(Ordering::Relaxed).max(1)
}

static AT_WORK: AtomicUsize = AtomicUsize::new(0);

/// A thread that is counted until this is dropped, whatever becomes of its work.
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

/// Maps items, in order; those that are left are handed out a share at a time, at least `least`. The caller takes part. Behind
/// each item every thread asks whether to go on: work that ends early once it shall ([`ambient::asked`]) is dropped.
///
/// # Errors
/// That of the context that ends the call; what was done until then is dropped.
pub(crate) fn map<T: Send, R: Send>(
    threads: usize,
    items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator + Send>,
    least: usize,
    work: impl Fn(T) -> R + Sync,
) -> Result<Vec<R>, Error> {
    map_dyn(threads, &mut items.into_iter(), least, &work)
}

/// The same, compiled once for all calls with the same items and answers; loops are written out for the same reason.
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

/// Has some threads do share after share, until there is none left or somebody fails.
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

/// The same to the end, whatever stops the call: what is begun here must not stay half-done.
pub(crate) fn map_all<T: Send, R: Send>(
    threads: usize,
    items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator + Send>,
    least: usize,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    ambient::uninterrupted(|| map(threads, items, least, work)).unwrap_or_default()
}

/// A panic of `work` reaches the caller anyway; what the lock holds is whole.
fn unpoisoned<T>(lock: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` here, and at the same time on as many workers that come in time as make `lanes` of them at most.
fn beside_each_other(lanes: usize, work: &(dyn Fn() + Sync)) {
    let ambient = ambient::current();
    let executor = ambient.as_ref().map(|ambient| ambient.executor.clone()).unwrap_or_default();
    let work = || {
        let _modes = default_floats();
        // What stops the call is heard by everybody who works on it.
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

/// Calls in a helper, who calls in two more before it begins: waking a thread takes as long as a short row, and one after the
/// other they would come too late.
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

/// How many helpers a helper calls in, itself included, directly or not.
fn behind(number: usize, all: usize) -> usize {
    let (mut first, mut many, mut count) = (number, 1, 0);
    while first < all {
        count += many.min(all - first);
        (first, many) = (2 * first + 1, 2 * many);
    }
    count
}

/// A worker that is free again when this is dropped, whatever became of its work.
struct Freed(&'static AtomicUsize);

impl Drop for Freed {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Maps `0..count` in portions of a size, between which it is asked whether to go on, and those in tasks of at least another size.
/// What comes out is taken in order, up to the first error.
///
/// # Errors
/// Whatever the work returns, or the caller's check (`interrupt`).
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

/// The same where a few pieces of work are to keep many threads busy: the work is told on how many it may run itself. All threads
/// do one each as often as there are enough for that; those that are left they share.
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

/// How many of `len` entries, in whole chunks, go to one task of `threads` threads.
pub(crate) fn share(len: usize, chunk: usize, threads: usize) -> usize {
    len.div_ceil(chunk).div_ceil(2 * threads).max(1) * chunk
}

/// The workers of a process.
struct Pool {
    process: (u32, usize),
    workers: ThreadPool,
    /// Workers that no call has taken.
    free: AtomicUsize,
    /// That of a forked child, or of a child of that one.
    next: OnceLock<Box<Pool>>,
}

/// The pool of this process, made when it is first asked for. `None` where there is nobody but the caller: on a machine of
/// one thread, or where the system refuses threads.
fn pool() -> Option<&'static Pool> {
    static FIRST: OnceLock<Box<Pool>> = OnceLock::new();
    // The number of a process may be that of its parent again, in another namespace.
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
    use std::time::Duration;

    use rayon::prelude::*;

    use super::*;

    #[test]
    fn one_thread_is_the_callers() {
        let caller = std::thread::current().id();
        let ids = map(1, 0..5, 1, |_| std::thread::current().id()).unwrap();
        assert!(ids.iter().all(|id| *id == caller));
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
        // Holds all workers there are while another call comes and goes.
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
    fn a_worker_of_a_host_gets_no_other_task_while_it_waits() {
        let host = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let lock = Mutex::new(0);
        host.install(|| {
            (0..64).into_par_iter().for_each(|_| {
                assert_eq!(count(None, true).unwrap(), 1);
                let mut calls = lock.lock().unwrap();
                // With a task of the host on top of it, this thread would wait here for itself.
                let sum: usize = map(2, 0..64, 1, |i| i).unwrap().into_iter().sum();
                assert_eq!(sum, 64 * 63 / 2);
                *calls += 1;
            });
        });
        assert_eq!(lock.into_inner().unwrap(), 64);
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
        for wrong in [0, 4097] {
            for worth_sharing in [false, true] {
                let refused = with_threads(Some(wrong), || count(None, worth_sharing)).unwrap_err();
                assert_eq!(refused, count(Some(wrong), worth_sharing).unwrap_err());
            }
        }
    }
}
