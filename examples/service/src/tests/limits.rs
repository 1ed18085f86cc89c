//! What a call may take: time, and memory.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{self, Method, Request, StatusCode};
use hyper::body::Frame;
use tokio::sync::mpsc;

use super::support::{Answer, Tensors, answer, app, ask, json_of, normal, numbers, post, until};
use crate::app::App;

const N: usize = 60_000;
const DIM: usize = 64;

/// A session that is large enough for calls to take long.
async fn large(router: &Router, name: &str) -> Tensors {
    let held = Tensors::new(1, 1, N, DIM, DIM);
    let put = Request::put(format!("/v1/sessions/{name}")).body(held.safetensors().into()).unwrap();
    assert_eq!(answer(router, put).await.0, StatusCode::CREATED);
    held
}

/// A call that takes minutes.
fn long(what: &str, milliseconds: &str) -> Request<Body> {
    let queries = bytemuck::cast_slice(&normal(1000 * DIM, 3)).repeat(200);
    let path = format!("/v1/sessions/s/{what}?shape=1,200000,{DIM}&eps=1e-9");
    Request::post(path).header("x-timeout-ms", milliseconds).body(queries.into()).unwrap()
}

/// Waits until nothing is computed any more.
async fn idle(app: &Arc<App>) {
    until(|| app.compute.gauges().1 == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_on_a_session_ends_with_its_time_or_its_request() {
    let (app, router) = app(&["--timeout-ms", "3600000", "--call-memory", "1000000000000"]);
    large(&router, "s").await;
    for what in ["search", "attention"] {
        let (status, _) = answer(&router, long(what, "100")).await;
        assert_eq!(status, StatusCode::GATEWAY_TIMEOUT);
        idle(&app).await;
        let request = {
            let router = router.clone();
            tokio::spawn(async move { answer(&router, long(what, "3600000")).await })
        };
        until(|| app.compute.gauges().1 > 0).await;
        assert!(app.bodies.held() >= 200_000 * DIM * 4);
        request.abort();
        idle(&app).await;
        until(|| app.bodies.held() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_was_too_late_changed_nothing() {
    let (app, router) = app(&[]);
    let held = large(&router, "s").await;
    let (_, before) = json_of(&router, ask(Method::GET, "/v1/sessions/s")).await;
    let body = held.safetensors();
    let mut late = 0;
    for milliseconds in [0, 1, 2, 5, 10, 15] {
        let request = Request::post("/v1/sessions/s/append").header("x-timeout-ms", milliseconds);
        let (status, _) = answer(&router, request.body(body.clone().into()).unwrap()).await;
        let put = Request::put("/v1/sessions/t").header("x-timeout-ms", milliseconds);
        let (other, _) = answer(&router, put.body(body.clone().into()).unwrap()).await;
        idle(&app).await;
        if status != StatusCode::GATEWAY_TIMEOUT || other != StatusCode::GATEWAY_TIMEOUT {
            break;
        }
        late += 1;
        assert_eq!(json_of(&router, ask(Method::GET, "/v1/sessions/s")).await.1, before);
        assert_eq!(
            answer(&router, ask(Method::GET, "/v1/sessions/t")).await.0,
            StatusCode::NOT_FOUND
        );
        assert_eq!(app.sessions.gauges().1 as u64, before["bytes"].as_u64().unwrap());
    }
    assert!(late > 0);
    let queries = normal(2 * DIM, 3);
    let path = format!("/v1/sessions/s/search?shape=1,2,{DIM}&eps=0.01");
    let (_, found) = answer(&router, post(&path, bytemuck::cast_slice(&queries).to_vec())).await;
    Answer::read(&found).check_sets(&held, &queries, 0.01, false);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_read_stays_until_its_readers_are_done() {
    // Room for one of them and a little.
    let (app, router) = app(&["--session-memory", "60000000", "--timeout-ms", "3600000"]);
    large(&router, "s").await;
    let reader = {
        let router = router.clone();
        tokio::spawn(async move { answer(&router, long("attention", "3600000")).await })
    };
    until(|| app.compute.gauges().1 > 0).await;
    let other = Tensors::new(2, 1, N / 2, DIM, DIM).safetensors();
    let put = || Request::put("/v1/sessions/other").body(other.clone().into()).unwrap();
    let (status, why) = json_of(&router, put()).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{why}");
    assert!(why["error"].as_str().unwrap().contains("in use"), "{why}");
    // Deleted, its memory is held by the reader still.
    assert_eq!(
        answer(&router, ask(Method::DELETE, "/v1/sessions/s")).await.0,
        StatusCode::NO_CONTENT
    );
    assert_eq!(answer(&router, put()).await.0, StatusCode::SERVICE_UNAVAILABLE);
    reader.abort();
    until(|| app.sessions.gauges().1 == 0).await;
    assert_eq!(answer(&router, put()).await.0, StatusCode::CREATED);
}

/// A body that comes in as somebody sends it, of a length that nobody says.
struct Trickle(mpsc::Receiver<Bytes>);

impl HttpBody for Trickle {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|data| data.map(|data| Ok(Frame::data(data))))
    }
}

fn trickle(request: http::request::Builder) -> (mpsc::Sender<Bytes>, Request<Body>) {
    let (to, from) = mpsc::channel(1);
    (to, request.body(Body::new(Trickle(from))).unwrap())
}

#[tokio::test]
async fn bodies_take_no_more_memory_than_they_may() {
    let (app, router) = app(&["--max-body", "5000000", "--bodies-memory", "6000000"]);
    let rows = Bytes::copy_from_slice(bytemuck::cast_slice(&numbers(1 << 20)));
    let path = "/v1/select?shape=1,1048576&eps=0.01";
    let (to, request) = trickle(Request::post(path));
    let first = {
        let router = router.clone();
        tokio::spawn(async move { answer(&router, request).await.0 })
    };
    to.send(rows.slice(..100)).await.unwrap();
    until(|| (1..1 << 12).contains(&app.bodies.held())).await;
    to.send(rows.slice(100..)).await.unwrap();
    until(|| (rows.len()..5_001_000).contains(&app.bodies.held())).await;
    let whole = || post(path, rows.clone());
    assert_eq!(answer(&router, whole()).await.0, StatusCode::SERVICE_UNAVAILABLE);
    drop(to);
    assert_eq!(first.await.unwrap(), StatusCode::OK);
    assert_eq!(app.bodies.held(), 0);
    assert_eq!(answer(&router, whole()).await.0, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_trickles_in_holds_what_has_come_until_its_time_is_over() {
    let (app, router) = app(&["--max-body", "5000000", "--bodies-memory", "6000000"]);
    let (to, request) = trickle(Request::put("/v1/sessions/s"));
    let slow = {
        let router = router.clone();
        tokio::spawn(async move { answer(&router, request).await.0 })
    };
    let begun = tokio::time::Instant::now();
    let trickles = async {
        while to.send(Bytes::from_static(&[0; 100])).await.is_ok() {
            // The clock goes on when everybody else waits.
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(app.bodies.held() <= 16 << 10, "{}", app.bodies.held());
            // Its name is refused, but not before its body is there.
            let large = Request::put("/v1/sessions/.s").body(vec![0; 5_000_000].into()).unwrap();
            assert_eq!(answer(&router, large).await.0, StatusCode::UNPROCESSABLE_ENTITY);
        }
    };
    trickles.await;
    assert_eq!(slow.await.unwrap(), StatusCode::REQUEST_TIMEOUT);
    assert!(begun.elapsed() < Duration::from_secs(45), "{:?}", begun.elapsed());
    assert_eq!(app.bodies.held(), 0);
}

#[tokio::test]
async fn what_json_becomes_counts() {
    let (app, router) = app(&["--max-body", "1000000", "--bodies-memory", "1000000"]);
    let json = |request: http::request::Builder| request.header("content-type", "application/json");
    let zeros = format!("[0{}", ",0".repeat(20_000));
    let (to, request) = trickle(json(Request::put("/v1/sessions/s")));
    let slow = {
        let router = router.clone();
        tokio::spawn(async move { answer(&router, request).await })
    };
    to.send(zeros.clone().into()).await.unwrap();
    until(|| (16 * zeros.len()..1_001_000).contains(&app.bodies.held())).await;
    drop(to);
    assert_eq!(slow.await.unwrap().0, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(app.bodies.held(), 0);
    // Larger than all that it may become, by its length and when it is there.
    let long = zeros.repeat(2);
    let whole = json(Request::post("/v1/select")).body(long.clone().into()).unwrap();
    let (to, request) = trickle(json(Request::post("/v1/select")));
    to.send(long.into()).await.unwrap();
    drop(to);
    for request in [whole, request] {
        let (status, why) = json_of(&router, request).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
        assert!(why["error"].as_str().unwrap().contains("raw numbers"), "{why}");
    }
    // What is not said to be JSON is not read as such.
    let held = Tensors::new(1, 1, 9, 4, 4);
    let put = Request::put("/v1/sessions/s").body(held.safetensors().into()).unwrap();
    assert_eq!(answer(&router, put).await.0, StatusCode::CREATED);
    let evict = post("/v1/sessions/s/evict", r#"{"positions": [1]}"#);
    assert_eq!(answer(&router, evict).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    // Nor does an error repeat all that was sent.
    let text = format!(r#"{{"{}": 1}}"#, "x".repeat(50_000));
    let request = json(Request::post("/v1/select")).body(text.into()).unwrap();
    let (status, why) = answer(&router, request).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(why.len() < 1000, "{}", why.len());
}
