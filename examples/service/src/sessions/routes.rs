//! What makes, changes, shows and deletes sessions.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::OwnedMutexGuard;

use super::tensors::Brought;
use super::version::{self, Outline, Pen, Version};
use super::{Session, Sessions, lock, name};
use crate::app::App;
use crate::asked::Asked;
use crate::bodies::Body;
use crate::compute::Watch;
use crate::failure::Failure;
use crate::tensors::Dtype;

/// What is said of a session.
#[derive(Debug, Serialize)]
struct About {
    name: String,
    version: u64,
    dtype: Dtype,
    heads: usize,
    /// Keys of a head.
    keys: usize,
    dim: usize,
    values_dim: Option<usize>,
    /// Bytes of memory, index and room to grow included; 0 if it is in its file only.
    bytes: usize,
    in_memory: bool,
    /// The version that its file holds.
    persisted: Option<u64>,
}

impl About {
    fn new(session: &Session, (outline, bytes): (Outline, usize)) -> Self {
        let filed = session.filed.load(Ordering::Relaxed);
        About {
            name: session.name.clone(),
            version: outline.number,
            dtype: outline.layout.dtype,
            heads: outline.layout.heads,
            keys: outline.n,
            dim: outline.layout.dim,
            values_dim: outline.layout.values,
            bytes,
            in_memory: bytes > 0,
            persisted: (filed > 0).then_some(filed),
        }
    }

    /// Of a version, whatever has become of the session since.
    fn of(session: &Session, version: &Version) -> Self {
        Self::new(session, (version.outline(), version.bytes()))
    }
}

/// What the query of a change may say.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    if_version: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Truncate {
    keys: usize,
    if_version: Option<u64>,
}

/// A body in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Evict {
    positions: Vec<usize>,
}

/// That a session is at the version that the client thinks of.
pub(super) fn expect(wanted: Option<u64>, version: &Version) -> Result<(), Failure> {
    let number = version.number;
    match wanted {
        Some(wanted) if wanted != number => {
            Err(Failure::conflict(format!("the session is at version {number}, not {wanted}")))
        }
        _ => Ok(()),
    }
}

/// The pen of a session, when it is free.
async fn turn(
    session: &Session,
    deadline: Instant,
) -> Result<OwnedMutexGuard<Option<Pen>>, Failure> {
    let turn = Arc::clone(&session.pen).lock_owned();
    tokio::time::timeout_at(deadline.into(), turn)
        .await
        .map_err(|_| Failure::from(certk_rs::Error::DeadlineExceeded))
}

/// The version that a reader works on.
pub(super) async fn current(
    app: &Arc<App>,
    name: &str,
    deadline: Instant,
) -> Result<Arc<Version>, Failure> {
    loop {
        let session = app.sessions.get(name)?;
        app.sessions.touch(&session);
        let found = match session.here() {
            Ok(Some(version)) => return Ok(version),
            Ok(None) => {
                let mut pen = turn(&session, deadline).await?;
                let all = Arc::clone(app);
                let load = move |watch: &Watch| all.sessions.load(&session, &mut pen, watch);
                app.compute.run_until(deadline, load).await
            }
            Err(failure) => Err(failure),
        };
        match found {
            // Another has its name, or nothing will have in a moment.
            Err(failure) if failure.is_replaced() => tokio::task::yield_now().await,
            found => return found,
        }
    }
}

/// Has the one writer of a session change it.
async fn change(
    app: &Arc<App>,
    name: &str,
    headers: &HeaderMap,
    work: impl FnOnce(&Sessions, &Version, &mut Option<Pen>, &Watch) -> Result<Option<Version>, Failure>
    + Send
    + 'static,
) -> Result<Response, Failure> {
    let deadline = Instant::now() + app.timeout(headers)?;
    let (session, mut pen) = loop {
        let session = app.sessions.get(name)?;
        app.sessions.touch(&session);
        let pen = turn(&session, deadline).await?;
        if session.here().is_ok() {
            break (session, pen);
        }
        tokio::task::yield_now().await;
    };
    let all = Arc::clone(app);
    let work = move |watch: &Watch| {
        let version = all.sessions.load(&session, &mut pen, watch)?;
        let Some(changed) = work(&all.sessions, &version, &mut pen, watch)? else {
            return Ok(About::of(&session, &version));
        };
        // Who waits no longer is not to find a change.
        watch.check()?;
        Ok(About::of(&session, &*session.publish(changed)?))
    };
    Ok(Json(app.compute.run_until(deadline, work).await?).into_response())
}

pub(crate) async fn put(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let deadline = Instant::now() + app.timeout(&headers)?;
    name::check(&name)?;
    app.sessions.may_be_made(&lock(&app.sessions.all), &name)?;
    let asked = Asked::new(&headers, query, body);
    let all = Arc::clone(&app);
    let work = move |watch: &Watch| {
        let sessions = &all.sessions;
        let brought = Brought::read(&asked)?;
        let (layout, n) = (brought.layout, brought.n);
        let room = version::roomy(n);
        let charge = sessions.room(version::bytes(&layout, room), watch)?;
        let mut pen = Pen::new(&layout, room, charge);
        pen.fill(&brought, watch)?;
        let version = pen.version(layout, n, version::next(0), watch)?;
        watch.check()?;
        let (session, version) = sessions.put(&name, version, pen)?;
        Ok(About::of(&session, &version))
    };
    let about = app.compute.run_until(deadline, work).await?;
    Ok((StatusCode::CREATED, Json(about)).into_response())
}

