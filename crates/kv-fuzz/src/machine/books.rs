//! The account of a script: its sessions, and the cost of its inputs.

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::KvPoll;
use kv_core::SessionId;
use kv_core::machine;
use kv_core::proto::{Command, NodeGauges, Output, Resource};

use super::{Charge, Outcome, Reach};

/// What the scheduler has asked for in one session.
#[derive(Debug, Default)]
struct Session {
    own: u64,
    sends: bool,
    /// How many `Pages` and items of groups have not come back.
    lent: u32,
    ended: bool,
}

/// The account of a script: what the scheduler's commands pay for, what sessions hold, and what inputs cost.
#[derive(Debug, Default)]
pub(super) struct Books {
    sessions: BTreeMap<SessionId, Session>,
    outcome: Outcome,
}

impl Books {
    pub(super) fn into_outcome(self) -> Outcome {
        self.outcome
    }

    /// Notes where a step of the script begins.
    pub(super) fn step(&mut self, at: usize) {
        self.outcome.steps.push(at);
    }

    /// The number of inputs so far.
    pub(super) fn inputs(&self) -> u64 {
        self.outcome.inputs
    }

    /// The amount that the commands of all open sessions pay for.
    pub(super) fn own(&self) -> u64 {
        self.sessions.values().map(|session| session.own).sum()
    }

    /// Enters a command that pays for `own` and lends `lent` times. Returns false, and enters nothing, if the
    /// session's handle has no such method: senders have none of the methods of receivers.
    pub(super) fn enter(&mut self, session: SessionId, own: u64, lent: u32, command: &Command) -> bool {
        let opens = matches!(command, Command::OpenSender { .. } | Command::OpenReceiver { .. });
        let sends = match command {
            Command::OpenReceiver { .. } | Command::InitReceiver { .. } => Some(false),
            Command::RequestCacheGroups { .. } | Command::Abort { .. } => None,
            _ => Some(true),
        };
        if opens {
            self.sessions.insert(session, Session { sends: sends == Some(true), ..Session::default() });
        }
        let Some(known) = self.sessions.get_mut(&session) else { return true };
        if sends.is_some_and(|sends| sends != known.sends) {
            return false;
        }
        known.own += own;
        known.lent += lent;
        true
    }

    /// Enters the cost and the outputs of an input.
    pub(super) fn charge(&mut self, charge: Charge, outputs: &[Output]) {
        self.note_cost(charge, outputs.iter().map(kind));
    }

    /// The same for outputs of which only the kinds are known.
    pub(super) fn note_cost(&mut self, charge: Charge, kinds: impl ExactSizeIterator<Item = u32>) {
        self.outcome.inputs += 1;
        let dearest = self.outcome.dearest.entry(charge.what).or_insert(charge);
        if charge.share() > dearest.share() {
            *dearest = charge;
        }
        let what = charge.what.as_bytes();
        let input = what.len() as u32 * 31 + u32::from(what.first().copied().unwrap_or(0));
        let dear = (charge.share() * 16.0) as u32;
        self.note(input, 1000 + dear.min(64));
        self.note(input, 2000 + kinds.len().min(16) as u32);
        self.note(input, 3000 + charge.paid.bytes.checked_ilog2().unwrap_or(0));
        for kind in kinds {
            self.note(input, kind);
        }
    }

    /// Enters how far the script has come, of a machine without gauges.
    pub(super) fn note_reach(&mut self, reach: Reach) {
        self.outcome.reach = self.outcome.reach.or(reach);
        for (gauge, held) in (50..).zip([reach.sessions, reach.peers, reach.posts]) {
            self.note(gauge, 5000 + held.checked_ilog2().map_or(0, |log| log + 1));
        }
    }

    /// Enters how far the script has come.
    pub(super) fn reached(&mut self, reach: Reach, gauges: &NodeGauges) {
        self.outcome.reach = self.outcome.reach.or(reach);
        let held = [
            gauges.senders,
            gauges.receivers,
            gauges.targets,
            gauges.sources,
            gauges.registrations,
            gauges.incoming,
            gauges.results,
            gauges.closed_runs,
            gauges.waiting_runs,
            gauges.queued,
            gauges.posts,
            gauges.pages_leased,
            gauges.ended_leases,
            gauges.draining,
            gauges.failed_rooms,
        ];
        for (gauge, held) in (0..).zip(held) {
            self.note(gauge, 4000 + held.checked_ilog2().map_or(0, |log| log + 1));
        }
    }

