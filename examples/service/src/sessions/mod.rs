//! Sessions: keys, and values if there are any, that stay with the service, each with an index.
//!
//! A session is a row of versions. Every change makes a new one and is made by one writer at a time; a reader works on the version
//! that is there when it begins, and names it. No reader waits for a writer, and no writer for readers.

mod attend;
mod files;
mod grown;
mod memory;
mod name;
mod routes;
mod rows;
mod search;
mod tensors;
mod version;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use tokio::sync::Mutex as Turn;

pub(crate) use attend::handle as attend;
pub(crate) use routes::{append, evict, list, persist, put, remove, show, truncate};
pub(crate) use search::handle as search;

use self::files::{Files, Trouble};
use self::memory::{Charge, Memory};
use self::version::{Outline, Pen, Version};
use crate::compute::Watch;
use crate::failure::Failure;

/// All sessions.
pub(crate) struct Sessions {
    /// How many there may be.
    most: usize,
    memory: Arc<Memory>,
    files: Option<Files>,
    all: Mutex<HashMap<String, Arc<Session>>>,
    /// Counts uses, so that each has a time.
    uses: AtomicU64,
    made_way: AtomicU64,
}

pub(crate) struct Session {
    name: String,
    /// Held by who writes; empty where memory for what comes next must be made.
    pen: Arc<Turn<Option<Pen>>>,
    now: Mutex<Now>,
    used: AtomicU64,
    /// The version that its file holds; 0 if there is no file.
    filed: AtomicU64,
}

/// Where a session is.
enum Now {
    Here(Arc<Version>),
    /// In its file only.
    Away(Outline),
    /// Deleted, replaced, or made way for others.
    Gone,
}

/// Nothing that is done under these locks panics, and nothing is left half-done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    fn new(name: &str, now: Now, pen: Option<Pen>, filed: u64) -> Arc<Self> {
        Arc::new(Session {
            name: name.to_owned(),
            pen: Arc::new(Turn::new(pen)),
            now: Mutex::new(now),
            used: AtomicU64::new(0),
            filed: AtomicU64::new(filed),
        })
    }

    /// The version that is here; `None` if it is in a file only.
    fn here(&self) -> Result<Option<Arc<Version>>, Failure> {
        match &*lock(&self.now) {
            Now::Here(version) => Ok(Some(Arc::clone(version))),
            Now::Away(_) => Ok(None),
            Now::Gone => Err(Failure::replaced()),
        }
    }

    /// What is there; `None` once it is gone.
    fn outline(&self) -> Option<(Outline, usize)> {
        match &*lock(&self.now) {
            Now::Here(of) => Some((of.outline(), of.bytes())),
            Now::Away(outline) => Some((*outline, 0)),
            Now::Gone => None,
        }
    }

    /// Makes a version the one that is there, unless the session is gone.
    fn publish(&self, version: Version) -> Result<Arc<Version>, Failure> {
        let version = Arc::new(version);
        match &mut *lock(&self.now) {
            Now::Gone => Err(Failure::replaced()),
            now => {
                *now = Now::Here(Arc::clone(&version));
                Ok(version)
            }
        }
    }
}

impl Sessions {
    /// With a folder, those that lie there.
    pub(crate) fn open(most: usize, bytes: usize, folder: Option<&Path>) -> io::Result<Self> {
        let mut all = HashMap::new();
        let mut files = None;
        if let Some(folder) = folder {
            let (opened, found) = Files::open(folder)?;
            for (name, outline) in found {
                let session = Session::new(&name, Now::Away(outline), None, outline.number);
                all.insert(name, session);
            }
            tracing::info!(sessions = all.len(), "came back");
            files = Some(opened);
        }
        Ok(Sessions {
            most,
            memory: Memory::new(bytes),
            files,
            all: Mutex::new(all),
            uses: AtomicU64::new(0),
            made_way: AtomicU64::new(0),
        })
    }

    /// How many there are, the bytes that they hold in memory, and how often one had to leave it.
    pub(crate) fn gauges(&self) -> (usize, usize, u64) {
        let all = lock(&self.all).len();
        (all, self.memory.held(), self.made_way.load(Ordering::Relaxed))
    }

    fn get(&self, name: &str) -> Result<Arc<Session>, Failure> {
        name::check(name)?;
        lock(&self.all).get(name).cloned().ok_or_else(Failure::missing)
    }

