//! What goes into the protocol machine and what comes out of it.

use std::time::Duration;

use bytes::Bytes;

use super::node::Node;
use crate::announce::{Fence, FenceError, FinalLayers};
use crate::args::KvArgs;
use crate::error::TransferError;
use crate::groups::Groups;
use crate::id::{AuxIndex, ChunkId, Incarnation, Room, SessionId};
use crate::lease::KV_LEASE_DURATION;
use crate::machine::{Amounts, Machine, SessionCommand, SessionResource, SessionStatus};
use crate::pages::Pages;
use crate::poll::KvPoll;
use crate::quarantine::Quarantine;
use crate::session::SessionOptions;
use crate::time::Time;
use crate::wire::{VERSIONS, Versions, hello_metadata};

/// Everything that a [`Node`](super::Node) is told.
pub type Input = crate::machine::Input<Command>;

/// Everything that a [`Node`](super::Node) wants done.
pub type Output = crate::machine::Output<KvPoll, Resource, TransferError>;

/// What a scheduler asks for through a session handle.
#[derive(Debug)]
pub enum Command {
    /// Opens a sending session.
    OpenSender {
        /// Its id, never used before.
        session: SessionId,
        /// The request.
        room: Room,
        /// How many receivers will register, at least one.
        receivers: u32,
        /// Deadline, mode, lease.
        options: Box<SessionOptions>,
    },
    /// Announces a sending session's pages.
    InitSender {
        /// Which.
        session: SessionId,
        /// How many pages in all.
        num_pages: usize,
        /// The aux row that goes with the last chunk.
        aux: Option<AuxIndex>,
    },
    /// The next pages of a sending session.
    Send {
        /// Which.
        session: SessionId,
        /// The pages; they come back in [`Output::Release`].
        chunk: Pages,
    },
    /// The next pages of a sending session, of which nothing is final yet.
    BeginChunk {
        /// Which.
        session: SessionId,
        /// The pages; they come back in [`Output::Release`].
        chunk: Pages,
    },
    /// Layers of a chunk of a sending session are final. The event in them is the worker's to wait for.
    LayersFinal {
        /// Which.
        session: SessionId,
        /// The chunk and its layers.
        layers: FinalLayers,
    },
    /// What an announcement waited for will never be: ends the session.
    FenceFailed {
        /// Which.
        session: SessionId,
        /// The chunk that was to be announced.
        chunk: ChunkId,
        /// What the fence said.
        error: FenceError,
    },
    /// Opens a receiving session.
    OpenReceiver {
        /// Its id, never used before.
        session: SessionId,
        /// The request.
        room: Room,
        /// The bootstrap server of the prefill engine.
        bootstrap_addr: String,
        /// Deadline, mode, replica, grant.
        options: Box<SessionOptions>,
    },
    /// The pages of a receiving session.
    InitReceiver {
        /// Which.
        session: SessionId,
        /// The pages; they come back in [`Output::Release`].
        pages: Pages,
        /// The aux row to fill.
        aux: Option<AuxIndex>,
    },
    /// The items of a session's state groups, before the last chunk, or before `InitReceiver`.
    Groups {
        /// Which.
        session: SessionId,
        /// The items; they come back in [`Output::Release`].
        groups: Groups,
    },
    /// Ends a session.
    Abort {
        /// Which.
        session: SessionId,
    },
    /// Ends all sessions and tells the peers; the node takes no new ones.
    Shutdown,
}

/// What a session is lent, and hands back at its end.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(feature = "model", derive(Clone))]
pub enum Resource {
    /// Pages: one for each `Send`, `BeginChunk` and `InitReceiver`.
    Pages(Pages),
    /// Items of state groups.
    Groups {
        /// The items.
        groups: Groups,
        /// On a receiver that succeeded: its optional groups that the sender did not name.
        skipped: Vec<u16>,
    },
}

impl Resource {
    /// The kind of pages in [`Amounts`].
    pub const PAGES: usize = 0;
    /// The kind of items of state groups in [`Amounts`].
    pub const ITEMS: usize = 1;
}

