//! Errors in OpenAI's form: a status, and a JSON object that says what was wrong.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, Method, Response, StatusCode};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use crate::engine::EngineError;

/// An error that a client gets.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// What was wrong: for a wrong field its name, the value that it has, and what it may be.
    pub message: String,
    /// The field that was wrong.
    pub param: Option<&'static str>,
    /// A word for programs.
    pub code: &'static str,
}

/// After how many seconds a client may try again.
const RETRY_AFTER_SECONDS: &str = "1";

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl std::fmt::Display) -> ApiError {
        ApiError { status, message: message.to_string(), param: None, code }
    }

    /// A field has a value that it cannot have.
    pub fn field(
        param: &'static str,
        got: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> ApiError {
        let message = format!("{param} is {got}; expected {expected}");
        ApiError { param: Some(param), ..ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message) }
    }

    /// The request is not one at all.
    pub fn malformed(message: impl std::fmt::Display) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "malformed_request", message)
    }

    /// The body is longer than the server reads.
    pub fn too_large(limit: usize) -> ApiError {
        let message = format!("the body is longer than {limit} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    }

    /// The body did not come in time.
    pub fn too_slow() -> ApiError {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", "the body did not arrive in time")
    }

    /// The server has another model.
    pub fn unknown_model(got: &str, served: &str) -> ApiError {
        let message = format!("model is {got:?}; this server has {served:?}");
        let error = ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message);
        ApiError { param: Some("model"), ..error }
    }

    /// The server has no such route.
    pub fn no_route(path: &str) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "no_route", format_args!("there is nothing at {path:.80}"))
    }

    /// The route has no such method.
    pub fn no_method(method: &Method, path: &str) -> ApiError {
        let message = format_args!("{path} does not take {method}");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "no_method", message)
    }

    /// As many requests as the server holds are waiting.
    pub fn queue_full(limit: usize) -> ApiError {
        let message = format!("{limit} requests are under way, which is the limit");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message)
    }

    /// The server cannot take the request now, and may later.
    pub fn unavailable(message: impl std::fmt::Display) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    }

    /// The status and the JSON of an error that another process has answered with.
    pub fn of_answer(status: StatusCode, body: &[u8]) -> ApiError {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let message = body["error"]["message"].as_str().unwrap_or("the engine has refused the request");
        ApiError::new(status, "engine_error", message)
    }

    /// True if the same request may succeed on another engine, or later.
    pub fn may_pass(&self) -> bool {
        self.status.is_server_error()
    }

    /// The JSON that OpenAI's clients read.
    pub fn to_json(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        let (message, param, code) = (&self.message, self.param, self.code);
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        ApiError::unavailable(error)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.to_json().to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_SECONDS));
        }
        response
    }
}
