//! What a session holds, and what is answered about it.

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use certk_rs::half::{bf16, f16};
use serde_json::json;

use super::support::{Answer, Tensors, answer, app, ask, json_of, json_post, normal, post};

fn put(path: &str, body: Vec<u8>) -> Request<Body> {
    Request::put(path).body(body.into()).unwrap()
}

fn raw(numbers: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(numbers).to_vec()
}

#[tokio::test]
async fn a_session_is_made_grows_shrinks_is_shown_and_goes() {
    let (_app, router) = app(&[]);
    let mut held = Tensors::new(1, 2, 300, 16, 8);
    let (status, made) = json_of(&router, put("/v1/sessions/a", held.safetensors())).await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    let queries = normal(4 * 3 * 16, 9);
    let ask_all = "/v1/sessions/a/search?shape=4,3,16&eps=0.05";
    let mut version = made["version"].as_u64().unwrap();
    let mut grown = 0;
    for step in 0..12u64 {
        let path = match step {
            0..=7 => {
                let more = Tensors::new(10 + step, 2, 40 * (step as usize % 3), 16, 8);
                held.append(&more);
                grown += usize::from(more.n() > 0);
                let path = format!("/v1/sessions/a/append?if_version={version}");
                json_of(&router, post(&path, more.safetensors())).await
            }
            8 => {
                held.only(|at| at < 350);
                json_of(&router, post("/v1/sessions/a/truncate?keys=350", "")).await
            }
            9 => {
                held.only(|at| at != 0 && at != 7 && !(100..120).contains(&at) && at != 349);
                let gone: Vec<usize> = [0, 7, 7, 349].into_iter().chain(100..120).collect();
                let body = json!({ "positions": gone });
                json_of(&router, json_post("/v1/sessions/a/evict", &body)).await
            }
            10 => {
                held.only(|_| false);
                json_of(&router, post("/v1/sessions/a/truncate?keys=0", "")).await
            }
            _ => {
                let more = Tensors::new(99, 2, 50, 16, 8);
                held.append(&more);
                json_of(&router, post("/v1/sessions/a/append", more.safetensors())).await
            }
        };
        let (status, about) = path;
        assert_eq!(status, StatusCode::OK, "{step}: {about}");
        assert_eq!(about["keys"], held.n(), "{step}");
        assert!(about["version"].as_u64().unwrap() >= version);
        version = about["version"].as_u64().unwrap();
        assert_eq!(json_of(&router, ask(Method::GET, "/v1/sessions/a")).await.1, about);
        let (status, body) = answer(&router, post(ask_all, raw(&queries))).await;
        assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&body));
        let found = Answer::read(&body);
        assert_eq!(found.version, version);
        found.check_sets(&held, &queries, 0.05, false);
    }
    assert!(grown >= 5);
    let (_, all) = json_of(&router, ask(Method::GET, "/v1/sessions")).await;
    assert_eq!(all["sessions"].as_array().unwrap().len(), 1);
    assert_eq!(all["bytes"], all["sessions"][0]["bytes"]);
    let gone = answer(&router, ask(Method::DELETE, "/v1/sessions/a")).await.0;
    assert_eq!(gone, StatusCode::NO_CONTENT);
    for (method, path) in [
        (Method::GET, "/v1/sessions/a"),
        (Method::DELETE, "/v1/sessions/a"),
        (Method::POST, "/v1/sessions/a/search?shape=1,1,16&eps=0.1"),
        (Method::POST, "/v1/sessions/a/append"),
        (Method::POST, "/v1/sessions/a/persist"),
    ] {
        let status = answer(&router, ask(method, path)).await.0;
        assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
    }
    let (_, all) = json_of(&router, ask(Method::GET, "/v1/sessions")).await;
    assert_eq!(all["bytes"], 0);
}

