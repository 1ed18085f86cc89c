//! Requests to the example service, against its router: what it answers, beside what its sessions must hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use axum::{Router, http};
use certk_service::{App, Settings, router};
use serde_json::Value;
use tempfile::TempDir;
use tower::ServiceExt;

use super::asked::{Asked, Held, NAMES, Tensors, What};
use super::judged;
use super::select::set_level;
use super::tape::Tape;

/// How narrow the service's limits are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limits {
    Wide,
    /// Sessions make way for one another.
    Memory,
    /// A token, one session, small bodies, little memory for a call.
    All,
}

const TOKEN: &str = "a token";
const MAX_BODY: usize = 3000;

/// A service, and what is known of it.
struct World {
    limits: Limits,
    folder: Option<TempDir>,
    /// Nothing only while another takes its place.
    running: Option<(Arc<App>, Router)>,
    held: BTreeMap<&'static str, Held>,
}

fn settings(limits: Limits, folder: Option<&TempDir>) -> Settings {
    let tight = limits == Limits::All;
    Settings {
        listen: ([127, 0, 0, 1], 0).into(),
        token: tight.then(|| TOKEN.into()),
        connections: 1,
        header_timeout_ms: 1000,
        compute_threads: 1,
        waiting: 4,
        timeout_ms: 1_000_000,
        max_body: if tight { MAX_BODY } else { 1 << 24 },
        bodies_memory: 1 << 25,
        call_memory: if tight { 400_000 } else { 1 << 30 },
        sessions: if tight { 1 } else { 10 },
        session_memory: if limits == Limits::Memory { 60_000 } else { 1 << 30 },
        data: folder.map(|folder| folder.path().to_owned()),
        grace: 0,
    }
}

thread_local! {
    static RUNTIME: tokio::runtime::Runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
}

/// What a request was told.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

impl World {
    fn new(tape: &mut Tape<'_>) -> Self {
        let (limits, filed) = match tape.below(64) {
            0..=39 => (Limits::Wide, false),
            40..=42 => (Limits::Wide, true),
            43..=52 => (Limits::Memory, false),
            53..=55 => (Limits::Memory, true),
            _ => (Limits::All, false),
        };
        let folder = filed.then(|| tempfile::tempdir().unwrap());
        let mut world = World { limits, folder, running: None, held: BTreeMap::new() };
        world.start();
        world
    }

    fn start(&mut self) {
        let app = App::new(settings(self.limits, self.folder.as_ref())).unwrap();
        let router = router(&app);
        self.running = Some((app, router));
    }

    /// Ends it as a signal would, and starts another over its files.
    fn restart(&mut self) {
        if let Some((app, _)) = self.running.take() {
            app.file_all();
        }
        self.start();
        if self.folder.is_none() {
            self.held.clear();
        }
    }

    fn tell(&self, asked: &Asked) -> Option<Told> {
        let uri = if asked.query.is_empty() {
            asked.path.clone()
        } else {
            format!("{}?{}", asked.path, asked.query)
        };
        let uri: http::Uri = uri.parse().ok()?;
        let mut request = Request::builder().method(asked.method).uri(uri);
        for (name, value) in &asked.headers {
            request = request.header(*name, *value);
        }
        if self.limits == Limits::All && asked.knows {
            request = request.header("authorization", format!("Bearer {TOKEN}"));
        }
        let request = request.body(Body::from(asked.body.clone())).ok()?;
        let (_, router) = self.running.as_ref()?;
        Some(RUNTIME.with(|runtime| {
            runtime.block_on(async {
                let response = router.clone().oneshot(request).await.unwrap();
                let status = response.status().as_u16();
                let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
                Told { status, body: body.to_vec() }
            })
        }))
    }

    /// Judges that a request was refused for what it is.
    fn refused(&self, asked: &Asked, told: &Told) -> bool {
        let known = asked.name.is_none_or(|name| self.held.contains_key(name));
        let forgets = self.limits == Limits::Memory && self.folder.is_none();
        let tight = self.limits != Limits::Wide;
        match told.status {
            400 => asked.path.contains("%FF"),
            401 => self.limits == Limits::All && !asked.knows,
            404 => !known || forgets || matches!(asked.what, What::Nothing),
            405 => matches!(asked.what, What::Nothing),
            409 => match asked.what {
                What::Persist => self.folder.is_none(),
                What::Put => self.limits == Limits::All,
                _ => asked.says("if_version"),
            },
            413 => {
                let each = if asked.says_json() { 16 } else { 1 };
                self.limits == Limits::Memory || tight && each * asked.body.len() > MAX_BODY
            }
            422 => {
                assert!(!asked.right, "{asked:?}\n{}", String::from_utf8_lossy(&told.body));
                true
            }
            503 => tight,
            504 => asked.headers.contains(&("x-timeout-ms", "0")),
            _ => false,
        }
    }

