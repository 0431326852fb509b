//! The router: takes a client's request, has the prompt computed by one process and continued by another, and passes
//! the answer on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router as Routes;
use axum::body::Body;
use axum::extract::{Request as HttpRequest, State};
use axum::http::Response;
use axum::routing::{get, post};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyStream, Full};
use hyper::body::Incoming;
use kv_examples::cli::Mode;
use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::{EngineId, Room, TransferMode};
use serde_json::{Map, Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::engine::Side;
use crate::fleet::{Fleet, Picked};
use crate::http::{self, HttpClient};
use crate::ids;
use crate::metrics;
use crate::openai::{ApiError, DONE, Kind, Limits, Request, event};
use crate::rank::{self, REQUEST_ID};

/// How often a request is tried, on other engines if there are any.
const TRIES: usize = 3;
/// How much longer than its deadline an engine may take to say that it has missed it.
const GRACE: Duration = Duration::from_secs(5);
/// Tokens of a prompt by which requests with the same beginning are known.
const KEY_TOKENS: usize = 32;

/// The router.
pub struct Router {
    fleet: Arc<Fleet>,
    limits: Limits,
    client: HttpClient,
    slots: Arc<Semaphore>,
    max_requests: usize,
    mode: Mode,
    deadline: Duration,
    /// The bootstrap server that the engines are registered with.
    bootstrap: String,
    draining: AtomicBool,
}

/// The settings of a router.
pub struct RouterConfig {
    /// What requests may ask for.
    pub limits: Limits,
    /// Most requests under way.
    pub max_requests: usize,
    /// Which side moves the bytes.
    pub mode: Mode,
    /// How long a request may take until its first token.
    pub deadline: Duration,
    /// The bootstrap server that the engines are registered with, `host:port`.
    pub bootstrap: String,
}

/// A request on its way.
struct Job {
    kind: Kind,
    body: Map<String, Value>,
    /// The first tokens.
    key: Vec<u32>,
    stream: bool,
}

/// The client has hung up. The sender of the answer knows.
struct HungUp;

/// Why a try has not led to an answer.
enum Failed {
    HungUp,
    Error(ApiError),
}

type Answer = oneshot::Sender<Result<Response<Body>, ApiError>>;

impl Router {
    /// A router for the processes of a fleet.
    pub fn new(fleet: Arc<Fleet>, config: RouterConfig) -> Arc<Router> {
        let RouterConfig { limits, max_requests, mode, deadline, bootstrap } = config;
        let slots = Arc::new(Semaphore::new(max_requests));
        let (client, draining) = (http::client(), AtomicBool::new(false));
        let router =
            Router { fleet, limits, client, slots, max_requests, mode, deadline, bootstrap, draining };
        Arc::new(router)
    }

    /// The routes of the router.
    pub fn routes(self: &Arc<Router>) -> Routes {
        Routes::new()
            .route(Kind::Completion.path(), post(completions))
            .route(Kind::Chat.path(), post(chat_completions))
            .route("/v1/models", get(models))
            .route("/health", get(health))
            .route("/metrics", get(|| async { metrics::render() }))
            .route("/reset_prefix_cache", post(reset_prefix_cache))
            .fallback(rank::no_route)
            .method_not_allowed_fallback(rank::no_method)
            .with_state(Arc::clone(self))
    }

    /// Takes no more requests; those that are under way go on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Waits until no request is under way.
    pub async fn idle(&self) {
        let all = u32::try_from(self.max_requests).unwrap_or(u32::MAX);
        let _ = self.slots.acquire_many(all).await;
    }

    async fn answer(self: Arc<Router>, kind: Kind, request: HttpRequest) -> Result<Response<Body>, ApiError> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::unavailable(
                "the server is draining: it ends what it has, and takes no more",
            ));
        }
        let slot = Arc::clone(&self.slots).try_acquire_owned();
        let slot = slot.map_err(|_| ApiError::queue_full(self.max_requests))?;
        let running = Running::new(slot);
        let body = http::read_object(request.into_body()).await?;
        let request = Request::parse(&body, kind, &self.limits)?;
        if request.kv_transfer_params.is_some() {
            let expected = "no such field: this router writes it";
            return Err(ApiError::field("kv_transfer_params", "given", expected));
        }
        let key = request.tokens.iter().copied().take(KEY_TOKENS).collect();
        let job = Job { kind, body, key, stream: request.stream };
        let (answer, answered) = oneshot::channel();
        // A task of its own: if the client hangs up, it still has to tell the engines.
        tokio::spawn(self.run(job, running, answer));
        answered.await.unwrap_or_else(|_| Err(ApiError::unavailable("the server is stopping")))
    }

    /// Tries until there is an answer, or until another try makes no sense. Never after a token was told.
    async fn run(self: Arc<Router>, job: Job, running: Running, mut answer: Answer) {
        let started = Instant::now();
        let mut failed = [None, None];
        for tried in 1.. {
            match self.two_step(&job, &mut failed, &mut answer).await {
                Ok((response, decode)) => {
                    metrics::first_token(started.elapsed());
                    let response = pass_on(response, job.stream, (decode, running));
                    // If nobody takes the response, it is dropped, and the decode engine aborts the request.
                    if answer.send(Ok(response.await)).is_err() {
                        metrics::hang_up();
                    }
                    return;
                }
                Err(Failed::HungUp) => return metrics::hang_up(),
                Err(Failed::Error(error)) if tried < TRIES && error.may_pass() => metrics::retry(),
                Err(Failed::Error(error)) => return drop(answer.send(Err(error))),
            }
        }
    }

    /// Has the prompt computed, and continued. `failed` are the numbers of the processes that have failed last, of
    /// each side.
    async fn two_step(
        self: &Arc<Router>,
        job: &Job,
        failed: &mut [Option<u32>; 2],
        answer: &mut Answer,
    ) -> Result<(Response<Incoming>, Picked), Failed> {
        let nobody =
            |side| move || Failed::Error(ApiError::unavailable(format_args!("no {side} process is up")));
        let prefill = self.fleet.pick(Side::Prefill, &job.key, failed[0]).await;
        let prefill = prefill.ok_or_else(nobody(Side::Prefill))?;
        let decode = self.fleet.pick(Side::Decode, &job.key, failed[1]).await;
        let decode = decode.ok_or_else(nobody(Side::Decode))?;
        let id = ids::new();
        let mode = TransferMode::from(self.mode);
        let to_prefill = job.first_step(TransferParams::prefill(mode).to_value());
        let first = self.post(&prefill, Side::Prefill, job.kind, &id, to_prefill);
        let outcome = if mode == TransferMode::Push {
            let params = self.expect_push(&prefill, &id).map_err(Failed::Error)?;
            let second = self.post(&decode, Side::Decode, job.kind, &id, job.second_step(params));
            // If one fails, the other is dropped, and its engine aborts the request.
            let both = async { tokio::try_join!(first, second).map(|(_, second)| second) };
            or_hung_up(answer, both).await
        } else {
            match or_hung_up(answer, self.kept(first)).await {
                Ok(Ok(params)) => {
                    let second = job.second_step(params.clone());
                    let second = self.post(&decode, Side::Decode, job.kind, &id, second);
                    let outcome = or_hung_up(answer, second).await;
                    if outcome.is_err() {
                        // The decode engine may not have heard of the request at all.
                        self.give_up(&decode, job, &id, params).await;
                    }
                    outcome
                }
                Ok(Err(error)) => Ok(Err(error)),
                Err(hung_up) => Err(hung_up),
            }
        };
        match outcome {
            Ok(Ok(response)) => Ok((response, decode)),
            Ok(Err((error, Side::Prefill))) => {
                failed[0] = Some(prefill.number);
                Err(Failed::Error(error))
            }
            Ok(Err((error, Side::Decode))) => {
                failed[1] = Some(decode.number);
                Err(Failed::Error(error))
            }
            Err(HungUp) => Err(Failed::HungUp),
        }
    }

    /// The parameters in the answer to the first step.
    async fn kept(
        &self,
        first: impl Future<Output = Result<Response<Incoming>, (ApiError, Side)>>,
    ) -> Result<Value, (ApiError, Side)> {
        let body = http::read_answer(first.await?.into_body()).await.unwrap_or_default();
        let mut answer: Value = serde_json::from_slice(&body).unwrap_or_default();
        match answer.get_mut("kv_transfer_params").map(Value::take) {
            Some(params) => Ok(params),
            None => Err((ApiError::unavailable("the prefill process is gone"), Side::Prefill)),
        }
    }

    /// In push mode: the parameters of the decode engine for a request that is not computed yet.
    fn expect_push(&self, prefill: &Picked, id: &str) -> Result<Value, ApiError> {
        let (host, port) = self.bootstrap.rsplit_once(':').unwrap_or((&self.bootstrap, ""));
        let engine = EngineId::new(&Side::Prefill.to_string()).map_err(ApiError::unavailable)?;
        let room = Room::request(id).map_err(ApiError::unavailable)?;
        let port = port.parse().map_err(ApiError::unavailable)?;
        let mut remote = RemoteKv::new(engine, room, host.trim_matches(['[', ']']), port);
        remote.dp_rank = Some(prefill.number);
        Ok(TransferParams::decode(TransferMode::Push, remote).to_value())
    }

    /// Sends a request to an engine. An answer with an error is an error.
    async fn post(
        &self,
        to: &Picked,
        side: Side,
        kind: Kind,
        id: &str,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, (ApiError, Side)> {
        let gone = || (ApiError::unavailable(format_args!("{side}/{} is gone", to.number)), side);
        let request = hyper::Request::post(format!("http://{}{}", to.addr, kind.path()))
            .header("content-type", "application/json")
            .header(REQUEST_ID, id)
            .body(Full::from(body))
            .map_err(|error| (ApiError::malformed(error), side))?;
        let answered = tokio::time::timeout(self.deadline + GRACE, self.client.request(request)).await;
        let late = || (ApiError::unavailable(format_args!("{side}/{} does not answer", to.number)), side);
        let response = answered.map_err(|_| late())?.map_err(|_| gone())?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = http::read_answer(response.into_body()).await.unwrap_or_default();
        Err((ApiError::of_answer(status, &body), side))
    }

    /// Has a decode engine give up the KV of a request that nobody wants any more, so that the pages of the prefill
    /// engine are free before their lease ends.
    async fn give_up(&self, decode: &Picked, job: &Job, id: &str, params: Value) {
        let mut body = job.body.clone();
        body.remove("max_completion_tokens");
        body.insert("max_tokens".to_owned(), 0.into());
        body.insert("stream".to_owned(), false.into());
        body.insert("kv_transfer_params".to_owned(), params);
        let _ = self.post(decode, Side::Decode, job.kind, id, Value::Object(body).to_string().into()).await;
    }
}

