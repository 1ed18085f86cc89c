//! Who may ask, what is counted, and what the service says of itself.

use axum::body::Body;
use axum::http::{Request, StatusCode};
use clap::Parser;
use serde_json::Value;

use super::support::{answer, app, post};
use crate::app::{App, OPENAPI, router};
use crate::settings::Settings;

#[tokio::test]
async fn who_brings_no_token_gets_no_answer() {
    let (_app, router) = app(&["--token", "secret"]);
    let ask = |token: Option<&str>, path: &str| {
        let mut request = Request::get(path);
        if let Some(token) = token {
            request = request.header("authorization", token);
        }
        request.body(Body::empty()).unwrap()
    };
    for token in
        [None, Some("secret"), Some("Bearer secre"), Some("Bearer secrets"), Some("Bearer ")]
    {
        let (status, _) = answer(&router, ask(token, "/metrics")).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{token:?}");
    }
    assert_eq!(answer(&router, ask(Some("Bearer secret"), "/metrics")).await.0, StatusCode::OK);
    for path in ["/healthz", "/openapi.json", "/"] {
        assert_eq!(answer(&router, ask(None, path)).await.0, StatusCode::OK);
    }
}

#[tokio::test]
async fn an_empty_token_is_none() {
    for token in ["", " ", "secret\n"] {
        let told = Settings::try_parse_from(["service", "--token", token]).unwrap_err();
        assert!(told.to_string().contains("--token"), "{told}");
    }
    // Nor does one that came another way let anybody in.
    let settings = Settings { token: Some(String::new()), ..Settings::parse_from(["service"]) };
    let router = router(&App::new(settings).unwrap());
    for authorization in ["Bearer ", "Bearer", ""] {
        let request = Request::get("/metrics").header("authorization", authorization);
        let (status, _) = answer(&router, request.body(Body::empty()).unwrap()).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{authorization:?}");
    }
}

#[tokio::test]
async fn requests_are_counted() {
    let (_app, router) = app(&[]);
    answer(&router, post("/v1/select?shape=2&eps=0.1", vec![0u8; 8])).await;
    answer(&router, post("/v1/select?shape=2&eps=2", vec![0u8; 8])).await;
    let (_, text) = answer(&router, Request::get("/metrics").body(Body::empty()).unwrap()).await;
    let text = String::from_utf8(text).unwrap();
    for line in [
        r#"certk_requests_total{route="/v1/select",status="200"} 1"#,
        r#"certk_requests_total{route="/v1/select",status="422"} 1"#,
        r#"certk_request_seconds_count{route="/v1/select"} 2"#,
        "certk_waiting_calls 0",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn the_description_names_every_route() {
    let described: Value = serde_json::from_str(OPENAPI).unwrap();
    let source = include_str!("../app.rs");
    let routes = source.split(".route(").skip(1).filter_map(|rest| rest.split('"').nth(1));
    let mut routes: Vec<&str> =
        routes.filter(|path| !["/", "/openapi.json"].contains(path)).collect();
    routes.sort_unstable();
    let mut paths: Vec<&String> = described["paths"].as_object().unwrap().keys().collect();
    paths.sort_unstable();
    assert_eq!(paths, routes);
    // What it refers to is there, and what a path has to say of its name.
    for (path, methods) in described["paths"].as_object().unwrap() {
        for (method, route) in methods.as_object().unwrap() {
            let mut names = Vec::new();
            let parts = route["parameters"].as_array().unwrap().iter();
            for part in parts.chain(route["responses"].as_object().unwrap().values()) {
                let part = match part["$ref"].as_str() {
                    Some(to) => described.pointer(to.strip_prefix('#').unwrap()).expect(to),
                    None => part,
                };
                assert!(part["description"].is_string(), "{method} {path} {part}");
                names.push(part["name"].as_str().unwrap_or_default());
            }
            assert_eq!(path.contains("{name}"), names.contains(&"name"), "{method} {path}");
        }
    }
}
