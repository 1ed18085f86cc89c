//! Whatever is sent, the service says what is wrong with it, and goes on as if nothing had been.

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::json;

use super::support::{Answer, Tensors, answer, app, normal, post};

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most.max(1)
    }

    /// Something that was bytes of a kind, and may be no longer.
    fn spoil(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(3) {
            let (at, with) = (self.below(bytes.len()), self.below(256) as u8);
            match self.below(9) {
                0 => bytes.truncate(at),
                1 => bytes.extend(vec![with; 1 + self.below(40)]),
                2 if !bytes.is_empty() => bytes[at] = with,
                3 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                4 => {
                    let tail = bytes.split_off(at);
                    bytes.truncate(self.below(at));
                    bytes.extend(tail);
                }
                5 => bytes.insert(at, with),
                // Of a safetensors file: how long its header is.
                6 => {
                    let length = [0, 1, 7, u64::MAX, 1 << 40, 100_000_001][self.below(6)];
                    bytes.splice(..bytes.len().min(8), length.to_le_bytes());
                }
                // Numbers in headers and JSON.
                7 => {
                    for byte in bytes.iter_mut().filter(|byte| byte.is_ascii_digit()) {
                        if self.below(6) == 0 {
                            *byte = b"0123456789.-e"[self.below(13)];
                        }
                    }
                }
                // No numbers at all.
                _ => {
                    let number = [f32::NAN, f32::INFINITY, 1e38, f32::MIN_POSITIVE];
                    let number = number[self.below(4)].to_le_bytes();
                    let end = (at + 4).min(bytes.len());
                    bytes.splice(end - (end - at)..end, number);
                }
            }
        }
    }
}

/// That the service answers a question that is right, rightly.
async fn check(router: &Router, held: &Tensors, queries: &[f32]) {
    let body: Vec<u8> = bytemuck::cast_slice(queries).to_vec();
    let (status, body) =
        answer(router, post("/v1/sessions/s/search?shape=2,2,8&eps=0.1", body)).await;
    assert_eq!(status, StatusCode::OK);
    Answer::read(&body).check_sets(held, queries, 0.1, false);
}

#[tokio::test]
async fn thousands_of_spoiled_bodies_and_queries_harm_nothing() {
    let (app, router) = app(&["--session-memory", "10000000", "--call-memory", "100000000"]);
    let held = Tensors::new(1, 2, 40, 8, 4);
    let put = Request::put("/v1/sessions/s").body(held.safetensors().into()).unwrap();
    assert_eq!(answer(&router, put).await.0, StatusCode::CREATED);
    let queries = normal(2 * 2 * 8, 4);
    let raw: Vec<u8> = bytemuck::cast_slice(&queries).to_vec();
    let listed: Vec<f64> = queries.iter().map(|&entry| f64::from(entry)).collect();
    let asked = json!({"shape": [2, 2, 8], "queries": listed, "eps": [0.1, 0.2, 0.3, 0.4], "lengths": [3, 4, 5, 40]});
    let scores = json!({"shape": [4, 8], "scores": listed, "eps": 0.1, "max_keep": 5});
    let tensors =
        json!({"shape": [2, 2, 8], "keys": listed, "values_shape": [2, 2, 8], "values": listed});
    // Method, path, query, whether it is JSON, body. Those that change do so to another session.
    let requests: Vec<(&str, &str, &str, bool, Vec<u8>)> = vec![
        ("POST", "/v1/select", "shape=4,8&eps=0.1&keep_last=2", false, raw.clone()),
        ("POST", "/v1/select", "shape=8,8&eps=0.1&dtype=f16", false, raw.clone()),
        ("POST", "/v1/select", "", true, scores.to_string().into()),
        ("POST", "/v1/sessions/s/search", "shape=2,2,8&eps=0.1&causal=true", false, raw.clone()),
        (
            "POST",
            "/v1/sessions/s/search",
            "shape=2,2,8&rule=topk&k=4&lengths=9",
            false,
            raw.clone(),
        ),
        ("POST", "/v1/sessions/s/search", "", true, asked.to_string().into()),
        ("POST", "/v1/sessions/s/attention", "shape=2,2,8&eps=0.1", false, raw.clone()),
        ("POST", "/v1/sessions/s/attention", "shape=2,2,8&out_tol=0.1,1,2,3", false, raw.clone()),
        ("POST", "/v1/sessions/s/attention", "", true, asked.to_string().into()),
        ("PUT", "/v1/sessions/t", "", false, held.safetensors()),
        ("PUT", "/v1/sessions/t", "", true, tensors.to_string().into()),
        ("POST", "/v1/sessions/t/append", "", false, held.safetensors()),
        (
            "POST",
            "/v1/sessions/t/evict",
            "",
            true,
            json!({"positions": [1, 2, 30]}).to_string().into(),
        ),
        ("POST", "/v1/sessions/t/truncate", "keys=3", false, Vec::new()),
    ];
    let mut dice = Dice(7);
    let (mut refused, mut answered) = (0, 0);
    for round in 0..6000 {
        let (method, path, query, is_json, body) = &requests[round % requests.len()];
        let (mut query, mut body) = (query.as_bytes().to_vec(), body.clone());
        if dice.below(3) == 0 && !query.is_empty() {
            dice.spoil(&mut query);
            query.retain(|byte| byte.is_ascii_graphic() && *byte != b'#');
        }
        dice.spoil(&mut body);
        let uri = format!("{path}?{}", String::from_utf8(query).unwrap());
        let request = Request::builder().method(*method).uri(&uri).header("x-timeout-ms", "2000");
        let kind = if *is_json { "application/json" } else { "application/octet-stream" };
        let Ok(request) = request.header("content-type", kind).body(Body::from(body)) else {
            continue;
        };
        let (status, body) = answer(&router, request).await;
        let expected = [200, 201, 404, 409, 413, 422, 503].contains(&status.as_u16());
        assert!(expected, "{round} {uri}: {status} {}", String::from_utf8_lossy(&body));
        if status.is_success() {
            answered += 1;
        } else {
            refused += 1;
        }
        if round % 100 == 0 {
            check(&router, &held, &queries).await;
        }
    }
    assert!(refused > 2000 && answered > 500, "{refused} {answered}");
    check(&router, &held, &queries).await;
    assert_eq!(app.compute.gauges().1, 0);
}

