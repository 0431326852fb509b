//! The two steps of a request: a prefill engine computes the prompt, a decode engine continues.

use std::sync::Arc;
use std::time::Duration;

use axum::http::Response;
use http_body_util::Full;
use hyper::body::Incoming;
use kv_transfer::params::{KV_RECOMPUTE_THRESHOLD, RemoteKv, TransferParams};
use kv_transfer::{EngineId, Room, TransferMode};
use serde_json::{Map, Value};

use super::passing::Answered;
use super::{Answer, Router};
use crate::engine::Side;
use crate::fleet::Picked;
use crate::http;
use crate::openai::{ApiError, Kind, Request};
use crate::rank::{KEPT_KV, REQUEST_ID};

/// How much longer than its deadline an engine may take to say that it has missed it.
const GRACE: Duration = Duration::from_secs(5);
/// How long a decode engine may take to say what it keeps.
const KEPT_WITHIN: Duration = Duration::from_secs(2);
/// Tokens of a prompt by which requests with the same beginning are known.
const KEY_TOKENS: usize = 32;

/// A request on its way.
pub struct Job {
    kind: Kind,
    body: Map<String, Value>,
    /// The first tokens.
    key: Vec<u32>,
    /// The number of tokens of the prompt.
    tokens: usize,
    stream: bool,
}

/// What a step has led to: an answer, or an error and the side that it is of.
type Stepped = Result<Response<Incoming>, (ApiError, Side)>;

/// Why a try has not led to an answer.
pub enum Failed {
    HungUp,
    Error(ApiError),
}

/// The client has hung up. The sender of the answer knows.
struct HungUp;

impl Router {
    /// Has the prompt computed, and continued, under the name `id`. `failed` are the numbers of the processes that have
    /// failed last, of each side.
    pub async fn two_step(
        self: &Arc<Router>,
        job: &Job,
        id: &str,
        failed: &mut [Option<u32>; 2],
        answer: &mut Answer,
    ) -> Result<Answered, Failed> {
        let nobody =
            |side| move || Failed::Error(ApiError::unavailable(format_args!("no {side} process is up")));
        let prefill = self.fleet.pick(Side::Prefill, &job.key, failed[0]).await;
        let prefill = prefill.ok_or_else(nobody(Side::Prefill))?;
        let decode = self.fleet.pick(Side::Decode, &job.key, failed[1]).await;
        let decode = decode.ok_or_else(nobody(Side::Decode))?;
        let number = decode.number;
        let outcome = match TransferMode::from(self.mode) {
            TransferMode::Push => self.at_once(job, id, &prefill, &decode, answer).await,
            mode => self.in_turn(job, id, mode, (&prefill, &decode), answer).await,
        };
        let outcome = match outcome {
            Ok(Ok(response)) => or_hung_up(answer, Answered::new(response, job.stream, decode)).await,
            Ok(Err(error)) => Ok(Err(error)),
            Err(hung_up) => Err(hung_up),
        };
        match outcome {
            Ok(Ok(answered)) => Ok(answered),
            Ok(Err((error, Side::Prefill))) => {
                failed[0] = Some(prefill.number);
                Err(Failed::Error(error))
            }
            Ok(Err((error, Side::Decode))) => {
                failed[1] = Some(number);
                Err(Failed::Error(error))
            }
            Err(HungUp) => Err(Failed::HungUp),
        }
    }

    /// Pull: the decode engine gets the parameters with which the prefill engine has answered.
    async fn in_turn(
        &self,
        job: &Job,
        id: &str,
        mode: TransferMode,
        (prefill, decode): (&Picked, &Picked),
        answer: &mut Answer,
    ) -> Result<Stepped, HungUp> {
        let to_prefill = job.first_step(self.earlier_turns(job, decode, mode).await);
        let first = self.post(prefill, Side::Prefill, job.kind, id, to_prefill);
        let params = match or_hung_up(answer, self.kept(first)).await? {
            Ok(params) => params,
            Err(error) => return Ok(Err(error)),
        };
        let second = self.post(decode, Side::Decode, job.kind, id, job.second_step(params.clone()));
        let outcome = or_hung_up(answer, second).await;
        if outcome.is_err() {
            // The decode engine may not have heard of the request at all.
            self.give_up(decode, job, id, params).await;
        }
        outcome
    }

    /// Push: both engines get the request at once, and find each other by its id.
    async fn at_once(
        &self,
        job: &Job,
        id: &str,
        prefill: &Picked,
        decode: &Picked,
        answer: &mut Answer,
    ) -> Result<Stepped, HungUp> {
        let params = match self.expect_push(prefill, id) {
            Ok(params) => params,
            Err(error) => return Ok(Err((error, Side::Prefill))),
        };
        let to_prefill = job.first_step(self.earlier_turns(job, decode, TransferMode::Push).await);
        let first = self.post(prefill, Side::Prefill, job.kind, id, to_prefill);
        let second = self.post(decode, Side::Decode, job.kind, id, job.second_step(params));
        // If one fails, the other is dropped, and its engine aborts the request.
        let both = async { tokio::try_join!(first, second).map(|(_, second)| second) };
        or_hung_up(answer, both).await
    }

    /// The parameters of the first step. If the decode engine keeps answers of earlier turns of the request, they say
    /// so, and the prefill engine reads what it lacks.
    async fn earlier_turns(&self, job: &Job, decode: &Picked, mode: TransferMode) -> Value {
        let nothing = TransferParams::prefill(mode).to_value();
        if job.tokens < KV_RECOMPUTE_THRESHOLD as usize {
            return nothing;
        }
        let body = Value::Object(job.body.clone()).to_string();
        let asked = async {
            let request = hyper::Request::post(format!("http://{}{KEPT_KV}", decode.addr));
            let request = request.body(Full::from(body)).ok()?;
            let response = self.client.request(request).await.ok().filter(|it| it.status().is_success())?;
            serde_json::from_slice::<Value>(&http::read_answer(response.into_body()).await?).ok()
        };
        // Without an answer, the prompt is computed.
        let kept = tokio::time::timeout(KEPT_WITHIN, asked).await.ok().flatten().unwrap_or_default();
        match &kept["kv_transfer_params"] {
            Value::Object(params) => {
                let mut params = params.clone();
                params.insert("transfer_mode".to_owned(), mode.to_string().into());
                Value::Object(params)
            }
            _ => nothing,
        }
    }

    /// The parameters in the answer to the first step.
    async fn kept(&self, first: impl Future<Output = Stepped>) -> Result<Value, (ApiError, Side)> {
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
    async fn post(&self, to: &Picked, side: Side, kind: Kind, id: &str, body: Vec<u8>) -> Stepped {
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
    /// A request of a client, as it came and as it was understood.
    pub fn new(kind: Kind, body: Map<String, Value>, request: &Request) -> Job {
        let key = request.tokens.iter().copied().take(KEY_TOKENS).collect();
        Job { kind, body, key, tokens: request.tokens.len(), stream: request.stream }
    }

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

/// Awaits `work`, unless the client hangs up before.
async fn or_hung_up<T>(answer: &mut Answer, work: impl Future<Output = T>) -> Result<T, HungUp> {
    tokio::select! {
        () = answer.closed() => Err(HungUp),
        done = work => Ok(done),
    }
}
