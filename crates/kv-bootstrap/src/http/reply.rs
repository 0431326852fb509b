//! The server's side of HTTP: answers are written here.

use bytes::Bytes;
use serde::Serialize;

/// An answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    content_type: &'static str,
    body: Vec<Bytes>,
    /// One more header field, with its line end.
    field: Option<&'static str>,
}

impl Reply {
    pub(crate) fn text(status: u16, text: impl Into<String>) -> Reply {
        let body = vec![Bytes::from(text.into())];
        Reply { status, content_type: "text/plain; charset=utf-8", body, field: None }
    }

    /// A JSON answer; 500 if the value cannot be written as JSON.
    pub(crate) fn json(status: u16, value: &impl Serialize) -> Reply {
        match serde_json::to_vec(value) {
            Ok(body) => Reply::json_parts(status, vec![Bytes::from(body)]),
            Err(_) => Reply::text(500, "the answer cannot be written as JSON"),
        }
    }

    /// A JSON answer whose body is given in parts, which are valid JSON when put together.
    pub(crate) fn json_parts(status: u16, body: Vec<Bytes>) -> Reply {
        Reply { status, content_type: "application/json; charset=utf-8", body, field: None }
    }

    /// Answer 405, with the header field that names the methods that are allowed.
    pub(crate) fn not_allowed(allow: &'static str) -> Reply {
        Reply { field: Some(allow), ..Reply::text(405, "405: Method Not Allowed") }
    }

    /// Answer 401: the request does not carry the server's secret.
    pub(crate) fn unauthorized() -> Reply {
        let error =
            serde_json::json!({ "error": "the Authorization field does not carry this server's secret" });
        Reply { field: Some("WWW-Authenticate: Bearer\r\n"), ..Reply::json(401, &error) }
    }

    /// The same answer with the content type of JSON, as SGLang sends one of its plain texts.
    pub(crate) fn declared_json(self) -> Reply {
        Reply { content_type: "application/json; charset=utf-8", ..self }
    }

    /// The bytes to send. `head_only` leaves the body out, for an answer to HEAD.
    pub(crate) fn encode(self, http11: bool, keep_alive: bool, head_only: bool) -> Vec<Bytes> {
        let length: usize = self.body.iter().map(Bytes::len).sum();
        let version = if http11 { "HTTP/1.1" } else { "HTTP/1.0" };
        let connection = if keep_alive { "keep-alive" } else { "close" };
        let field = self.field.unwrap_or_default();
        let head = format!(
            "{version} {} {}\r\nContent-Type: {}\r\nContent-Length: {length}\r\nConnection: {connection}\r\n{field}\r\n",
            self.status,
            reason(self.status),
            self.content_type,
        );
        let mut parts = vec![Bytes::from(head)];
        if !head_only {
            parts.extend(self.body.into_iter().filter(|part| !part.is_empty()));
        }
        parts
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        417 => "Expectation Failed",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        507 => "Insufficient Storage",
        505 => "HTTP Version Not Supported",
        _ => "Unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_to_head_have_the_length_but_not_the_body() {
        let sent = |head_only| Reply::text(200, "OK").encode(true, true, head_only).concat();
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\n\
                    Connection: keep-alive\r\n\r\n";
        assert_eq!(sent(true), head.as_bytes());
        assert_eq!(sent(false), [head.as_bytes(), b"OK"].concat());
    }
}
