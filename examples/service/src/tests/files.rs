//! Sessions that leave memory, and come back.

use std::fs;
use std::path::Path;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use clap::Parser;
use serde_json::Value;
use tempfile::TempDir;

use super::support::{Answer, Tensors, answer, app, ask, json_of, normal, post};
use crate::app::App;
use crate::settings::Settings;

async fn put(router: &Router, name: &str, held: &Tensors) -> (StatusCode, Value) {
    let request = Request::put(format!("/v1/sessions/{name}"));
    json_of(router, request.body(held.safetensors().into()).unwrap()).await
}

/// Searches and checks; the status, and the version that was answered.
async fn search(router: &Router, name: &str, held: &Tensors) -> Result<u64, StatusCode> {
    let queries = normal(held.heads * 2 * held.dim, 77);
    let path = format!("/v1/sessions/{name}/search?shape={},2,{}&eps=0.1", held.heads, held.dim);
    let body: Vec<u8> = bytemuck::cast_slice(&queries).to_vec();
    let (status, body) = answer(router, post(&path, body)).await;
    if status != StatusCode::OK {
        return Err(status);
    }
    let found = Answer::read(&body);
    found.check_sets(held, &queries, 0.1, false);
    Ok(found.version)
}

fn data(folder: &TempDir) -> [String; 2] {
    ["--data".into(), folder.path().display().to_string()]
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn sessions_come_back_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let [flag, path] = data(&folder);
    let mut a = Tensors::new(1, 2, 100, 16, 8);
    let b = Tensors::new(2, 1, 50, 8, 0);
    let last = {
        let (app, router) = app(&[&flag, &path]);
        assert_eq!(put(&router, "a", &a).await.0, StatusCode::CREATED);
        assert_eq!(put(&router, "b", &b).await.0, StatusCode::CREATED);
        let more = Tensors::new(3, 2, 30, 16, 8);
        a.append(&more);
        answer(&router, post("/v1/sessions/a/append", more.safetensors())).await;
        let (status, about) = json_of(&router, post("/v1/sessions/a/persist", "")).await;
        assert_eq!(status, StatusCode::OK, "{about}");
        assert_eq!(about["persisted"], about["version"]);
        // As at the end of a service that was told to end.
        app.sessions.file_all();
        about["version"].as_u64().unwrap()
    };
    assert_eq!(names(folder.path()), [".lock", "a.safetensors", "b.safetensors"]);
    let (_app, router) = app(&[&flag, &path]);
    let (_, all) = json_of(&router, ask(Method::GET, "/v1/sessions")).await;
    assert_eq!(all["sessions"].as_array().unwrap().len(), 2);
    assert_eq!(all["bytes"], 0);
    assert_eq!(search(&router, "a", &a).await, Ok(last));
    assert!(search(&router, "b", &b).await.is_ok());
    // It goes on as if nothing had been.
    let more = Tensors::new(4, 2, 200, 16, 8);
    a.append(&more);
    let path = format!("/v1/sessions/a/append?if_version={last}");
    assert_eq!(answer(&router, post(&path, more.safetensors())).await.0, StatusCode::OK);
    assert!(search(&router, "a", &a).await.unwrap() > last);
}

