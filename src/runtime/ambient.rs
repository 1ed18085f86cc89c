//! What the calls on a thread run under: who works, what stops them, and what memory they may use.
//!
//! It goes with a thread for as long as [`under`] runs, and with every helper of a call for as long as it helps.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rayon::ThreadPool;

use crate::error::Error;
use crate::runtime::workspace::Workspace;

/// A flag that ends calls: those that run under a [`Context`](crate::Context) which was given it, on any thread, once it is raised.
/// A clone is the same flag. It cannot be lowered.
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
    /// A flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises the flag.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was raised.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Who works beside the thread that calls.
#[derive(Debug, Clone, Default)]
pub(crate) enum Executor {
    /// Workers of the crate's own pool that are free.
    #[default]
    Own,
    /// The threads of an OpenMP runtime that a host keeps, or else those.
    OpenMp,
    /// Nobody.
    Serial,
    /// Workers of a host's pool that come in time.
    Pool(Arc<ThreadPool>),
    /// Those of the pool that the thread belongs to, else of rayon's global one.
    Current,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Ambient {
    pub(crate) executor: Executor,
    pub(crate) tokens: Vec<CancelToken>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) memory_limit: Option<usize>,
    /// For calls whose own option names no number.
    pub(crate) threads: Option<usize>,
    pub(crate) workspace: Option<Workspace>,
}

impl Ambient {
    fn can_stop(&self) -> bool {
        self.deadline.is_some() || !self.tokens.is_empty()
    }

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

/// What this thread's calls run under.
pub(crate) fn current() -> Option<Arc<Ambient>> {
    AMBIENT.with_borrow(Option::clone)
}

/// Runs `work` on this thread under that.
pub(crate) fn under<R>(ambient: Option<Arc<Ambient>>, work: impl FnOnce() -> R) -> R {
    let _before = Before(AMBIENT.replace(ambient));
    work()
}

/// Runs `work` where nothing stops it.
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

/// What there was, and is again when this is dropped, also by a panic.
struct Before(Option<Arc<Ambient>>);

impl Drop for Before {
    fn drop(&mut self) {
        AMBIENT.set(self.0.take());
    }
}

/// Looks at what this thread's calls run under.
fn look<R: Default>(what: impl FnOnce(&Ambient) -> R) -> R {
    AMBIENT.with_borrow(|ambient| ambient.as_deref().map(what).unwrap_or_default())
}

/// Who works beside this thread.
pub(crate) fn executor() -> Executor {
    look(|ambient| ambient.executor.clone())
}

/// The number of threads for calls that name none.
pub(crate) fn threads() -> Option<usize> {
    look(|ambient| ambient.threads)
}

/// The workspace of its context; none where a thread ends.
pub(crate) fn workspace() -> Option<Workspace> {
    let of =
        |ambient: &RefCell<Option<Arc<Ambient>>>| ambient.borrow().as_deref()?.workspace.clone();
    AMBIENT.try_with(of).ok()?
}

/// Whether its context was given one.
pub(crate) fn has_workspace() -> bool {
    let of = |ambient: &RefCell<Option<Arc<Ambient>>>| {
        ambient.borrow().as_deref().is_some_and(|ambient| ambient.workspace.is_some())
    };
    AMBIENT.try_with(of).unwrap_or(false)
}

/// The most that may be asked for at a time.
pub(crate) fn memory_limit() -> Option<usize> {
    look(|ambient| ambient.memory_limit)
}

/// Whether this thread's calls shall end.
///
/// # Errors
/// [`Error::Interrupted`], [`Error::DeadlineExceeded`].
pub(crate) fn check() -> Result<(), Error> {
    AMBIENT.with_borrow(|ambient| ambient.as_deref().map_or(Ok(()), Ambient::check))
}

/// Entries that are worked on between two questions whether to go on: some tens of microseconds.
pub(crate) const PIECE: usize = 1 << 13;

/// Items that end early once this thread's calls shall end. Whoever takes them asks afterwards ([`check`]), before anything is
/// made of what came of them; `threads` does so behind each piece of work.
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

/// The same of items that take their time each.
pub(crate) fn asked_each<I: IntoIterator>(items: I) -> impl Iterator<Item = I::Item> {
    items.into_iter().take_while(|_| check().is_ok())
}

/// Pieces of a list, for loops that compilers turn into vector code; they end as [`asked`] has it.
pub(crate) fn pieces<T>(list: &[T]) -> impl Iterator<Item = &[T]> {
    list.chunks(PIECE).take_while(|_| check().is_ok())
}

/// The same, to be written to.
pub(crate) fn pieces_mut<T>(list: &mut [T]) -> impl Iterator<Item = &mut [T]> {
    list.chunks_mut(PIECE).take_while(|_| check().is_ok())
}
