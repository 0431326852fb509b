//! What goes into the protocol machine and what comes out of it.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

use crate::announce::FenceError;
use crate::args::KvArgs;
use crate::bootstrap::{LookupId, RankQuery, RankRecord};
use crate::error::{BootstrapError, TransferError};
use crate::groups::Groups;
use crate::id::{AuxIndex, ChunkId, Incarnation, PeerId, PostId, Room, SessionId};
use crate::lease::KV_LEASE_DURATION;
use crate::pages::Pages;
use crate::plane::{Directions, Origin, PlaneError, Post, WayEnd, WriteFence};
use crate::poll::KvPoll;
use crate::session::SessionOptions;
use crate::time::Time;
use crate::wire::{VERSIONS, Versions};

/// Everything that a [`Node`](super::Node) is told.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    /// The scheduler wants something.
    Command(Command),
    /// A frame arrived. A [`Hello`](crate::wire::Hello) only if the connection on which it came may speak for
    /// the metadata in it ([`Plane::may_speak_for`](crate::Plane::may_speak_for),
    /// [`wire::hello_metadata`](crate::wire::hello_metadata)).
    Frame {
        /// The transport connection on which it came.
        from: Origin,
        /// The frame.
        frame: Bytes,
    },
    /// A post ended; its memory is quiet.
    Posted {
        /// Which.
        post: PostId,
        /// How it went.
        result: Result<(), PlaneError>,
    },
    /// The plane has opened the way to a peer, and says what it is good for. Until it does, both
    /// directions are taken to be.
    Connected {
        /// Which.
        peer: PeerId,
        /// What the way is good for.
        directions: Directions,
        /// What ends the danger of the peer's last writes.
        fence: WriteFence,
    },
    /// The plane could not open the way to a peer.
    ConnectFailed {
        /// Which.
        peer: PeerId,
        /// Why.
        error: PlaneError,
    },
    /// The way to a peer has ended.
    PeerGone {
        /// Which.
        peer: PeerId,
        /// Whose end it is.
        end: WayEnd,
    },
    /// No write of the peer arrives any more: answers [`Output::Revoke`].
    Revoked {
        /// Which.
        peer: PeerId,
    },
    /// The bootstrap server answered.
    Found {
        /// The question.
        lookup: LookupId,
        /// All ranks of the replica, in rank order.
        ranks: Vec<RankRecord>,
    },
    /// The bootstrap server did not answer, or has no such ranks.
    LookupFailed {
        /// The question.
        lookup: LookupId,
        /// Why.
        error: BootstrapError,
    },
    /// Time has passed: [`Node::next_timeout`](super::Node::next_timeout) is due.
    Timeout,
}

/// What a scheduler asks for through a session handle.
#[derive(Debug, PartialEq, Eq)]
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
    /// Layers of a chunk of a sending session are final, see [`FinalLayers`](crate::FinalLayers).
    LayersFinal {
        /// Which.
        session: SessionId,
        /// The chunk.
        chunk: ChunkId,
        /// The layers, by their numbers in the model; `None` for all that this rank has.
        layers: Option<Range<u32>>,
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
        /// The items; they come back in [`Output::ReleaseGroups`].
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

/// Everything that a [`Node`](super::Node) wants done. Carried out in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    /// Open the way to a peer. On failure: [`Input::ConnectFailed`].
    Connect {
        /// The id under which the plane shall know it.
        peer: PeerId,
        /// Its metadata.
        metadata: Bytes,
    },
    /// Forget a peer.
    Disconnect {
        /// Which.
        peer: PeerId,
    },
    /// Send a frame. It may be lost: failures need not be reported.
    Send {
        /// To whom.
        peer: PeerId,
        /// The frame.
        frame: Bytes,
    },
    /// Start a data operation. If the plane refuses it, that is an [`Input::Posted`] with the
    /// error.
    Post {
        /// To or from whom.
        peer: PeerId,
        /// The operation.
        post: Post,
    },
    /// The peer allows writes into its memory until then.
    Permit {
        /// Which.
        peer: PeerId,
        /// Until when.
        until: Time,
    },
    /// Take from the peer, for good, the right to write into this worker's memory. Answered by
    /// [`Input::Revoked`], or by [`Input::PeerGone`] with [`WayEnd::Dead`].
    Revoke {
        /// Which.
        peer: PeerId,
    },
    /// Ask for an early end of a post.
    Cancel {
        /// Which.
        post: PostId,
    },
    /// Ask a bootstrap server. Answered by [`Input::Found`] or [`Input::LookupFailed`].
    Lookup {
        /// The question.
        lookup: LookupId,
        /// The server.
        addr: String,
        /// What is asked.
        query: RankQuery,
    },
    /// A session changed its state. States only move as the table at [`KvPoll`] says; the two
    /// final ones come exactly once and last.
    Status {
        /// Which.
        session: SessionId,
        /// The new state.
        poll: KvPoll,
        /// Why, if it is [`KvPoll::Failed`].
        failure: Option<Box<TransferError>>,
    },
    /// Pages given to a session come back: no wire can touch them any more. Each token that went in
    /// (one per `Send`, `BeginChunk` and `InitReceiver`) comes out exactly once, after the final status.
    Release {
        /// Which session they had been given to. It may be one that the node does not know (any
        /// more).
        session: SessionId,
        /// The pages.
        pages: Pages,
    },
    /// Items of state groups given to a session come back, under the same promise.
    ReleaseGroups {
        /// Which session they had been given to.
        session: SessionId,
        /// The items.
        groups: Groups,
        /// On a receiver that succeeded: its optional groups that the sender did not name.
        skipped: Vec<u16>,
    },
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