#[tokio::test]
async fn after_a_crash_there_is_what_was_written_and_its_number_means_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let [flag, path] = data(&folder);
    let held = Tensors::new(1, 2, 100, 16, 0);
    let (written, lost) = {
        let (_app, router) = app(&[&flag, &path]);
        let written = put(&router, "a", &held).await.1["version"].as_u64().unwrap();
        answer(&router, post("/v1/sessions/a/persist", "")).await;
        let more = Tensors::new(3, 2, 30, 16, 0).safetensors();
        let (_, about) = json_of(&router, post("/v1/sessions/a/append", more)).await;
        assert_eq!(about["persisted"], written);
        (written, about["version"].as_u64().unwrap())
    };
    // What a killed service has not finished.
    fs::write(folder.path().join(".unfinished-x7"), "half").unwrap();
    fs::write(folder.path().join("README"), "ours").unwrap();
    let (_app, router) = app(&[&flag, &path]);
    assert_eq!(names(folder.path()), [".lock", "README", "a.safetensors"]);
    assert_eq!(search(&router, "a", &held).await, Ok(written));
    let other = Tensors::new(4, 2, 10, 16, 0).safetensors();
    let path = format!("/v1/sessions/a/append?if_version={lost}");
    assert_eq!(answer(&router, post(&path, other.clone())).await.0, StatusCode::CONFLICT);
    let (_, about) = json_of(&router, post("/v1/sessions/a/append", other)).await;
    assert!(about["version"].as_u64().unwrap() > lost);
}

#[tokio::test]
async fn a_damaged_file_is_set_aside_and_never_believed() {
    let folder = tempfile::tempdir().unwrap();
    let [flag, path] = data(&folder);
    let (held, other) = (Tensors::new(1, 2, 20, 8, 4), Tensors::new(2, 1, 10, 8, 0));
    {
        let (app, router) = app(&[&flag, &path]);
        put(&router, "a", &held).await;
        put(&router, "b", &other).await;
        app.sessions.file_all();
    }
    let file = folder.path().join("a.safetensors");
    let whole = fs::read(&file).unwrap();
    let mut damages: Vec<Vec<u8>> = Vec::new();
    for at in (0..whole.len()).step_by(7).chain(0..16) {
        for change in [1, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            damages.push(bytes);
        }
    }
    damages.extend([0, 7, 8, 100, whole.len() - 1].map(|length| whole[..length].to_vec()));
    damages.push([&whole[..], b"more"].concat());
    damages.push(fs::read(folder.path().join("b.safetensors")).unwrap());
    for (i, bytes) in damages.iter().enumerate() {
        fs::write(&file, bytes).unwrap();
        let (_app, router) = app(&[&flag, &path]);
        let status = search(&router, "a", &held).await.unwrap_err();
        assert!([StatusCode::GONE, StatusCode::NOT_FOUND].contains(&status), "{i} {status}");
        assert_eq!(search(&router, "a", &held).await, Err(StatusCode::NOT_FOUND));
        assert!(search(&router, "b", &other).await.is_ok());
        let aside = names(folder.path());
        let aside: Vec<_> = aside.iter().filter(|name| name.starts_with("a.")).collect();
        assert!(matches!(&aside[..], [one] if one.starts_with("a.damaged-")), "{i} {aside:?}");
        assert_eq!(fs::read(folder.path().join(aside[0])).unwrap(), *bytes);
        fs::remove_file(folder.path().join(aside[0])).unwrap();
        // Its name is free.
        if i % 50 == 0 {
            assert_eq!(put(&router, "a", &held).await.0, StatusCode::CREATED);
            assert!(search(&router, "a", &held).await.is_ok());
        }
    }
    fs::write(&file, &whole).unwrap();
    let (_app, router) = app(&[&flag, &path]);
    assert!(search(&router, "a", &held).await.is_ok());
}

#[tokio::test]
async fn what_is_deleted_stays_deleted_and_a_folder_serves_one_service() {
    let folder = tempfile::tempdir().unwrap();
    let [flag, path] = data(&folder);
    {
        let (app, router) = app(&[&flag, &path]);
        put(&router, "a", &Tensors::new(1, 1, 10, 8, 0)).await;
        app.sessions.file_all();
        let another = App::new(Settings::parse_from(["service", &flag, &path]));
        assert!(another.err().unwrap().to_string().contains("another service"));
        answer(&router, ask(Method::DELETE, "/v1/sessions/a")).await;
        assert_eq!(names(folder.path()), [".lock"]);
        app.sessions.file_all();
    }
    let (_app, router) = app(&[&flag, &path]);
    let gone = answer(&router, ask(Method::GET, "/v1/sessions/a")).await.0;
    assert_eq!(gone, StatusCode::NOT_FOUND);
    let (_app, router) = super::support::app(&[]);
    put(&router, "a", &Tensors::new(1, 1, 10, 8, 0)).await;
    let nowhere = answer(&router, post("/v1/sessions/a/persist", "")).await.0;
    assert_eq!(nowhere, StatusCode::CONFLICT);
}

