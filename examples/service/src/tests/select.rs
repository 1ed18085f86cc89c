//! Selection over HTTP.

use axum::body::Body;
use axum::http::{Request, StatusCode};
use certk_rs::{CertifyOptions, Keep, Options, Scores, certify, select};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::support::{answer, app, json_post, numbers, post, until};

#[tokio::test]
async fn raw_numbers_are_selected_as_by_the_crate() {
    let (_app, router) = app(&[]);
    let rows = numbers(4 * 1000);
    let scores = Scores::new(&rows, &[4, 1000]).unwrap();
    let want = select(&scores, &[0.02], &Options::new().keep_last(5)).unwrap();
    let path = "/v1/select?shape=4,1000&eps=0.02&keep_last=5";
    // At an odd address, too.
    for odd in [0, 1, 3] {
        let mut bytes = vec![0u8; odd];
        bytes.extend_from_slice(bytemuck::cast_slice(&rows));
        let body = axum::body::Bytes::from(bytes).slice(odd..);
        let (status, found) = answer(&router, post(path, body)).await;
        assert_eq!(status, StatusCode::OK);
        let found = SafeTensors::deserialize(&found).unwrap();
        let indices: Vec<u32> = found
            .tensor("indices")
            .unwrap()
            .data()
            .chunks(4)
            .map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        assert_eq!(indices, want.indices);
        let upper: Vec<f64> = found
            .tensor("tail_mass_upper")
            .unwrap()
            .data()
            .chunks(8)
            .map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        assert_eq!(upper, want.tail_mass_upper);
    }
}

#[tokio::test]
async fn json_is_read_and_written_without_moving_a_bound() {
    let (_app, router) = app(&[]);
    let rows: Vec<f64> =
        numbers(300).into_iter().map(|score| f64::from(score) * 1.000_000_1).collect();
    let body = json!({"scores": rows, "shape": [3, 100], "eps": 0.05, "scale": 0.5});
    let (status, found) = answer(&router, json_post("/v1/select", &body)).await;
    assert_eq!(status, StatusCode::OK);
    let found: Value = serde_json::from_slice(&found).unwrap();
    let scores = Scores::new(&rows, &[3, 100]).unwrap().scale(0.5).unwrap();
    let want = select(&scores, &[0.05], &Options::new()).unwrap();
    let upper: Vec<f64> = serde_json::from_value(found["tail_mass_upper"].clone()).unwrap();
    assert_eq!(upper, want.tail_mass_upper);
    let judged =
        certify(&scores, &Keep::from(&want), &CertifyOptions::new().eps(&[0.05]).independent(true))
            .unwrap();
    assert!(judged.holds.unwrap().iter().all(|holds| *holds));
}

#[tokio::test]
async fn bad_requests_are_told_what_is_wrong() {
    let (_app, router) = app(&["--max-body", "10000"]);
    let raw = |path: &str, len: usize| post(path, vec![0u8; len]);
    let too_large = raw("/v1/select?shape=1,4000&eps=0.1", 16_000);
    assert_eq!(answer(&router, too_large).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    for (request, says) in [
        (raw("/v1/select", 8), "shape"),
        (raw("/v1/select?shape=2", 8), "eps"),
        (raw("/v1/select?shape=2&eps=x", 8), "eps"),
        (raw("/v1/select?shape=2&eps=0.1&dtype=i8", 8), "dtype"),
        (raw("/v1/select?shape=two&eps=0.1", 8), "axes"),
        (raw("/v1/select?shape=3&eps=0.1", 8), "shape"),
        (raw("/v1/select?shape=2&eps=0.1", 7), "7 bytes"),
        (raw("/v1/select?shape=2&eps=1.5", 8), "eps"),
        (raw("/v1/select?shape=2&eps=0.1&colour=red", 8), "colour"),
        (raw("/v1/select?shape=2&eps=0.1&max_keep=1&max_fraction=.5", 8), "exclude"),
        (raw("/v1/select?shape=18446744073709551615,2&eps=0.1", 8), "shape"),
        (post("/v1/select?shape=1&eps=0.1", f32::NAN.to_le_bytes().to_vec()), "NaN"),
        (json_post("/v1/select", &json!({"scores": [1.0], "shape": [1]})), "eps"),
        (json_post("/v1/select", &json!([1, 2])), "body"),
    ] {
        let (status, body) = answer(&router, request).await;
        let body = String::from_utf8(body).unwrap();
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
        assert!(body.contains(says), "{body} says nothing of {says}");
    }
    let (status, _) = answer(&router, raw("/v1/select?shape=0,0&eps=0.1", 0)).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer(&router, raw("/nothing", 0)).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_call_has_no_more_time_than_it_asked_for() {
    let (app, router) = app(&[]);
    let rows = numbers(1 << 22);
    let body: Vec<u8> = bytemuck::cast_slice(&rows).to_vec();
    let path = "/v1/select?shape=1,4194304&eps=0.01&prove_minimal=true";
    let request = Request::post(path).header("x-timeout-ms", "1").body(body.into()).unwrap();
    let (status, _) = answer(&router, request).await;
    assert_eq!(status, StatusCode::GATEWAY_TIMEOUT);
    until(|| app.compute.gauges().1 == 0).await;
    let request = Request::post(path).header("x-timeout-ms", "soon").body(Body::empty()).unwrap();
    assert_eq!(answer(&router, request).await.0, StatusCode::UNPROCESSABLE_ENTITY);
}
