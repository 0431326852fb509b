//! The events of the machine of the KV cache.

use std::fmt;
use std::time::Duration;

use super::dropped::Dropped;
use super::event::What;
use super::message::Message;
use crate::error::{BootstrapError, Cause, Phase, TransferError};
use crate::id::{ChunkId, Incarnation, PostId, Room, WorkerId};
use crate::names::names;
use crate::poll::KvPoll;
use crate::quarantine::QuarantineReason;
use crate::transport::{Op, TransportError};

/// The events of a worker of the KV cache. They show where a request spends its time, and why it
/// ends.
///
/// Each session begins with [`Opened`](KvWhat::Opened), ends with exactly one of
/// [`Ended`](KvWhat::Ended) and [`Failed`](KvWhat::Failed), and is over with exactly one
/// [`Closed`](KvWhat::Closed). Pages that a session is given before `Opened` or after `Closed` come
/// back at once, with an event that says so.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvWhat {
    // ---- a session ------------------------------------------------------------------------------
    /// A scheduler has opened a session.
    Opened {
        /// The room of the request.
        room: Room,
        /// Whether the session sends or receives.
        half: Half,
    },
    /// The session has reached a state that is not its last one. The first state, `Bootstrapping`,
    /// comes with `Opened`.
    State(KvPoll),
    /// The machine asks the bootstrap server which ranks serve the request. Sessions that ask the
    /// same question at the same time share one lookup: the event names the first of them, and no
    /// session when the lookup is repeated.
    Asked {
        /// True if the same lookup was made before, without success.
        again: bool,
    },
    /// The bootstrap server has answered.
    Answered {
        /// How many ranks the server named.
        ranks: usize,
        /// How many sessions waited for the answer.
        sessions: usize,
    },
    /// The bootstrap server did not answer, or knows no such ranks.
    NotAnswered(BootstrapError),
    /// A session that receives knows the ranks from which its pages come: by an answer of the bootstrap
    /// server, or at once by an answer that was kept. The lookup of the session is over.
    SourcesKnown {
        /// How many ranks send pages, or a release, to this worker.
        sources: usize,
    },
    /// The registration, or the acquire message, of a receiver has met the session that sends.
    ReceiverCame,
    /// The scheduler has given the pages of a chunk to a session that sends.
    ChunkGiven {
        /// The position of the chunk among the chunks of the session.
        chunk: ChunkId,
        /// How many pages the chunk has.
        pages: usize,
    },
    /// The scheduler has given the pages of a request to a session that receives.
    PagesGiven {
        /// How many pages were given.
        pages: usize,
    },
    /// A data operation has started.
    PostStarted {
        /// The id of the post, which is never used again.
        post: PostId,
        /// Whether the post writes or reads.
        op: Op,
        /// How many bytes the post moves.
        bytes: u64,
        /// How many descriptors the post has.
        descriptors: usize,
    },
    /// A data operation has ended: no data operation touches its memory any more.
    PostEnded {
        /// The id of the post.
        post: PostId,
        /// How many bytes the post was to move.
        bytes: u64,
        /// How long the post took.
        took: Duration,
        /// The error, if the post failed.
        error: Option<TransportError>,
    },
    /// The lease on the session's pages has run out before every reader had read the pages.
    LeaseExpired,
    /// The session has succeeded.
    Ended,
    /// The session has failed.
    Failed(Box<TransferError>),
    /// The session has failed, and a data operation may still touch its pages.
    QuarantineBegan {
        /// The event for which the pages wait.
        reason: QuarantineReason,
        /// How many pages are in quarantine.
        pages: usize,
        /// How many items of cache groups are in quarantine.
        items: usize,
    },
    /// No data operation can touch the pages of the failed session any more.
    QuarantineEnded {
        /// The reason with which the quarantine began.
        reason: QuarantineReason,
        /// How long the quarantine lasted.
        lasted: Duration,
    },
    /// Pages of the session have come back to the scheduler.
    PagesBack {
        /// How many pages came back.
        pages: usize,
    },
    /// Items of cache groups of the session have come back to the scheduler.
    ItemsBack {
        /// How many items came back.
        items: usize,
    },
    /// Nothing is left of the session in the machine.
    Closed,

    // ---- messages -------------------------------------------------------------------------------
    /// This worker has sent a message to a peer.
    Said(Message),
    /// A peer's message has arrived at this worker. The answer to a hello of this worker is told as
    /// [`PeerAnswers`](KvWhat::PeerAnswers) or [`PeerRefuses`](KvWhat::PeerRefuses) instead.
    Heard(Message),
    /// A frame was ignored, for this reason.
    Dropped(Dropped),

    // ---- a peer ---------------------------------------------------------------------------------
    /// This worker has met another worker, which is the peer with this id from now on.
    PeerMet {
        /// The engine and the rank of the peer.
        worker: WorkerId,
        /// The incarnation of the peer's worker.
        incarnation: Incarnation,
    },
    /// The peer is to be reached by this transport, unless it fails before the peer has answered.
    WayChosen {
        /// The name of the transport.
        transport: String,
    },
    /// The peer has welcomed this worker's hello. Messages can be sent to the peer from now on.
    PeerAnswers,
    /// The peer has refused this worker's hello.
    PeerRefuses(Box<Cause>),
    /// The transport has opened the way to the peer.
    WayOpened,
    /// The transport could not open the way to the peer.
    ConnectFailed(TransportError),
    /// A transport has failed for the peer, and is left alone for a while. Only told by a worker with
    /// several transports.
    WayFailed {
        /// The name of the transport.
        transport: String,
        /// How the transport has failed.
        fault: WayFault,
        /// How long sessions do without the transport, if the peer has another; `None` for as long as
        /// the peer lives.
        pause: Option<Duration>,
    },
    /// This worker's way to the peer is lost. The peer may still be running.
    WayLost,
    /// Nothing was heard from the peer for a while, although a session waits for the peer.
    PeerSilent {
        /// How long nothing was heard.
        silent_for: Duration,
    },
    /// Nothing was heard from the peer for too long: its sessions fail.
    PeerGivenUp {
        /// How long nothing was heard.
        silent_for: Duration,
    },
    /// A peer that was given up was heard again.
    PeerBack,
    /// The peer is dead, or has said that it writes nothing more.
    PeerDead {
        /// For how long from now the peer's last writes may still arrive.
        quiet_after: Duration,
    },
    /// The peer has forgotten the conversation, or another incarnation of its worker has answered in its place: the sessions
    /// with the peer fail.
    PeerRestarted,
    /// This worker has forgotten the peer. If they meet again, the peer gets another id.
    PeerForgotten,
    /// The peer has permitted writes into its memory, or has extended its permission.
    PermissionBegan {
        /// How long from now on writes may begin.
        lasts: Duration,
    },
    /// This worker stops asking for permission, because it has nothing to write. The permission
    /// lasts until its time is over.
    PermissionEnded,
    /// This worker has asked its transport to take from the peer the right to write.
    Revoking,
    /// No write of the peer arrives any more: the right to write was taken back, or has ended.
    WritesOver,
}

