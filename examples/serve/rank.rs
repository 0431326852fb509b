//! One engine process: takes vLLM's two-step requests over HTTP.
//!
//! A router sends a request to a prefill engine with `kv_transfer_params: {"do_remote_decode": true}`, and gets
//! `kv_transfer_params` back. It sends the request with those to a decode engine, which answers the client. The
//! parameters are those of [`kv_transfer::params`], which vLLM's proxies and llm-d pass on as they are. A request with
//! parameters may give the tokens as `prompt` for a chat, too: so our router sends them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request as HttpRequest, State};
use axum::http::{HeaderMap, Response};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use kv_transfer::params::{Leg, TransferParams};
use kv_transfer::{Room, TransferMode};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::{Continue, DecodeEngine, Engine, Event, FinishReason, PrefillEngine, Prompt, refusal};
use crate::http;
use crate::ids;
use crate::metrics;
use crate::openai::{Answer, ApiError, Kind, Limits, Request, Usage};
use crate::reply::Reply;
use crate::timeline;

/// The header by which a router names a request to both engines.
pub const REQUEST_ID: &str = "x-request-id";

/// The route on which a decode engine says what it keeps of a prompt.
pub const KEPT_KV: &str = "/kept_kv";

/// An engine behind HTTP.
pub struct Rank {
    engine: Role,
    /// What requests may ask for.
    pub limits: Limits,
    slots: Arc<Semaphore>,
    draining: AtomicBool,
}

enum Role {
    Prefill(Arc<PrefillEngine>),
    Decode(Arc<DecodeEngine>),
}

impl Rank {
    /// A prefill engine.
    pub fn prefill(engine: Arc<PrefillEngine>, limits: Limits) -> Arc<Rank> {
        let slots = engine.engine.spec.max_requests;
        Rank::new(Role::Prefill(engine), limits, slots)
    }

    /// A decode engine.
    pub fn decode(engine: Arc<DecodeEngine>, limits: Limits) -> Arc<Rank> {
        let slots = engine.engine.spec.max_requests;
        Rank::new(Role::Decode(engine), limits, slots)
    }

    fn new(engine: Role, limits: Limits, slots: usize) -> Arc<Rank> {
        let draining = AtomicBool::new(false);
        Arc::new(Rank { engine, limits, slots: Arc::new(Semaphore::new(slots)), draining })
    }

    /// The routes of the process.
    pub fn routes(self: &Arc<Rank>) -> Router {
        Router::new()
            .route(Kind::Completion.path(), post(completions))
            .route(Kind::Chat.path(), post(chat_completions))
            .route("/v1/models", get(models))
            .route("/health", get(health))
            .route("/metrics", get(show_metrics))
            .route(KEPT_KV, post(kept_kv))
            .route("/reset_prefix_cache", post(reset_prefix_cache))
            .merge(timeline::of_rank(self.engine().recorders.clone()))
            .fallback(no_route)
            .method_not_allowed_fallback(no_method)
            .with_state(Arc::clone(self))
    }

    /// Takes no more requests; those that are under way go on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Waits until no request is under way, and no page is kept for another engine.
    pub async fn idle(&self) {
        let all = u32::try_from(self.engine().spec.max_requests).unwrap_or(u32::MAX);
        let _ = self.slots.acquire_many(all).await;
        self.engine().store.unused().await;
    }

    /// Stops the workers of the engine.
    pub async fn stop(&self) {
        self.engine().stop().await;
    }

    fn engine(&self) -> &Engine {
        match &self.engine {
            Role::Prefill(prefill) => &prefill.engine,
            Role::Decode(decode) => &decode.engine,
        }
    }

