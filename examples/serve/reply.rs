//! The answer of a decode engine to a client: whole, or as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Response};
use futures_util::stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::{Event, FinishReason};
use crate::http;
use crate::metrics;
use crate::openai::{Answer, ApiError, DONE, Request, Text, Usage, event};
use crate::rank::Rank;

/// The answer of a decode engine to one request. When it is dropped, the request is aborted.
pub struct Reply {
    rank: Arc<Rank>,
    answer: Answer,
    usage: Usage,
    events: UnboundedReceiver<Event>,
    _slot: OwnedSemaphorePermit,
}

/// What is next in an answer.
enum Next {
    /// A token, and the text that can be told with it.
    Token(u32, String),
    /// The last token, if the answer ends with a stop string, and the rest of the text.
    End { token: Option<u32>, text: String, reason: &'static str },
}

impl Reply {
    /// An answer of which nothing is told yet. `slot` counts the request as under way.
    pub fn new(
        rank: Arc<Rank>,
        answer: Answer,
        usage: Usage,
        events: UnboundedReceiver<Event>,
        slot: OwnedSemaphorePermit,
    ) -> Reply {
        Reply { rank, answer, usage, events, _slot: slot }
    }

    /// Waits until the KV is there, so that a failure before that has a status of its own.
    async fn begun(&mut self) -> Result<(), ApiError> {
        let started = Instant::now();
        match self.events.recv().await {
            Some(Event::Begun { cached_tokens }) => {
                metrics::prompt_tokens(self.usage.prompt_tokens, cached_tokens);
                metrics::first_token(started.elapsed());
                self.usage.cached_tokens = cached_tokens;
                Ok(())
            }
            Some(Event::Failed(error)) => Err(error.into()),
            // The KV was given up unread, as was wanted.
            Some(_) => {
                self.events.close();
                Ok(())
            }
            None => Err(stopping()),
        }
    }

    /// What comes next. With a stop string the engine is told to stop, and keeps the KV.
    async fn next(&mut self, text: &mut Text) -> Result<Next, ApiError> {
        loop {
            return match self.events.recv().await {
                Some(Event::Token(token)) => {
                    self.usage.completion_tokens += 1;
                    let new = text.push(&self.rank.limits.vocabulary, token);
                    if text.is_stopped() {
                        self.events.close();
                        return Ok(Next::End {
                            token: Some(token),
                            text: new,
                            reason: FinishReason::Stop.name(),
                        });
                    }
                    Ok(Next::Token(token, new))
                }
                Some(Event::Done(reason)) => {
                    Ok(Next::End { token: None, text: text.rest(), reason: reason.name() })
                }
                Some(Event::Failed(error)) => Err(error.into()),
                Some(Event::Begun { .. }) => continue,
                None => Err(stopping()),
            };
        }
    }

    /// The whole answer.
    pub async fn whole(mut self, request: &Request) -> Result<Response<Body>, ApiError> {
        self.begun().await?;
        let (mut tokens, mut whole) = (Vec::new(), String::new());
        let mut text = Text::new(&request.stop);
        let reason = loop {
            if request.max_tokens == 0 {
                break FinishReason::Length.name();
            }
            match self.next(&mut text).await? {
                Next::Token(token, new) => {
                    tokens.push(token);
                    whole.push_str(&new);
                }
                Next::End { token, text, reason } => {
                    tokens.extend(token);
                    whole.push_str(&text);
                    break reason;
                }
            }
        };
        let ids = request.return_token_ids.then_some(&tokens[..]);
        Ok(http::json(&self.answer.whole(&whole, ids, reason, self.usage, None)))
    }

    /// The answer as server-sent events.
    pub async fn stream(mut self, request: &Request) -> Result<Response<Body>, ApiError> {
        self.begun().await?;
        let (ids, usage) = (request.return_token_ids, request.include_usage);
        let state = Some((self, Text::new(&request.stop)));
        let chunks = stream::unfold(state, move |state| async move {
            let (mut reply, mut text) = state?;
            let first = reply.usage.completion_tokens == 0;
            let (chunk, more) = match reply.next(&mut text).await {
                Ok(Next::Token(token, new)) => {
                    (reply.answer.chunk(&new, ids.then_some(token), first, None, usage), true)
                }
                Ok(Next::End { token, text, reason }) => {
                    let mut end = String::new();
                    let token = token.filter(|_| ids);
                    if token.is_some() || !text.is_empty() {
                        end.push_str(&reply.answer.chunk(&text, token, first, None, usage));
                    }
                    end.push_str(&reply.answer.chunk("", None, false, Some(reason), usage));
                    if usage {
                        end.push_str(&reply.answer.usage_chunk(reply.usage));
                    }
                    (end + DONE, false)
                }
                Err(error) => (event(&error.to_json()) + DONE, false),
            };
            Some((Ok::<_, Infallible>(bytes::Bytes::from(chunk)), more.then_some((reply, text))))
        });
        Ok(event_stream(Body::from_stream(chunks)))
    }
}

fn stopping() -> ApiError {
    ApiError::unavailable("the engine is stopping")
}

/// A response of server-sent events.
pub fn event_stream(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    response
}

impl FinishReason {
    /// The word of OpenAI's interface.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}
