//! Where scratch lies between calls. No thread waits for another here: where a workspace is just being looked at, scratch is
//! made anew.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

/// Scratch of one kind, which grows with what it is used for.
pub(crate) trait Scratch: Default + Send + 'static {
    /// How much memory it holds.
    fn bytes(&self) -> usize;
}

/// What the process keeps at most without being asked to give it back: what rows of some millions of keys need.
pub(crate) const MOST_IDLE: usize = 1 << 28;

/// Memory that calls reuse: [`Workspace::bytes`] says how much of it lies idle, [`Workspace::shrink_to`] gives it back.
///
/// Calls use that of the process, which keeps at most 256 MiB by itself, and beside it each thread keeps up to 1 MiB of each kind
/// of scratch. A [`Context`](crate::Context) with a workspace of its own uses nothing else. A clone is the same workspace.
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

/// Scratch of all kinds, the one used last at the end.
#[derive(Default)]
pub(crate) struct Shelf(Vec<Idle>);

/// Scratch that nobody uses now.
struct Idle {
    /// Of what type it is: to ask each by its own table would be slower.
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

    /// Works on scratch where it lies; says whether it holds more than `most` now.
    pub(crate) fn on<T: Scratch, R>(
        &mut self,
        most: usize,
        work: impl FnOnce(&mut T) -> R,
    ) -> Option<(R, bool)> {
        let at = self.0.iter().rposition(|idle| idle.kind == TypeId::of::<T>())?;
        let idle = &mut self.0[at];
        let scratch: &mut T = idle.scratch.downcast_mut()?;
        let found = work(scratch);
        idle.bytes = scratch.bytes();
        let large = idle.bytes > most;
        // Those that are asked for often are found soon.
        if at + 1 < self.0.len() {
            self.0.swap(at, at + 1);
        }
        Some((found, large))
    }

    /// Whether there is scratch of a kind.
    fn has<T: Scratch>(&self) -> bool {
        self.0.iter().any(|idle| idle.kind == TypeId::of::<T>())
    }

    pub(crate) fn put<T: Scratch>(&mut self, scratch: Box<T>, bytes: usize) {
        self.0.push(Idle { kind: TypeId::of::<T>(), scratch, bytes });
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(|idle| idle.bytes).sum()
    }

    /// Lets go of what was not used for longest.
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
    /// An empty workspace; it grows with what it is used for.
    pub fn new() -> Self {
        Self::default()
    }

    /// That of calls outside of any context.
    pub fn of_process() -> Self {
        process().clone()
    }

    /// Bytes that lie idle here: what calls that run at this moment use is not counted.
    pub fn bytes(&self) -> usize {
        self.shelf(|shelf| shelf.bytes())
    }

    /// Gives memory back until at most so many bytes lie idle. What calls use at this moment stays with them, and comes here
    /// when they end.
    pub fn shrink_to(&self, bytes: usize) {
        self.shelf(|shelf| shelf.shrink_to(bytes));
    }

    fn shelf<R>(&self, what: impl FnOnce(&mut Shelf) -> R) -> R {
        what(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Scratch that lies here, if there is some; and whether there may be some that could not be looked for.
    pub(crate) fn take<T: Scratch>(&self) -> (Option<Box<T>>, bool) {
        self.0.try_lock().map_or((None, true), |mut shelf| (shelf.take(), false))
    }

    /// Puts scratch here, unless it is `extra`, made because others could not be looked for, and there are others: a workspace would grow
    /// with every time that two threads meet.
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

/// A forked child may find it locked for ever, and then makes all scratch anew.
pub(crate) fn process() -> &'static Workspace {
    static PROCESS: OnceLock<Workspace> = OnceLock::new();
    PROCESS.get_or_init(Workspace::new)
}