#[tokio::test]
async fn every_rule_and_visibility_holds_by_brute_force() {
    let (_app, router) = app(&[]);
    let held = Tensors::new(3, 2, 500, 24, 4);
    answer(&router, put("/v1/sessions/s", held.safetensors())).await;
    let queries: Vec<f32> = normal(4 * 5 * 24, 5).iter().map(|entry| entry * 3.0).collect();
    for (more, eps, causal) in [
        ("eps=0.02", 0.02, false),
        ("eps=0.02&causal=true", 0.02, true),
        ("eps=0.05&rule=gap", 0.05, false),
        ("eps=0.3&rule=topk&k=20", 0.3, false),
        ("rule=topk&k=20", 1.0, false),
        ("eps=0.01&max_scored=30", 0.01, false),
        ("eps=0", 0.0, true),
    ] {
        let path = format!("/v1/sessions/s/search?shape=4,5,24&{more}");
        let path = if causal && !more.contains("causal") { path + "&causal=true" } else { path };
        let (status, body) = answer(&router, post(&path, raw(&queries))).await;
        assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&body));
        let found = Answer::read(&body);
        found.check_sets(&held, &queries, eps, causal);
        if more.contains("topk") {
            assert!(found.numbers::<i64>("k").iter().all(|&k| k == 20));
        }
    }
    // Each row its own budget and its own length.
    let eps: Vec<f64> = (1..=20).map(|row| f64::from(row) / 100.0).collect();
    let lengths: Vec<usize> = (0..20).map(|row| row * 26).collect();
    let wide: Vec<f64> = queries.iter().map(|&entry| f64::from(entry)).collect();
    let body = json!({"shape": [4, 5, 24], "queries": wide, "eps": eps, "lengths": lengths});
    let (status, found) = json_of(&router, json_post("/v1/sessions/s/search", &body)).await;
    assert_eq!(status, StatusCode::OK, "{found}");
    let (upper, indptr, indices) =
        (&found["tail_mass_upper"], &found["indptr"], found["indices"].as_array().unwrap());
    for row in 0..20 {
        let query = &queries[row * 24..][..24];
        let mut weights = held.weights(row / 10, query, lengths[row]);
        let part =
            indptr[row].as_u64().unwrap() as usize..indptr[row + 1].as_u64().unwrap() as usize;
        for key in &indices[part] {
            weights[key.as_u64().unwrap() as usize] = 0.0;
        }
        let lost: f64 = weights.iter().filter(|weight| weight.is_finite()).sum();
        let upper = upper[row].as_f64().unwrap();
        assert!(lost <= upper + 1e-12 && upper <= eps[row], "{row}: {lost} {upper}");
    }
}

#[tokio::test]
async fn attention_is_as_near_as_it_says_in_every_precision() {
    let (_app, router) = app(&[]);
    let held = Tensors::new(4, 2, 600, 32, 12);
    answer(&router, put("/v1/sessions/s", held.safetensors())).await;
    let queries: Vec<f32> = normal(4 * 3 * 32, 6).iter().map(|entry| entry * 4.0).collect();
    let mut thinned = 0;
    for budget in ["eps=0.05", "eps=0", "out_tol=0.1", "eps=0.05&even_if_slower=true"] {
        for precision in ["", "&precision=f64", "&precision=f16", "&precision=bf16"] {
            for causal in [false, true] {
                let path = format!("/v1/sessions/s/attention?shape=4,3,32&{budget}{precision}");
                let path = format!("{path}&causal={causal}");
                let (status, body) = answer(&router, post(&path, raw(&queries))).await;
                assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&body));
                let found = Answer::read(&body);
                let out: Vec<f64> = match precision {
                    "" => found.numbers::<f32>("out").into_iter().map(f64::from).collect(),
                    "&precision=f64" => found.numbers("out"),
                    "&precision=f16" => {
                        found.numbers::<f16>("out").into_iter().map(f64::from).collect()
                    }
                    _ => found.numbers::<bf16>("out").into_iter().map(f64::from).collect(),
                };
                found.check_outputs(&held, &queries, &out, causal);
                let most = if budget.starts_with("eps=0.05") { 0.05 } else { 1.0 };
                assert!(found.numbers::<f64>("tail_mass_upper").iter().all(|&lost| lost <= most));
                if budget.starts_with("out_tol") {
                    assert!(found.numbers::<f64>("error_bound").iter().all(|&off| off <= 0.1));
                }
                thinned += found.numbers::<i64>("k").iter().filter(|&&k| k < 500).count();
            }
        }
    }
    assert!(thinned > 0);
    let wide: Vec<f64> = queries.iter().map(|&entry| f64::from(entry)).collect();
    let body = json!({"shape": [4, 3, 32], "queries": wide, "eps": 0.05});
    let (status, found) = json_of(&router, json_post("/v1/sessions/s/attention", &body)).await;
    assert_eq!((status, found["keys"].as_u64()), (StatusCode::OK, Some(600)), "{found}");
    assert_eq!(found["out"].as_array().unwrap().len(), 4 * 3 * 12);
    let path = "/v1/sessions/s/attention?shape=4,3,32&out_tol=1e-30";
    assert_eq!(
        answer(&router, post(path, raw(&queries))).await.0,
        StatusCode::UNPROCESSABLE_ENTITY
    );
}

