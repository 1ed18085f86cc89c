//! Connections: so many at a time, and none that stays without asking.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use crate::app::{App, router};

/// A connection is told to close at this age, whatever it does: nobody keeps a place by not reading an answer.
const OLD: Duration = Duration::from_secs(600);

/// Answers requests until `end`, then waits for those that are being answered.
///
/// Where as many clients are connected as may be, others wait to be accepted.
pub async fn serve(mut listener: impl Listener, app: &Arc<App>, end: impl Future<Output = ()>) {
    let service = TowerToHyperService::new(router(app));
    let mut http = http1::Builder::new();
    // Its clock also runs between requests.
    http.timer(TokioTimer::new()).header_read_timeout(app.settings.header_timeout());
    let patience = app.patience();
    let most = app.settings.connections.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
    let places = Arc::new(Semaphore::new(most));
    let (ending, ended) = watch::channel(());
    let mut end = pin!(end);
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await.0)
        };
        let (place, stream) = tokio::select! { next = next => next, () = &mut end => break };
        let connection = http.serve_connection(TokioIo::new(stream), service.clone());
        let mut ended = ended.clone();
        tokio::spawn(async move {
            let _place = place;
            let mut connection = pin!(connection);
            tokio::select! {
                _ = connection.as_mut() => return,
                _ = ended.changed() => {}
                () = sleep(OLD) => {}
            }
            connection.as_mut().graceful_shutdown();
            timeout(patience, connection).await.ok();
        });
    }
    drop((listener, ending));
    places.acquire_many(most as u32).await.ok();
}