    fn note(&mut self, input: u32, what: u32) {
        self.outcome.features.push(input.wrapping_mul(0x9e37_79b1) ^ what.wrapping_mul(0x85eb_ca6b));
    }

    /// Enters a change of a session's state.
    pub(super) fn told(&mut self, session: SessionId, poll: KvPoll) {
        let known = self.sessions.get_mut(&session);
        assert!(known.as_ref().is_some_and(|known| !known.ended), "{session} ends twice, or never was");
        if let Some(known) = known.filter(|_| poll.is_terminal()) {
            known.ended = true;
        }
        self.forget(session);
    }

    /// What was lent to a session with one command has come back.
    pub(super) fn released(&mut self, session: SessionId) {
        if let Some(known) = self.sessions.get_mut(&session) {
            assert!(known.ended, "pages of {session} come back before its end");
            assert!(known.lent > 0, "more comes back of {session} than was given");
            known.lent -= 1;
        }
        self.forget(session);
    }

    /// A session that has ended, and of which everything has come back, pays for nothing any more.
    fn forget(&mut self, session: SessionId) {
        if let Some(known) = self.sessions.get_mut(&session)
            && known.ended
            && known.lent == 0
        {
            known.own = 0;
        }
    }

    /// The machine was shut down: every session has ended.
    pub(super) fn check_all_ended(&self) {
        let open = self.sessions.iter().find(|(_, session)| !session.ended);
        assert!(open.is_none(), "{open:?} has not ended at shutdown");
    }
}

/// The name of a command, for messages.
pub(super) fn name(command: &Command) -> &'static str {
    match command {
        Command::OpenSender { .. } => "OpenSender",
        Command::OpenReceiver { .. } => "OpenReceiver",
        Command::InitSender { .. } => "InitSender",
        Command::Send { .. } | Command::BeginChunk { .. } => "Send",
        Command::LayersFinal { .. } => "LayersFinal",
        Command::InitReceiver { .. } => "InitReceiver",
        Command::RequestCacheGroups { .. } => "RequestCacheGroups",
        _ => "Abort",
    }
}

/// About how many bytes an output is. `of_resource` says it of a resource that comes back.
pub(super) fn size<S, R, F>(output: &machine::Output<S, R, F>, of_resource: impl FnOnce(&R) -> usize) -> u64 {
    let size = match output {
        machine::Output::Send { frame, .. } => frame.len(),
        machine::Output::Post { post, .. } => {
            post.descriptors.len() * size_of::<kv_core::Descriptor>()
                + post.notify.as_ref().map_or(0, Bytes::len)
        }
        machine::Output::Connect { transport, .. } => transport.metadata.len(),
        machine::Output::Lookup { addr, .. } => addr.len(),
        machine::Output::Release { resource, .. } => of_resource(resource),
        _ => 0,
    };
    (size + 16) as u64
}

/// About how many bytes a resource of the KV cache is.
pub(super) fn size_of_resource(resource: &Resource) -> usize {
    match resource {
        Resource::Pages(pages) => 8 * pages.list().runs().len(),
        Resource::RequestCacheGroups { groups, .. } => 8 * groups.lists().runs(),
    }
}

fn kind(output: &Output) -> u32 {
    match output {
        Output::Connect { .. } => 1,
        Output::Disconnect { .. } => 2,
        Output::Send { frame, .. } => 100 + u32::from(frame.get(2).copied().unwrap_or(0)),
        Output::Post { .. } => 4,
        Output::Permit { .. } => 5,
        Output::Revoke { .. } => 6,
        Output::Cancel { .. } => 7,
        Output::Lookup { .. } => 8,
        Output::Status { poll, failure, .. } => {
            // The name of the cause: what its text begins with.
            let text = failure.as_ref().map(|failure| format!("{:?}", failure.cause));
            let name: u32 = text
                .iter()
                .flat_map(|text| text.bytes().take_while(u8::is_ascii_alphabetic))
                .fold(0, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
            (*poll as u32 + 10) ^ name << 8
        }
        Output::Release { resource: Resource::Pages(_), .. } => 30,
        Output::Release { resource: Resource::RequestCacheGroups { .. }, .. } => 31,
    }
}
