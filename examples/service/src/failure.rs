//! What a request is told that gets no answer.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use certk_rs::{Error, ErrorClass};
use serde_json::json;

const REPLACED: &str = "the session was deleted or replaced meanwhile; ask again";

#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Failure { status, message: message.into() }
    }

    /// The request says something that cannot be.
    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }

    /// There is no such session.
    pub(crate) fn missing() -> Self {
        let message =
            "no such session: it was never made, was deleted, or made way for others; PUT it";
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// What was asked does not go with what there is.
    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message)
    }

    /// The session that was found is no longer the one of its name.
    pub(crate) fn replaced() -> Self {
        Self::conflict(REPLACED)
    }

    pub(crate) fn is_replaced(&self) -> bool {
        self.message == REPLACED
    }

    /// What no request should bring about.
    pub(crate) fn bug(message: &str) -> Self {
        let message = format!("a bug of the service, please report what was asked: {message}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// As many calls wait as may.
    pub(crate) fn busy() -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "as many calls wait as may; try again in a second")
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error.class() {
            ErrorClass::Resource => StatusCode::SERVICE_UNAVAILABLE,
            ErrorClass::Cancelled => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::UNPROCESSABLE_ENTITY,
        };
        Self::new(status, error.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(json!({ "error": self.message }))).into_response();
        let later = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
        if later.contains(&self.status) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