impl SessionResource for Resource {
    const KINDS: &'static [&'static str] = &["pages", "items of state groups"];

    fn amounts(&self) -> Amounts {
        match self {
            Resource::Pages(pages) => Amounts::of(Resource::PAGES, pages.len()),
            Resource::Groups { groups, .. } => Amounts::of(Resource::ITEMS, groups.len()),
        }
    }
}

impl From<Pages> for Resource {
    fn from(pages: Pages) -> Resource {
        Resource::Pages(pages)
    }
}

impl From<Groups> for Resource {
    fn from(groups: Groups) -> Resource {
        Resource::Groups { groups, skipped: Vec::new() }
    }
}

impl SessionCommand for Command {
    type Resource = Resource;

    fn abort(session: SessionId) -> Command {
        Command::Abort { session }
    }

    fn shutdown() -> Command {
        Command::Shutdown
    }

    fn lends(&self) -> Option<Amounts> {
        match self {
            Command::Send { chunk: pages, .. }
            | Command::BeginChunk { chunk: pages, .. }
            | Command::InitReceiver { pages, .. } => Some(Amounts::of(Resource::PAGES, pages.len())),
            Command::Groups { groups, .. } => Some(Amounts::of(Resource::ITEMS, groups.len())),
            _ => None,
        }
    }

    fn into_resource(self) -> Option<Resource> {
        match self {
            Command::Send { chunk: pages, .. }
            | Command::BeginChunk { chunk: pages, .. }
            | Command::InitReceiver { pages, .. } => Some(pages.into()),
            Command::Groups { groups, .. } => Some(groups.into()),
            _ => None,
        }
    }

    fn take_ready(&mut self) -> Option<Box<dyn Fence>> {
        match self {
            Command::LayersFinal { layers, .. } => layers.fence.take(),
            _ => None,
        }
    }

    fn not_ready(self, error: FenceError) -> Command {
        match self {
            Command::LayersFinal { session, layers } => {
                Command::FenceFailed { session, chunk: layers.chunk, error }
            }
            command => command,
        }
    }
}

impl SessionStatus for KvPoll {
    const OPENED: KvPoll = KvPoll::Bootstrapping;
    const FAILED: KvPoll = KvPoll::Failed;

    fn is_terminal(self) -> bool {
        KvPoll::is_terminal(self)
    }

    fn to_u8(self) -> u8 {
        self as u8
    }

    fn from_u8(number: u8) -> Option<KvPoll> {
        KvPoll::from_u8(number)
    }
}

impl Machine for Node {
    type Command = Command;
    type Status = KvPoll;
    type Resource = Resource;
    type Failure = TransferError;
    type Quarantine = Quarantine;

    fn handle(&mut self, now: Time, input: Input) {
        Node::handle(self, now, input);
    }

    fn poll_output(&mut self) -> Option<Output> {
        Node::poll_output(self)
    }

    fn next_timeout(&self) -> Option<Time> {
        Node::next_timeout(self)
    }

    fn leased(&self) -> usize {
        self.pages_leased()
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        Node::quarantine(self)
    }

    fn metadata_in(&self, frame: &[u8]) -> Option<Bytes> {
        hello_metadata(frame)
    }
}

/// What a [`Node`](super::Node) knows and may do.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// The worker.
    pub args: KvArgs,
    /// This life of it.
    pub incarnation: Incarnation,
    /// The plane's name.
    pub plane: String,
    /// The plane's metadata, for peers.
    pub metadata: Bytes,
    /// The versions of the wire that are offered to peers: all of [`VERSIONS`], or the older of them, for as
    /// long as an upgrade may have to be taken back.
    pub versions: Versions,
    /// Seed of the node's own random numbers.
    pub seed: u64,
    /// Timing.
    pub timing: Timing,
    /// Bounds.
    pub limits: Limits,
}