/// How a transport has failed for a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WayFault {
    /// The transport could not open the way.
    Refused(TransportError),
    /// The way is lost.
    Lost,
    /// Nothing has come back over the way: for too long, or before a session had to end.
    Silent,
    /// Another incarnation has answered over the way.
    AnotherLife,
}

impl WayFault {
    /// A short name of the fault, for labels of metrics.
    pub fn name(&self) -> &'static str {
        match self {
            WayFault::Refused(_) => "refused",
            WayFault::Lost => "lost",
            WayFault::Silent => "silent",
            WayFault::AnotherLife => "another_life",
        }
    }
}

impl fmt::Display for WayFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WayFault::Refused(error) => write!(f, "{error}"),
            WayFault::Lost => f.write_str("the way was lost"),
            WayFault::Silent => f.write_str("nothing came back"),
            WayFault::AnotherLife => f.write_str("another incarnation answered"),
        }
    }
}

/// Whether a session sends or receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// The session has the pages of the request.
    Sender,
    /// The session wants the pages of the request.
    Receiver,
}

impl Half {
    /// The name of the half in lower case, for labels of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Half::Sender => "sender",
            Half::Receiver => "receiver",
        }
    }
}

impl What for KvWhat {
    fn phase(&self) -> Option<Phase> {
        match self {
            KvWhat::Opened { .. }
            | KvWhat::Asked { .. }
            | KvWhat::Answered { .. }
            | KvWhat::NotAnswered(_)
            | KvWhat::SourcesKnown { .. } => Some(Phase::Bootstrap),
            KvWhat::PeerMet { .. }
            | KvWhat::WayChosen { .. }
            | KvWhat::PeerAnswers
            | KvWhat::PeerRefuses(_)
            | KvWhat::WayOpened
            | KvWhat::ConnectFailed(_)
            | KvWhat::WayFailed { .. } => Some(Phase::Handshake),
            KvWhat::ReceiverCame | KvWhat::State(KvPoll::WaitingForInput) => Some(Phase::Rendezvous),
            KvWhat::PostStarted { .. }
            | KvWhat::PostEnded { .. }
            | KvWhat::PermissionBegan { .. }
            | KvWhat::PermissionEnded
            | KvWhat::State(KvPoll::Transferring) => Some(Phase::Transfer),
            KvWhat::Failed(failure) => Some(failure.phase),
            KvWhat::Said(message) | KvWhat::Heard(message) => message.phase(),
            KvWhat::State(_)
            | KvWhat::ChunkGiven { .. }
            | KvWhat::PagesGiven { .. }
            | KvWhat::LeaseExpired
            | KvWhat::Ended
            | KvWhat::QuarantineBegan { .. }
            | KvWhat::QuarantineEnded { .. }
            | KvWhat::PagesBack { .. }
            | KvWhat::ItemsBack { .. }
            | KvWhat::Closed
            | KvWhat::Dropped(_)
            | KvWhat::WayLost
            | KvWhat::PeerSilent { .. }
            | KvWhat::PeerGivenUp { .. }
            | KvWhat::PeerBack
            | KvWhat::PeerDead { .. }
            | KvWhat::PeerRestarted
            | KvWhat::PeerForgotten
            | KvWhat::Revoking
            | KvWhat::WritesOver => None,
        }
    }
}