    /// Judges what came of a request that was not refused, and keeps what it changed.
    fn answered(&mut self, asked: &Asked, told: &Told) {
        let said = || -> Value { serde_json::from_slice(&told.body).unwrap() };
        let Some(name) = asked.name else {
            match &asked.what {
                What::Select(scores) => judged::selected(scores, asked, told),
                What::List => self.listed(&said()),
                What::Nothing => panic!("{asked:?}"),
                _ => {}
            }
            return;
        };
        if matches!(asked.what, What::Put) {
            let brought = Tensors::read(asked).expect("what cannot be read was taken");
            let said = said();
            let number = said["version"].as_u64().unwrap();
            let before = self.held.insert(name, Held { tensors: brought, number });
            assert!(before.is_none_or(|before| before.number < number));
            self.held[name].check(name, &said);
            return;
        }
        let Some(held) = self.held.get_mut(name) else { panic!("there is no {name}: {asked:?}") };
        let (n, number) = (held.tensors.n(), held.number);
        match &asked.what {
            What::Search(of) => judged::searched(&held.tensors, of, asked, told, number),
            What::Attend(of) => judged::attended(&held.tensors, of, asked, told, number),
            What::Delete => {
                self.held.remove(name);
                return;
            }
            What::Append => held.tensors.append(Tensors::read(asked).expect("it was taken")),
            What::Truncate => {
                let keys = asked.number("keys").expect("it was taken");
                assert!(keys <= n);
                held.tensors.only(|at| at < keys);
            }
            What::Evict => {
                let body: Value = serde_json::from_slice(&asked.body).unwrap();
                let gone: Vec<usize> = serde_json::from_value(body["positions"].clone()).unwrap();
                assert!(gone.iter().all(|at| *at < n));
                held.tensors.only(|at| !gone.contains(&at));
            }
            _ => {}
        }
        if matches!(asked.what, What::Search(_) | What::Attend(_)) {
            return;
        }
        let said = said();
        let next = said["version"].as_u64().unwrap();
        assert!(if held.tensors.n() == n { next == number } else { next > number }, "{asked:?}");
        held.number = next;
        held.check(name, &said);
    }

    fn listed(&self, said: &Value) {
        let names: Vec<_> =
            said["sessions"].as_array().unwrap().iter().map(|each| &each["name"]).collect();
        assert!(names.iter().all(|name| self.held.contains_key(name.as_str().unwrap())));
        let forgets = self.limits == Limits::Memory && self.folder.is_none();
        assert!(forgets || names.len() == self.held.len());
    }
}

/// Asks until the tape ends; says of each request what it was and what it was told.
pub fn asked(input: &[u8], mut each: impl FnMut(&'static str, u16)) {
    let mut tape = Tape::new(input);
    set_level(&mut tape);
    let mut world = World::new(&mut tape);
    for round in 0..12 {
        if round > 0 && tape.is_over() {
            break;
        }
        if round > 1 && tape.rarely(24) {
            world.restart();
        }
        let asked = Asked::new(&mut tape, &world.held);
        let Some(told) = world.tell(&asked) else { continue };
        each(asked.what.name(), told.status);
        if told.status >= 300 {
            let text = String::from_utf8_lossy(&told.body);
            assert!(world.refused(&asked, &told), "{} {text} {asked:?}", told.status);
            assert!(told.status == 405 || told.status == 400 || text.starts_with("{\"error\":"));
            if told.status == 404
                && let Some(name) = asked.name
            {
                // It made way for others.
                world.held.remove(name);
            }
        } else {
            world.answered(&asked, &told);
        }
    }
    // Whatever was asked, the sessions are there.
    for name in NAMES {
        let Some(told) = world.tell(&Asked::show(name)) else { unreachable!() };
        match world.held.get(name) {
            Some(held) if told.status == 200 => {
                held.check(name, &serde_json::from_slice(&told.body).unwrap());
            }
            held => {
                let forgets = world.limits == Limits::Memory && world.folder.is_none();
                assert!(told.status == 404 && (held.is_none() || forgets), "{name} {told:?}");
            }
        }
    }
}

pub fn run(input: &[u8]) {
    asked(input, |_, _| {});
}
