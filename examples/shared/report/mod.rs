//! The report of a run, as a table or as JSON.

mod table;

use serde::Serialize;

use crate::control::{Accounting, History, NamedError, millis};
use crate::error::ExampleError;
use crate::model::Sample;
use crate::router::{Harm, Harmed, Purpose, Routed, Run, Side};

/// The report of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The requests, in the order in which they were sent.
    pub requests: Vec<RequestReport>,
    /// The ranks, with their pages.
    pub ranks: Vec<RankReport>,
    /// The harm, if some was done.
    pub harm: Option<Harmed>,
    /// How the leases ended, if pages were left unread.
    pub lease: Option<LeaseReport>,
    /// The sums over all requests.
    pub totals: Totals,
    /// The problems of the run; empty if there are none.
    pub problems: Vec<String>,
}

/// How long prefill ranks kept pages that were never read.
#[derive(Debug, Serialize)]
pub struct LeaseReport {
    /// The duration of the lease, in milliseconds.
    lease_ms: f64,
    /// The number of requests whose pages were freed without having been read.
    requests: usize,
    /// For each such request that was acquired: the time from the last heartbeat that named it until its
    /// pages were free, in milliseconds.
    freed_after_ms: Vec<f64>,
}

/// The report of one request.
#[derive(Debug, Serialize)]
pub struct RequestReport {
    chat: usize,
    /// The turn of the chat, counted from 1.
    pub turn: usize,
    room: u64,
    prefill: String,
    decode: String,
    prompt_tokens: usize,
    /// The time from the arrival at the decode rank until the handshake was done.
    bootstrap_ms: Option<f64>,
    /// The time from the end of the handshake until the pages were registered.
    prealloc_ms: Option<f64>,
    /// From there until every byte was in place. Overlaps with the computation of the prompt.
    transfer_ms: Option<f64>,
    /// Of that, time in which bytes were on the wire.
    wire_ms: Option<f64>,
    /// How long the computation of the prompt took.
    compute_ms: Option<f64>,
    bytes: u64,
    /// Bytes over the time on the wire.
    gb_per_s: Option<f64>,
    /// Where the KV of the turns before came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<History>,
    /// Tokens of the prompt that the prefill rank did not compute, as the decode rank was told.
    cached_tokens: u32,
    /// Tokens that both runs have made.
    pub tokens_compared: usize,
    tokens: Vec<u32>,
    /// How often the pages of the request were taken back on the decode rank, and computed again later.
    retractions: u32,
    /// True if the request was sent after a rank was killed or stopped, to see that its ranks serve.
    proof: bool,
    /// The position among the requests that were sent for the same answer, from 1.
    attempt: usize,
    /// The request that was sent in place of this request, if this one was lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    again: Option<usize>,
    /// True if the user got every token, with the right logits.
    answered: bool,
    /// The outcome of the request.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// The outcome of a request.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// Every token, and every bit of the logits, is as in the run in one process.
    Ok,
    /// Something else than in the monolithic run.
    Mismatch {
        /// The position of the first token that differs.
        at: usize,
    },
    /// The request failed with a named error.
    Failed(NamedError),
    /// The request had neither all tokens nor an error within its deadline.
    Overdue,
}

/// The report of one rank.
#[derive(Debug, Serialize)]
pub struct RankReport {
    name: String,
    #[serde(skip)]
    side: Side,
    harmed: Option<Harm>,
    /// True if the rank was stopped and resumed.
    resumed: bool,
    /// True if the rank was told to drain.
    drained: bool,
    accounting: Option<Accounting>,
    leaked: Option<usize>,
}

/// The sums over a run.
#[derive(Debug, Serialize)]
pub struct Totals {
    requests: usize,
    ok: usize,
    failed: usize,
    /// The number of failed requests that were sent again.
    again: usize,
    overdue: usize,
    mismatches: usize,
    tokens_compared: usize,
    /// Times that a request's pages were taken back on a decode rank, and filled anew.
    pub retractions: u32,
    bytes: u64,
    pages_leaked: usize,
    wall_ms: f64,
}

