//! Requests of `/v1/completions` and `/v1/chat/completions`.

use serde_json::{Map, Value};

use super::error::ApiError;
use super::vocabulary::Vocabulary;

/// Tokens of an answer if the request does not say, as OpenAI has it for completions.
const DEFAULT_TOKENS: usize = 16;
/// The same for chats.
const DEFAULT_CHAT_TOKENS: usize = 128;
/// Most messages of a chat.
const MAX_MESSAGES: usize = 4096;
/// Most stop strings of a request, as OpenAI has it, and most bytes of each.
const MAX_STOPS: usize = 4;
const MAX_STOP_BYTES: usize = 256;
/// Most characters of a value that an error shows.
const SHOWN: usize = 80;

/// Which of the two routes a request came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

/// What a server can do.
pub struct Limits {
    /// The name of its model.
    pub model: String,
    /// The vocabulary of the model.
    pub vocabulary: Vocabulary,
    /// The number of tokens that the model knows.
    pub vocab_size: usize,
    /// Most tokens of a request, prompt and answer together.
    pub max_model_len: usize,
}

/// A request that was checked.
#[derive(Debug)]
pub struct Request {
    /// The tokens of the prompt, at least one.
    pub tokens: Vec<u32>,
    /// The number of tokens to generate. 0 is for decode engines, which then give up the KV unread.
    pub max_tokens: usize,
    /// True if the client wants each token as it comes.
    pub stream: bool,
    /// True if the stream ends with the numbers of tokens.
    pub include_usage: bool,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// True if the answer names the tokens, besides its text (vLLM: `return_token_ids`).
    pub return_token_ids: bool,
    /// What a router says of the KV of the request (vLLM: `kv_transfer_params`).
    pub kv_transfer_params: Option<Value>,
}

impl Kind {
    /// The path of the route.
    pub fn path(self) -> &'static str {
        match self {
            Kind::Completion => "/v1/completions",
            Kind::Chat => "/v1/chat/completions",
        }
    }
}

impl Request {
    /// Checks a request. The model decodes greedily: fields that choose among tokens, such as `temperature`, have no
    /// effect. Fields that would change the form of the answer are refused.
    pub fn parse(body: &Map<String, Value>, kind: Kind, limits: &Limits) -> Result<Request, ApiError> {
        let fields = Fields(body);
        if let Some(model) = fields.text("model")?
            && model != limits.model
        {
            return Err(ApiError::unknown_model(&shortened(model), &limits.model));
        }
        for (field, only) in [("n", 1), ("best_of", 1), ("logprobs", 0), ("top_logprobs", 0)] {
            if let Some(got) = fields.get(field).filter(|got| !is_number(got, only) && **got != false) {
                return Err(ApiError::field(field, shown(got), format_args!("{only}, or no such field")));
            }
        }
        for field in ["tools", "functions", "suffix", "response_format"] {
            if let Some(got) = fields.get(field).filter(|got| !is_empty(got)) {
                return Err(ApiError::field(field, shown(got), "no such field: the server does not have it"));
            }
        }
        if fields.flag("echo")? {
            return Err(ApiError::field("echo", "true", "false"));
        }
        let tokens = match kind {
            Kind::Completion => fields.prompt(limits)?,
            // Our router has made tokens of the messages.
            Kind::Chat if fields.get("messages").is_none() && fields.get("kv_transfer_params").is_some() => {
                fields.prompt(limits)?
            }
            Kind::Chat => fields.messages(limits)?,
        };
        let room = limits.max_model_len.saturating_sub(tokens.len());
        let name = if kind == Kind::Chat { "messages" } else { "prompt" };
        if tokens.is_empty() || room == 0 {
            let (got, most) = (tokens.len(), limits.max_model_len.saturating_sub(1));
            let expected = format_args!("1 to {most} tokens");
            return Err(ApiError::field(name, format_args!("{got} tokens long"), expected));
        }
        let default = if kind == Kind::Chat { DEFAULT_CHAT_TOKENS } else { DEFAULT_TOKENS };
        let max_tokens = match fields.number("max_completion_tokens")? {
            Some(tokens) => Some(("max_completion_tokens", tokens)),
            None => fields.number("max_tokens")?.map(|tokens| ("max_tokens", tokens)),
        };
        let kv_transfer_params = fields.get("kv_transfer_params").cloned();
        let max_tokens = match max_tokens {
            Some((field, got)) => {
                let least = u64::from(kv_transfer_params.is_none());
                let fits = usize::try_from(got).ok().filter(|got| *got <= room && got >= &(least as usize));
                let expected = format_args!(
                    "{least} to {room}: the prompt has {} of {} tokens",
                    tokens.len(),
                    limits.max_model_len
                );
                fits.ok_or_else(|| ApiError::field(field, got, expected))?
            }
            None => default.min(room),
        };
        let options = match fields.get("stream_options") {
            None => false,
            Some(Value::Object(options)) => Fields(options).flag("include_usage")?,
            Some(other) => return Err(ApiError::field("stream_options", shown(other), "an object")),
        };
        Ok(Request {
            tokens,
            max_tokens,
            stream: fields.flag("stream")?,
            include_usage: options,
            stop: fields.stop()?,
            return_token_ids: fields.flag("return_token_ids")?,
            kv_transfer_params,
        })
    }
}

