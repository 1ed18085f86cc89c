//! Under what a caller's calls run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::ThreadPool;

use crate::runtime::ambient::{self, Ambient, CancelToken, Executor};
use crate::runtime::workspace::Workspace;

/// Who works on calls, what stops them, and what memory they may use: whatever [`Context::run`] runs, every function of this
/// crate that is called in it on the same thread keeps to it. What is found does not depend on it, bit for bit.
///
/// It replaces the context around it, if there is one, and may be used any number of times, by any number of threads at a time.
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
/// # How soon a call ends
/// Within 10 ms of its cancellation or deadline on a machine that is not overloaded, rows of many millions of keys included: every
/// thread that works on it asks between portions of some tens of microseconds to a few milliseconds. Nothing is returned then
/// but the error. Beside that there is the time in which the system takes memory back, some 30 ms for each gigabyte of
/// what was found until then.
#[derive(Debug, Clone, Default)]
#[must_use = "a context does nothing until something runs under it"]
pub struct Context(Arc<Ambient>);

/// Work that panics leaves nothing in a context half-done.
impl std::panic::UnwindSafe for Context {}
impl std::panic::RefUnwindSafe for Context {}

impl Context {
    /// The crate's own workers, no limits, the workspace of the process.
    pub fn new() -> Self {
        Self::default()
    }

    fn with(mut self, change: impl FnOnce(&mut Ambient)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// Calls use at most so many threads, the one that calls included, where their own option `threads` is `None` or they have
    /// none; without this, all that are available. A number that is not in 1 to 4096 is an
    /// [`Error::Option`](crate::Error::Option) of every call that may use several.
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

    /// The thread that calls does all the work, whatever `threads` says.
    pub fn serial(self) -> Self {
        self.with(|ambient| ambient.executor = Executor::Serial)
    }

    /// Workers of this pool help, as many as are free and at most as many as `threads` says, or as it has. A call waits for
    /// no worker that has not begun, and runs no other task of the pool meanwhile; it may be made on one of its workers.
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

    /// As [`Context::pool`], of the pool that the calling thread is a worker of, else of rayon's global pool: the way for a
    /// pool that is only borrowed, `pool.install(|| context.run(|| ..))`.
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

    /// Calls end with [`Error::Interrupted`](crate::Error::Interrupted) once this flag is raised, or another that was given before.
    pub fn cancel(self, token: &CancelToken) -> Self {
        self.with(|ambient| ambient.tokens.push(token.clone()))
    }

    /// Calls end with [`Error::DeadlineExceeded`](crate::Error::DeadlineExceeded) from this moment on.
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

    /// The same, so long from now; what is too long for a clock is no deadline.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.with(|ambient| ambient.deadline = Instant::now().checked_add(timeout))
    }

    /// A call that would ask for more bytes than this at a time ends with [`Error::NoMemory`](crate::Error::NoMemory) before it does. A call
    /// asks a few times: for what it needs beside its arguments, by thread, and for what it returns.
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

    /// Calls reuse the memory of this workspace, and no other.
    pub fn workspace(self, workspace: &Workspace) -> Self {
        self.with(|ambient| ambient.workspace = Some(workspace.clone()))
    }

    /// Runs `work` on this thread under this context.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> R {
        ambient::under(Some(Arc::clone(&self.0)), work)
    }
}