impl Job {
    /// The request for the prefill engine: one token, and the KV is kept.
    fn first_step(&self, params: Value) -> Vec<u8> {
        let mut body = self.body.clone();
        for field in ["max_completion_tokens", "stream_options"] {
            body.remove(field);
        }
        body.insert("max_tokens".to_owned(), 1.into());
        body.insert("stream".to_owned(), false.into());
        body.insert("kv_transfer_params".to_owned(), params);
        Value::Object(body).to_string().into()
    }

    /// The request for the decode engine: the client's, and where the KV is.
    fn second_step(&self, params: Value) -> Vec<u8> {
        let mut body = self.body.clone();
        body.insert("kv_transfer_params".to_owned(), params);
        Value::Object(body).to_string().into()
    }
}

/// A request that counts against the bound until it has ended.
struct Running(#[allow(dead_code)] OwnedSemaphorePermit);

impl Running {
    fn new(slot: OwnedSemaphorePermit) -> Running {
        metrics::running(1.0);
        Running(slot)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        metrics::running(-1.0);
    }
}

/// Awaits `work`, unless the client hangs up before.
async fn or_hung_up<T>(answer: &mut Answer, work: impl Future<Output = T>) -> Result<T, HungUp> {
    tokio::select! {
        () = answer.closed() => Err(HungUp),
        done = work => Ok(done),
    }
}

/// The answer of a decode engine, for the client. `until_end` is dropped with the last byte. A stream that breaks off
/// ends with an event that says so.
async fn pass_on<G: Send + 'static>(
    response: Response<Incoming>,
    is_stream: bool,
    until_end: G,
) -> Response<Body> {
    let (parts, body) = response.into_parts();
    if !is_stream {
        let whole = http::read_answer(body).await;
        drop(until_end);
        return match whole {
            Some(whole) => Response::from_parts(parts, Body::from(whole)),
            None => rank::counted(Kind::Completion, Err(ApiError::unavailable("the decode process is gone"))),
        };
    }
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
            Ok(data) => Some((Ok::<_, std::convert::Infallible>(data), Some((frames, until_end)))),
            Err(_) => {
                let error = ApiError::unavailable("the decode process is gone");
                Some((Ok(Bytes::from(event(&error.to_json()) + DONE)), None))
            }
        }
    });
    rank::event_stream(Body::from_stream(chunks))
}

