//! What happens in the machine of the KV cache.

use std::fmt;
use std::time::Duration;

use super::dropped::Dropped;
use super::event::What;
use super::message::Message;
use crate::error::{BootstrapError, Cause, Phase, TransferError};
use crate::id::{ChunkId, Incarnation, PostId, Room, WorkerId};
use crate::poll::KvPoll;
use crate::quarantine::QuarantineReason;
use crate::transport::{Op, TransportError};

/// What happens in a worker of the KV cache: where a request spends its time, and why it ends.
///
/// Each session begins with [`Opened`](KvWhat::Opened), ends with exactly one of [`Ended`](KvWhat::Ended)
/// and [`Failed`](KvWhat::Failed), and is over with exactly one [`Closed`](KvWhat::Closed). What is given to a
/// session before the first or after the last of them comes back at once, and that is told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvWhat {
    // ---- a session ------------------------------------------------------------------------------
    /// A session is opened.
    Opened {
        /// The request.
        room: Room,
        /// Which half of the request the session is.
        half: Half,
    },
    /// The session has reached a state, and not its last one. The first, `Bootstrapping`, comes with `Opened`.
    State(KvPoll),
    /// The bootstrap server is asked who serves the request. Sessions that ask the same at the same time
    /// share the question: it is told of the first of them, and of none when it is repeated.
    Asked {
        /// It was asked before, without success.
        again: bool,
    },
    /// The bootstrap server has answered.
    Answered {
        /// How many ranks it named.
        ranks: usize,
        /// How many sessions waited for the answer.
        sessions: usize,
    },
    /// The bootstrap server has not answered, or knows no such ranks.
    NotAnswered(BootstrapError),
    /// A receiver's registration, or its acquire message, has met the session that sends.
    ReceiverCame,
    /// The scheduler has given pages to a session that sends.
    ChunkGiven {
        /// The number of the chunk in its request.
        chunk: ChunkId,
        /// How many.
        pages: usize,
    },
    /// The scheduler has given pages to a session that receives.
    PagesGiven {
        /// How many.
        pages: usize,
    },
    /// A data operation is started.
    PostStarted {
        /// Its id, which is never used again.
        post: PostId,
        /// Which way the bytes go.
        op: Op,
        /// How many bytes.
        bytes: u64,
        /// In how many descriptors.
        descs: usize,
    },
    /// A data operation has ended: nothing touches its memory any more.
    PostEnded {
        /// Its id.
        post: PostId,
        /// How many bytes it was to move.
        bytes: u64,
        /// How long it took.
        took: Duration,
        /// Why it failed, if it did.
        error: Option<TransportError>,
    },
    /// The lease on the session's pages has run out before every reader had read them.
    LeaseExpired,
    /// The session has succeeded.
    Ended,
    /// The session has failed.
    Failed(Box<TransferError>),
    /// The session has failed, and its pages may not be used again yet.
    QuarantineBegan {
        /// What is waited for.
        reason: QuarantineReason,
        /// How many pages.
        pages: usize,
        /// How many items of cache groups.
        items: usize,
    },
    /// Nothing can touch the pages of the failed session any more.
    QuarantineEnded {
        /// What was waited for at first, and has happened.
        reason: QuarantineReason,
        /// How long the quarantine has lasted.
        lasted: Duration,
    },
    /// Pages have come back to the scheduler.
    PagesBack {
        /// How many.
        pages: usize,
    },
    /// Items of cache groups have come back to the scheduler.
    ItemsBack {
        /// How many.
        items: usize,
    },
    /// Nothing is left of the session.
    Closed,

    // ---- messages -------------------------------------------------------------------------------
    /// This worker has told a peer something.
    Said(Message),
    /// A peer has told this worker something. What answers a hello of this worker is told as
    /// [`PeerAnswers`](KvWhat::PeerAnswers) or [`PeerRefuses`](KvWhat::PeerRefuses) instead.
    Heard(Message),
    /// A frame was ignored.
    Dropped(Dropped),

    // ---- a peer ---------------------------------------------------------------------------------
    /// A worker is met: from now on it is the peer with this number.
    PeerMet {
        /// The worker.
        worker: WorkerId,
        /// Which life of it.
        incarnation: Incarnation,
    },
    /// The peer has welcomed this worker's hello: it can be spoken to.
    PeerAnswers,
    /// The peer has refused this worker's hello.
    PeerRefuses(Box<Cause>),
    /// The way to the peer is open.
    WayOpened,
    /// The way to the peer could not be opened.
    ConnectFailed(TransportError),
    /// This worker's way to the peer is lost. The peer may go on.
    WayLost,
    /// Nothing was heard from the peer for a while, and something depends on it.
    PeerSilent {
        /// How long.
        silent_for: Duration,
    },
    /// The peer was silent for too long: its sessions fail.
    PeerGivenUp {
        /// How long.
        silent_for: Duration,
    },
    /// A peer that was given up speaks again.
    PeerBack,
    /// The peer is dead, or has said that it writes no more.
    PeerDead {
        /// How long its last writes may still arrive.
        quiet_after: Duration,
    },
    /// The peer has begun anew, or another life of its worker answers in its place: its sessions with this worker
    /// are forgotten there.
    PeerRestarted,
    /// Nothing is known of the peer any more. Whoever meets it again gives it another number.
    PeerForgotten,
    /// The peer permits writes into its memory, or permits them for longer than before.
    PermissionBegan {
        /// How long from now on.
        lasts: Duration,
    },
    /// The permission is not asked for any more, because nothing is to be written. It lasts until its time is over.
    PermissionEnded,
    /// The transport is to take from the peer the right to write into this worker's memory.
    Revoking,
    /// No write of the peer's arrives any more: the right to it is taken back, or has ended.
    WritesOver,
}

