//! Bodies of requests: how much memory all of them may take, and the memory that they lie in.
//!
//! A body is read into memory that bodies before it have used: pages that the system gives anew take longer to come than
//! numbers of a large body take to be looked at.

use std::sync::{Arc, Mutex, PoisonError};

use axum::body::{Bytes, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::app::App;
use crate::failure::Failure;
use crate::tensors::is_json;

/// A permit is so many bytes.
const UNIT: usize = 1 << 10;
/// Bytes that one of JSON may become. `0,` is a number in two bytes: it has 8 in a list that grows to twice what it holds, and 8 as stored.
const JSON: usize = 16;
/// Bytes that lie idle at most.
const IDLE: usize = 64 << 20;
/// Memory of smaller bodies comes from the allocator.
const SMALL: usize = 1 << 16;

pub(crate) struct Bodies {
    free: Arc<Semaphore>,
    most: usize,
    idle: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Bodies {
    /// At least the largest single body has room.
    pub(crate) fn new(most: usize, largest: usize) -> Self {
        let most = most.max(largest).div_ceil(UNIT).min(Semaphore::MAX_PERMITS >> 1);
        Bodies { free: Arc::new(Semaphore::new(most)), most, idle: Arc::default() }
    }

    pub(crate) fn held(&self) -> usize {
        (self.most - self.free.available_permits()) * UNIT
    }

    /// Empty memory for so many bytes.
    fn memory(&self, bytes: usize) -> Memory {
        let anew = || Memory { bytes: Vec::with_capacity(bytes), idle: Arc::clone(&self.idle) };
        self.reused(bytes).unwrap_or_else(anew)
    }

    /// The smallest idle memory for so many bytes that is not far too large.
    fn reused(&self, bytes: usize) -> Option<Memory> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |each: &Vec<u8>| (bytes..=bytes.saturating_mul(4)).contains(&each.capacity());
        let best = idle.iter().enumerate().filter(|(_, each)| bytes > SMALL && fits(each));
        let (at, _) = best.min_by_key(|(_, each)| each.capacity())?;
        Some(Memory { bytes: idle.swap_remove(at), idle: Arc::clone(&self.idle) })
    }

    /// Raises what is held to so many bytes, if they are free.
    fn raise(&self, held: &mut Option<OwnedSemaphorePermit>, bytes: usize) -> Result<(), Failure> {
        let have = held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.div_ceil(UNIT).saturating_sub(have);
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        let more = Arc::clone(&self.free).try_acquire_many_owned(more).map_err(|_| {
            let problem =
                "bodies of other requests take all the memory for them; try again in a second";
            Failure::new(StatusCode::SERVICE_UNAVAILABLE, problem)
        })?;
        match held {
            Some(held) => held.merge(more),
            None => *held = Some(more),
        }
        Ok(())
    }
}

/// Memory of a body, which the next may have.
struct Memory {
    bytes: Vec<u8>,
    idle: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = idle.iter().map(Vec::capacity).sum();
        if bytes.capacity() > SMALL && all.saturating_add(bytes.capacity()) <= IDLE {
            idle.push(bytes);
        }
    }
}

/// A body, whole. Its memory is held until this is dropped: what was read of it is not to live longer.
#[derive(Default)]
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    _held: Option<OwnedSemaphorePermit>,
}

impl FromRequest<Arc<App>> for Body {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let each = if is_json(request.headers()) { JSON } else { 1 };
        let most = app.settings.max_body / each;
        let too_large = || {
            let remedy = if each > 1 { "; send raw numbers, which may be more" } else { "" };
            let message = format!("the body is larger than {most} bytes{remedy}");
            Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        let mut body = request.into_body();
        let says = body.size_hint();
        if says.lower() > most as u64 {
            return Err(too_large());
        }
        let longest = says.upper().map_or(most, |upper| most.min(upper as usize));
        let (mut memory, mut held) = (app.bodies.memory(0), None);
        while let Some(frame) = body.frame().await {
            let broken = |_| Failure::new(StatusCode::BAD_REQUEST, "the body ends too soon");
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            let needed = memory.bytes.len() + data.len();
            if needed > most {
                return Err(too_large());
            }
            if needed > memory.bytes.capacity() {
                // By what has come, not by what is announced.
                let room = (2 * needed).min(longest).max(needed);
                app.bodies.raise(&mut held, room * each)?;
                if let Some(mut larger) = app.bodies.reused(room) {
                    larger.bytes.extend_from_slice(&memory.bytes);
                    memory = larger;
                } else {
                    let more = room - memory.bytes.len();
                    memory.bytes.reserve_exact(more);
                }
            }
            memory.bytes.extend_from_slice(&data);
        }
        Ok(Body { bytes: Bytes::from_owner(memory), _held: held })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::{Dtype, stored_bytes};

    #[test]
    fn memory_is_used_again_and_little_of_it_lies_idle() {
        let bodies = Bodies::new(1 << 30, 1 << 20);
        let first = bodies.memory(1 << 20);
        let at = first.bytes.as_ptr();
        drop(first);
        assert_eq!(bodies.memory(1 << 19).bytes.as_ptr(), at);
        // Far too large for this one.
        assert_ne!(bodies.memory(1 << 17).bytes.as_ptr(), at);
        let many: Vec<_> = (0..10).map(|_| bodies.memory(10 << 20)).collect();
        drop(many);
        let idle: usize = bodies.idle.lock().unwrap().iter().map(Vec::capacity).sum();
        assert!((10 << 20..=IDLE).contains(&idle));
        assert!(bodies.memory(10).bytes.capacity() < SMALL);
    }

    #[test]
    fn json_becomes_no_more_than_it_counts() {
        // A list is largest beside what it holds where it has just grown.
        for count in [1000, 1023, 1024, 1025, (1 << 16) + 1] {
            let text = format!("[0{}]", ",0".repeat(count - 1));
            let list: Vec<f64> = serde_json::from_str(&text).unwrap();
            let stored = stored_bytes(&list, Dtype::F64);
            let all = text.len() + 8 * list.capacity() + stored.capacity();
            assert!(all <= JSON * text.len(), "{count} {all}");
        }
    }
}