names! {
    /// A short name of the kind of event, in lower case with underscores, for labels of metrics.
    KvWhat {
        KvWhat::Opened { .. } => "opened",
        KvWhat::State(_) => "state",
        KvWhat::Asked { .. } => "asked",
        KvWhat::Answered { .. } => "answered",
        KvWhat::NotAnswered(_) => "not_answered",
        KvWhat::SourcesKnown { .. } => "sources_known",
        KvWhat::ReceiverCame => "receiver_came",
        KvWhat::ChunkGiven { .. } => "chunk_given",
        KvWhat::PagesGiven { .. } => "pages_given",
        KvWhat::PostStarted { .. } => "post_started",
        KvWhat::PostEnded { .. } => "post_ended",
        KvWhat::LeaseExpired => "lease_expired",
        KvWhat::Ended => "ended",
        KvWhat::Failed(_) => "failed",
        KvWhat::QuarantineBegan { .. } => "quarantine_began",
        KvWhat::QuarantineEnded { .. } => "quarantine_ended",
        KvWhat::PagesBack { .. } => "pages_back",
        KvWhat::ItemsBack { .. } => "items_back",
        KvWhat::Closed => "closed",
        KvWhat::Said(_) => "said",
        KvWhat::Heard(_) => "heard",
        KvWhat::Dropped(_) => "dropped",
        KvWhat::PeerMet { .. } => "peer_met",
        KvWhat::WayChosen { .. } => "way_chosen",
        KvWhat::PeerAnswers => "peer_answers",
        KvWhat::PeerRefuses(_) => "peer_refuses",
        KvWhat::WayOpened => "way_opened",
        KvWhat::ConnectFailed(_) => "connect_failed",
        KvWhat::WayFailed { .. } => "way_failed",
        KvWhat::WayLost => "way_lost",
        KvWhat::PeerSilent { .. } => "peer_silent",
        KvWhat::PeerGivenUp { .. } => "peer_given_up",
        KvWhat::PeerBack => "peer_back",
        KvWhat::PeerDead { .. } => "peer_dead",
        KvWhat::PeerRestarted => "peer_restarted",
        KvWhat::PeerForgotten => "peer_forgotten",
        KvWhat::PermissionBegan { .. } => "permission_began",
        KvWhat::PermissionEnded => "permission_ended",
        KvWhat::Revoking => "revoking",
        KvWhat::WritesOver => "writes_over",
    }
}

