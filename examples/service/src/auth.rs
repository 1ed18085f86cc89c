//! Who may ask.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;

use crate::app::App;
use crate::failure::Failure;

/// Lets requests through that bring the token, in a time that says nothing of how much of it was right.
pub(crate) async fn bearer(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(token) = &app.settings.token else { return next.run(request).await };
    let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let given = given.and_then(|value| value.strip_prefix(b"Bearer ")).unwrap_or_default();
    // An empty token, of settings that no command line made, is no token.
    if !given.is_empty() && bool::from(given.ct_eq(token.as_bytes())) {
        return next.run(request).await;
    }
    Failure::new(StatusCode::UNAUTHORIZED, "bring the token: Authorization: Bearer ..")
        .into_response()
}
