//! Refusals: a status, and one line that says why.

use axum::Json;
use axum::http::{StatusCode, header::CONNECTION};
use axum::response::{IntoResponse, Response};
use certk_rs::{Error, ErrorClass};
use serde_json::json;

pub(crate) type Result<T> = std::result::Result<T, Failure>;

pub(crate) struct Failure(StatusCode, String);

impl Failure {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Failure(status, message.into())
    }

    /// Refuse input that is wrong and stays so.
    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }
}

/// The class says what a client can do; the message names argument, place and remedy.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error.class() {
            ErrorClass::Input => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorClass::Resource => StatusCode::SERVICE_UNAVAILABLE,
            ErrorClass::Cancelled => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        // The body may not have been read, and would be taken for the next request.
        (self.0, [(CONNECTION, "close")], Json(json!({ "error": self.1 }))).into_response()
    }
}
