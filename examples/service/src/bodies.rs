//! Bodies of requests: how many bytes of them there may be at a time, and the memory that they lie in.
//!
//! A body is read into memory that bodies before it have used: pages that the system gives anew take longer to come than
//! numbers of a large body take to be looked at.

use std::sync::{Arc, Mutex, PoisonError};

use axum::body::{Bytes, HttpBody};
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use tokio::sync::Semaphore;

use crate::app::App;
use crate::failure::Failure;

/// A permit is so many bytes.
const UNIT: usize = 1 << 10;
/// Bytes that lie idle at most.
const IDLE: usize = 64 << 20;
/// Memory of smaller bodies comes from the allocator.
const SMALL: usize = 1 << 16;

pub(crate) struct Bodies {
    free: Semaphore,
    most: usize,
    idle: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Bodies {
    /// At least the largest single body has room.
    pub(crate) fn new(most: usize, largest: usize) -> Self {
        let most = most.max(largest).div_ceil(UNIT).min(Semaphore::MAX_PERMITS >> 1);
        Bodies { free: Semaphore::new(most), most, idle: Arc::default() }
    }

    pub(crate) fn held(&self) -> usize {
        (self.most - self.free.available_permits()) * UNIT
    }

    /// Empty memory for so many bytes: the smallest idle one that is not far too large.
    fn memory(&self, bytes: usize) -> Memory {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |each: &Vec<u8>| (bytes..=bytes.saturating_mul(4)).contains(&each.capacity());
        let best = idle.iter().enumerate().filter(|(_, each)| bytes > SMALL && fits(each));
        let best = best.min_by_key(|(_, each)| each.capacity()).map(|(at, _)| at);
        let bytes = match best {
            Some(at) => idle.swap_remove(at),
            None => Vec::with_capacity(bytes),
        };
        Memory { bytes, idle: Arc::clone(&self.idle) }
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

/// A body, whole.
pub(crate) struct Body(pub(crate) Bytes);

impl FromRequest<Arc<App>> for Body {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let most = app.settings.max_body;
        let too_large = || {
            let message = format!("the body is larger than {most} bytes");
            Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        let mut body = request.into_body();
        let says = body.size_hint();
        if says.lower() > most as u64 {
            return Err(too_large());
        }
        let mut memory = app.bodies.memory(says.lower() as usize);
        while let Some(frame) = body.frame().await {
            let broken = |_| Failure::new(StatusCode::BAD_REQUEST, "the body ends too soon");
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            if data.len() > most - memory.bytes.len() {
                return Err(too_large());
            }
            memory.bytes.extend_from_slice(&data);
        }
        Ok(Body(Bytes::from_owner(memory)))
    }
}

/// Lets a request through whose body there is room for, by the length that it says, until it is answered.
pub(crate) async fn limit(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    // Who does not say how long a body is may send the longest. A longer one is refused when it is read.
    let most = app.settings.max_body as u64;
    let length = request.body().size_hint().upper().unwrap_or(most).min(most) as usize;
    let permits = u32::try_from(length.div_ceil(UNIT)).unwrap_or(u32::MAX);
    let Ok(_held) = app.bodies.free.try_acquire_many(permits) else {
        let message =
            "bodies of other requests take all the memory for them; try again in a second";
        return Failure::new(StatusCode::SERVICE_UNAVAILABLE, message).into_response();
    };
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
