//! What a call may take: time, and memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};

use super::support::{Answer, Tensors, answer, app, ask, json_of, normal, numbers, post};
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

/// A call that takes many seconds.
fn long(what: &str, milliseconds: &str) -> Request<Body> {
    let queries: Vec<u8> = bytemuck::cast_slice(&normal(20000 * DIM, 3)).to_vec();
    let path = format!("/v1/sessions/s/{what}?shape=1,20000,{DIM}&eps=1e-9");
    Request::post(path).header("x-timeout-ms", milliseconds).body(queries.into()).unwrap()
}

/// Waits until nothing is computed any more, and says how long that took.
async fn idle(app: &Arc<App>) -> Duration {
    let begun = Instant::now();
    while app.compute.gauges().1 > 0 {
        assert!(begun.elapsed() < Duration::from_secs(5), "it computes on");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_on_a_session_ends_with_its_time_or_its_request() {
    let (app, router) = app(&[]);
    large(&router, "s").await;
    for what in ["search", "attention"] {
        let begun = Instant::now();
        let (status, _) = answer(&router, long(what, "100")).await;
        assert_eq!(status, StatusCode::GATEWAY_TIMEOUT);
        // Tests that run beside it may keep it from a processor for a while.
        assert!(begun.elapsed() < Duration::from_millis(400), "{:?}", begun.elapsed());
        assert!(idle(&app).await < Duration::from_millis(200));
        let request = {
            let router = router.clone();
            tokio::spawn(async move { answer(&router, long(what, "30000")).await })
        };
        while app.compute.gauges().1 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
        request.abort();
        assert!(idle(&app).await < Duration::from_millis(200));
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
    let (app, router) = app(&["--session-memory", "60000000"]);
    large(&router, "s").await;
    let reader = {
        let router = router.clone();
        tokio::spawn(async move { answer(&router, long("attention", "700")).await })
    };
    while app.compute.gauges().1 == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
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
    assert_eq!(reader.await.unwrap().0, StatusCode::GATEWAY_TIMEOUT);
    idle(&app).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(answer(&router, put()).await.0, StatusCode::CREATED);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_take_no_more_memory_than_they_may() {
    let rows = numbers(1 << 20);
    let body: Vec<u8> = bytemuck::cast_slice(&rows).to_vec();
    let (app, router) = app(&["--max-body", "5000000", "--bodies-memory", "6000000"]);
    let path = "/v1/select?shape=1,1048576&eps=0.01";
    // Two of them are more than may be: however they meet, one may be refused, and both may be asked again.
    let mut tasks = Vec::new();
    for _ in 0..16 {
        let (router, body) = (router.clone(), body.clone());
        tasks.push(tokio::spawn(async move { answer(&router, post(path, body)).await.0 }));
    }
    let (mut answered, mut refused) = (0, 0);
    for task in tasks {
        match task.await.unwrap() {
            StatusCode::OK => answered += 1,
            StatusCode::SERVICE_UNAVAILABLE => refused += 1,
            status => panic!("{status}"),
        }
    }
    assert!(answered >= 1 && refused >= 1, "{answered} {refused}");
    assert_eq!(app.bodies.held(), 0);
    assert_eq!(answer(&router, post(path, body)).await.0, StatusCode::OK);
}