    async fn answer(self: Arc<Rank>, kind: Kind, request: HttpRequest) -> Result<Response<Body>, ApiError> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::unavailable(
                "the engine is draining: it ends what it has, and takes no more",
            ));
        }
        let slot = Arc::clone(&self.slots).try_acquire_owned();
        let slot = slot.map_err(|_| ApiError::unavailable("the engine is overloaded"))?;
        let id = request_id(request.headers())?;
        let body = http::read_object(request.into_body()).await?;
        let mut request = Request::parse(&body, kind, &self.limits)?;
        // What the body says besides may be a hundred times as long in memory.
        drop(body);
        let params = match request.kv_transfer_params.take() {
            Some(params) => TransferParams::from_value(&params),
            None => Err(ApiError::field("kv_transfer_params", "missing", "an object"))?,
        };
        let params = params.map_err(|error| ApiError::field("kv_transfer_params", "wrong", error))?;
        match &self.engine {
            Role::Prefill(prefill) => self.compute(prefill, kind, request, &params, id).await,
            Role::Decode(decode) => {
                let answer = Answer::new(kind, id.as_deref().unwrap_or(&ids::new()), &self.limits.model);
                let (usage, events) = self.begin(decode, &request, params, id)?;
                let reply = Reply::new(Arc::clone(&self), answer, usage, events, slot);
                if request.stream { reply.stream(&request).await } else { reply.whole(&request).await }
            }
        }
    }

    /// The first step: computes the prompt.
    async fn compute(
        &self,
        prefill: &Arc<PrefillEngine>,
        kind: Kind,
        request: Request,
        params: &TransferParams,
        id: Option<String>,
    ) -> Result<Response<Body>, ApiError> {
        if !params.is_prefill() {
            let expected = "do_remote_decode: this is a prefill engine";
            return Err(ApiError::field("kv_transfer_params", "without do_remote_decode", expected));
        }
        let configured = TransferMode::from(prefill.engine.spec.hand_over.mode);
        // A router that says push has sent the request to a decode engine at the same time, under this id.
        let (paired, name) = match (params.mode, &id) {
            (Some(TransferMode::Push), Some(id)) => (true, id.clone()),
            _ => (false, ids::new()),
        };
        let room = Room::request(&name).map_err(|error| ApiError::field(REQUEST_ID, name.len(), error))?;
        let usage = Usage { prompt_tokens: request.tokens.len(), ..Usage::default() };
        let tokens = request.tokens.into();
        let elsewhere = params.remote().cloned().map(Box::new);
        let prompt = Prompt { room, tokens, mode: params.mode.unwrap_or(configured), paired, elsewhere };
        let computed = prefill.compute(prompt).await?;
        metrics::prompt_tokens(usage.prompt_tokens, computed.cached_tokens);
        let usage = Usage { cached_tokens: computed.cached_tokens, completion_tokens: 1, ..usage };
        let text = self.limits.vocabulary.decode(&[computed.first]);
        let answer = Answer::new(kind, &name, &self.limits.model);
        let tokens = [computed.first];
        let tokens = request.return_token_ids.then_some(&tokens[..]);
        let whole = answer.whole(&text, tokens, FinishReason::Length.name(), usage, Some(computed.params));
        Ok(http::json(&whole))
    }

    /// What a decode engine keeps of the answers in a prompt, for the prefill engine that is about to compute it.
    async fn kept(&self, request: HttpRequest) -> Result<Value, ApiError> {
        let Role::Decode(decode) = &self.engine else { return Ok(Value::Null) };
        let _slot =
            self.slots.try_acquire().map_err(|_| ApiError::unavailable("the engine is overloaded"))?;
        let body = http::read_object(request.into_body()).await?;
        let kind = if body.contains_key("messages") { Kind::Chat } else { Kind::Completion };
        let request = Request::parse(&body, kind, &self.limits)?;
        drop(body);
        Ok(decode.offer(request.tokens).await?.unwrap_or_default())
    }

    /// The second step: begins to continue the prompt.
    fn begin(
        &self,
        decode: &Arc<DecodeEngine>,
        request: &Request,
        params: TransferParams,
        id: Option<String>,
    ) -> Result<(Usage, UnboundedReceiver<Event>), ApiError> {
        let Leg::Decode { remote } = params.leg else {
            let expected = "do_remote_prefill: this is a decode engine";
            return Err(ApiError::field("kv_transfer_params", "without do_remote_prefill", expected));
        };
        let mode = params.mode.unwrap_or(decode.engine.spec.hand_over.mode.into());
        let named = remote.room.clone().or_else(|| id.and_then(|id| Room::request(&id).ok()));
        let room = named.ok_or_else(|| ApiError::field("remote_request_id", "missing", "a text"))?;
        let (tokens, page_tokens) = (request.tokens.clone(), decode.engine.kv.page_tokens());
        if let Some(why) = refusal(&remote, tokens.len(), page_tokens) {
            return Err(ApiError::field("kv_transfer_params", "of other KV", why));
        }
        let usage = Usage { prompt_tokens: tokens.len(), ..Usage::default() };
        let max_tokens = request.max_tokens;
        Ok((usage, decode.begin(Continue { tokens, max_tokens, remote, room, mode })))
    }
}