impl NodeConfig {
    /// A configuration with the default timing and limits. The seed follows the incarnation, which
    /// is random.
    pub fn new(args: KvArgs, incarnation: Incarnation, plane: &str, metadata: Bytes) -> NodeConfig {
        NodeConfig {
            args,
            incarnation,
            plane: plane.to_owned(),
            metadata,
            versions: VERSIONS,
            seed: incarnation.get(),
            timing: Timing::default(),
            limits: Limits::default(),
        }
    }
}

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A session's life, unless it says otherwise (SGLang: 300 s).
    pub session_deadline: Duration,
    /// First repetition of an unanswered frame; doubles from there on.
    pub retry_first: Duration,
    /// Longest pause between repetitions.
    pub retry_max: Duration,
    /// A peer that matters and has been silent for this long is pinged.
    pub keepalive: Duration,
    /// A peer that matters and has been silent for this long is given up; three keepalives at least.
    pub peer_timeout: Duration,
    /// How long a peer may write into this worker's memory after each time that it was allowed to. Renewed
    /// three times in this duration while a registration is open.
    pub write_permission: Duration,
    /// First repetition of a failed lookup; doubles from there on, up to `retry_max`.
    pub lookup_retry: Duration,
    /// How long a failed or aborted room is remembered for a receiver that comes late.
    pub failed_room_ttl: Duration,
    /// The lease of pages that wait for a reader, where a session does not say otherwise (vLLM's
    /// `kv_lease_duration`).
    pub kv_lease_duration: Duration,
}

/// The longest time that counts: beyond it nobody waits. Sums and multiples of it are numbers still.
pub(super) const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Timing {
    /// The same, with no pause so short that timers would spin, nor that a live peer seems silent.
    pub(super) fn sane(mut self) -> Timing {
        for pause in [
            &mut self.retry_first,
            &mut self.retry_max,
            &mut self.keepalive,
            &mut self.peer_timeout,
            &mut self.write_permission,
            &mut self.lookup_retry,
            &mut self.failed_room_ttl,
            &mut self.kv_lease_duration,
            &mut self.session_deadline,
        ] {
            *pause = (*pause).clamp(Duration::from_micros(10), LONGEST);
        }
        // A peer is asked twice before it is given up.
        self.peer_timeout = self.peer_timeout.max(self.keepalive * 3);
        self
    }
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            session_deadline: Duration::from_secs(300),
            retry_first: Duration::from_millis(200),
            retry_max: Duration::from_secs(2),
            keepalive: Duration::from_secs(1),
            peer_timeout: Duration::from_secs(5),
            write_permission: Duration::from_secs(10),
            lookup_retry: Duration::from_millis(100),
            failed_room_ttl: Duration::from_secs(60),
            kv_lease_duration: KV_LEASE_DURATION,
        }
    }
}

/// Bounds on what peers and schedulers can make a node remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Peers known at once; idle ones make way, busy ones do not.
    pub max_peers: usize,
    /// Registrations waiting for a sender, in all.
    pub max_registrations: usize,
    /// Runs of pages in the waiting registrations, in all: bounds their memory.
    pub max_waiting_runs: usize,
    /// Failed rooms remembered.
    pub max_failed_rooms: usize,
    /// Most bytes in one post: smaller ones let small sessions pass large ones.
    pub max_post_bytes: u64,
    /// Most attempts of one peer that may be open at once.
    pub max_attempts: u64,
    /// Of [`max_registrations`](Limits::max_registrations), [`max_waiting_runs`](Limits::max_waiting_runs)
    /// and the failed rooms that peers have told of: the share of one transport connection, as one in so many.
    pub connections_share: usize,
    /// Incarnations that one transport connection may bring, at once.
    pub max_incarnations: usize,
    /// Addresses of bootstrap servers whose answers are remembered.
    pub max_addresses: usize,
    /// Ended grants remembered, so that a late reader is told what became of its one.
    pub max_ended_grants: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_peers: 1024,
            max_registrations: 1 << 17,
            max_waiting_runs: 1 << 22,
            max_failed_rooms: 1 << 16,
            max_post_bytes: 8 << 20,
            max_attempts: 1 << 18,
            connections_share: 8,
            max_incarnations: 4,
            max_addresses: 1024,
            max_ended_grants: 1 << 16,
        }
    }
}
