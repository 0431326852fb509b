//! What a sending session knows of its decode ranks.
//!
//! | a target | from | when |
//! |---|---|---|
//! | attached | – | every decode rank of the room has asked |
//! | written | attached | a final chunk is being written |
//! | done | written | all pages and the aux row are in place; `KV_STATUS` 4 is sent |
//! | given up | attached, written | the session has failed; when its posts have ended, `KV_STATUS` 0 is sent, and `ABORT_ACK` if the rank had sent `ABORT` |

use std::collections::BTreeSet;

use kv_core::PageList;
use kv_core::proto::Given;

use super::pushes::Endpoint;
use crate::flows::FlowId;

/// A sending session.
#[derive(Debug)]
pub(super) struct Send {
    pub(super) room: u64,
    /// How many decode ranks the scheduler expects; 0 if the first one tells.
    pub(super) receivers: u32,
    pub(super) given: Given<PageList>,
    pub(super) targets: Vec<Target>,
    /// True once every decode rank has asked.
    pub(super) attached: bool,
    /// What decode ranks are told, once the session has failed.
    pub(super) reason: Option<String>,
}

/// One decode rank of a session.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) agent: String,
    pub(super) endpoint: Endpoint,
    /// True if nothing is written to the rank.
    pub(super) dummy: bool,
    /// From how many decode ranks a request comes, as this one says.
    pub(super) required: u32,
    /// The pages of the rank, the first of which is page `prefix` of the request.
    pub(super) pages: PageList,
    pub(super) prefix: usize,
    pub(super) aux: u32,
    /// The chunks that are being written or were.
    pub(super) begun: BTreeSet<usize>,
    pub(super) aux_begun: bool,
    pub(super) flows: BTreeSet<FlowId>,
    /// True once the rank was told how the request has ended, or needs to be told nothing.
    pub(super) told: bool,
    /// The numbers of the aborts that wait for an acknowledgement.
    pub(super) stop: BTreeSet<u64>,
}

impl Send {
    /// True if every decode rank has everything and was told.
    pub(super) fn is_done(&self) -> bool {
        self.attached
            && self.given.is_complete()
            && self.targets.iter().all(|target| target.told || target.dummy)
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.targets.iter().all(|target| target.flows.is_empty())
    }

    /// From how many decode ranks requests must come.
    pub(super) fn required(&self) -> usize {
        let told = self.targets.first().map_or(1, |target| target.required);
        (if self.receivers > 0 { self.receivers } else { told }).max(1) as usize
    }

    /// The agents of all decode ranks.
    pub(super) fn agents(&self) -> Vec<String> {
        self.targets.iter().map(|target| target.agent.clone()).collect()
    }

    pub(super) fn targets(&self, agent: &str) -> bool {
        self.targets.iter().any(|target| target.agent == agent)
    }
}