#[tokio::test]
async fn what_is_wrong_with_keys_and_queries_is_said() {
    let (_app, router) = app(&[]);
    let held = Tensors::new(1, 2, 40, 8, 4);
    let put = |body: Vec<u8>| Request::put("/v1/sessions/s").body(body.into()).unwrap();
    let mut nan = held.clone();
    nan.keys[1][3 * 8 + 5] = f32::NAN;
    let mut infinite = held.clone();
    infinite.values[0][7] = f32::INFINITY;
    let file = |name: &str, shape: &[usize], dtype, bytes: &[u8]| {
        let view = safetensors::tensor::TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
        safetensors::serialize([(name, view)], None).unwrap()
    };
    let (f32_, f64_) = (safetensors::Dtype::F32, safetensors::Dtype::F64);
    let huge = [&(1u64 << 40).to_le_bytes()[..], b"{}"].concat();
    for (body, says) in [
        (nan.safetensors(), "keys[1, 3, 5]"),
        (infinite.safetensors(), "values[0, 1, 3]"),
        (file("keys", &[4, 2], f32_, &[0; 32]), "axes"),
        (file("keys", &[0, 4, 2], f32_, &[]), "heads"),
        (file("keys", &[1, 4, 0], f32_, &[]), "entries"),
        (file("keys", &[1 << 21, 0, 1 << 21], f32_, &[]), "2^20"),
        (file("keys", &[1, 2, 2], f64_, &[0; 32]), "convert"),
        (file("keys", &[1, 2, 2], safetensors::Dtype::I32, &[0; 16]), "I32"),
        (file("values", &[1, 2, 2], f32_, &[0; 16]), "no tensor keys"),
        (huge, "header"),
        (b"{}".to_vec(), "header"),
        (Vec::new(), "header"),
    ] {
        let (status, body) = answer(&router, put(body)).await;
        let body = String::from_utf8(body).unwrap();
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
        assert!(body.contains(says), "{body} says nothing of {says}");
    }
    // Nothing was made.
    let gone = answer(&router, Request::get("/v1/sessions/s").body(Body::empty()).unwrap()).await;
    assert_eq!(gone.0, StatusCode::NOT_FOUND);
    assert_eq!(answer(&router, put(held.safetensors())).await.0, StatusCode::CREATED);
    let queries: Vec<u8> = bytemuck::cast_slice(&normal(2 * 2 * 8, 4)).to_vec();
    let mut bad = queries.clone();
    bad.splice(40..44, f32::NAN.to_le_bytes());
    for (path, body, says) in [
        ("search?shape=2,2,8&eps=0.1", &bad, "queries[0, 1, 2]"),
        ("attention?shape=2,2,8&eps=0.1", &bad, "queries[0, 1, 2]"),
        ("search?shape=2,2,8", &queries, "eps"),
        ("search?shape=2,2,8&eps=nan", &queries, "eps"),
        ("search?shape=2,2,8&eps=0.1,0.2", &queries, "one per row"),
        ("search?shape=2,2,8&eps=0.1&lengths=41", &queries, "41"),
        ("search?shape=2,2,8&eps=0.1&lengths=1,2", &queries, "one per row"),
        ("search?shape=2,2,8&eps=0.1&k=4", &queries, "topk"),
        ("search?shape=2,2,8&rule=topk", &queries, "needs k"),
        ("search?shape=2,2,8&rule=topk&k=0", &queries, "at least one"),
        ("search?shape=2,2,8&rule=best&eps=0.1", &queries, "rule"),
        ("search?shape=4,8&eps=0.1", &queries, "axes"),
        ("search?shape=1,4,8&eps=0.1", &queries, "2 heads"),
        ("search?shape=2,4,4&eps=0.1", &queries, "8 entries"),
        ("search?shape=2,3,8&eps=0.1", &queries, "32 numbers"),
        ("search?shape=2,9223372036854775807,8&eps=0.1", &queries, "32 numbers"),
        ("search?shape=2,2,8&eps=0.1&scale=inf", &queries, "scale"),
        ("search?shape=2,2,8&eps=0.1&scale=1e300&rule=gap", &queries, "at head 0"),
        ("attention?shape=2,2,8", &queries, "either"),
        ("attention?shape=2,2,8&eps=0.1&out_tol=1", &queries, "either"),
        ("attention?shape=2,2,8&out_tol=-1", &queries, "out_tol"),
        ("attention?shape=2,2,8&eps=1", &queries, "eps"),
    ] {
        let (status, body) =
            answer(&router, post(&format!("/v1/sessions/s/{path}"), body.clone())).await;
        let body = String::from_utf8_lossy(&body);
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{path} {body}");
        assert!(body.contains(says), "{path}: {body} says nothing of {says}");
    }
}
