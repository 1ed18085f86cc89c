//! Calls of the library: a `Context` for each request, on threads that serve no connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use certk_rs::{CancelToken, Context, Error, Workspace};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use crate::Settings;
use crate::failure::{Failure, Result};
use crate::sessions::Sessions;

/// The state that all requests share.
pub(crate) struct App {
    pub(crate) sessions: Sessions,
    timeout: Duration,
    call_memory: usize,
    /// A permit for each request that waits or runs, from before its body is read: so bodies are bounded, too.
    admitted: Arc<Semaphore>,
    /// A permit for each call that runs.
    running: Arc<Semaphore>,
    workspace: Workspace,
}

/// A request: the name of a session if the route has one, options, and the bytes of tensors.
pub(crate) struct Asked<Q> {
    pub(crate) name: String,
    pub(crate) query: Q,
    pub(crate) body: Bytes,
}

/// Cancels a call when its request is dropped, as hyper does when the client goes away.
struct CancelOnDrop(CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl App {
    pub(crate) fn new(settings: &Settings) -> Self {
        let threads = settings.threads.clamp(1, 256);
        let admitted = threads.saturating_add(settings.waiting).min(Semaphore::MAX_PERMITS);
        App {
            sessions: Sessions::new(settings.session_memory),
            timeout: Duration::from_millis(settings.timeout_ms.into()),
            call_memory: settings.call_memory,
            admitted: Arc::new(Semaphore::new(admitted)),
            running: Arc::new(Semaphore::new(threads)),
            workspace: Workspace::new(),
        }
    }

    /// Answer with what `work` returns, as JSON. The call ends at the deadline, or when the client goes away.
    pub(crate) async fn answer<Q: DeserializeOwned + Send + 'static, R: Serialize + 'static>(
        self: Arc<Self>,
        request: Request,
        work: fn(&App, &Asked<Q>) -> Result<R>,
    ) -> Result<Response> {
        let busy = |_| Failure::new(StatusCode::TOO_MANY_REQUESTS, "many requests wait: try later");
        let admitted = Arc::clone(&self.admitted).try_acquire_owned().map_err(busy)?;
        let deadline = Instant::now() + self.timeout;
        let late = |_| Failure::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
        let asked = timeout_at(deadline.into(), read(request)).await.map_err(late)??;
        let running = timeout_at(deadline.into(), Arc::clone(&self.running).acquire_owned()).await;
        let running = running.map_err(|_| Error::DeadlineExceeded)?;
        let token = CancelToken::new();
        let _cancel = CancelOnDrop(token.clone());
        let context = Context::new()
            .serial()
            .cancel(&token)
            .deadline(deadline)
            .memory_limit(self.call_memory)
            .workspace(&self.workspace);
        // A cancelled call holds its permits until it has ended.
        let call = spawn_blocking(move || {
            let _permits = (admitted, running);
            context.run(|| work(&self, &asked)).map(|found| Json(found).into_response())
        });
        // No input makes the library panic; if one does, the service goes on.
        let fault = |_| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "a fault: report it");
        call.await.map_err(fault)?
    }
}

/// Read a request; the router has set a limit for its body.
async fn read<Q: DeserializeOwned>(request: Request) -> Result<Asked<Q>> {
    let (mut parts, body) = request.into_parts();
    let name = Option::<Path<String>>::from_request_parts(&mut parts, &()).await;
    let query = Query::<Q>::from_request_parts(&mut parts, &()).await;
    let body = Bytes::from_request(Request::from_parts(parts, body), &()).await;
    let name = name.map_err(|error| Failure::new(error.status(), error.body_text()))?;
    let Query(query) = query.map_err(|error| Failure::new(error.status(), error.body_text()))?;
    let body = body.map_err(|error| Failure::new(error.status(), error.body_text()))?;
    Ok(Asked { name: name.map_or_else(String::new, |Path(name)| name), query, body })
}
