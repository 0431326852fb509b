//! The two steps of a request: a prefill engine computes the prompt, a decode engine continues.

use std::sync::Arc;
use std::time::Duration;

use axum::http::Response;
use http_body_util::Full;
use hyper::body::Incoming;
use kv_transfer::params::{KV_RECOMPUTE_THRESHOLD, RemoteKv, TransferParams};
use kv_transfer::{EngineId, Room, TransferMode};
use serde_json::{Value, json};

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
    /// What the client wants. Of the body of the client nothing is kept, which may be longer in memory by far.
    request: Request,
    /// The first tokens.
    key: Vec<u32>,
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
            Ok(Ok(response)) => or_hung_up(answer, Answered::new(response, job.request.stream, decode)).await,
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
        if job.request.tokens.len() < KV_RECOMPUTE_THRESHOLD as usize {
            return nothing;
        }
        let body = json!({ "prompt": job.request.tokens }).to_string();
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
        let body = job.body(0, false, params);
        let _ = self.post(decode, Side::Decode, job.kind, id, body).await;
    }
}

impl Job {
    /// A request of a client.
    pub fn new(kind: Kind, request: Request) -> Job {
        let key = request.tokens.iter().copied().take(KEY_TOKENS).collect();
        Job { kind, request, key }
    }

    /// The request for the prefill engine: one token, and the KV is kept.
    fn first_step(&self, params: Value) -> Vec<u8> {
        self.body(1, false, params)
    }

    /// The request for the decode engine: the client's, and where the KV is.
    fn second_step(&self, params: Value) -> Vec<u8> {
        self.body(self.request.max_tokens, self.request.stream, params)
    }

    /// The request for an engine. The prompt stands there as tokens, also that of a chat, so that both engines have the
    /// same.
    fn body(&self, max_tokens: usize, stream: bool, params: Value) -> Vec<u8> {
        let Request { tokens, include_usage, stop, return_token_ids, .. } = &self.request;
        let body = json!({
            "prompt": tokens, "max_tokens": max_tokens, "stop": stop, "stream": stream,
            "stream_options": { "include_usage": include_usage }, "return_token_ids": return_token_ids,
            "kv_transfer_params": params,
        });
        body.to_string().into()
    }
}

/// Awaits `work`, unless the client hangs up before. What is done counts: it may have to be given up.
async fn or_hung_up<T>(answer: &mut Answer, work: impl Future<Output = T>) -> Result<T, HungUp> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = answer.closed() => Err(HungUp),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{Limits, Vocabulary};

    #[tokio::test]
    async fn an_answer_that_comes_with_the_hang_up_is_not_lost() {
        for _ in 0..32 {
            let (mut answer, answered) = tokio::sync::oneshot::channel();
            drop(answered);
            assert_eq!(or_hung_up(&mut answer, async { 7 }).await.ok(), Some(7));
            assert!(or_hung_up(&mut answer, std::future::pending::<()>()).await.is_err());
        }
    }

    #[test]
    fn what_a_client_says_besides_is_neither_kept_nor_passed_on_to_engines() {
        let limits = Limits {
            model: "demo".to_owned(),
            vocabulary: Vocabulary::Demonstration,
            vocab_size: 1024,
            max_model_len: 64,
        };
        let parse = |kind, body: &Value| Request::parse(body.as_object().unwrap(), kind, &limits).unwrap();
        let junk = vec![json!({ "": 0 }); 10_000];
        let completion =
            json!({ "prompt": [1, 2], "max_tokens": 3, "stop": "x", "stream": true, "user": junk });
        let message = json!({ "role": "user", "content": "hi", "name": junk });
        let chat =
            json!({ "messages": [message], "max_completion_tokens": 3, "stop": ["x"], "stream": true });
        for (kind, body) in [(Kind::Completion, completion), (Kind::Chat, chat)] {
            let request = parse(kind, &body);
            let (tokens, stop) = (request.tokens.clone(), request.stop.clone());
            let job = Job::new(kind, request);
            let told = job.second_step(json!({ "do_remote_prefill": true }));
            assert!(told.len() < 1024, "{} bytes of {kind:?}", told.len());
            let again = parse(kind, &serde_json::from_slice(&told).unwrap());
            assert_eq!((again.tokens, again.stop), (tokens, stop));
            assert_eq!((again.max_tokens, again.stream), (3, true));
        }
    }
}
