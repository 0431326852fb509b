//! The report of a run, as a table or as JSON.

mod table;

use std::collections::BTreeSet;

use kv_examples::control::{Accounting, NamedError, millis};
use kv_examples::error::ExampleError;
use kv_examples::model::Sample;
use serde::Serialize;

use crate::messages::{Arrived, Blocks, Way};
use crate::requests::Request;
use crate::router::{Killed, Role, Routed, Run};

/// The report of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The requests, in the order in which they were sent.
    pub requests: Vec<RequestReport>,
    /// What the caches have saved in each round.
    pub rounds: Vec<Round>,
    /// The processes, with their pages and blocks.
    pub processes: Vec<ProcessReport>,
    /// The kill, if one was done.
    pub killed: Option<Killed>,
    /// The sums over all requests.
    pub totals: Totals,
    /// The problems of the run; empty if there are none.
    pub problems: Vec<String>,
}

/// What a run may show, and what would be a problem.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// The role of the process that was to be killed, if any.
    pub kill: Option<Role>,
    /// True if the prefill process computes embeddings that it cannot fetch, so that no request needs an
    /// encoder.
    pub encode_here: bool,
}

/// The report of one request.
#[derive(Debug, Serialize)]
pub struct RequestReport {
    /// The round, from 1.
    pub round: usize,
    /// The number of the request in its round.
    pub request: usize,
    prompt_tokens: usize,
    /// The images of the request.
    pub images: Vec<ImageReport>,
    /// From the beginning of the round until the end of the request, in milliseconds.
    wall_ms: Option<f64>,
    /// The number of tokens compared with the run in one process.
    pub tokens_compared: usize,
    /// How the request ended.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// The report of one image of a request.
#[derive(Debug, Serialize)]
pub struct ImageReport {
    image: String,
    hash: String,
    encoder: Option<String>,
    /// True if the encoder computed the embedding for this request; false if its cache had it; `None` if no
    /// encoder has answered.
    computed: Option<bool>,
    /// How long decoding and computing took on the encoder, in milliseconds.
    compute_ms: Option<f64>,
    /// How the embedding came to the prefill process.
    #[serde(flatten)]
    pub arrived: Option<Arrived>,
}

/// How a request ended.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// Every token, and every bit of the logits, is as in the run in one process.
    Ok,
    /// Something else than in the run in one process.
    Mismatch {
        /// The position of the first token that differs.
        at: usize,
    },
    /// The request failed with a named error.
    Failed(NamedError),
    /// The request had neither all tokens nor an error within its deadline.
    Overdue,
}

/// What the caches have saved in one round.
#[derive(Debug, Default, Serialize)]
pub struct Round {
    /// The number of images in all requests of the round.
    pub images: usize,
    /// How many of them were in the cache of their encoder.
    pub encoder_hits: usize,
    /// How many of them were in the cache of the prefill process.
    pub local_hits: usize,
    /// The number of transfers from encoders.
    pub transfers: usize,
    /// How many waited for a transfer that another request had begun.
    pub joined: usize,
    /// How many the prefill process computed itself.
    pub encoded_here: usize,
    /// The longest time from request to ready, in milliseconds.
    pub slowest_ms: f64,
}

/// The report of one process.
#[derive(Debug, Serialize)]
pub struct ProcessReport {
    name: String,
    killed: bool,
    pages: Option<Accounting>,
    blocks: Option<Blocks>,
    /// Of the prefill process: the number of embeddings that it has fetched.
    fetched: Option<u64>,
    /// Of an encoder: the number of embeddings that were fetched from it.
    served: Option<u64>,
}

/// The sums over a run.
#[derive(Debug, Serialize)]
pub struct Totals {
    requests: usize,
    ok: usize,
    failed: usize,
    overdue: usize,
    mismatches: usize,
    /// Tokens that both runs have made.
    pub tokens_compared: usize,
    /// The number of images with different contents.
    pub distinct_images: usize,
    /// The number of requests for which an embedding was fetched.
    pub transfers: usize,
    /// The number of embeddings that were moved, as the encoder cache of the prefill process counts.
    pub fetched: u64,
    /// The number of embeddings that were moved, as the encoder caches of the encoders count.
    pub served: u64,
    embedding_bytes: u64,
    pages_leaked: usize,
    /// The number of blocks of encoder caches that are neither free nor of an entry that nobody uses.
    pub blocks_leaked: u64,
    wall_ms: f64,
}

