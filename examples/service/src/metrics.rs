//! What operators want to know, in the text format of Prometheus.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::app::App;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    route: String,
}

pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Labels, Counter>,
    seconds: Family<Route, Histogram>,
    waiting: Gauge,
    at_work: Gauge,
    scratch: Gauge,
    sessions: Gauge,
    session_bytes: Gauge,
    made_way: Gauge,
    body_bytes: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("certk");
        let requests = Family::<Labels, Counter>::default();
        registry.register("requests", "Requests by route and status", requests.clone());
        let seconds = Family::<Route, Histogram>::new_with_constructor(|| {
            // 0.1 ms to 100 s.
            Histogram::new(exponential_buckets(1e-4, 2.0, 21))
        });
        let help = "From a request's headers to those of its answer";
        registry.register_with_unit("request", help, Unit::Seconds, seconds.clone());
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let waiting = gauge("waiting_calls", "Calls that wait for a thread");
        let at_work = gauge("calls_at_work", "Calls that threads compute");
        let scratch = gauge("idle_scratch_bytes", "Scratch between calls");
        let sessions = gauge("sessions", "Sessions, those included that are in files only");
        let session_bytes = gauge("session_bytes", "Memory that sessions hold");
        let made_way = gauge("sessions_made_way", "How often a session left memory for another");
        let body_bytes = gauge("body_bytes", "Bodies of requests that are not answered yet");
        Metrics {
            registry,
            requests,
            seconds,
            waiting,
            at_work,
            scratch,
            sessions,
            session_bytes,
            made_way,
            body_bytes,
        }
    }
}

/// Counts a request and takes its time.
pub(crate) async fn measure(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    // The route, not the path: there are few of them.
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let route = route.unwrap_or_else(|| "none".into());
    let begun = Instant::now();
    let response = next.run(request).await;
    let metrics = &app.metrics;
    let status = response.status().as_u16();
    metrics.requests.get_or_create(&Labels { route: route.clone(), status }).inc();
    metrics.seconds.get_or_create(&Route { route }).observe(begun.elapsed().as_secs_f64());
    response
}

pub(crate) async fn show(State(app): State<Arc<App>>) -> Response {
    let (waiting, at_work, scratch) = app.compute.gauges();
    let metrics = &app.metrics;
    metrics.waiting.set(waiting as i64);
    metrics.at_work.set(at_work as i64);
    metrics.scratch.set(scratch as i64);
    let (sessions, bytes, made_way) = app.sessions.gauges();
    metrics.sessions.set(sessions as i64);
    metrics.session_bytes.set(bytes as i64);
    metrics.made_way.set(made_way as i64);
    metrics.body_bytes.set(app.bodies.held() as i64);
    let mut text = String::new();
    if encode(&mut text, &metrics.registry).is_err() {
        return axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}
