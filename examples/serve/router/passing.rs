//! The answer of a decode engine, on its way to the client.

use std::convert::Infallible;
use std::time::Instant;

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::BodyStream;
use hyper::body::Incoming;

use crate::engine::Side;
use crate::fleet::Picked;
use crate::http;
use crate::openai::{ApiError, DONE, event};
use crate::reply::event_stream;

/// An answer that has begun. When it is dropped, the decode engine aborts the request.
pub struct Answered {
    /// When the decode engine had the first token.
    pub first_token: Instant,
    response: Response<Passing>,
    decode: Picked,
}

enum Passing {
    /// All of it, so that a request whose decode engine dies can be tried again.
    Whole(Bytes),
    Stream(Incoming),
}

impl Answered {
    /// The answer of a decode engine. A stream may begin to pass; any other answer is waited for to its end.
    pub async fn new(
        response: Response<Incoming>,
        is_stream: bool,
        decode: Picked,
    ) -> Result<Answered, (ApiError, Side)> {
        let first_token = Instant::now();
        let (parts, body) = response.into_parts();
        let passing = if is_stream {
            Passing::Stream(body)
        } else {
            let gone =
                || (ApiError::unavailable(format_args!("decode/{} is gone", decode.number)), Side::Decode);
            Passing::Whole(http::read_answer(body).await.ok_or_else(gone)?)
        };
        Ok(Answered { first_token, response: Response::from_parts(parts, passing), decode })
    }

    /// The answer for the client. `until_end` is dropped with the last byte. A stream that breaks off ends with an
    /// event that says so.
    pub fn pass_on<G: Send + 'static>(self, until_end: G) -> Response<Body> {
        let Answered { response, decode, .. } = self;
        let (parts, body) = response.into_parts();
        match body {
            Passing::Whole(bytes) => Response::from_parts(parts, Body::from(bytes)),
            Passing::Stream(body) => event_stream(pass_stream(body, (decode, until_end))),
        }
    }
}

fn pass_stream<G: Send + 'static>(body: Incoming, until_end: G) -> Body {
    let frames = BodyStream::new(body).filter_map(|frame| async move {
        match frame.map(hyper::body::Frame::into_data) {
            Ok(Ok(data)) => Some(Ok(data)),
            Ok(Err(_)) => None,
            Err(error) => Some(Err(error)),
        }
    });
    let state = Some((Box::pin(frames), until_end));
    let chunks = stream::unfold(state, |state| async move {
        let (mut frames, until_end) = state?;
        match frames.next().await? {
            Ok(data) => Some((Ok::<_, Infallible>(data), Some((frames, until_end)))),
            Err(_) => {
                let error = ApiError::unavailable("the decode process is gone");
                Some((Ok(Bytes::from(event(&error.to_json()) + DONE)), None))
            }
        }
    });
    Body::from_stream(chunks)
}
