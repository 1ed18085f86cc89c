//! Settings of the calls on a thread: executor, cancellation and memory.
//!
//! They apply to a thread while [`under`] runs, and to every helper of a call while it helps.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rayon::ThreadPool;

use crate::error::Error;
use crate::runtime::workspace::Workspace;

/// Flag that ends every call under a [`Context`](crate::Context) with this token, on any thread, once it is raised.
/// Clones share the flag. It cannot be lowered.
///
/// ```
/// use certk_rs::{CancelToken, Context, Error, Options, Scores, select};
///
/// let token = CancelToken::new();
/// let row = [1.0_f32, 2.0];
/// let scores = Scores::new(&row[..], &[1, 2])?;
/// let context = Context::new().cancel(&token);
/// assert!(context.run(|| select(&scores, &[0.1], &Options::new())).is_ok());
/// token.cancel();
/// let stopped = context.run(|| select(&scores, &[0.1], &Options::new()));
/// assert_eq!(stopped, Err(Error::Interrupted));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Returns a flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises the flag.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if the flag was raised.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Threads that help the calling thread.
#[derive(Debug, Clone, Default)]
pub(crate) enum Executor {
    /// Free workers of the crate's own pool.
    #[default]
    Own,
    /// Threads of an OpenMP runtime of the host, or else the own pool.
    OpenMp,
    /// No other thread.
    Serial,
    /// Workers of a host's pool that start in time.
    Pool(Arc<ThreadPool>),
    /// Workers of the pool that the thread belongs to, else of rayon's global pool.
    Current,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Ambient {
    pub(crate) executor: Executor,
    pub(crate) tokens: Vec<CancelToken>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) memory_limit: Option<usize>,
    /// Number of threads for calls whose own option gives none.
    pub(crate) threads: Option<usize>,
    pub(crate) workspace: Option<Workspace>,
}

impl Ambient {
    fn can_stop(&self) -> bool {
        self.deadline.is_some() || !self.tokens.is_empty()
    }

    /// Checks the flags and the deadline.
    ///
    /// # Errors
    /// [`Error::Interrupted`], [`Error::DeadlineExceeded`].
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.tokens.iter().any(CancelToken::is_cancelled) {
            return Err(Error::Interrupted);
        }
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(Error::DeadlineExceeded),
            _ => Ok(()),
        }
    }
}

thread_local! {
    static AMBIENT: RefCell<Option<Arc<Ambient>>> = const { RefCell::new(None) };
}

/// Returns the settings of this thread's calls.
pub(crate) fn current() -> Option<Arc<Ambient>> {
    AMBIENT.with_borrow(Option::clone)
}

/// Runs `work` on this thread under these settings.
pub(crate) fn under<R>(ambient: Option<Arc<Ambient>>, work: impl FnOnce() -> R) -> R {
    let _before = Before(AMBIENT.replace(ambient));
    work()
}

/// Runs `work` without cancellation and deadline.
pub(crate) fn uninterrupted<R>(work: impl FnOnce() -> R) -> R {
    let patient = current().filter(|ambient| ambient.can_stop()).map(|ambient| {
        let tokens = Vec::new();
        Arc::new(Ambient { tokens, deadline: None, ..Ambient::clone(&ambient) })
    });
    match patient {
        Some(patient) => under(Some(patient), work),
        None => work(),
    }
}

/// Previous settings, restored on drop, also by a panic.
struct Before(Option<Arc<Ambient>>);

impl Drop for Before {
    fn drop(&mut self) {
        AMBIENT.set(self.0.take());
    }
}

/// Reads this thread's settings.
fn look<R: Default>(what: impl FnOnce(&Ambient) -> R) -> R {
    AMBIENT.with_borrow(|ambient| ambient.as_deref().map(what).unwrap_or_default())
}

/// Returns the executor of this thread's calls.
pub(crate) fn executor() -> Executor {
    look(|ambient| ambient.executor.clone())
}

/// Returns the number of threads for calls that give none.
pub(crate) fn threads() -> Option<usize> {
    look(|ambient| ambient.threads)
}

/// Returns the workspace of the context; `None` while a thread ends.
pub(crate) fn workspace() -> Option<Workspace> {
    let of =
        |ambient: &RefCell<Option<Arc<Ambient>>>| ambient.borrow().as_deref()?.workspace.clone();
    AMBIENT.try_with(of).ok()?
}

/// Returns `true` if the context has a workspace.
pub(crate) fn has_workspace() -> bool {
    let of = |ambient: &RefCell<Option<Arc<Ambient>>>| {
        ambient.borrow().as_deref().is_some_and(|ambient| ambient.workspace.is_some())
    };
    AMBIENT.try_with(of).unwrap_or(false)
}

/// Returns the limit on a single request for memory, in bytes.
pub(crate) fn memory_limit() -> Option<usize> {
    look(|ambient| ambient.memory_limit)
}

/// Checks that this thread's calls may continue.
///
/// # Errors
/// [`Error::Interrupted`], [`Error::DeadlineExceeded`].
pub(crate) fn check() -> Result<(), Error> {
    AMBIENT.with_borrow(|ambient| ambient.as_deref().map_or(Ok(()), Ambient::check))
}

/// Entries processed between two checks: some tens of microseconds.
pub(crate) const PIECE: usize = 1 << 13;

/// Returns items that end early once this thread's calls are to end. The caller must [`check`] before it uses the
/// results; `threads` does so after each piece of work.
pub(crate) fn asked<I: IntoIterator>(items: I) -> impl Iterator<Item = I::Item> {
    let mut left = 0;
    items.into_iter().map_while(move |item| {
        if left == 0 {
            left = PIECE;
            check().ok()?;
        }
        left -= 1;
        Some(item)
    })
}

/// Returns the same for items that each take a while.
pub(crate) fn asked_each<I: IntoIterator>(items: I) -> impl Iterator<Item = I::Item> {
    items.into_iter().take_while(|_| check().is_ok())
}

/// Returns pieces of a list, for loops that compilers vectorize. They end like [`asked`].
pub(crate) fn pieces<T>(list: &[T]) -> impl Iterator<Item = &[T]> {
    list.chunks(PIECE).take_while(|_| check().is_ok())
}

/// Returns mutable pieces, as [`pieces`].
pub(crate) fn pieces_mut<T>(list: &mut [T]) -> impl Iterator<Item = &mut [T]> {
    list.chunks_mut(PIECE).take_while(|_| check().is_ok())
}