/// The fields of an object; null counts as no field.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    fn text(&self, field: &'static str) -> Result<Option<&'a str>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(ApiError::field(field, shown(other), "a text")),
        }
    }

    fn flag(&self, field: &'static str) -> Result<bool, ApiError> {
        match self.get(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(ApiError::field(field, shown(other), "true or false")),
        }
    }

    /// The stop strings: one text, or an array of up to four.
    fn stop(&self) -> Result<Vec<String>, ApiError> {
        let text = |value: &Value| match value {
            Value::String(text) if !text.is_empty() && text.len() <= MAX_STOP_BYTES => Ok(text.clone()),
            other => {
                let expected =
                    format_args!("a text of 1 to {MAX_STOP_BYTES} bytes, or an array of such texts");
                Err(ApiError::field("stop", shown(other), expected))
            }
        };
        match self.get("stop") {
            None => Ok(Vec::new()),
            Some(Value::Array(texts)) if texts.len() > MAX_STOPS => {
                let expected = format_args!("up to {MAX_STOPS} texts");
                Err(ApiError::field("stop", format_args!("{} texts long", texts.len()), expected))
            }
            Some(Value::Array(texts)) => texts.iter().map(text).collect(),
            Some(one) => Ok(vec![text(one)?]),
        }
    }

    fn number(&self, field: &'static str) -> Result<Option<u64>, ApiError> {
        let number = |value: &Value| {
            value.as_u64().ok_or_else(|| ApiError::field(field, shown(value), "a number of tokens"))
        };
        self.get(field).map(number).transpose()
    }

    /// The prompt of a completion: a text, or the numbers of tokens.
    fn prompt(&self, limits: &Limits) -> Result<Vec<u32>, ApiError> {
        let expected = "a text, or an array of token numbers";
        match self.get("prompt") {
            Some(Value::String(text)) => encode("prompt", text, limits),
            Some(Value::Array(tokens)) => {
                if tokens.len() >= limits.max_model_len {
                    let expected = format_args!("1 to {} tokens", limits.max_model_len.saturating_sub(1));
                    let got = format_args!("{} tokens long", tokens.len());
                    return Err(ApiError::field("prompt", got, expected));
                }
                let token = |value: &Value| {
                    let known = value.as_u64().filter(|token| *token < limits.vocab_size as u64);
                    known.and_then(|token| u32::try_from(token).ok()).ok_or_else(|| {
                        let expected =
                            format_args!("an array of token numbers from 0 to {}", limits.vocab_size - 1);
                        ApiError::field("prompt", format_args!("an array with {}", shown(value)), expected)
                    })
                };
                tokens.iter().map(token).collect()
            }
            Some(other) => Err(ApiError::field("prompt", shown(other), expected)),
            None => Err(ApiError::field("prompt", "missing", expected)),
        }
    }

    /// The prompt of a chat. The template is a plain one, whatever the model: a line with the role, and the content.
    fn messages(&self, limits: &Limits) -> Result<Vec<u32>, ApiError> {
        let expected = "an array of objects with a role and a content";
        let messages = match self.get("messages") {
            Some(Value::Array(messages)) => messages,
            Some(other) => return Err(ApiError::field("messages", shown(other), expected)),
            None => return Err(ApiError::field("messages", "missing", expected)),
        };
        if messages.is_empty() || messages.len() > MAX_MESSAGES {
            let expected = format_args!("1 to {MAX_MESSAGES} messages");
            return Err(ApiError::field("messages", format_args!("{} long", messages.len()), expected));
        }
        let mut text = String::new();
        for message in messages {
            let Value::Object(message) = message else {
                let got = format_args!("an array with {}", shown(message));
                return Err(ApiError::field("messages", got, expected));
            };
            let role = Fields(message).text("role")?.unwrap_or_default();
            if !["system", "developer", "user", "assistant", "tool"].contains(&role) {
                let expected = "system, developer, user, assistant or tool";
                return Err(ApiError::field("role", format_args!("{:?}", shortened(role)), expected));
            }
            let content = content(Fields(message).get("content"))?;
            text.push_str(&format!("<{role}>\n{content}\n"));
        }
        text.push_str("<assistant>\n");
        encode("messages", &text, limits)
    }
}