impl Report {
    /// Compares a run with the run in one process.
    pub fn new(run: &Run, requests: &[Request], expected: &[Vec<Sample>], rules: Rules) -> Report {
        let reports: Vec<RequestReport> = run
            .requests
            .iter()
            .map(|routed| request_report(run, routed, &requests[routed.request], &expected[routed.request]))
            .collect();
        let processes: Vec<ProcessReport> = run
            .members
            .iter()
            .map(|member| ProcessReport {
                name: member.name(),
                killed: member.killed,
                pages: member.pages.clone(),
                blocks: member.blocks,
                fetched: member.blocks.map(|blocks| blocks.fetched).filter(|_| member.role == Role::Prefill),
                served: member.blocks.map(|blocks| blocks.served).filter(|_| member.role == Role::Encoder),
            })
            .collect();
        let rounds = reports.iter().map(|report| report.round).max().unwrap_or(0);
        let rounds: Vec<Round> = (1..=rounds).map(|round| round_report(&reports, round)).collect();
        let distinct: BTreeSet<&str> = requests
            .iter()
            .flat_map(|request| request.items.iter().map(|item| item.image.hash.as_str()))
            .collect();
        let count = |is: fn(&Outcome) -> bool| reports.iter().filter(|report| is(&report.outcome)).count();
        let fetched =
            reports.iter().flat_map(|report| &report.images).filter_map(|image| image.arrived.as_ref());
        let totals = Totals {
            requests: reports.len(),
            ok: count(|outcome| *outcome == Outcome::Ok),
            failed: count(|outcome| matches!(outcome, Outcome::Failed(_))),
            overdue: count(|outcome| *outcome == Outcome::Overdue),
            mismatches: count(|outcome| matches!(outcome, Outcome::Mismatch { .. })),
            tokens_compared: reports.iter().map(|report| report.tokens_compared).sum(),
            distinct_images: distinct.len(),
            transfers: rounds.iter().map(|round| round.transfers).sum(),
            fetched: processes.iter().filter_map(|process| process.fetched).sum(),
            served: processes.iter().filter_map(|process| process.served).sum(),
            embedding_bytes: fetched.filter(|arrived| arrived.way == Way::Fetched).map(|a| a.bytes).sum(),
            pages_leaked: processes.iter().filter_map(|p| p.pages.as_ref()).map(Accounting::leaked).sum(),
            blocks_leaked: processes.iter().filter_map(|p| p.blocks.as_ref()).map(Blocks::leaked).sum(),
            wall_ms: millis(run.wall),
        };
        let mut report = Report {
            requests: reports,
            rounds,
            processes,
            killed: run.killed.clone(),
            totals,
            problems: Vec::new(),
        };
        report.problems = report.find_problems(rules);
        report
    }

    /// The report as one JSON object, or as text for people.
    pub fn text(&self, json: bool) -> Result<String, ExampleError> {
        if json {
            serde_json::to_string(self).map_err(ExampleError::Command).map(|text| text + "\n")
        } else {
            Ok(self.table())
        }
    }

    /// Everything in the run that the service promises not to happen.
    fn find_problems(&self, Rules { kill, encode_here }: Rules) -> Vec<String> {
        let may_fail = kill == Some(Role::Prefill) || (kill.is_some() && !encode_here);
        let Totals { mismatches, overdue, failed, pages_leaked, blocks_leaked, .. } = self.totals;
        let mut problems = Vec::new();
        for (count, what) in [
            (mismatches, "requests got tokens that differ from the run in one process"),
            (overdue, "requests neither finished nor failed within their deadline"),
            (if may_fail { 0 } else { failed }, "requests failed"),
            (pages_leaked, "pages were never given back"),
            (blocks_leaked as usize, "blocks of encoder caches were never given back"),
        ] {
            if count > 0 {
                problems.push(format!("{count} {what}"));
            }
        }
        for process in self.processes.iter().filter(|process| !process.killed) {
            if process.pages.is_none() && process.blocks.is_none() {
                problems.push(format!("{} did not report its pages or blocks", process.name));
            }
        }
        if kill.is_some() && self.killed.is_none() {
            problems.push("no process was seen in the middle of a transfer, so none was killed".to_owned());
        }
        let evicted = self.processes.iter().filter_map(|p| p.blocks).any(|blocks| blocks.evictions > 0);
        if kill.is_none() && !evicted {
            problems.extend(self.repeated_work());
        }
        problems
    }

