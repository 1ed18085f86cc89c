//! Sessions: keys and values, with an index that grows with them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use certk_rs::{IndexOptions, KeyIndex, ValueBall, Vectors};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::failure::{Failure, Result};
use crate::tensors::Tensor;

/// Bytes that a permit for memory stands for.
const UNIT: usize = 1 << 12;

pub(crate) struct Sessions {
    all: Mutex<HashMap<String, Arc<Session>>>,
    memory: Arc<Semaphore>,
}

/// The snapshot that is there now, and the memory that is reserved for it.
type Session = Mutex<(Arc<Snapshot>, OwnedSemaphorePermit)>;

/// A session at one moment. A request works on the snapshot that is there when it begins.
#[derive(Clone)]
pub(crate) struct Snapshot {
    /// `(n, heads, d)`, so that what is appended lies behind what is there.
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) index: KeyIndex<'static>,
    pub(crate) ball: ValueBall,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that is done under a lock is left half-done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sessions {
    pub(crate) fn new(bytes: usize) -> Self {
        let memory = Semaphore::new((bytes / UNIT).min(Semaphore::MAX_PERMITS));
        Sessions { all: Mutex::default(), memory: Arc::new(memory) }
    }

    fn get(&self, name: &str) -> Result<Arc<Session>> {
        let missing = || Failure::new(StatusCode::NOT_FOUND, "no such session: PUT it first");
        lock(&self.all).get(name).cloned().ok_or_else(missing)
    }

    pub(crate) fn now(&self, name: &str) -> Result<Arc<Snapshot>> {
        Ok(Arc::clone(&lock(&*self.get(name)?).0))
    }

    pub(crate) fn delete(&self, name: &str) -> Result<()> {
        // Its memory is freed after the lock.
        let _session = self.get(name)?;
        lock(&self.all).remove(name);
        Ok(())
    }

    /// Make a session, in the place of one of the same name; returns how many keys it has.
    pub(crate) fn put(&self, name: &str, [keys, values]: [Tensor; 2]) -> Result<usize> {
        let len = check(&keys, &values)?;
        let index = KeyIndex::build(&vectors(&keys)?, &IndexOptions::new())?;
        let ball = finite(ValueBall::new(&vectors(&values)?)?)?;
        let memory = self.reserve(cost(&keys, &values, &index) + name.len())?;
        let snapshot = Arc::new(Snapshot { keys, values, index, ball });
        let session = Arc::new(Mutex::new((snapshot, memory)));
        let _replaced = lock(&self.all).insert(name.to_owned(), session);
        Ok(len)
    }

    /// Append to a session that has `at` keys; returns how many it has then. On an error nothing has changed.
    pub(crate) fn append(&self, name: &str, at: Option<usize>, of: &[Tensor; 2]) -> Result<usize> {
        let [keys, values] = of;
        check(keys, values)?;
        let session = self.get(name)?;
        let before = Arc::clone(&lock(&session).0);
        let len = before.keys.shape[0];
        // These share their memory with the snapshot.
        let (mut index, mut ball) = (before.index.snapshot(), before.ball.clone());
        index.append(&vectors(keys)?)?;
        ball.append(&vectors(values)?)?;
        let ball = finite(ball)?;
        let more = cost(keys, values, &index).saturating_sub(before.index.bytes());
        let memory = self.reserve(more)?;
        drop(before);
        let (now, reserved) = &mut *lock(&session);
        let have = now.keys.shape[0];
        if have != len || at.is_some_and(|at| at != have) {
            let message = format!("the session has {have} keys now: append at {have}");
            return Err(Failure::new(StatusCode::CONFLICT, message));
        }
        // In place, unless a request reads the snapshot: then that stays, and this is a copy.
        let now = Arc::make_mut(now);
        now.keys.append(keys);
        now.values.append(values);
        (now.index, now.ball) = (index, ball);
        reserved.merge(memory);
        Ok(now.keys.shape[0])
    }

    fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        Arc::clone(&self.memory).try_acquire_many_owned(units).map_err(|_| {
            let message = format!("no memory is left for {bytes} bytes: delete a session");
            Failure::new(StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }
}

/// Bytes of a snapshot, with room to grow.
fn cost(keys: &Tensor, values: &Tensor, index: &KeyIndex<'_>) -> usize {
    2 * (keys.bytes().len() + values.bytes().len()) + index.bytes()
}

/// See a tensor `(n, heads, d)` as vectors `(heads, n, d)`: strides say where they lie.
pub(crate) fn vectors(of: &Tensor) -> Result<Vectors<'_>> {
    let (n, heads, dim) = (of.shape[0], of.shape[1], of.shape[2]);
    Ok(Vectors::strided(of.name, of.data()?, &[heads, n, dim], &[dim, heads * dim])?)
}

/// Refuse keys and values that do not belong together.
fn check(keys: &Tensor, values: &Tensor) -> Result<usize> {
    let sized = |tensor: &Tensor| tensor.shape.len() == 3 && !tensor.shape.contains(&0);
    let alike = keys.shape.get(..2) == values.shape.get(..2) && keys.dtype == values.dtype;
    if sized(keys) && sized(values) && alike {
        return Ok(keys.shape[0]);
    }
    let (k, v) = (&keys.shape, &values.shape);
    let problem =
        format!("keys {k:?}, values {v:?}: send (n, heads, d), (n, heads, d_v), one type");
    Err(Failure::input(problem))
}

/// Refuse values that are not finite: a ball around them is infinite.
fn finite(ball: ValueBall) -> Result<ValueBall> {
    let finite = ball.radii().iter().all(|radius| radius.is_finite());
    finite.then_some(ball).ok_or_else(|| Failure::input("values are not all finite: repair them"))
}