/// The id that a router has given the request.
fn request_id(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(id) = headers.get(REQUEST_ID) else { return Ok(None) };
    let id = id.to_str().map_err(|_| ApiError::field(REQUEST_ID, "no text", "a text"))?;
    match Room::request(id) {
        Ok(_) => Ok(Some(id.to_owned())),
        Err(error) => Err(ApiError::field(REQUEST_ID, format_args!("{} bytes long", id.len()), error)),
    }
}

async fn kept_kv(State(rank): State<Arc<Rank>>, request: HttpRequest) -> Response<Body> {
    let kept = rank.kept(request).await;
    kept.map_or_else(IntoResponse::into_response, |params| {
        http::json(&json!({ "kv_transfer_params": params }))
    })
}

async fn completions(State(rank): State<Arc<Rank>>, request: HttpRequest) -> Response<Body> {
    counted(Kind::Completion, rank.answer(Kind::Completion, request).await)
}

async fn chat_completions(State(rank): State<Arc<Rank>>, request: HttpRequest) -> Response<Body> {
    counted(Kind::Chat, rank.answer(Kind::Chat, request).await)
}

/// Counts a request by its outcome.
pub fn counted(kind: Kind, answer: Result<Response<Body>, ApiError>) -> Response<Body> {
    let response = answer.unwrap_or_else(IntoResponse::into_response);
    metrics::request(kind.path(), response.status().as_u16());
    response
}

/// Answers requests for what the server does not have.
pub async fn no_route(uri: axum::http::Uri) -> ApiError {
    ApiError::no_route(uri.path())
}

/// Answers requests with a method that the route does not have.
pub async fn no_method(method: axum::http::Method, uri: axum::http::Uri) -> ApiError {
    ApiError::no_method(&method, uri.path())
}

async fn models(State(rank): State<Arc<Rank>>) -> Response<Body> {
    http::json(&models_json(&rank.limits))
}

/// The list of models.
pub fn models_json(limits: &Limits) -> Value {
    let model = json!({
        "id": limits.model, "object": "model", "created": 0, "owned_by": "kv-transfer",
        "max_model_len": limits.max_model_len,
    });
    json!({ "object": "list", "data": [model] })
}

async fn health(State(rank): State<Arc<Rank>>) -> Response<Body> {
    let spec = &rank.engine().spec;
    let pages = rank.engine().store.counts();
    let draining = rank.draining.load(Ordering::Relaxed);
    let status = if draining { "draining" } else { "ok" };
    let quarantined: usize =
        rank.engine().manager.managers().iter().map(|rank| rank.gauges().pages_quarantined()).sum();
    http::json(&json!({
        "status": status, "rank": spec.name(), "pid": std::process::id(), "pages": pages,
        "leaked": pages.leaked(), "quarantined": quarantined,
        "requests": spec.max_requests - rank.slots.available_permits(),
    }))
}

async fn show_metrics(State(rank): State<Arc<Rank>>) -> String {
    let engine = rank.engine();
    metrics::pages(engine.store.counts());
    engine.observing.sample(&engine.manager, &engine.standings);
    metrics::render()
}

async fn reset_prefix_cache(State(rank): State<Arc<Rank>>) -> Response<Body> {
    rank.engine().store.forget_prefixes();
    http::json(&json!({}))
}
