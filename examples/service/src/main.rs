//! Certified selection, search and attention over HTTP: an example of a service that embeds `certk-rs`.

mod call;
mod failure;
mod routes;
mod sessions;
mod tensors;

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use clap::Parser;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

/// Certified selection, search and attention over HTTP.
#[derive(Parser)]
struct Settings {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Connections at a time; more wait to be accepted
    #[arg(long, default_value_t = 1024)]
    connections: u32,
    /// Milliseconds for a request, for the head of the next one, and for the end of the service
    #[arg(long, default_value_t = 30_000)]
    timeout_ms: u32,
    /// Calls that run at a time, each on one thread
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, usize::from))]
    threads: usize,
    /// Requests that may wait for a thread; more are refused (429)
    #[arg(long, default_value_t = 16)]
    waiting: usize,
    /// Bytes of a body; each request that waits or runs may have one, and a copy of it
    #[arg(long, default_value_t = 64 << 20)]
    max_body: usize,
    /// Bytes that one call may ask for at a time
    #[arg(long, default_value_t = 1 << 30)]
    call_memory: usize,
    /// Bytes of all sessions, indexes included
    #[arg(long, default_value_t = 4 << 30)]
    session_memory: usize,
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let settings = Settings::parse();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut listener = TcpListener::bind(settings.listen).await?;
    eprintln!("listening on {}", listener.local_addr()?);
    let patience = Duration::from_millis(settings.timeout_ms.into());
    let mut http = http1::Builder::new();
    // The clock also runs between requests.
    http.timer(TokioTimer::new()).header_read_timeout(patience);
    let places = Arc::new(Semaphore::new(settings.connections as usize));
    let service = TowerToHyperService::new(routes::router(&settings));
    let (end, ended) = watch::channel(());
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, Listener::accept(&mut listener).await.0)
        };
        let (place, stream) = tokio::select! {
            next = next => next,
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        };
        let connection = http.serve_connection(TokioIo::new(stream), service.clone());
        let mut ended = ended.clone();
        tokio::spawn(async move {
            let _place = place;
            let mut connection = pin!(connection);
            tokio::select! {
                _ = connection.as_mut() => return,
                _ = ended.changed() => {}
                // A client that reads no answers keeps no place.
                () = sleep(20 * patience) => {}
            }
            connection.as_mut().graceful_shutdown();
            timeout(patience, connection).await.ok();
        });
    }
    // Requests under way are answered; calls that are not done in time are cancelled.
    drop((listener, end));
    timeout(patience, places.acquire_many(settings.connections)).await.ok();
    Ok(())
}