#[tokio::test]
async fn half_precisions_and_json_are_held_as_they_were_brought() {
    let (_app, router) = app(&[]);
    let mut held = Tensors::new(5, 2, 200, 16, 0);
    for dtype in ["f32", "f16", "bf16"] {
        let round = |x: f32| match dtype {
            "f16" => f16::from_f32(x).to_f32(),
            "bf16" => bf16::from_f32(x).to_f32(),
            _ => x,
        };
        held.keys.iter_mut().flatten().for_each(|entry| *entry = round(*entry));
        let body = json!({"dtype": dtype, "shape": [2, 200, 16], "keys": held.keys.concat()});
        let path = format!("/v1/sessions/{dtype}");
        let request = Request::put(&path).header("content-type", "application/json");
        let request = request.body(body.to_string().into()).unwrap();
        let (status, about) = json_of(&router, request).await;
        assert_eq!((status, about["dtype"].as_str()), (StatusCode::CREATED, Some(dtype)));
        let queries: Vec<f32> = normal(2 * 2 * 16, 8).into_iter().map(round).collect();
        let stored: Vec<u8> = match dtype {
            "f16" => queries.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            "bf16" => queries.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => raw(&queries),
        };
        let path = format!("{path}/search?shape=2,2,16&eps=0.1&dtype={dtype}");
        let (status, body) = answer(&router, post(&path, stored)).await;
        assert_eq!(status, StatusCode::OK);
        Answer::read(&body).check_sets(&held, &queries, 0.1, false);
    }
    // Another type is not taken by a session that holds this one.
    let (status, why) = json_of(&router, post("/v1/sessions/f16/append", held.safetensors())).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{why}");
    let path = "/v1/sessions/f32/attention?shape=2,2,16&eps=0.1";
    let (status, why) = json_of(&router, post(path, raw(&normal(64, 1)))).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(why["error"].as_str().unwrap().contains("no values"), "{why}");
}

#[tokio::test]
async fn a_client_that_thinks_of_another_version_is_told() {
    let (_app, router) = app(&[]);
    let held = Tensors::new(6, 1, 50, 8, 4);
    let (_, made) = json_of(&router, put("/v1/sessions/s", held.safetensors())).await;
    let old = made["version"].as_u64().unwrap();
    let more = Tensors::new(7, 1, 5, 8, 4).safetensors();
    let path = format!("/v1/sessions/s/append?if_version={old}");
    assert_eq!(answer(&router, post(&path, more.clone())).await.0, StatusCode::OK);
    for path in [
        path,
        format!("/v1/sessions/s/search?shape=1,1,8&eps=0.1&if_version={old}"),
        format!("/v1/sessions/s/attention?shape=1,1,8&eps=0.1&if_version={old}"),
        format!("/v1/sessions/s/truncate?keys=1&if_version={old}"),
    ] {
        let body = if path.contains("append") { more.clone() } else { raw(&normal(8, 3)) };
        assert_eq!(answer(&router, post(&path, body)).await.0, StatusCode::CONFLICT, "{path}");
    }
    // Put anew it is another version, too, also with the same keys.
    let (_, again) = json_of(&router, put("/v1/sessions/s", held.safetensors())).await;
    assert!(again["version"].as_u64().unwrap() > old);
    assert_eq!(again["keys"], 50);
}