impl fmt::Display for KvWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvWhat::Said(message) => write!(f, "says {message}"),
            KvWhat::Heard(message) => write!(f, "hears {message}"),
            KvWhat::Dropped(why) => write!(f, "a frame is ignored: {why}"),
            KvWhat::PeerMet { worker, incarnation } => write!(f, "is {worker}, incarnation {incarnation}"),
            KvWhat::WayChosen { transport } => write!(f, "is to be reached by {transport}"),
            KvWhat::PeerAnswers => f.write_str("welcomes this worker"),
            KvWhat::PeerRefuses(cause) => write!(f, "refuses this worker: {cause}"),
            KvWhat::WayOpened => f.write_str("the way to it is open"),
            KvWhat::ConnectFailed(error) => write!(f, "the way to it cannot be opened: {error}"),
            KvWhat::WayFailed { transport, fault, pause: Some(pause) } => {
                write!(f, "is not reached by {transport} for {pause:?}: {fault}")
            }
            KvWhat::WayFailed { transport, fault, pause: None } => {
                write!(f, "is not reached by {transport}: {fault}")
            }
            KvWhat::WayLost => f.write_str("the way to it is lost"),
            KvWhat::PeerSilent { silent_for } => write!(f, "has been silent for {silent_for:?}"),
            KvWhat::PeerGivenUp { silent_for } => write!(f, "is given up after {silent_for:?} of silence"),
            KvWhat::PeerBack => f.write_str("speaks again"),
            KvWhat::PeerDead { quiet_after } => write!(f, "is dead; its writes are over in {quiet_after:?}"),
            KvWhat::PeerRestarted => {
                f.write_str("has begun anew, or another incarnation answers in its place: its sessions fail")
            }
            KvWhat::PeerForgotten => f.write_str("is forgotten"),
            KvWhat::PermissionBegan { lasts } => write!(f, "permits writes for {lasts:?}"),
            KvWhat::PermissionEnded => f.write_str("is not asked for permission to write any more"),
            KvWhat::Revoking => f.write_str("its right to write is being revoked"),
            KvWhat::WritesOver => f.write_str("none of its writes arrives any more"),
            KvWhat::Opened { room, half: Half::Sender } => write!(f, "is opened to send room {room}"),
            KvWhat::Opened { room, half: Half::Receiver } => write!(f, "is opened to receive room {room}"),
            KvWhat::State(poll) => write!(f, "is {poll}"),
            KvWhat::Asked { again: false } => f.write_str("asks the bootstrap server"),
            KvWhat::Asked { again: true } => f.write_str("asks the bootstrap server again"),
            KvWhat::Answered { ranks, sessions } => {
                write!(f, "the bootstrap server names {ranks} ranks to {sessions} sessions")
            }
            KvWhat::NotAnswered(error) => write!(f, "the bootstrap server does not answer: {error}"),
            KvWhat::SourcesKnown { sources } => write!(f, "knows the {sources} ranks that have its pages"),
            KvWhat::ReceiverCame => f.write_str("meets its receiver"),
            KvWhat::ChunkGiven { chunk, pages } => write!(f, "is given {pages} pages as chunk {chunk}"),
            KvWhat::PagesGiven { pages } => write!(f, "is given {pages} pages"),
            KvWhat::PostStarted { post, op, bytes, descriptors } => {
                let op = if *op == Op::Write { "write" } else { "read" };
                write!(f, "begins to {op} {bytes} bytes in {descriptors} descriptors, post {post}")
            }
            KvWhat::PostEnded { post, bytes, took, error: None } => {
                write!(f, "has moved {bytes} bytes in {took:?}, post {post}")
            }
            KvWhat::PostEnded { post, bytes, took, error: Some(error) } => {
                write!(f, "has not moved {bytes} bytes in {took:?}, post {post}: {error}")
            }
            KvWhat::LeaseExpired => f.write_str("the lease on its pages has run out"),
            KvWhat::Ended => f.write_str("has succeeded"),
            KvWhat::Failed(failure) => write!(f, "has failed: {failure}"),
            KvWhat::QuarantineBegan { reason, pages, items } => {
                write!(f, "has {pages} pages and {items} items of cache groups in quarantine: {reason}")
            }
            KvWhat::QuarantineEnded { reason, lasted: time } => {
                write!(f, "the quarantine of its pages is over after {time:?}; it had begun because {reason}")
            }
            KvWhat::PagesBack { pages } => write!(f, "gives back {pages} pages"),
            KvWhat::ItemsBack { items } => write!(f, "gives back {items} items of cache groups"),
            KvWhat::Closed => f.write_str("is closed, and nothing is left of it"),
        }
    }
}
