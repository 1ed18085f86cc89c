//! How many bytes sessions may hold together, counted until the last reader of them is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct Memory {
    most: usize,
    held: AtomicUsize,
}

/// Some of it; it is given back when this is dropped.
pub(super) struct Charge {
    memory: Arc<Memory>,
    pub(super) bytes: usize,
}

impl Memory {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Memory { most, held: AtomicUsize::new(0) })
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// So many bytes, if they are there.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        let more = |held: usize| held.checked_add(bytes).filter(|&held| held <= self.most);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Charge { memory: Arc::clone(self), bytes })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.memory.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