    /// Of a run in which the caches had room for everything: what was done more than once.
    fn repeated_work(&self) -> Vec<String> {
        let Totals { transfers, fetched, served, distinct_images, .. } = self.totals;
        let mut problems = Vec::new();
        let counts = [transfers as u64, fetched, served];
        if counts.iter().any(|count| *count != distinct_images as u64) {
            problems.push(format!(
                "{distinct_images} different images took {transfers} transfers, {fetched} as the prefill process \
                 counts and {served} as the encoders count"
            ));
        }
        for (round, number) in self.rounds.iter().zip(1..).skip(1) {
            if round.local_hits != round.images {
                let (hits, images) = (round.local_hits, round.images);
                problems.push(format!("only {hits} of {images} images of round {number} were local hits"));
            }
        }
        problems
    }
}

fn request_report(run: &Run, routed: &Routed, request: &Request, expected: &[Sample]) -> RequestReport {
    let decoded = routed.decoded.as_ref().filter(|decoded| decoded.error.is_none());
    let name = |index: usize| run.members.get(index).map(|member| member.name());
    let images = request.items.iter().zip(&routed.items).enumerate();
    let images = images.map(|(place, (item, sent))| ImageReport {
        image: item.image.name(),
        hash: item.image.hash.clone(),
        encoder: sent.encoder.and_then(name),
        computed: sent.encoded.as_ref().map(|encoded| encoded.computed),
        compute_ms: sent.encoded.as_ref().map(|encoded| encoded.compute_ms),
        arrived: routed.inputs.as_ref().and_then(|inputs| inputs.get(place)).cloned(),
    });
    RequestReport {
        round: routed.round + 1,
        request: routed.request,
        prompt_tokens: request.prompt.len(),
        images: images.collect(),
        wall_ms: routed.wall.map(millis),
        tokens_compared: decoded.map_or(0, |decoded| decoded.samples.len()),
        outcome: outcome(routed, expected),
    }
}

/// The outcome of a request. The decode side decides, because it has the tokens.
fn outcome(routed: &Routed, expected: &[Sample]) -> Outcome {
    let prefill_error = routed.prefilled.as_ref().and_then(|half| half.error.as_ref());
    let decoded = routed.decoded.as_ref();
    let error = decoded.and_then(|half| half.error.as_ref()).or(prefill_error).or(routed.orphaned.as_ref());
    match (decoded, error) {
        (_, Some(error)) => Outcome::Failed(error.clone()),
        (None, None) => Outcome::Overdue,
        (Some(decoded), None) => {
            let samples = &decoded.samples;
            let equal =
                samples.iter().zip(expected).take_while(|(sample, expected)| sample == expected).count();
            let all = equal == samples.len().max(expected.len());
            if all { Outcome::Ok } else { Outcome::Mismatch { at: equal } }
        }
    }
}

fn round_report(requests: &[RequestReport], round: usize) -> Round {
    let mut report = Round::default();
    let images = requests.iter().filter(|request| request.round == round).flat_map(|request| &request.images);
    for image in images {
        report.images += 1;
        report.encoder_hits += usize::from(image.computed == Some(false));
        let Some(arrived) = &image.arrived else { continue };
        report.slowest_ms = report.slowest_ms.max(arrived.ready_ms);
        *match arrived.way {
            Way::LocalHit => &mut report.local_hits,
            Way::Fetched => &mut report.transfers,
            Way::Joined => &mut report.joined,
            Way::EncodedHere => &mut report.encoded_here,
        } += 1;
    }
    report
}
