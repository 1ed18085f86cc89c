//! Readers and a writer at the same time: each answer is about one version, the one that it names, and none is stale.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};

use super::support::{Answer, Tensors, answer, app, json_of, json_post, normal, post};

const HEADS: usize = 2;
const DIM: usize = 16;
const WIDTH: usize = 4;

/// Asks again as long as memory is in use: nothing was done then.
async fn insist(router: &Router, make: impl Fn() -> Request<Body>) -> (StatusCode, Vec<u8>) {
    loop {
        let (status, body) = answer(router, make()).await;
        if status != StatusCode::SERVICE_UNAVAILABLE {
            return (status, body);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Changes a session, and remembers what it held at each version.
async fn write(router: Router, steps: u64, at: Arc<AtomicU64>) -> HashMap<u64, Tensors> {
    let mut held = Tensors::new(1, HEADS, 100, DIM, WIDTH);
    let mut versions = HashMap::new();
    for step in 0..steps {
        let (status, about) = match step % 8 {
            0 => {
                held = Tensors::new(step, HEADS, 100 + step as usize, DIM, WIDTH);
                let body = held.safetensors();
                let put = || Request::put("/v1/sessions/s").body(body.clone().into()).unwrap();
                insist(&router, put).await
            }
            6 => {
                let gone: Vec<usize> = (0..held.n()).filter(|at| at % 10 == 3).collect();
                held.only(|at| at % 10 != 3);
                let body = json!({ "positions": gone });
                insist(&router, || json_post("/v1/sessions/s/evict", &body)).await
            }
            _ => {
                let more = Tensors::new(step, HEADS, 1 + (step as usize * 13) % 60, DIM, WIDTH);
                held.append(&more);
                let body = more.safetensors();
                insist(&router, || post("/v1/sessions/s/append", body.clone())).await
            }
        };
        let about: Value = serde_json::from_slice(&about).unwrap();
        assert!(status.is_success(), "{status} {about}");
        let version = about["version"].as_u64().unwrap();
        assert!(versions.insert(version, held.clone()).is_none());
        // From now on no answer is about an older one.
        at.store(version, Ordering::SeqCst);
        // Others have a turn.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    versions
}

type Answers = Arc<Mutex<Vec<(Vec<u8>, Vec<f32>, bool)>>>;

async fn read(router: Router, seed: u64, at: Arc<AtomicU64>, end: Arc<AtomicBool>, to: Answers) {
    let mut last = 0;
    for step in 0.. {
        if end.load(Ordering::SeqCst) {
            return;
        }
        let queries = normal(HEADS * 2 * DIM, seed * 100_003 + step);
        let attends = step % 2 == 1;
        let what = if attends { "attention" } else { "search" };
        let path = format!("/v1/sessions/s/{what}?shape={HEADS},2,{DIM}&eps=0.1");
        let body: Vec<u8> = bytemuck::cast_slice(&queries).to_vec();
        let before = at.load(Ordering::SeqCst);
        let (status, body) = insist(&router, || post(&path, body.clone())).await;
        assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&body));
        let version = Answer::read(&body).version;
        assert!(version >= before && version >= last, "{version} is older than {before} or {last}");
        last = version;
        to.lock().unwrap().push((body, queries, attends));
    }
}

/// Uses another session now and then, so that ours has to leave memory.
async fn crowd(router: Router, end: Arc<AtomicBool>) {
    let other = Tensors::new(3, HEADS, 1500, DIM, WIDTH).safetensors();
    while !end.load(Ordering::SeqCst) {
        let put = Request::put("/v1/sessions/other").body(other.clone().into()).unwrap();
        let (status, _) = answer(&router, put).await;
        assert!(status.is_success() || status == StatusCode::SERVICE_UNAVAILABLE, "{status}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn run(arguments: &[&str], crowded: bool) -> u64 {
    let (app, router) = app(arguments);
    let (at, end) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let answers = Answers::default();
    let first = Tensors::new(0, HEADS, 100, DIM, WIDTH);
    let put = Request::put("/v1/sessions/s").body(first.safetensors().into()).unwrap();
    let (_, about) = json_of(&router, put).await;
    let mut tasks = Vec::new();
    for seed in 0..3 {
        let (at, end, to) = (Arc::clone(&at), Arc::clone(&end), Arc::clone(&answers));
        tasks.push(tokio::spawn(read(router.clone(), seed, at, end, to)));
    }
    if crowded {
        tasks.push(tokio::spawn(crowd(router.clone(), Arc::clone(&end))));
    }
    let versions = tokio::spawn(write(router.clone(), 150, at)).await;
    end.store(true, Ordering::SeqCst);
    for task in tasks {
        task.await.unwrap();
    }
    let mut versions = versions.unwrap();
    versions.insert(about["version"].as_u64().unwrap(), first);
    let answers = answers.lock().unwrap();
    assert!(answers.len() > 100, "{}", answers.len());
    for (body, queries, attends) in answers.iter() {
        let found = Answer::read(body);
        let held = versions.get(&found.version).expect("an answer names a version that was made");
        if *attends {
            let out: Vec<f64> = found.numbers::<f32>("out").into_iter().map(f64::from).collect();
            found.check_outputs(held, queries, &out, false);
        } else {
            found.check_sets(held, queries, 0.1, false);
        }
    }
    app.sessions.gauges().2
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_answer_is_about_the_version_that_it_names() {
    assert_eq!(run(&[], false).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn also_while_sessions_leave_memory_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display().to_string();
    let made_way = run(&["--data", &path, "--session-memory", "700000"], true).await;
    assert!(made_way > 3, "{made_way}");
}
