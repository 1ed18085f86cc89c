//! Scratch between calls. No thread waits for a workspace: if it is locked, new scratch is made.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use crate::runtime::held::Held;

/// Scratch of one kind, which grows with use.
pub(crate) trait Scratch: Default + Send + Held + 'static {}

impl<T: Default + Send + Held + 'static> Scratch for T {}

/// Bytes that the process keeps at most by itself: enough for rows of some millions of keys.
pub(crate) const MOST_IDLE: usize = 1 << 28;

/// Memory that calls reuse. [`Workspace::bytes`] returns the idle part, [`Workspace::shrink_to`] frees it.
///
/// By default calls use the workspace of the process, which keeps at most 256 MiB by itself; each thread also keeps up
/// to 1 MiB of each kind of scratch. A [`Context`](crate::Context) with a workspace uses nothing else. Clones share the
/// workspace.
///
/// ```
/// use certk_rs::{Context, Options, Scores, Workspace, select};
///
/// let workspace = Workspace::new();
/// let context = Context::new().workspace(&workspace);
/// let row: Vec<f32> = (0..100_000).map(|i| (i % 97) as f32 / 9.0).collect();
/// let scores = Scores::new(&row[..], &[1, row.len()])?;
/// context.run(|| select(&scores, &[0.1], &Options::new()))?;
/// assert!(workspace.bytes() > 0);
/// workspace.shrink_to(0);
/// assert_eq!(workspace.bytes(), 0);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Workspace(Arc<Mutex<Shelf>>);

/// Scratch of all kinds, the last used at the end.
#[derive(Default)]
pub(crate) struct Shelf(Vec<Idle>);

/// Scratch not in use.
struct Idle {
    /// Type of the scratch: faster to compare than through each one's own table.
    kind: TypeId,
    scratch: Box<dyn Any + Send>,
    bytes: usize,
}

impl Shelf {
    pub(crate) const EMPTY: Shelf = Shelf(Vec::new());

    pub(crate) fn take<T: Scratch>(&mut self) -> Option<Box<T>> {
        let at = self.0.iter().rposition(|idle| idle.kind == TypeId::of::<T>())?;
        self.0.remove(at).scratch.downcast().ok()
    }

    /// Uses scratch in place; the flag is `true` if it now holds more than `most`.
    pub(crate) fn on<T: Scratch, R>(
        &mut self,
        most: usize,
        work: impl FnOnce(&mut T) -> R,
    ) -> Option<(R, bool)> {
        let at = self.0.iter().rposition(|idle| idle.kind == TypeId::of::<T>())?;
        let idle = &mut self.0[at];
        let scratch: &mut T = idle.scratch.downcast_mut()?;
        let found = work(scratch);
        idle.bytes = scratch.held();
        let large = idle.bytes > most;
        // Often requested scratch is found soon.
        if at + 1 < self.0.len() {
            self.0.swap(at, at + 1);
        }
        Some((found, large))
    }

    /// Returns `true` if there is scratch of a kind.
    fn has<T: Scratch>(&self) -> bool {
        self.0.iter().any(|idle| idle.kind == TypeId::of::<T>())
    }

    pub(crate) fn put<T: Scratch>(&mut self, scratch: Box<T>, bytes: usize) {
        self.0.push(Idle { kind: TypeId::of::<T>(), scratch, bytes });
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(|idle| idle.bytes).sum()
    }

    /// Frees the scratch that was not used for longest.
    fn shrink_to(&mut self, most: usize) {
        let mut left = self.bytes();
        self.0.retain(|idle| {
            let stays = left <= most;
            left -= if stays { 0 } else { idle.bytes };
            stays
        });
    }
}

impl Workspace {
    /// Returns an empty workspace, which grows with use.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the workspace of calls outside any context.
    pub fn of_process() -> Self {
        process().clone()
    }

    /// Returns the idle bytes, without the memory of calls that are running.
    pub fn bytes(&self) -> usize {
        self.shelf(|shelf| shelf.bytes())
    }

    /// Frees memory until at most `bytes` are idle. Running calls keep their memory, and return it here when they end.
    pub fn shrink_to(&self, bytes: usize) {
        self.shelf(|shelf| shelf.shrink_to(bytes));
    }

    fn shelf<R>(&self, what: impl FnOnce(&mut Shelf) -> R) -> R {
        what(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Takes idle scratch, if there is any. The flag is `true` if the workspace was locked, so that there may be some.
    pub(crate) fn take<T: Scratch>(&self) -> (Option<Box<T>>, bool) {
        self.0.try_lock().map_or((None, true), |mut shelf| (shelf.take(), false))
    }

    /// Puts scratch back. `extra` scratch, made while the workspace was locked, is dropped if there is other scratch of
    /// its kind: else a workspace would grow with every collision of threads.
    pub(crate) fn put_back<T: Scratch>(
        &self,
        scratch: Box<T>,
        (bytes, extra): (usize, bool),
        most: Option<usize>,
    ) {
        if let Ok(mut shelf) = self.0.try_lock() {
            if extra && shelf.has::<T>() {
                return;
            }
            shelf.put(scratch, bytes);
            if let Some(most) = most {
                shelf.shrink_to(most);
            }
        }
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace").field("bytes", &self.bytes()).finish()
    }
}

/// Returns the workspace of the process. A forked child may find it locked for ever, and then makes all scratch anew.
pub(crate) fn process() -> &'static Workspace {
    static PROCESS: OnceLock<Workspace> = OnceLock::new();
    PROCESS.get_or_init(Workspace::new)
}
