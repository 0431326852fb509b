//! The prefill side: requests whose KV this worker writes into the memory of an SGLang decode engine.
//!
//! ```text
//! asking.rs     registrations, requests and aborts of decode ranks
//! writing.rs    the scheduler's commands; chunks become posts
//! ending.rs     how sessions end, and what decode ranks are told then
//! session.rs    what a session knows of its decode ranks
//! rooms.rs      where requests and senders find each other    agents.rs  registered decode workers
//! pushes.rs     ways to their sockets                         foreign.rs their caches
//! ```
//!
//! A decode rank is told nothing about a request while a post of this worker may still write for the request:
//! after `KV_STATUS` and `ABORT_ACK` the rank's pages are its own.

mod agents;
mod asking;
mod ending;
mod foreign;
mod pushes;
mod rooms;
mod session;
mod writing;

use std::collections::{BTreeMap, BTreeSet};

use kv_core::layout::HeldLayers;
use kv_core::{Cause, KvArgs, Obstacle, PeerCause, Phase, Quarantine, SessionId, Time};

use super::cache::OurCache;
use super::config::{SglangLimits, SglangTiming};
use super::ranks::unique_rank;
use crate::effects::Effects;
use crate::flows::{Bounds, FlowId, Flows};
use crate::sessions::{Due, Sessions};
use agents::Agents;
use pushes::Pushes;
use rooms::Rooms;
use session::Send;

/// The sending sessions of a machine.
#[derive(Debug)]
pub(super) struct Sending {
    cache: OurCache,
    layers: HeldLayers,
    /// The number of this rank in its messages.
    rank: u32,
    timing: SglangTiming,
    limits: SglangLimits,
    sessions: Sessions<Send>,
    rooms: Rooms,
    agents: Agents,
    pushes: Pushes,
    flows: Flows,
    /// The session and the target of each flow.
    flow_of: BTreeMap<FlowId, (SessionId, usize)>,
    /// The sessions that write, or wrote, to each agent.
    of_agent: BTreeMap<String, BTreeSet<SessionId>>,
    /// Why no session is opened any more: the worker drains, or is stopping.
    closed: Option<Cause>,
}

impl Sending {
    pub(super) fn new(
        cache: OurCache,
        args: &KvArgs,
        (timing, limits): (SglangTiming, SglangLimits),
    ) -> Sending {
        let bounds =
            Bounds { descriptors: args.max_sge(), bytes: limits.post_bytes, in_flight: args.max_inflight() };
        Sending {
            layers: HeldLayers::new(&cache.geometry),
            rank: unique_rank(&cache.geometry.parallel),
            cache,
            timing,
            limits,
            sessions: Sessions::default(),
            rooms: Rooms::default(),
            agents: Agents::new(limits.agents),
            pushes: Pushes::new(limits.agents.saturating_mul(2)),
            flows: Flows::new(bounds),
            flow_of: BTreeMap::new(),
            of_agent: BTreeMap::new(),
            closed: None,
        }
    }

    /// True if the session is one of this half of the machine.
    pub(super) fn knows(&mut self, session: SessionId) -> bool {
        self.sessions.any(session).is_some()
    }

    /// How many sessions, rooms with or without one, flows, and agents in use are remembered.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> [usize; 4] {
        [self.sessions.len(), self.rooms.len(), self.flow_of.len(), self.of_agent.len()]
    }

    /// Does what time brings.
    pub(super) fn tick(&mut self, effects: &mut Effects, now: Time) {
        while let Some(due) = self.sessions.due(now) {
            match due {
                Due::Deadline(session) => self.deadline(effects, session),
                Due::Free(session) => self.sessions.free(effects, session),
            }
        }
        while let Some(room) = self.rooms.overdue(now) {
            if self.give_up_room(effects, room, "no sender has opened the room") {
                // A sender that comes later would wait in vain.
                let refusal = (None, Cause::ByPeer(PeerCause::DeadlineExceeded));
                self.rooms.refuse(now + self.timing.unclaimed, room, refusal);
            }
        }
    }

    pub(super) fn next_due(&self) -> Option<Time> {
        [self.sessions.next_due(), self.rooms.next_due()].into_iter().flatten().min()
    }

    pub(super) fn quarantine(&self, now: Time) -> Vec<Quarantine> {
        self.sessions.quarantine(now)
    }

    /// The worker stops: every session ends, and decode ranks are told.
    pub(super) fn shut_down(&mut self, effects: &mut Effects) {
        self.closed = Some(Cause::WorkerStopped);
        for session in self.sessions.live_ids() {
            self.fail(effects, session, (None, Cause::WorkerStopped));
        }
        for room in self.rooms.all_unclaimed() {
            self.give_up_room(effects, room, "the prefill worker is stopping");
        }
    }

    /// Opens no session any more. Decode ranks that wait for a sender are told that none will come.
    pub(super) fn drain(&mut self, effects: &mut Effects) {
        self.closed.get_or_insert(Cause::Draining);
        for room in self.rooms.all_unclaimed() {
            self.give_up_room(effects, room, "the prefill worker drains");
        }
    }

    /// True while a session lacks decode ranks.
    pub(super) fn awaits_peers(&self) -> bool {
        self.sessions.iter().any(|(_, open)| !open.has_ended() && !open.dialect.attached)
    }

    fn deadline(&mut self, effects: &mut Effects, session: SessionId) {
        let Some(open) = self.sessions.live(session) else { return };
        let after = open.patience;
        let stuck = open.dialect.targets.iter().find(|target| !target.flows.is_empty());
        let last = stuck.and_then(|target| {
            let peer = self.agents.get(&target.agent)?.worker()?;
            Some(Obstacle::Stuck { peer, posts: target.flows.len() })
        });
        self.fail(effects, session, (None, Cause::DeadlineExceeded { after, last }));
    }

    fn phase(&mut self, session: SessionId) -> Phase {
        match self.sessions.any(session).map(|session| &session.dialect) {
            Some(send) if send.targets.iter().any(|target| !target.begun.is_empty() || target.aux_begun) => {
                Phase::Transfer
            }
            _ => Phase::Rendezvous,
        }
    }
}