/// Which half of a request a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// It has the pages.
    Sender,
    /// It wants them.
    Receiver,
}

impl What for KvWhat {
    fn phase(&self) -> Option<Phase> {
        match self {
            KvWhat::Opened { .. }
            | KvWhat::Asked { .. }
            | KvWhat::Answered { .. }
            | KvWhat::NotAnswered(_) => Some(Phase::Bootstrap),
            KvWhat::PeerMet { .. }
            | KvWhat::PeerAnswers
            | KvWhat::PeerRefuses(_)
            | KvWhat::WayOpened
            | KvWhat::ConnectFailed(_) => Some(Phase::Handshake),
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

impl KvWhat {
    /// A short name of the kind, in lower case with underscores: a label of metrics.
    pub fn name(&self) -> &'static str {
        match self {
            KvWhat::Opened { .. } => "opened",
            KvWhat::State(_) => "state",
            KvWhat::Asked { .. } => "asked",
            KvWhat::Answered { .. } => "answered",
            KvWhat::NotAnswered(_) => "not_answered",
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
            KvWhat::PeerAnswers => "peer_answers",
            KvWhat::PeerRefuses(_) => "peer_refuses",
            KvWhat::WayOpened => "way_opened",
            KvWhat::ConnectFailed(_) => "connect_failed",
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

    fn of_session(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvWhat::Opened { room, half: Half::Sender } => write!(f, "is opened to send room {room}"),
            KvWhat::Opened { room, half: Half::Receiver } => write!(f, "is opened to receive room {room}"),
            KvWhat::State(poll) => write!(f, "is {poll}"),
            KvWhat::Asked { again: false } => f.write_str("asks the bootstrap server"),
            KvWhat::Asked { again: true } => f.write_str("asks the bootstrap server again"),
            KvWhat::Answered { ranks, sessions } => {
                write!(f, "the bootstrap server names {ranks} ranks to {sessions} sessions")
            }
            KvWhat::NotAnswered(error) => write!(f, "the bootstrap server does not answer: {error}"),
            KvWhat::ReceiverCame => f.write_str("meets its receiver"),
            KvWhat::ChunkGiven { chunk, pages } => write!(f, "is given {pages} pages as chunk {chunk}"),
            KvWhat::PagesGiven { pages } => write!(f, "is given {pages} pages"),
            KvWhat::PostStarted { post, op, bytes, descs } => {
                let op = if *op == Op::Write { "write" } else { "read" };
                write!(f, "begins to {op} {bytes} bytes in {descs} descriptors, post {post}")
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
                write!(f, "{pages} pages and {items} items of it are in quarantine: {reason}")
            }
            KvWhat::QuarantineEnded { reason, lasted } => {
                write!(
                    f,
                    "the quarantine of its pages is over after {lasted:?}; it had begun because {reason}"
                )
            }
            KvWhat::PagesBack { pages } => write!(f, "gives back {pages} pages"),
            KvWhat::ItemsBack { items } => write!(f, "gives back {items} items of cache groups"),
            KvWhat::Closed => f.write_str("nothing is left of it"),
            KvWhat::Said(_)
            | KvWhat::Heard(_)
            | KvWhat::Dropped(_)
            | KvWhat::PeerMet { .. }
            | KvWhat::PeerAnswers
            | KvWhat::PeerRefuses(_)
            | KvWhat::WayOpened
            | KvWhat::ConnectFailed(_)
            | KvWhat::WayLost
            | KvWhat::PeerSilent { .. }
            | KvWhat::PeerGivenUp { .. }
            | KvWhat::PeerBack
            | KvWhat::PeerDead { .. }
            | KvWhat::PeerRestarted
            | KvWhat::PeerForgotten
            | KvWhat::PermissionBegan { .. }
            | KvWhat::PermissionEnded
            | KvWhat::Revoking
            | KvWhat::WritesOver => f.write_str(self.name()),
        }
    }
}

impl fmt::Display for KvWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvWhat::Said(message) => write!(f, "says {message}"),
            KvWhat::Heard(message) => write!(f, "hears {message}"),
            KvWhat::Dropped(why) => write!(f, "a frame is ignored: {why}"),
            KvWhat::PeerMet { worker, incarnation } => write!(f, "is {worker}, incarnation {incarnation}"),
            KvWhat::PeerAnswers => f.write_str("welcomes this worker"),
            KvWhat::PeerRefuses(cause) => write!(f, "refuses this worker: {cause}"),
            KvWhat::WayOpened => f.write_str("the way to it is open"),
            KvWhat::ConnectFailed(error) => write!(f, "the way to it cannot be opened: {error}"),
            KvWhat::WayLost => f.write_str("the way to it is lost"),
            KvWhat::PeerSilent { silent_for } => write!(f, "has been silent for {silent_for:?}"),
            KvWhat::PeerGivenUp { silent_for } => write!(f, "is given up after {silent_for:?} of silence"),
            KvWhat::PeerBack => f.write_str("speaks again"),
            KvWhat::PeerDead { quiet_after } => write!(f, "is dead; its writes are over in {quiet_after:?}"),
            KvWhat::PeerRestarted => f.write_str(
                "has begun anew, or another life of it answers, and its sessions are forgotten there",
            ),
            KvWhat::PeerForgotten => f.write_str("is forgotten"),
            KvWhat::PermissionBegan { lasts } => write!(f, "permits writes for {lasts:?}"),
            KvWhat::PermissionEnded => f.write_str("is asked for its permission to write no more"),
            KvWhat::Revoking => f.write_str("its right to write is being revoked"),
            KvWhat::WritesOver => f.write_str("none of its writes arrives any more"),
            of_session => of_session.of_session(f),
        }
    }
}