pub(crate) async fn append(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let asked = Asked::new(&headers, query, body);
    let work = move |sessions: &Sessions, old: &Version, pen: &mut Option<Pen>, watch: &Watch| {
        expect(asked.query::<Change>()?.if_version, old)?;
        let brought = Brought::read(&asked)?;
        let layout = old.layout;
        if brought.layout != layout {
            let have = brought.layout;
            let problem = format!("the session holds {layout:?}, the body {have:?}");
            return Err(Failure::input(problem));
        }
        if brought.n == 0 {
            return Ok(None);
        }
        match pen {
            Some(pen) if pen.has_room(old, brought.n) => old.append(pen, &brought).map(Some),
            _ => {
                let n = old.n + brought.n;
                let mut larger = sessions.larger(old, n, watch)?;
                larger.take(old, std::slice::from_ref(&(0..old.n)), watch)?;
                larger.fill(&brought, watch)?;
                let changed = larger.version(layout, n, version::next(old.number), watch)?;
                *pen = Some(larger);
                Ok(Some(changed))
            }
        }
    };
    change(&app, &name, &headers, work).await
}

/// The session with only those keys that lie in some ranges, in memory of its own, for readers may be at the old one.
fn only(
    sessions: &Sessions,
    old: &Version,
    ranges: &[std::ops::Range<usize>],
    pen: &mut Option<Pen>,
    watch: &Watch,
) -> Result<Option<Version>, Failure> {
    let n = ranges.iter().map(ExactSizeIterator::len).sum();
    if n == old.n {
        return Ok(None);
    }
    let mut smaller = sessions.larger(old, n, watch)?;
    smaller.take(old, ranges, watch)?;
    let changed = smaller.version(old.layout, n, version::next(old.number), watch)?;
    *pen = Some(smaller);
    Ok(Some(changed))
}

pub(crate) async fn truncate(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let asked: Truncate = Asked::new(&headers, query, Body::default()).query()?;
    let work = move |sessions: &Sessions, old: &Version, pen: &mut Option<Pen>, watch: &Watch| {
        expect(asked.if_version, old)?;
        if asked.keys > old.n {
            let (keys, n) = (asked.keys, old.n);
            return Err(Failure::input(format!("{keys} keys cannot stay of {n}")));
        }
        only(sessions, old, std::slice::from_ref(&(0..asked.keys)), pen, watch)
    };
    change(&app, &name, &headers, work).await
}

pub(crate) async fn evict(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let asked = Asked::new(&headers, query, body);
    let work = move |sessions: &Sessions, old: &Version, pen: &mut Option<Pen>, watch: &Watch| {
        expect(asked.query::<Change>()?.if_version, old)?;
        let Evict { mut positions } = asked.body()?;
        positions.sort_unstable();
        positions.dedup();
        if let Some(last) = positions.last().filter(|last| **last >= old.n) {
            return Err(Failure::input(format!("there is no position {last} of {}", old.n)));
        }
        // What lies between them.
        let mut ranges = Vec::with_capacity(positions.len() + 1);
        let mut from = 0;
        for to in positions.into_iter().chain([old.n]) {
            if to > from {
                ranges.push(from..to);
            }
            from = to + 1;
        }
        only(sessions, old, &ranges, pen, watch)
    };
    change(&app, &name, &headers, work).await
}

pub(crate) async fn persist(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let deadline = Instant::now() + app.timeout(&headers)?;
    let all = Arc::clone(&app);
    let work = move |watch: &Watch| {
        loop {
            watch.check()?;
            let session = all.sessions.get(&name)?;
            all.sessions.touch(&session);
            match session.here() {
                Ok(Some(version)) => {
                    all.sessions.file(&session, &version, watch)?;
                    return Ok(About::of(&session, &version));
                }
                // What is in its file only is there.
                Ok(None) => {
                    if let Some(outline) = session.outline() {
                        return Ok(About::new(&session, outline));
                    }
                }
                Err(_) => {}
            }
        }
    };
    Ok(Json(app.compute.run_until(deadline, work).await?).into_response())
}

pub(crate) async fn remove(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let timeout = app.timeout(&headers)?;
    let all = Arc::clone(&app);
    let work = move |watch: &Watch| {
        loop {
            watch.check()?;
            match all.sessions.delete(&all.sessions.get(&name)?) {
                Err(failure) if failure.is_replaced() => {}
                done => return done,
            }
        }
    };
    app.compute.run(timeout, work).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(crate) async fn show(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response, Failure> {
    loop {
        let session = app.sessions.get(&name)?;
        if let Some(outline) = session.outline() {
            return Ok(Json(About::new(&session, outline)).into_response());
        }
        tokio::task::yield_now().await;
    }
}

pub(crate) async fn list(State(app): State<Arc<App>>) -> Response {
    let all: Vec<_> = lock(&app.sessions.all).values().cloned().collect();
    let about = |session: &Arc<Session>| Some(About::new(session, session.outline()?));
    let mut all: Vec<_> = all.iter().filter_map(about).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let memory = &app.sessions.memory;
    let answer = json!({ "sessions": all, "bytes": memory.held(), "most_bytes": memory.most() });
    Json(answer).into_response()
}

impl Sessions {
    /// Memory for so many keys of a session that is there, too, until its readers are done.
    fn larger(&self, than: &Version, n: usize, watch: &Watch) -> Result<Pen, Failure> {
        let (layout, most) = (&than.layout, self.memory.most());
        let fits = |room: &usize| {
            let needed = version::bytes(layout, *room).saturating_add(than.bytes());
            needed <= most
        };
        let room = [version::roomy(n), n].into_iter().find(fits).ok_or_else(|| {
            let message = format!(
                "with {n} keys the session needs {} bytes beside the {} that it has, and all may have {most}",
                version::bytes(layout, n),
                than.bytes()
            );
            Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        })?;
        let charge = self.room(version::bytes(layout, room), watch)?;
        Ok(Pen::new(layout, room, charge))
    }
}