/// The text of a message: a text, or parts of type `text`.
fn content(value: Option<&Value>) -> Result<String, ApiError> {
    let expected = "a text, or an array of parts of type text";
    match value {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
                (Some("text"), Some(text)) => Ok(text.to_owned()),
                _ => Err(ApiError::field("content", format_args!("an array with {}", shown(part)), expected)),
            };
            parts.iter().map(text).collect()
        }
        Some(other) => Err(ApiError::field("content", shown(other), expected)),
    }
}

fn encode(field: &'static str, text: &str, limits: &Limits) -> Result<Vec<u32>, ApiError> {
    let refused = || ApiError::field(field, format_args!("{} bytes long", text.len()), "a text with tokens");
    limits.vocabulary.encode(text).ok_or_else(refused)
}

fn is_number(value: &Value, only: u64) -> bool {
    value.as_u64() == Some(only)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(array) => array.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Object(object) => object.get("type").is_some_and(|kind| kind == "text"),
        _ => false,
    }
}

/// A value as an error shows it.
fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kind: Kind, body: &str) -> Result<Request, String> {
        let limits = Limits {
            model: "demo".to_owned(),
            vocabulary: Vocabulary::Demonstration,
            vocab_size: 1024,
            max_model_len: 64,
        };
        let body: Map<String, Value> = serde_json::from_str(body).unwrap();
        Request::parse(&body, kind, &limits).map_err(|error| error.message)
    }

    #[test]
    fn a_wrong_field_is_named_with_its_value_and_what_it_may_be() {
        for (body, message) in [
            (r#"{}"#, "prompt is missing; expected a text, or an array of token numbers"),
            (r#"{"prompt": ""}"#, "prompt is 0 tokens long; expected 1 to 63 tokens"),
            (
                r#"{"prompt": [1, 1024]}"#,
                "prompt is an array with 1024; expected an array of token numbers from 0 to 1023",
            ),
            (
                r#"{"prompt": [-1]}"#,
                "prompt is an array with -1; expected an array of token numbers from 0 to 1023",
            ),
            (
                r#"{"prompt": "a", "max_tokens": 64}"#,
                "max_tokens is 64; expected 1 to 63: the prompt has 1 of 64 tokens",
            ),
            (
                r#"{"prompt": "a", "max_tokens": 0}"#,
                "max_tokens is 0; expected 1 to 63: the prompt has 1 of 64 tokens",
            ),
            (r#"{"prompt": "a", "max_tokens": "b"}"#, "max_tokens is \"b\"; expected a number of tokens"),
            (r#"{"prompt": "a", "stream": 1}"#, "stream is 1; expected true or false"),
            (r#"{"prompt": "a", "n": 2}"#, "n is 2; expected 1, or no such field"),
            (r#"{"prompt": "a", "model": "b"}"#, "model is \"b\"; this server has \"demo\""),
            (
                r#"{"prompt": "a", "stop": ["b", ""]}"#,
                "stop is \"\"; expected a text of 1 to 256 bytes, or an array of such texts",
            ),
            (
                r#"{"prompt": "a", "stop": ["b", "c", "d", "e", "f"]}"#,
                "stop is 5 texts long; expected up to 4 texts",
            ),
            (
                r#"{"prompt": "a", "suffix": "b"}"#,
                "suffix is \"b\"; expected no such field: the server does not have it",
            ),
        ] {
            assert_eq!(parse(Kind::Completion, body).map(|_| ()), Err(message.to_owned()), "{body}");
        }
        let long = format!(r#"{{"prompt": "{}"}}"#, "x".repeat(64));
        assert_eq!(
            parse(Kind::Completion, &long).map(|_| ()),
            Err("prompt is 64 tokens long; expected 1 to 63 tokens".to_owned())
        );
        let body = r#"{"messages": [{"role": "king", "content": "a"}]}"#;
        let message = "role is \"king\"; expected system, developer, user, assistant or tool";
        assert_eq!(parse(Kind::Chat, body).map(|_| ()), Err(message.to_owned()));
    }

    #[test]
    fn a_request_has_openais_defaults_and_a_chat_of_parts_is_the_chat_of_their_text() {
        let request =
            parse(Kind::Completion, r#"{"prompt": "abc", "temperature": 0.7, "logprobs": null}"#).unwrap();
        assert_eq!((request.tokens.as_slice(), request.max_tokens), (&[97, 98, 99][..], 16));
        assert!(!request.stream && !request.include_usage);
        let parts = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3}"#;
        let text = r#"{"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3}"#;
        let [parts, text] = [parts, text].map(|body| parse(Kind::Chat, body).unwrap());
        assert_eq!((&parts.tokens, parts.max_tokens), (&text.tokens, 3));
    }
}
