//! The sending half of a push session, on the prefill side.
//!
//! ```text
//! open ─▶ Bootstrapping ─ every receiver has registered ─▶ WaitingForInput ─ send ─▶ Transferring
//!            (chunks given early wait)                                                  │ every part of
//!                                                                                       ▼ every target done
//!                                                                                    Success, pages back
//! any failure ─▶ Failed ─▶ Failed{quiet: false} to the targets, posts cancelled
//!                            └─ last post of a target ended ─▶ Failed{quiet: true} | AbortAck
//!                                 └─ of all targets ─▶ pages back
//! ```
//!
//! A *target* is a receiver that has registered, or claimed. How its bytes are written is in
//! `write.rs`, how it reads them in `grant.rs`.

mod attempts;
mod chunks;
mod ending;
mod groups;
mod holder;
mod meeting;
mod opening;
mod peers;
mod quarantine;
mod write;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::PeerCause;
use crate::groups::{GroupLists, Groups};
use crate::id::{Attempt, AuxIndex, Incarnation, PeerId, SessionId};
use crate::layout::{Geometry, HeldLayers};
use crate::lease::{Lease, TransferMode};
use crate::pages::PageList;
use crate::plan::Plan;
use crate::poll::KvPoll;
use crate::proto::rendezvous::Named;
use crate::proto::run_set::RunSet;
use crate::proto::sending::chunks::{Chunk, Final};
use crate::proto::sending::holder::EndedGrants;
use crate::time::Time;
use crate::wire::Link;

/// All sending sessions of a worker.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(in crate::proto) struct Sending {
    sessions: BTreeMap<SessionId, SendSession>,
    held_layers: HeldLayers,
    ended_grants: EndedGrants,
    pages_leased: usize,
}

impl Sending {
    pub(in crate::proto) fn new(geometry: &Geometry) -> Sending {
        Sending {
            sessions: BTreeMap::new(),
            held_layers: HeldLayers::new(geometry),
            ended_grants: EndedGrants::default(),
            pages_leased: 0,
        }
    }

    /// How many sessions have not ended, or have pages that have not come back.
    pub(in crate::proto) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub(in crate::proto) fn ids(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }

    pub(in crate::proto) fn has(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    pub(in crate::proto) fn deadline(&self, session: SessionId) -> Option<Duration> {
        self.sessions.get(&session).map(|sender| sender.deadline)
    }

    /// How many receivers the sessions have met.
    pub(in crate::proto) fn targets(&self) -> usize {
        self.sessions.values().map(|sender| sender.targets.len()).sum()
    }

    /// Complete pages that are pinned for readers.
    pub(in crate::proto) fn pages_leased(&self) -> usize {
        self.pages_leased
    }

    /// How many ended leases are remembered for latecomers.
    pub(in crate::proto) fn ended_grants(&self) -> usize {
        self.ended_grants.len()
    }
}

/// A sending session.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
struct SendSession {
    deadline: Duration,
    named: Named,
    /// How many ranks receive: told by the scheduler, or by the first of them.
    receivers: usize,
    /// The scheduler has not said how many.
    learns: bool,
    mode: TransferMode,
    /// How long the pages stay for readers.
    lease: Lease,
    /// Until when they stay at least; set when they are complete.
    pinned_until: Option<Time>,
    poll: KvPoll,
    announced: Option<(usize, Option<AuxIndex>)>,
    chunks: Vec<Chunk>,
    given: usize,
    /// How many chunks are final in all layers.
    chunks_final: usize,
    /// What of the chunks is final, in the order in which it was announced.
    finals: Vec<Final>,
    /// All announced pages have been given, and are final.
    complete: bool,
    /// Items of state groups, sent with the last chunk.
    groups: Option<Groups>,
    targets: Vec<Target>,
    /// The last target of each receiver.
    target_of: BTreeMap<Incarnation, usize>,
    failure: Option<PeerCause>,
}

impl SendSession {
    /// How many receivers have come.
    pub(in crate::proto) fn met(&self) -> usize {
        self.targets.len()
    }

    /// True if receivers are to come.
    fn lacks_receivers(&self) -> bool {
        self.met() < self.receivers
    }

    /// The receivers that read, with their positions.
    pub(in crate::proto) fn readers(&self) -> impl Iterator<Item = (usize, &Target)> + Clone {
        self.targets.iter().enumerate().filter(|(_, target)| target.reads)
    }

    /// All pages given, in request order.
    fn all_pages(&self) -> PageList {
        let runs = self.chunks.iter().flat_map(|chunk| chunk.pages.list().runs());
        PageList::from_runs(runs.copied()).unwrap_or_default()
    }

    /// How many pages are pinned for readers.
    pub(in crate::proto) fn pages_leased(&self) -> usize {
        let pinned = self.pinned_until.and(self.announced).filter(|_| self.failure.is_none());
        pinned.map_or(0, |(pages, _)| pages)
    }

    /// The aux row, if there is one.
    pub(in crate::proto) fn aux(&self) -> Option<AuxIndex> {
        self.announced.and_then(|(_, aux)| aux)
    }
}

/// A receiver that has registered.
#[derive(Debug, Clone)]
struct Target {
    peer: PeerId,
    attempt: Attempt,
    /// In which conversation it came.
    link: Link,
    /// It reads: none of the fields of writing are used.
    reads: bool,
    /// The number in its last claim.
    beat: u64,
    /// It needs the pages no more.
    released: bool,
    /// The session has failed after the grant: when the last lease that it may know of is over.
    fence: Option<Time>,
    pages: PageList,
    /// The number of the first of them in the request.
    first: usize,
    /// How many pages the request has at the receiver.
    whole: usize,
    aux: Option<AuxIndex>,
    /// The aux row is this worker's to write.
    aux_here: bool,
    groups: GroupLists,
    /// Plans of the groups, in reverse order; `None` until the request is complete.
    group_plans: Option<Vec<Plan>>,
    /// Registered groups that this worker leaves out.
    skipped: Vec<u16>,
    queued: bool,
    /// First announcement that is not planned yet.
    next_final: usize,
    aux_planned: bool,
    /// What is left of the plan before.
    plan: Option<Plan>,
    next_part: u32,
    /// Known once the last part is posted.
    total: Option<u32>,
    done: RunSet,
    outstanding: u32,
    /// The receiver waits for an acknowledgement of its abort.
    abort_asked: bool,
    /// All of its parts are in place, or it has failed and is quiet.
    over: bool,
}

impl Sending {
    /// A session's receiver at this position.
    fn target_mut(&mut self, session: SessionId, index: usize) -> Option<&mut Target> {
        self.sessions.get_mut(&session)?.targets.get_mut(index)
    }
}