    fn touch(&self, session: &Session) {
        session.used.store(self.uses.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    fn is_current(&self, session: &Arc<Session>) -> bool {
        lock(&self.all).get(&session.name).is_some_and(|current| Arc::ptr_eq(current, session))
    }

    /// That a session of this name may be made.
    fn may_be_made(&self, all: &HashMap<String, Arc<Session>>, name: &str) -> Result<(), Failure> {
        if all.contains_key(name) || all.len() < self.most {
            return Ok(());
        }
        let most = self.most;
        Err(Failure::conflict(format!("there are {most} sessions, as many as may be: delete one")))
    }

    /// Puts a session in the place of whatever had its name.
    fn put(
        &self,
        name: &str,
        mut version: Version,
        pen: Pen,
    ) -> Result<(Arc<Session>, Arc<Version>), Failure> {
        let mut all = lock(&self.all);
        self.may_be_made(&all, name)?;
        let old = all.get(name).cloned();
        let mut filed = 0;
        if let Some(old) = &old {
            // Who writes to it now learns that it is gone.
            let last = old.outline().map_or(0, |(outline, _)| outline.number);
            version.number = version::next(last.max(version.number));
            *lock(&old.now) = Now::Gone;
            filed = old.filed.load(Ordering::Relaxed);
        }
        let version = Arc::new(version);
        let session = Session::new(name, Now::Here(Arc::clone(&version)), Some(pen), filed);
        self.touch(&session);
        all.insert(name.to_owned(), Arc::clone(&session));
        Ok((session, version))
    }

    /// Memory for a session; others that nobody reads leave it, those first that were not used for longest.
    fn room(&self, bytes: usize, watch: &Watch) -> Result<Charge, Failure> {
        let most = self.memory.most();
        if bytes > most {
            let message = format!(
                "the session alone needs {bytes} bytes, index included, and all may have {most}"
            );
            return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        loop {
            if let Some(charge) = self.memory.take(bytes) {
                return Ok(charge);
            }
            watch.check()?;
            if !self.make_way(watch)? {
                let message = "the memory for sessions is in use; try again, or delete some";
                return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, message));
            }
        }
    }

    /// Has one session leave memory; false if none can.
    fn make_way(&self, watch: &Watch) -> Result<bool, Failure> {
        let mut idle: Vec<_> = lock(&self.all).values().cloned().collect();
        idle.sort_by_key(|session| session.used.load(Ordering::Relaxed));
        for session in idle {
            // Who holds the pen writes.
            let Ok(mut pen) = Arc::clone(&session.pen).try_lock_owned() else { continue };
            // One is ours, one the session's; whoever reads has another.
            let unread =
                |version: &Arc<Version>, ours: usize| Arc::strong_count(version) == 1 + ours;
            let version = match &*lock(&session.now) {
                Now::Here(version) if unread(version, 0) => Arc::clone(version),
                _ => continue,
            };
            if self.files.is_some() {
                match self.file(&session, &version, watch) {
                    Ok(()) => {}
                    Err(failure) if failure.status == StatusCode::GATEWAY_TIMEOUT => {
                        return Err(failure);
                    }
                    // It stays; another may go.
                    Err(_) => continue,
                }
            }
            let outline = version.outline();
            {
                let mut now = lock(&session.now);
                if !matches!(&*now, Now::Here(version) if unread(version, 1)) {
                    continue;
                }
                *now = if self.files.is_some() { Now::Away(outline) } else { Now::Gone };
            }
            *pen = None;
            if self.files.is_none() {
                self.forget(&session);
            }
            self.made_way.fetch_add(1, Ordering::Relaxed);
            tracing::info!(name = session.name, "a session leaves memory");
            return Ok(true);
        }
        Ok(false)
    }

    /// Takes a session out of the list, if it is still the one of its name.
    fn forget(&self, session: &Arc<Session>) {
        let mut all = lock(&self.all);
        if all.get(&session.name).is_some_and(|current| Arc::ptr_eq(current, session)) {
            all.remove(&session.name);
        }
    }

    /// Writes a version into the session's file, unless that is there or somebody has replaced the session.
    fn file(&self, session: &Arc<Session>, of: &Version, watch: &Watch) -> Result<(), Failure> {
        let Some(files) = &self.files else {
            return Err(Failure::conflict("the service keeps no files: start it with --data"));
        };
        let _writing = lock(&files.writing);
        if session.filed.load(Ordering::Relaxed) >= of.number || !self.is_current(session) {
            return Ok(());
        }
        files.write(&session.name, of, watch)?;
        session.filed.store(of.number, Ordering::Relaxed);
        Ok(())
    }

    /// Writes all sessions that changed since they were written. Those that cannot be are in the log.
    pub(crate) fn file_all(&self) {
        if self.files.is_none() {
            return;
        }
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        for session in all {
            if let Ok(Some(version)) = session.here()
                && let Err(failure) = self.file(&session, &version, &Watch::patient())
            {
                tracing::error!(name = session.name, ?failure, "a session is not written");
            }
        }
    }

    /// Reads a session that is in its file only; who holds its pen does that.
    fn load(
        &self,
        session: &Arc<Session>,
        pen: &mut Option<Pen>,
        watch: &Watch,
    ) -> Result<Arc<Version>, Failure> {
        // Whoever had the pen before may have done it.
        if let Some(version) = session.here()? {
            return Ok(version);
        }
        let files = self.files.as_ref().ok_or_else(Failure::missing)?;
        let room = |outline: &Outline| {
            let room = version::roomy(outline.n);
            let charge = self.room(version::bytes(&outline.layout, room), watch)?;
            Ok(Pen::new(&outline.layout, room, charge))
        };
        match files.read(&session.name, room, watch) {
            Ok((outline, read)) => {
                let Outline { number, layout, n } = outline;
                let version = session.publish(read.version(layout, n, number, watch)?)?;
                *pen = Some(read);
                Ok(version)
            }
            Err(Trouble::Other(failure)) => Err(failure),
            Err(trouble) => {
                let _writing = lock(&files.writing);
                if !self.is_current(session) {
                    return Err(Failure::replaced());
                }
                if let Trouble::Damaged(why) = trouble {
                    files.set_aside(&session.name, &why);
                }
                *lock(&session.now) = Now::Gone;
                self.forget(session);
                let message = "the session's file was damaged and is set aside; PUT it anew";
                Err(Failure::new(StatusCode::GONE, message))
            }
        }
    }

    /// Deletes a session and its file; it does not come back.
    fn delete(&self, session: &Arc<Session>) -> Result<(), Failure> {
        let _writing = self.files.as_ref().map(|files| lock(&files.writing));
        if !self.is_current(session) {
            return Err(Failure::replaced());
        }
        if let Some(files) = &self.files {
            files.remove(&session.name)?;
        }
        *lock(&session.now) = Now::Gone;
        self.forget(session);
        Ok(())
    }
}
