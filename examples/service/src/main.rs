//! Certified selection over HTTP: a service that embeds `certk-rs`. Its README says how to ask.

use std::time::Duration;

use certk_service::{App, Settings, serve};
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    let settings = Settings::parse();
    let grace = Duration::from_secs(settings.grace);
    let listener = TcpListener::bind(settings.listen).await?;
    if settings.token.is_none() {
        tracing::warn!("no token: everybody who reaches this address may ask");
    }
    let app = App::new(settings)?;
    tracing::info!(address = %listener.local_addr()?, "listening");
    let (told, end) = tokio::sync::oneshot::channel::<()>();
    let asked = async move {
        asked_to_end().await;
        tracing::info!("ending: calls that run are waited for");
        told.send(()).ok();
    };
    let patience = async move {
        end.await.ok();
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        () = serve(listener, &app, asked) => {}
        () = patience => tracing::warn!("calls that still run are left"),
    }
    tokio::task::spawn_blocking(move || app.file_all()).await?;
    tracing::info!("ended");
    Ok(())
}

/// Until somebody presses Ctrl-C, or the system sends SIGTERM.
async fn asked_to_end() {
    #[cfg(unix)]
    {
        let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate()).ok();
        let terminated = async {
            match &mut terminate {
                Some(terminate) => terminate.recv().await,
                None => std::future::pending().await,
            };
        };
        tokio::select! {
            _ = signal::ctrl_c() => {}
            () = terminated => {}
        }
    }
    #[cfg(not(unix))]
    signal::ctrl_c().await.ok();
}
