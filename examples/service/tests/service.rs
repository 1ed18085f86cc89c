//! The program as its clients see it: answers, refusals, cancellation, and its end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

struct Service(Child, String);

impl Drop for Service {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn started(options: &[&str]) -> Service {
    let mut program = Command::new(env!("CARGO_BIN_EXE_certk-service"));
    program.args(["--listen", "127.0.0.1:0"]).args(options).stderr(Stdio::piped());
    let mut child = program.spawn().unwrap();
    let line = BufReader::new(child.stderr.take().unwrap()).lines().next().unwrap().unwrap();
    Service(child, line.rsplit(' ').next().unwrap().to_owned())
}

impl Service {
    /// Send a request with a part of its body, or all of it.
    fn send(&self, request: &str, length: usize, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.1).unwrap();
        let head = format!("host: x\r\nconnection: close\r\ncontent-length: {length}");
        write!(stream, "{request} HTTP/1.1\r\n{head}\r\n\r\n").unwrap();
        stream.write_all(body).unwrap();
        stream
    }

    fn ask(&self, request: &str, body: &[u8]) -> (u16, Value) {
        answer(self.send(request, body.len(), body))
    }

    /// Ask until a request is refused since its place is taken, or until it is not; whether that came soon.
    fn is_soon_full(&self, full: bool) -> bool {
        let mut asks = (0..9999).map(|_| self.ask("POST /select?eps=0.1", &one_row(&[0.0])).0);
        asks.any(|status| (status == 429) == full)
    }

    /// Send a request that takes the only place, again where one of the asks had taken it first.
    fn occupy(&self, request: &str, length: usize, body: &[u8]) -> TcpStream {
        let mut sent = (0..20).map(|_| self.send(request, length, body));
        sent.find(|_| self.is_soon_full(true)).expect("a place for the request")
    }
}

fn answer(mut stream: TcpStream) -> (u16, Value) {
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    let (head, body) = all.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), serde_json::from_str(body).unwrap_or_default())
}

fn file(tensors: &[(&str, &[usize], &[f32])]) -> Vec<u8> {
    let views = tensors.iter().map(|(name, shape, numbers)| {
        let bytes = bytemuck::cast_slice(numbers);
        (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

fn one_row(scores: &[f32]) -> Vec<u8> {
    file(&[("scores", &[1, scores.len()], scores)])
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.618).fract() * 4.0 - 2.0).collect()
}

fn cache(shape: [usize; 3]) -> Vec<u8> {
    let numbers = numbers(shape.iter().product());
    file(&[("keys", &shape, &numbers), ("values", &shape, &numbers)])
}

#[test]
fn wrong_requests_are_refused_and_change_nothing() {
    let service = started(&["--max-body", "100000", "--session-memory", "1000000"]);
    assert_eq!(service.ask("PUT /sessions/a", &cache([50, 1, 64])).0, 200);
    let row = one_row(&[1.0, f32::NAN]);
    let (_, told) = service.ask("POST /select?eps=0.1", &row);
    assert!(told["error"].as_str().unwrap().contains("scores[0, 1]"), "{told}");
    let (fine, mut spoiled) = ([1.0; 64], [1.0; 64]);
    spoiled[9] = f32::INFINITY;
    for (keys, values) in [(&spoiled, &fine), (&fine, &spoiled)] {
        let wrong = file(&[("keys", &[1, 1, 64], keys), ("values", &[1, 1, 64], values)]);
        assert_eq!(service.ask("PUT /sessions/a", &wrong).0, 422);
        assert_eq!(service.ask("POST /sessions/a/append", &wrong).0, 422);
    }
    for (request, body, status) in [
        ("POST /select?eps=2", &one_row(&[1.0]), 422),
        ("POST /select?eps=0.1&k=3", &row, 400),
        ("POST /certify?eps=0.1", &row, 422),
        ("PUT /sessions/%ff", &cache([1, 1, 64]), 400),
        ("PUT /sessions/a", &cache([0, 1, 64]), 422),
        ("POST /sessions/a/append", &cache([1, 2, 64]), 422),
        ("PUT /sessions/b", &cache([10, 1, 1000]), 503),
        ("POST /sessions/a/attention", &file(&[("queries", &[1, 1, 64], &fine)]), 422),
        ("GET /sessions/a", &vec![], 405),
        ("GET /", &vec![], 404),
        ("POST /select?eps=0.1", &b"{}".to_vec(), 422),
        ("POST /select?eps=0.1", &vec![0; 100_001], 413),
    ] {
        let (found, told) = service.ask(request, body);
        assert_eq!(found, status, "{request}: {told}");
    }
    let again = || service.ask("POST /sessions/a/append?at=50", &cache([1, 1, 64]));
    assert_eq!(again(), (200, json!({ "keys": 51 })));
    assert_eq!(again().0, 409);
    assert_eq!(service.ask("DELETE /sessions/a", b"").0, 200);
    assert_eq!(again().0, 404);
}

#[test]
fn a_call_ends_with_its_client_and_with_its_time() {
    // It would take many seconds.
    let (long, queries) = ("POST /sessions/a/attention?eps=0", [1, 1 << 17, 4]);
    let queries = file(&[("queries", &queries, &numbers(1 << 19))]);
    let service = started(&["--threads", "1", "--waiting", "0", "--timeout-ms", "3600000"]);
    assert_eq!(service.ask("PUT /sessions/a", &cache([1 << 17, 1, 4])).0, 200);
    let request = service.occupy(long, queries.len(), &queries);
    // So many asks later its call runs.
    (0..300).for_each(|_| assert!(service.is_soon_full(true)));
    drop(request);
    assert!(service.is_soon_full(false));

    let service = started(&["--threads", "1", "--waiting", "0", "--timeout-ms", "1500"]);
    assert_eq!(service.ask("PUT /sessions/a", &cache([1 << 17, 1, 4])).0, 200);
    assert_eq!(service.ask(long, &queries).0, 504);
    assert!(service.is_soon_full(false));
    // A body and a head that do not come.
    assert_eq!(answer(service.send(long, queries.len(), &queries[..9])).0, 408);
    assert_eq!(TcpStream::connect(&service.1).unwrap().read(&mut [0]).unwrap(), 0);
}

#[test]
fn sigterm_lets_requests_end() {
    let mut service = started(&["--threads", "1", "--waiting", "0"]);
    let body = cache([10, 1, 64]);
    let mut request = service.occupy("PUT /sessions/a", body.len(), &body[..100]);
    Command::new("kill").arg(service.0.id().to_string()).status().unwrap();
    // Until it listens no longer.
    while TcpStream::connect(&service.1).is_ok() {}
    request.write_all(&body[100..]).unwrap();
    assert_eq!(answer(request).0, 200);
    assert!(service.0.wait().unwrap().success());
}
