//! The router: takes a client's request, has the prompt computed by one process and continued by another, and passes
//! the answer on.

mod passing;
mod status;
mod steps;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router as Routes;
use axum::body::Body;
use axum::extract::{Request as HttpRequest, State};
use axum::http::Response;
use axum::routing::{get, post};
use kv_examples::cli::Mode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::fleet::Fleet;
use crate::http::{self, HttpClient};
use crate::metrics;
use crate::openai::{ApiError, Kind, Limits, Request};
use crate::rank;
use crate::{ids, timeline};
use steps::{Failed, Job};

/// How often a request is tried, on other engines if there are any.
const TRIES: usize = 3;
/// How long after a failure.
const RETRY_AFTER: Duration = Duration::from_millis(250);

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

/// Where the client's answer goes. Closed if the client has hung up.
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
            .route("/v1/models", get(status::models))
            .route("/health", get(status::health))
            .route("/metrics", get(status::all_metrics))
            .route("/reset_prefix_cache", post(status::reset_prefix_cache))
            .merge(timeline::of_router(Arc::clone(&self.fleet), self.client.clone()))
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
        // What the body says besides may be a hundred times as long in memory.
        drop(body);
        let job = Job::new(kind, request);
        let (answer, answered) = oneshot::channel();
        // A task of its own: if the client hangs up, it still has to tell the engines.
        tokio::spawn(self.run(job, running, answer));
        answered.await.unwrap_or_else(|_| Err(ApiError::unavailable("the server is stopping")))
    }

    /// Tries until there is an answer, or until another try makes no sense. Never after a token was told.
    async fn run(self: Arc<Router>, job: Job, running: Running, mut answer: Answer) {
        let started = Instant::now();
        let (name, mut failed) = (ids::new(), [None, None]);
        for tried in 1.. {
            let id = timeline::try_id(&name, tried);
            match self.two_step(&job, &id, &mut failed, &mut answer).await {
                Ok(answered) => {
                    metrics::first_token(answered.first_token.duration_since(started));
                    // If nobody takes the response, it is dropped, and the decode engine aborts the request.
                    if answer.send(Ok(answered.pass_on(running))).is_err() {
                        metrics::hang_up();
                    }
                    return;
                }
                Err(Failed::HungUp) => return metrics::hang_up(),
                Err(Failed::Error(error)) if tried < TRIES && error.may_pass() => {
                    metrics::retry();
                    // The fleet hears of a process that has died, and starts another one.
                    tokio::select! {
                        () = answer.closed() => return metrics::hang_up(),
                        () = tokio::time::sleep(RETRY_AFTER) => {}
                    }
                }
                Err(Failed::Error(error)) => return drop(answer.send(Err(error))),
            }
        }
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

async fn completions(State(router): State<Arc<Router>>, request: HttpRequest) -> Response<Body> {
    rank::counted(Kind::Completion, router.answer(Kind::Completion, request).await)
}

async fn chat_completions(State(router): State<Arc<Router>>, request: HttpRequest) -> Response<Body> {
    rank::counted(Kind::Chat, router.answer(Kind::Chat, request).await)
}
