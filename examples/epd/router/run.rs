//! The plan of a router, its processes and requests, and the result.

use std::time::{Duration, Instant};

use kv_examples::control::{Accounting, Decoded, NamedError, Prefilled};
use kv_examples::process::Process;
use serde::Serialize;

use crate::messages::{Arrived, Blocks, Encoded};
use crate::progress::Progress;
use crate::requests::Request;

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes the embeddings of images.
    Encoder,
    /// Computes prompts, with rows of embeddings in place of images.
    Prefill,
    /// Continues prompts, token by token.
    #[value(skip)]
    Decode,
}

/// The plan for all requests.
pub struct Plan {
    /// How often all requests are sent.
    pub rounds: usize,
    /// The address of the bootstrap server, `host:port`.
    pub bootstrap: String,
    /// Tokens to generate for each request.
    pub max_new_tokens: usize,
    /// How long a request may take.
    pub deadline: Duration,
    /// Kill a process of this role in the middle.
    pub kill: Option<Role>,
}

/// What a run is to do.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    /// The requests of each round.
    pub requests: &'a [Request],
    /// How the requests are sent.
    pub plan: &'a Plan,
    /// Where the progress is shown.
    pub progress: &'a Progress,
}

/// A process as the router sees it.
pub struct Member {
    /// What the process does.
    pub role: Role,
    /// The number of the process in its role.
    pub number: usize,
    /// True if the router has killed the process.
    pub killed: bool,
    /// The pages of the process at the end, if it has any.
    pub pages: Option<Accounting>,
    /// The blocks of the encoder cache of the process at the end, if it has one.
    pub blocks: Option<Blocks>,
    pub(super) ready: bool,
    pub(super) process: Process,
}

impl Member {
    /// The name of the process, such as `encoder/0`.
    pub fn name(&self) -> String {
        let role = match self.role {
            Role::Encoder => "encoder",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        format!("{role}/{}", self.number)
    }

    /// True if the process has reported everything that it reports at the end.
    pub(super) fn closed(&self) -> bool {
        (self.role == Role::Encoder || self.pages.is_some())
            && (self.role == Role::Decode || self.blocks.is_some())
    }
}

/// A request that was sent, and how far it is.
#[derive(Debug)]
pub struct Routed {
    /// The round, from 0.
    pub round: usize,
    /// The number of the request in its round.
    pub request: usize,
    /// The encoder of each image of the request, and its answer.
    pub items: Vec<Sent>,
    /// Where the embeddings came from, when the prefill process has all of them.
    pub inputs: Option<Vec<Arrived>>,
    /// The report of the prefill rank.
    pub prefilled: Option<Prefilled>,
    /// The report of the decode rank.
    pub decoded: Option<Decoded>,
    /// Set if a process that the request needs is gone.
    pub orphaned: Option<NamedError>,
    /// From the beginning of the round until the end of the request.
    pub wall: Option<Duration>,
    pub(super) room: u64,
    pub(super) since: Instant,
    pub(super) passed_on: bool,
}

/// An image of a request, as it was sent to an encoder.
#[derive(Debug)]
pub struct Sent {
    /// The position of the encoder in [`Run::members`]; `None` if no encoder serves.
    pub encoder: Option<usize>,
    /// The answer of the encoder.
    pub encoded: Option<Encoded>,
    /// True if the answer is here, or does not come.
    pub(super) settled: bool,
}

impl Routed {
    /// True if no more events of the request are to come.
    pub(super) fn ended(&self) -> bool {
        let failed = |half: &Prefilled| half.error.is_some();
        self.orphaned.is_some()
            || (self.decoded.is_some() && self.prefilled.is_some())
            || (self.inputs.is_none() && self.prefilled.as_ref().is_some_and(failed))
    }
}

/// The kill that was done.
#[derive(Debug, Clone, Serialize)]
pub struct Killed {
    /// The name of the process.
    pub process: String,
    /// What went on at that moment.
    pub moment: String,
}

/// The result of a run.
pub struct Run {
    /// The requests, in the order in which they were sent.
    pub requests: Vec<Routed>,
    /// The processes, with their reports.
    pub members: Vec<Member>,
    /// The kill, if one was done.
    pub killed: Option<Killed>,
    /// From the first request until the last had ended.
    pub wall: Duration,
}