async fn completions(State(router): State<Arc<Router>>, request: HttpRequest) -> Response<Body> {
    rank::counted(Kind::Completion, router.answer(Kind::Completion, request).await)
}

async fn chat_completions(State(router): State<Arc<Router>>, request: HttpRequest) -> Response<Body> {
    rank::counted(Kind::Chat, router.answer(Kind::Chat, request).await)
}

async fn models(State(router): State<Arc<Router>>) -> Response<Body> {
    http::json(&rank::models_json(&router.limits))
}

/// Whether all processes are up, and what each says of itself.
async fn health(State(router): State<Arc<Router>>) -> Response<Body> {
    let mut ranks = Vec::new();
    for (name, addr) in router.fleet.addrs() {
        let health = match &addr {
            Some(addr) => http::get_json(&router.client, addr, "/health").await,
            None => None,
        };
        let mut health = health.unwrap_or_else(|| json!({ "status": "down", "rank": name }));
        health["addr"] = addr.into();
        ranks.push(health);
    }
    let draining = router.draining.load(Ordering::Relaxed);
    let up = !draining && ranks.iter().all(|rank| rank["status"] == "ok");
    let requests = router.max_requests - router.slots.available_permits();
    let status = if draining {
        "draining"
    } else if up {
        "ok"
    } else {
        "degraded"
    };
    let mut response = http::json(&json!({
        "status": status, "pid": std::process::id(), "requests": requests, "ranks": ranks,
    }));
    if !up {
        *response.status_mut() = axum::http::StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

async fn reset_prefix_cache(State(router): State<Arc<Router>>) -> Response<Body> {
    for (_, addr) in router.fleet.addrs() {
        let Some(addr) = addr else { continue };
        let request = hyper::Request::post(format!("http://{addr}/reset_prefix_cache"));
        if let Ok(request) = request.body(Full::default()) {
            let _ = router.client.request(request).await;
        }
    }
    http::json(&json!({}))
}
