//! What the service may use, from the command line or the environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

/// Certified selection of attention scores over HTTP.
#[derive(Debug, Clone, Parser)]
#[command(version, about)]
pub struct Settings {
    /// Address to listen on.
    #[arg(long, env = "CERTK_LISTEN", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Token that requests must bring (`Authorization: Bearer ..`); without one everybody may ask.
    #[arg(long, env = "CERTK_TOKEN", hide_env_values = true, value_parser = token)]
    pub token: Option<String>,
    /// Connections at a time; more wait to be accepted.
    #[arg(long, env = "CERTK_CONNECTIONS", default_value_t = 1024)]
    pub connections: usize,
    /// Milliseconds that a connection may take for the head of a request, the wait for it included.
    #[arg(long, env = "CERTK_HEADER_TIMEOUT_MS", default_value_t = 30_000)]
    pub header_timeout_ms: u64,
    /// Threads that compute; each works on one call at a time.
    #[arg(long, env = "CERTK_COMPUTE_THREADS", default_value_t = available())]
    pub compute_threads: usize,
    /// Calls that may wait for a thread; more are told to come back (429).
    #[arg(long, env = "CERTK_WAITING", default_value_t = 64)]
    pub waiting: usize,
    /// Milliseconds that a call may take, waiting included; a request may ask for less (`x-timeout-ms`).
    #[arg(long, env = "CERTK_TIMEOUT_MS", default_value_t = 30_000)]
    pub timeout_ms: u64,
    /// Bytes of a request's body; in JSON one counts as the 16 that it may become.
    #[arg(long, env = "CERTK_MAX_BODY", default_value_t = 256 << 20)]
    pub max_body: usize,
    /// Bytes of the bodies of all requests that are not answered yet, as they arrive.
    #[arg(long, env = "CERTK_BODIES_MEMORY", default_value_t = 1 << 30)]
    pub bodies_memory: usize,
    /// Bytes that one call may ask for at a time.
    #[arg(long, env = "CERTK_CALL_MEMORY", default_value_t = 2 << 30)]
    pub call_memory: usize,
    /// Sessions that there may be, those included that are in files only.
    #[arg(long, env = "CERTK_SESSIONS", default_value_t = 1000)]
    pub sessions: usize,
    /// Bytes of memory that sessions may hold together; those used last stay.
    #[arg(long, env = "CERTK_SESSION_MEMORY", default_value_t = 4 << 30)]
    pub session_memory: usize,
    /// Folder for sessions' files; without one they end with the service.
    #[arg(long, env = "CERTK_DATA")]
    pub data: Option<PathBuf>,
    /// Seconds that calls may go on after the service was told to end.
    #[arg(long, env = "CERTK_GRACE", default_value_t = 30)]
    pub grace: u64,
}

fn available() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// A token that a header can bring: an empty one is what everybody has.
fn token(text: &str) -> Result<String, &'static str> {
    if text.is_empty() || text.trim() != text {
        return Err("a token is not empty and has no space around it; without one leave it out");
    }
    Ok(text.to_owned())
}

impl Settings {
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    pub(crate) fn header_timeout(&self) -> Duration {
        Duration::from_millis(self.header_timeout_ms)
    }
}
