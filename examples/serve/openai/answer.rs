//! Answers: whole ones, and the chunks of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::request::Kind;

/// The last line of every stream.
pub const DONE: &str = "data: [DONE]\n\n";

/// The numbers of tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose KV the engine that answers had already.
    pub cached_tokens: usize,
    /// Tokens of the answer.
    pub completion_tokens: usize,
}

/// What all parts of an answer have in common.
#[derive(Debug, Clone)]
pub struct Answer {
    kind: Kind,
    id: String,
    model: String,
    created: u64,
}

impl Answer {
    /// The answer to a request with this id.
    pub fn new(kind: Kind, id: &str, model: &str) -> Answer {
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Answer { kind, id: format!("{prefix}-{id}"), model: model.to_owned(), created }
    }

    /// A whole answer.
    pub fn whole(
        &self,
        text: &str,
        tokens: Option<&[u32]>,
        finish_reason: &str,
        usage: Usage,
        kv_transfer_params: Option<Value>,
    ) -> Value {
        let mut choice = match self.kind {
            Kind::Completion => json!({ "index": 0, "text": text, "logprobs": null }),
            Kind::Chat => {
                json!({ "index": 0, "message": { "role": "assistant", "content": text }, "logprobs": null })
            }
        };
        choice["finish_reason"] = finish_reason.into();
        if let Some(tokens) = tokens {
            choice["token_ids"] = tokens.into();
        }
        let object = if self.kind == Kind::Chat { "chat.completion" } else { "text_completion" };
        let mut answer = self.frame(object, vec![choice]);
        answer.insert("usage".to_owned(), usage.to_json());
        if let Some(params) = kv_transfer_params {
            answer.insert("kv_transfer_params".to_owned(), params);
        }
        Value::Object(answer)
    }

    /// A chunk of a stream, as a server-sent event. The first chunk of a chat names the role. With `usage`, a later
    /// chunk has the numbers of tokens, and this one says that it has not.
    pub fn chunk(
        &self,
        text: &str,
        token: Option<u32>,
        first: bool,
        finish_reason: Option<&str>,
        usage: bool,
    ) -> String {
        let mut choice = match self.kind {
            Kind::Completion => json!({ "index": 0, "text": text, "logprobs": null }),
            Kind::Chat if first => {
                json!({ "index": 0, "delta": { "role": "assistant", "content": text }, "logprobs": null })
            }
            Kind::Chat if finish_reason.is_some() => json!({ "index": 0, "delta": {}, "logprobs": null }),
            Kind::Chat => json!({ "index": 0, "delta": { "content": text }, "logprobs": null }),
        };
        choice["finish_reason"] = finish_reason.into();
        if let Some(token) = token {
            choice["token_ids"] = json!([token]);
        }
        let mut frame = self.frame(self.chunk_object(), vec![choice]);
        if usage {
            frame.insert("usage".to_owned(), Value::Null);
        }
        event(&Value::Object(frame))
    }

    /// The chunk of a stream that has the numbers of tokens.
    pub fn usage_chunk(&self, usage: Usage) -> String {
        let mut frame = self.frame(self.chunk_object(), Vec::new());
        frame.insert("usage".to_owned(), usage.to_json());
        event(&Value::Object(frame))
    }

    fn chunk_object(&self) -> &'static str {
        if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn frame(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let fields = [
            ("id", self.id.as_str().into()),
            ("object", object.into()),
            ("created", self.created.into()),
            ("model", self.model.as_str().into()),
            ("choices", Value::Array(choices)),
        ];
        fields.into_iter().map(|(key, value): (&str, Value)| (key.to_owned(), value)).collect()
    }
}

impl Usage {
    fn to_json(self) -> Value {
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = self;
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": { "cached_tokens": cached_tokens },
        })
    }
}

/// A server-sent event.
pub fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}