#[tokio::test]
async fn the_one_that_was_not_used_for_longest_makes_way() {
    let folder = tempfile::tempdir().unwrap();
    let [flag, path] = data(&folder);
    let held: Vec<Tensors> = (0..4).map(|seed| Tensors::new(seed, 2, 300, 16, 8)).collect();
    for keeps_files in [true, false] {
        // Room for three of them.
        let all = ["--session-memory", "400000", &flag, &path];
        let (app, router) = app(if keeps_files { &all } else { &all[..2] });
        for (name, held) in ["a", "b", "c"].iter().zip(&held) {
            assert_eq!(put(&router, name, held).await.0, StatusCode::CREATED);
        }
        assert_eq!(app.sessions.gauges().2, 0);
        search(&router, "a", &held[0]).await.unwrap();
        assert_eq!(put(&router, "d", &held[3]).await.0, StatusCode::CREATED);
        assert_eq!(app.sessions.gauges().2, 1);
        let (status, b) = json_of(&router, ask(Method::GET, "/v1/sessions/b")).await;
        if keeps_files {
            assert_eq!((status, &b["in_memory"]), (StatusCode::OK, &Value::Bool(false)));
            // All of them can be asked, in any order, and written to.
            for round in 0..12 {
                let which = (round * 7) % 4;
                search(&router, ["a", "b", "c", "d"][which], &held[which]).await.unwrap();
            }
            let mut longer = held[1].clone();
            let more = Tensors::new(9, 2, 3, 16, 8);
            longer.append(&more);
            answer(&router, post("/v1/sessions/b/append", more.safetensors())).await;
            for which in [0, 2, 3] {
                search(&router, ["a", "b", "c", "d"][which], &held[which]).await.unwrap();
            }
            search(&router, "b", &longer).await.unwrap();
        } else {
            assert_eq!(status, StatusCode::NOT_FOUND);
            for which in [0, 2, 3] {
                search(&router, ["a", "b", "c", "d"][which], &held[which]).await.unwrap();
            }
        }
        let (_, about) = json_of(&router, ask(Method::GET, "/v1/sessions")).await;
        assert!(about["bytes"].as_u64().unwrap() <= 400_000);
        // One that is too large by itself.
        let (status, why) = put(&router, "e", &Tensors::new(5, 2, 2000, 16, 8)).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "{why}");
        for (method, path) in ["a", "c", "d"].map(|name| (Method::DELETE, name)) {
            answer(&router, ask(method, &format!("/v1/sessions/{path}"))).await;
        }
        answer(&router, ask(Method::DELETE, "/v1/sessions/b")).await;
        assert_eq!(app.sessions.gauges().1, 0);
    }
}

#[tokio::test]
async fn there_are_no_more_sessions_than_may_be() {
    let (_app, router) = app(&["--sessions", "2"]);
    let held = Tensors::new(1, 1, 10, 8, 0);
    for (name, status) in [("a", 201), ("b", 201), ("c", 409), ("b", 201), ("../a", 404)] {
        assert_eq!(put(&router, name, &held).await.0, status, "{name}");
    }
    let (status, _) = put(&router, "%2e%2e%2fa", &held).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    let request = Request::delete("/v1/sessions/a").body(Body::empty()).unwrap();
    answer(&router, request).await;
    assert_eq!(put(&router, "c", &held).await.0, StatusCode::CREATED);
}