impl Report {
    /// Compares a run with the run in one process. `harm_wanted` says that failures are expected.
    pub fn new(run: &Run, monolithic: &[Vec<Vec<Sample>>], harm_wanted: bool) -> Report {
        let expected = |routed: &Routed| {
            let answers = monolithic.get(routed.chat)?;
            answers.get(routed.turn).map(Vec::as_slice)
        };
        let requests: Vec<RequestReport> = run
            .requests
            .iter()
            .map(|routed| request_report(run, routed, expected(routed).unwrap_or_default()))
            .collect();
        let ranks: Vec<RankReport> = run
            .ranks
            .iter()
            .map(|rank| RankReport {
                name: rank.name(),
                side: rank.side,
                harmed: rank.harmed,
                resumed: rank.resumed,
                drained: rank.drained,
                accounting: rank.accounting.clone(),
                leaked: rank.accounting.as_ref().map(Accounting::leaked),
            })
            .collect();
        let count = |is: fn(&Outcome) -> bool| requests.iter().filter(|request| is(&request.outcome)).count();
        let totals = Totals {
            requests: requests.len(),
            ok: count(|outcome| *outcome == Outcome::Ok),
            failed: count(|outcome| matches!(outcome, Outcome::Failed(_))),
            again: requests.iter().filter(|request| request.again.is_some()).count(),
            overdue: count(|outcome| *outcome == Outcome::Overdue),
            mismatches: count(|outcome| matches!(outcome, Outcome::Mismatch { .. })),
            tokens_compared: requests.iter().map(|request| request.tokens_compared).sum(),
            retractions: requests.iter().map(|request| request.retractions).sum(),
            bytes: requests.iter().map(|request| request.bytes).sum(),
            pages_leaked: ranks.iter().filter_map(|rank| rank.leaked).sum(),
            wall_ms: millis(run.wall),
        };
        let lease = lease_report(run);
        let mut problems = problems(&totals, &ranks, run.harm.as_ref(), harm_wanted);
        if harm_wanted {
            problems.extend(left_behind(&requests, &ranks));
        }
        problems.extend(lease.iter().filter_map(LeaseReport::problem));
        Report { requests, ranks, harm: run.harm.clone(), lease, totals, problems }
    }

    /// The report as one JSON object, or as text for people.
    pub fn text(&self, json: bool) -> Result<String, ExampleError> {
        if json {
            serde_json::to_string(self).map_err(ExampleError::Command).map(|text| text + "\n")
        } else {
            Ok(self.table())
        }
    }
}

/// Only of a run in which pages were left behind.
fn lease_report(run: &Run) -> Option<LeaseReport> {
    run.harm.as_ref()?;
    // A rank that was stopped frees nothing meanwhile.
    let harmed = |routed: &Routed| run.ranks.get(routed.prefill).is_some_and(|rank| rank.harmed.is_some());
    let failed = |routed: &&Routed| {
        routed.prefilled.as_ref().is_some_and(|half| half.error.is_some()) && !harmed(routed)
    };
    let left: Vec<&Routed> = run.requests.iter().filter(failed).collect();
    let freed = left.iter().filter_map(|routed| routed.prefilled.as_ref()?.freed_after_ms);
    Some(LeaseReport { lease_ms: millis(run.lease), requests: left.len(), freed_after_ms: freed.collect() })
        .filter(|lease| !lease.freed_after_ms.is_empty())
}

impl LeaseReport {
    /// When the last pages came back.
    fn latest_ms(&self) -> f64 {
        self.freed_after_ms.iter().copied().fold(0.0, f64::max)
    }

    fn problem(&self) -> Option<String> {
        let (latest, lease) = (self.latest_ms() / 1e3, self.lease_ms / 1e3);
        // A rank looks at its leases between two forward passes.
        (latest > lease + 1.0).then(|| {
            format!("pages were freed {latest:.2} s after their last heartbeat, although the lease was {lease:.2} s")
        })
    }
}

