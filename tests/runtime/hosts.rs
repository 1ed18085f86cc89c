//! Calls from the workers of a host's own rayon pool. A worker that waits for another pool runs tasks of its own in that time;
//! nothing here may wait like that.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use certk_rs::{
    AttentionOptions, Budget, Context, IndexOptions, KeyIndex, Options, Scores, SearchOptions,
    Vectors, attention, keep_set, select,
};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{alone, gaussian};

fn host() -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(2).build().unwrap()
}

/// Runs some work, and panics if it does not end within two minutes. The calls below take a second or two.
fn in_time(work: impl FnOnce() + Send + 'static) {
    let _alone = alone();
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    match ended.recv_timeout(Duration::from_secs(120)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a host waits for itself"),
        _ => thread.join().unwrap(),
    }
}

#[test]
fn many_calls_at_once_do_not_pile_up() {
    /// An emulated processor takes its time.
    const CALLS: usize = if cfg!(target_arch = "x86_64") { 20_000 } else { 2000 };
    in_time(|| {
        let row = gaussian(17 * 4096, 4.0 / 2.0);
        let scores = Scores::new(&row[..], &[17, 4096]).unwrap();
        let want = select(&scores, &[0.5], &Options::new()).unwrap().k;
        host().install(|| {
            (0..CALLS).into_par_iter().for_each(|_| {
                assert_eq!(select(&scores, &[0.5], &Options::new()).unwrap().k, want);
            });
        });
    });
}

#[test]
fn every_kind_of_call_may_run_under_a_lock_of_the_host() {
    in_time(|| {
        let (n, d) = (70_000, 32);
        let (keys, query) = (gaussian(n * d, 1.0), gaussian(32 * d, 4.0));
        let keys = Vectors::new("k", &keys[..], &[n, d]).unwrap();
        let queries = Vectors::new("q", &query[..], &[32, d]).unwrap();
        let rows = gaussian(4 * n, 4.0);
        let scores = Scores::new(&rows[..], &[4, n]).unwrap();
        let index = KeyIndex::build(&keys, &IndexOptions::default()).unwrap();
        let search = SearchOptions::new();
        let want = index.search(&queries, Some(&keys), &[0.01], &search).unwrap();
        for threads in [None, Some(2), Some(7)] {
            let context = threads.map_or(Context::new(), |threads| Context::new().threads(threads));
            let (lock, calls) = (Mutex::new(()), AtomicUsize::new(0));
            host().install(|| {
                (0..12).into_par_iter().for_each(|call| {
                    let _held = lock.lock().unwrap();
                    calls.fetch_add(1, Ordering::Relaxed);
                    if call % 3 == 0 {
                        let options = Options::new().threads(threads);
                        keep_set(&scores, &[0.1], &options).unwrap();
                    } else if call % 3 == 1 {
                        let search = search.threads(threads);
                        let found = index.search(&queries, Some(&keys), &[0.01], &search).unwrap();
                        assert_eq!(found.selection, want.selection);
                    } else {
                        let build = IndexOptions::new().threads(threads);
                        let index = KeyIndex::build(&keys, &build).unwrap();
                        context.run(|| index.check(&keys)).unwrap();
                        let options = AttentionOptions::new().threads(threads);
                        let budget = Budget::TailMass(&[0.1]);
                        attention(&queries, &keys, &keys, budget, None, &options).unwrap();
                    }
                });
            });
            assert_eq!(calls.into_inner(), 12);
        }
    });
}

/// An explicit number of threads does not pile up, and neither does the help of a host's pool.
#[test]
fn a_worker_that_waits_is_given_no_other_call() {
    in_time(|| {
        let row = gaussian(17 * 8192, 2.0);
        let scores = Scores::new(&row[..], &[17, 8192]).unwrap();
        let long = Scores::new(&row[..16 * 8192], &[1, 16 * 8192]).unwrap();
        let want = select(&scores, &[0.1], &Options::new()).unwrap();
        let whole = select(&long, &[0.1], &Options::new()).unwrap();
        let host = Arc::new(ThreadPoolBuilder::new().num_threads(3).build().unwrap());
        let deepest = AtomicUsize::new(0);
        for (context, options) in [
            (Context::new(), Options::new().threads(3)),
            (Context::new().pool(&host), Options::new()),
            (Context::new().current_pool(), Options::new()),
        ] {
            let lock = Mutex::new(());
            host.install(|| {
                (0..200).into_par_iter().for_each(|_| {
                    thread_local!(static DEPTH: Cell<usize> = const { Cell::new(0) });
                    DEPTH.set(DEPTH.get() + 1);
                    deepest.fetch_max(DEPTH.get(), Ordering::Relaxed);
                    context.run(|| {
                        assert_eq!(select(&scores, &[0.1], &options).unwrap(), want);
                        let _held = lock.lock().unwrap();
                        assert_eq!(select(&long, &[0.1], &options).unwrap(), whole);
                    });
                    DEPTH.set(DEPTH.get() - 1);
                });
            });
            // From outside, too.
            assert_eq!(context.run(|| select(&long, &[0.1], &options)).unwrap(), whole);
        }
        assert_eq!(deepest.into_inner(), 1);
    });
}

#[test]
fn workers_of_a_host_that_come_in_time_do_help() {
    in_time(|| {
        let row = gaussian(1 << 22, 4.0 / 2.0);
        let scores = Scores::new(&row[..], &[1 << 10, 1 << 12]).unwrap();
        let host = Arc::new(ThreadPoolBuilder::new().num_threads(3).build().unwrap());
        // Of a pool that is busy for ever nobody helps, and nobody is waited for.
        let (busy, free) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(4)));
        for _ in 0..3 {
            let (busy, free) = (Arc::clone(&busy), Arc::clone(&free));
            host.spawn(move || {
                busy.fetch_add(1, Ordering::SeqCst);
                free.wait();
            });
        }
        while busy.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        let context = Context::new().pool(&host);
        let want = context.run(|| select(&scores, &[0.1], &Options::new())).unwrap();
        free.wait();
        let found = context.run(|| select(&scores, &[0.1], &Options::new())).unwrap();
        assert_eq!(found, want);
    });
}
