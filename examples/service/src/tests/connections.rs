//! How clients hold connections. The clock stands still while anybody has something to do, so that nothing here waits.

use std::io;
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex, split};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::support::app;
use crate::connections::serve;

const ASK: &[u8] = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";

struct Streams(mpsc::UnboundedReceiver<DuplexStream>);

impl Listener for Streams {
    type Io = DuplexStream;
    type Addr = ();

    async fn accept(&mut self) -> (DuplexStream, ()) {
        match self.0.recv().await {
            Some(stream) => (stream, ()),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

struct Served {
    to: mpsc::UnboundedSender<DuplexStream>,
    end: oneshot::Sender<()>,
    ended: JoinHandle<()>,
}

impl Served {
    fn new(arguments: &[&str]) -> Self {
        let (app, _) = app(arguments);
        let (to, streams) = mpsc::unbounded_channel();
        let (end, asked) = oneshot::channel();
        let ended = tokio::spawn(async move {
            serve(Streams(streams), &app, async { asked.await.unwrap() }).await;
        });
        Served { to, end, ended }
    }

    fn connect(&self) -> DuplexStream {
        let (ours, theirs) = duplex(1 << 10);
        self.to.send(theirs).unwrap();
        ours
    }
}

/// Reads an answer of `/healthz`; the connection stays.
async fn is_healthy(stream: &mut DuplexStream) -> bool {
    let mut answer = Vec::new();
    while !answer.ends_with(b"ok\n") {
        if stream.read_buf(&mut answer).await.unwrap() == 0 {
            return false;
        }
    }
    answer.starts_with(b"HTTP/1.1 200")
}

#[tokio::test(start_paused = true)]
async fn a_head_that_does_not_end_ends_its_connection() {
    let served = Served::new(&["--header-timeout-ms", "5000"]);
    for (before, trickles) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut stream = served.connect();
        if before {
            stream.write_all(ASK).await.unwrap();
            assert!(is_healthy(&mut stream).await);
        }
        let begun = Instant::now();
        let (mut read, mut write) = split(stream);
        let trickle = async {
            write.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
            while write.write_all(b"a: b\r\n").await.is_ok() {
                sleep(Duration::from_millis(100)).await;
            }
        };
        let mut rest = Vec::new();
        tokio::select! {
            () = trickle, if trickles => {}
            end = timeout(Duration::from_secs(3600), read.read_to_end(&mut rest)) => {
                end.expect("the connection ends").ok();
            }
        }
        let took = begun.elapsed().as_millis();
        assert!((4900..5200).contains(&took), "{before} {trickles} {took}");
    }
}

#[tokio::test(start_paused = true)]
async fn more_connections_than_may_be_wait_for_one_to_end() {
    let served = Served::new(&["--connections", "2"]);
    let mut streams: Vec<_> = (0..3).map(|_| served.connect()).collect();
    for stream in &mut streams {
        stream.write_all(ASK).await.unwrap();
    }
    let mut third = streams.pop().unwrap();
    for stream in &mut streams {
        assert!(is_healthy(stream).await);
    }
    let early = timeout(Duration::from_secs(1), is_healthy(&mut third)).await;
    assert!(early.is_err(), "a third was let in");
    streams.pop();
    assert!(is_healthy(&mut third).await);
}

#[tokio::test(start_paused = true)]
async fn who_reads_no_answer_loses_its_place_in_the_end() {
    let served = Served::new(&["--connections", "1"]);
    let mut idle = served.connect();
    idle.write_all(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut next = served.connect();
    next.write_all(ASK).await.unwrap();
    assert!(timeout(Duration::from_secs(3600), is_healthy(&mut next)).await.expect("a place"));
}

#[tokio::test(start_paused = true)]
async fn the_end_waits_for_requests_and_not_for_connections() {
    let served = Served::new(&[]);
    let mut idle = served.connect();
    idle.write_all(ASK).await.unwrap();
    assert!(is_healthy(&mut idle).await);
    let mut busy = served.connect();
    let head = b"PUT /v1/sessions/.x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n";
    busy.write_all(head).await.unwrap();
    sleep(Duration::from_millis(1)).await;
    served.end.send(()).unwrap();
    assert_eq!(idle.read(&mut [0; 9]).await.unwrap(), 0);
    assert!(!served.ended.is_finished());
    busy.write_all(b"{}").await.unwrap();
    let mut answer = String::new();
    busy.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 422"), "{answer}");
    served.ended.await.unwrap();
}
