//! Settings for a caller's calls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::ThreadPool;

use crate::runtime::ambient::{self, Ambient, CancelToken, Executor};
use crate::runtime::workspace::Workspace;

/// Threads, cancellation, deadline and memory for calls. Every function of this crate that [`Context::run`] calls on
/// the same thread obeys them. Results do not depend on them, bit for bit.
///
/// A context replaces any outer one. It may be used any number of times, by any number of threads at once.
///
/// ```
/// use std::time::Duration;
///
/// use certk_rs::{Context, Error, Options, Scores, select};
///
/// let row = vec![0.5_f32; 1 << 20];
/// let scores = Scores::new(&row[..], &[1, row.len()])?;
/// let context = Context::new().serial().timeout(Duration::from_secs(60));
/// assert!(context.run(|| select(&scores, &[0.1], &Options::new())).is_ok());
///
/// let late = Context::new().timeout(Duration::ZERO);
/// let found = late.run(|| select(&scores, &[0.1], &Options::new()));
/// assert_eq!(found, Err(Error::DeadlineExceeded));
/// # Ok::<(), Error>(())
/// ```
///
/// # Latency of cancellation
/// A call ends within 10 ms of its cancellation or deadline on a machine that is not overloaded, even with rows of many
/// millions of keys. Every thread of the call checks between portions of some tens of microseconds to a few
/// milliseconds. Nothing but the error is returned. Then the system takes memory back, some 30 ms per gigabyte of
/// partial results.
#[derive(Debug, Clone, Default)]
#[must_use = "a context does nothing until something runs under it"]
pub struct Context(Arc<Ambient>);

/// A panic in the work leaves the context intact.
impl std::panic::UnwindSafe for Context {}
impl std::panic::RefUnwindSafe for Context {}

impl Context {
    /// Returns a context with the crate's own workers, no limits and the workspace of the process.
    pub fn new() -> Self {
        Self::default()
    }

    fn with(mut self, change: impl FnOnce(&mut Ambient)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// Limits the threads of a call, the caller included, if the call's own option `threads` is `None` or missing. The
    /// default is all that are available. A number outside 1 to 4096 is an [`Error::Option`](crate::Error::Option) of
    /// every call that may use several threads.
    ///
    /// ```
    /// use certk_rs::{Context, Scores, bounds::score_gap};
    /// let row = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0];
    /// let scores = Scores::new(&row, &[1, 6])?;
    /// let gap = Context::new().threads(2).run(|| score_gap(&scores, &[2]))?;
    /// assert_eq!(gap, score_gap(&scores, &[2])?);
    /// assert!(Context::new().threads(0).run(|| score_gap(&scores, &[2])).is_err());
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn threads(self, threads: usize) -> Self {
        self.with(|ambient| ambient.threads = Some(threads))
    }

    /// Does all work on the calling thread, for any `threads`.
    pub fn serial(self) -> Self {
        self.with(|ambient| ambient.executor = Executor::Serial)
    }

    /// Takes helpers from this pool: free workers, at most `threads` or the size of the pool. A call waits for no
    /// worker that has not begun, and runs no other task of the pool meanwhile. It may be made on one of the pool's
    /// workers.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use certk_rs::{Context, Options, Scores, select};
    /// let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
    /// let row = vec![0.5_f32; 1 << 18];
    /// let scores = Scores::new(&row, &[1, row.len()])?;
    /// let found = Context::new().pool(&pool).run(|| select(&scores, &[0.1], &Options::new()))?;
    /// assert_eq!(found, select(&scores, &[0.1], &Options::new().threads(1))?);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn pool(self, pool: &Arc<ThreadPool>) -> Self {
        self.with(|ambient| ambient.executor = Executor::Pool(Arc::clone(pool)))
    }

    /// Takes helpers, as [`Context::pool`], from the pool of the calling worker, else from rayon's global pool. Use it
    /// for a borrowed pool: `pool.install(|| context.run(|| ..))`.
    ///
    /// ```
    /// use certk_rs::{Context, Options, Scores, select};
    /// let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    /// let scores = Scores::new(&[9.0_f32, 0.0], &[1, 2])?;
    /// let context = Context::new().current_pool();
    /// let found = pool.install(|| context.run(|| select(&scores, &[0.1], &Options::new())))?;
    /// assert_eq!(found.row(0), [0]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn current_pool(self) -> Self {
        self.with(|ambient| ambient.executor = Executor::Current)
    }

    /// Ends calls with [`Error::Interrupted`](crate::Error::Interrupted) once this flag, or one given before, is
    /// raised.
    pub fn cancel(self, token: &CancelToken) -> Self {
        self.with(|ambient| ambient.tokens.push(token.clone()))
    }

    /// Ends calls with [`Error::DeadlineExceeded`](crate::Error::DeadlineExceeded) from this moment on.
    ///
    /// ```
    /// use std::time::Instant;
    /// use certk_rs::{Context, Error, Options, Scores, select};
    /// let scores = Scores::new(&[9.0_f32, 0.0], &[1, 2])?;
    /// let late = Context::new().deadline(Instant::now());
    /// let found = late.run(|| select(&scores, &[0.1], &Options::new()));
    /// assert_eq!(found, Err(Error::DeadlineExceeded));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn deadline(self, deadline: Instant) -> Self {
        self.with(|ambient| ambient.deadline = Some(deadline))
    }

    /// Sets the deadline to a time from now; a time too long for the clock sets none.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.with(|ambient| ambient.deadline = Instant::now().checked_add(timeout))
    }

    /// Limits a single request for memory, in bytes. A larger one ends the call with
    /// [`Error::NoMemory`](crate::Error::NoMemory) before it is made. A call makes a few requests: for its working
    /// memory, by thread, and for its results.
    ///
    /// ```
    /// use certk_rs::{Context, ErrorClass, Options, Scores, select};
    /// let row: Vec<f32> = (0..100_000).map(|i| (i % 97) as f32 / 9.0).collect();
    /// let scores = Scores::new(&row, &[1, row.len()])?;
    /// let small = Context::new().memory_limit(10_000);
    /// let error = small.run(|| select(&scores, &[0.1], &Options::new())).unwrap_err();
    /// assert_eq!(error.class(), ErrorClass::Resource);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    pub fn memory_limit(self, bytes: usize) -> Self {
        self.with(|ambient| ambient.memory_limit = Some(bytes))
    }

    /// Makes calls reuse the memory of this workspace, and no other.
    pub fn workspace(self, workspace: &Workspace) -> Self {
        self.with(|ambient| ambient.workspace = Some(workspace.clone()))
    }

    /// Runs `work` on this thread under this context.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> R {
        ambient::under(Some(Arc::clone(&self.0)), work)
    }
}