fn request_report(run: &Run, routed: &Routed, expected: &[Sample]) -> RequestReport {
    let name = |rank: usize| run.ranks.get(rank).map(|rank| rank.name()).unwrap_or_default();
    let decoded = routed.decoded.as_ref().filter(|decoded| decoded.error.is_none());
    let prefilled = routed.prefilled.as_ref().filter(|prefilled| prefilled.error.is_none());
    let samples = decoded.map(|decoded| decoded.samples.as_slice()).unwrap_or_default();
    let moved = |half: Option<(u64, f64)>| half.unwrap_or_default();
    let (written, write_ms) = moved(prefilled.map(|half| (half.bytes, half.wire_ms)));
    let (read, read_ms) = moved(decoded.map(|half| (half.bytes, half.wire_ms)));
    let (bytes, wire_ms) = (written + read, prefilled.map(|_| write_ms + read_ms));
    RequestReport {
        chat: routed.chat,
        turn: routed.turn + 1,
        room: routed.room,
        prefill: name(routed.prefill),
        decode: name(routed.decode),
        prompt_tokens: routed.prompt.len(),
        bootstrap_ms: decoded.map(|decoded| decoded.bootstrap_ms),
        prealloc_ms: decoded.map(|decoded| decoded.prealloc_ms),
        transfer_ms: decoded.map(|decoded| decoded.transfer_ms),
        wire_ms,
        compute_ms: prefilled.map(|prefilled| prefilled.compute_ms),
        bytes,
        gb_per_s: wire_ms.filter(|ms| *ms > 0.0).map(|ms| bytes as f64 / ms / 1e6),
        history: prefilled.and_then(|half| half.history.clone()),
        cached_tokens: decoded.map_or(0, |decoded| decoded.cached_tokens),
        tokens_compared: samples.len(),
        retractions: decoded.map_or(0, |decoded| decoded.retractions),
        tokens: samples.iter().map(|sample| sample.token).collect(),
        proof: routed.purpose == Purpose::Proof,
        attempt: match routed.purpose {
            Purpose::AnswerAgain { attempt } => attempt,
            Purpose::Answer | Purpose::Proof => 1,
        },
        again: routed.again,
        answered: decoded.is_some() && first_difference(samples, expected).is_none(),
        outcome: outcome(routed, expected),
    }
}

/// The problems that a killed or stopped rank may not cause. As long as each side has a rank that serves,
/// every user gets an answer at last, and each pair of serving ranks hands over later requests.
fn left_behind(requests: &[RequestReport], ranks: &[RankReport]) -> Vec<String> {
    let serves = |side| ranks.iter().any(|rank| rank.side == side && (rank.harmed.is_none() || rank.resumed));
    if !serves(Side::Prefill) || !serves(Side::Decode) {
        return Vec::new();
    }
    let answered = |request: &RequestReport| {
        let same = |other: &&RequestReport| {
            (other.chat, other.turn, other.proof) == (request.chat, request.turn, false)
        };
        requests.iter().filter(same).any(|other| other.answered)
    };
    let first = |request: &&RequestReport| request.attempt == 1 && !request.proof;
    let unanswered = requests.iter().filter(first).filter(|request| !answered(request)).count();
    let refused: Vec<&RequestReport> =
        requests.iter().filter(|request| request.proof && request.outcome != Outcome::Ok).collect();
    let unanswered = (unanswered > 0).then(|| format!("{unanswered} requests were never answered"));
    let refused = refused.first().map(|first| {
        let (count, from, to) = (refused.len(), &first.prefill, &first.decode);
        format!(
            "{count} requests to surviving ranks failed, the first from {from} to {to}: {:?}",
            first.outcome
        )
    });
    unanswered.into_iter().chain(refused).collect()
}

