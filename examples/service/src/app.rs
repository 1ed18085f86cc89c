//! The routes, and what all of them share.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::Html;
use axum::routing::{get, post, put};
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;

use crate::bodies::Bodies;
use crate::compute::Compute;
use crate::failure::Failure;
use crate::metrics::Metrics;
use crate::sessions::{self, Sessions};
use crate::settings::Settings;
use crate::{auth, metrics, select};

/// What all requests share.
pub struct App {
    pub(crate) settings: Settings,
    pub(crate) compute: Compute,
    pub(crate) metrics: Metrics,
    pub(crate) bodies: Bodies,
    pub(crate) sessions: Sessions,
}

impl App {
    /// Starts the threads that compute, and finds the sessions that have files.
    ///
    /// # Errors
    /// A thread cannot be started, or the data folder cannot be used.
    pub fn new(settings: Settings) -> std::io::Result<Arc<Self>> {
        let (threads, waiting) = (settings.compute_threads, settings.waiting);
        let compute = Compute::start(threads, waiting, settings.call_memory)?;
        let (most, bytes) = (settings.sessions, settings.session_memory);
        let sessions = Sessions::open(most, bytes, settings.data.as_deref())?;
        let bodies = Bodies::new(settings.bodies_memory, settings.max_body);
        let metrics = Metrics::new();
        Ok(Arc::new(App { settings, compute, metrics, bodies, sessions }))
    }

    /// Writes all sessions that changed since they were written, as at the end.
    pub fn file_all(&self) {
        self.sessions.file_all();
    }

    /// How long a request may take, its body and the wait for others included: a body that trickles in holds its memory no longer.
    pub(crate) fn patience(&self) -> Duration {
        self.settings.timeout() + Duration::from_secs(10)
    }

    /// How long a request's call may take.
    pub(crate) fn timeout(&self, headers: &HeaderMap) -> Result<Duration, Failure> {
        let most = self.settings.timeout();
        let Some(asked) = headers.get("x-timeout-ms") else { return Ok(most) };
        let asked = asked.to_str().ok().and_then(|text| text.parse().ok());
        let asked =
            asked.ok_or_else(|| Failure::input("x-timeout-ms is no number of milliseconds"))?;
        Ok(Duration::from_millis(asked).min(most))
    }
}

/// What the service can be asked, for people and for programs that write clients.
pub(crate) const OPENAPI: &str = include_str!("../openapi.json");
const PAGE: &str = include_str!("page.html");

/// All that can be asked.
pub fn router(app: &Arc<App>) -> Router {
    let calls = Router::new()
        .route("/v1/select", post(select::handle))
        .route("/v1/sessions", get(sessions::list))
        .route(
            "/v1/sessions/{name}",
            put(sessions::put).get(sessions::show).delete(sessions::remove),
        )
        .route("/v1/sessions/{name}/append", post(sessions::append))
        .route("/v1/sessions/{name}/truncate", post(sessions::truncate))
        .route("/v1/sessions/{name}/evict", post(sessions::evict))
        .route("/v1/sessions/{name}/persist", post(sessions::persist))
        .route("/v1/sessions/{name}/search", post(sessions::search))
        .route("/v1/sessions/{name}/attention", post(sessions::attend))
        .route("/metrics", get(metrics::show))
        .route_layer(from_fn_with_state(Arc::clone(app), auth::bearer));
    let open = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/openapi.json", get(|| async { ([("content-type", "application/json")], OPENAPI) }))
        .route("/", get(|| async { Html(PAGE) }));
    calls
        .merge(open)
        .fallback(|| async { Failure::new(StatusCode::NOT_FOUND, "no such route; / lists them") })
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, app.patience()))
        .layer(from_fn_with_state(Arc::clone(app), metrics::measure))
        .layer(TraceLayer::new_for_http())
        .with_state(Arc::clone(app))
}