/// The outcome of a request. The decode side decides, because it has the tokens; without its report, the
/// prefill side's report is used.
fn outcome(routed: &Routed, expected: &[Sample]) -> Outcome {
    let prefill_error = routed.prefilled.as_ref().and_then(|prefilled| prefilled.error.as_ref());
    match &routed.decoded {
        Some(decoded) => match &decoded.error {
            Some(error) => Outcome::Failed(error.clone()),
            None => match first_difference(&decoded.samples, expected) {
                Some(at) => Outcome::Mismatch { at },
                // The tokens are right, but the two sides must agree about that.
                None => prefill_error.map_or(Outcome::Ok, |error| Outcome::Failed(error.clone())),
            },
        },
        None => match prefill_error.or(routed.orphaned.as_ref()) {
            Some(error) => Outcome::Failed(error.clone()),
            None => Outcome::Overdue,
        },
    }
}

fn first_difference(samples: &[Sample], expected: &[Sample]) -> Option<usize> {
    let equal = samples.iter().zip(expected).take_while(|(sample, expected)| sample == expected).count();
    (equal < samples.len().max(expected.len())).then_some(equal)
}

fn problems(totals: &Totals, ranks: &[RankReport], harm: Option<&Harmed>, harm_wanted: bool) -> Vec<String> {
    let mut problems = Vec::new();
    for (count, what) in [
        (totals.mismatches, "requests got tokens that differ from the run in one process"),
        (totals.overdue, "requests neither finished nor failed within their deadline"),
        (totals.pages_leaked, "pages were never given back"),
        (if harm_wanted { 0 } else { totals.failed }, "requests failed"),
    ] {
        if count > 0 {
            problems.push(format!("{count} {what}"));
        }
    }
    let accounts = |rank: &&RankReport| rank.harmed.is_none() || rank.resumed;
    for rank in ranks.iter().filter(accounts).filter(|rank| rank.accounting.is_none()) {
        problems.push(format!("{} did not report its pages at the end", rank.name));
    }
    if harm_wanted && harm.is_none() {
        problems.push(
            "no request was seen in the middle of a transfer, so no rank was killed or stopped".to_owned(),
        );
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Decoded, Prefilled};

    fn routed(tokens: &[u32]) -> Routed {
        let samples = tokens.iter().map(|&token| Sample { token, digest: 1 }).collect();
        Routed {
            chat: 0,
            turn: 0,
            purpose: Purpose::Answer,
            again: None,
            room: 7,
            prompt: vec![1],
            keep_as: None,
            prefill: 0,
            decode: 1,
            passed_on: true,
            reading: true,
            prefilled: Some(Prefilled { room: 7, ..Prefilled::default() }),
            decoded: Some(Decoded { room: 7, samples, ..Decoded::default() }),
            orphaned: None,
        }
    }

    #[test]
    fn missing_surplus_and_different_tokens_are_mismatches() {
        let expected = [1, 2, 3].map(|token| Sample { token, digest: 1 });
        assert_eq!(outcome(&routed(&[1, 2, 3]), &expected), Outcome::Ok);
        assert_eq!(outcome(&routed(&[1, 2]), &expected), Outcome::Mismatch { at: 2 });
        assert_eq!(outcome(&routed(&[1, 2, 3, 4]), &expected), Outcome::Mismatch { at: 3 });
        assert_eq!(outcome(&routed(&[1, 9, 3]), &expected), Outcome::Mismatch { at: 1 });
        let mut same_token_other_logits = routed(&[1, 2, 3]);
        same_token_other_logits.decoded.as_mut().unwrap().samples[0].digest = 2;
        assert_eq!(outcome(&same_token_other_logits, &expected), Outcome::Mismatch { at: 0 });
    }

    #[test]
    fn silence_is_overdue_and_never_ok() {
        let mut silent = routed(&[]);
        silent.decoded = None;
        assert_eq!(outcome(&silent, &[]), Outcome::Overdue);
        silent.prefilled.as_mut().unwrap().error = Some(NamedError::new("PeerLost", "the peer died"));
        assert!(matches!(outcome(&silent, &[]), Outcome::Failed(_)));
    }
}
