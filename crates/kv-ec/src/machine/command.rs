//! The words between the handles of sessions and the machine: commands, resources and states.

use std::fmt;
use std::time::Duration;

use kv_core::machine::{Amounts, SessionCommand, SessionResource, SessionStatus};
use kv_core::{ContentHash, ReadyEvent, ReadyEventError, SessionId, TransferMode};

use super::error::EcError;
use crate::cache::{Reservation, Shape};
use crate::claims::Claim;
use crate::params::Held;
use crate::store::EntryGuard;

/// An entry that a consumer wants, and the producer from which the entry is fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Want {
    /// The hash of the entry's content.
    pub hash: ContentHash,
    /// The length of the entry in bytes, as the producer has saved the entry. The session fails if the
    /// producer's entry has another length ([`PeerCause::EntrySize`](kv_core::PeerCause::EntrySize)), or if the
    /// cache of this host has the entry with another length
    /// ([`EcError::OtherLength`](crate::EcError::OtherLength)).
    pub bytes: u64,
    /// The address (`host:port`) of the bootstrap server with which the producer is registered
    /// ([`EcConfig::publish`](crate::EcConfig::publish)).
    pub source: String,
    /// The replica of the producer's engine ([`EcConfig::replica`](crate::EcConfig::replica)). `None` is right
    /// only if the engine has one replica: of several replicas, each try asks an arbitrary one, and the session
    /// fails if that replica does not have the entry.
    pub replica: Option<u32>,
    /// Which side moves the bytes; `None` for [`MachineConfig::mode`](crate::MachineConfig::mode).
    pub mode: Option<TransferMode>,
    /// How long the entry may take, all tries together; `None` for
    /// [`MachineConfig::budget`](crate::MachineConfig::budget). When the budget is over, the session fails with
    /// [`EcError::Budget`](crate::EcError::Budget), and the caller encodes the item locally.
    pub budget: Option<Duration>,
    /// The room of the request to which the entry belongs.
    pub(crate) claim: Option<Claim>,
}

impl Want {
    /// An entry of `bytes` bytes at the producer that is registered with the bootstrap server `source`.
    pub fn new(hash: ContentHash, bytes: u64, source: impl Into<String>) -> Want {
        Want { hash, bytes, source: source.into(), replica: None, mode: None, budget: None, claim: None }
    }

    /// The entry that an item of [`ec_transfer_params`](crate::params) describes. `shape` is what
    /// [`Held::check`] has returned. The source is the item's `peer_host` and `peer_port`; the parameters name no
    /// replica.
    pub fn held(hash: ContentHash, shape: Shape, held: &Held) -> Want {
        let host = if held.peer_host.contains(':') && !held.peer_host.starts_with('[') {
            format!("[{}]", held.peer_host)
        } else {
            held.peer_host.clone()
        };
        Want::new(hash, shape.bytes(), format!("{host}:{}", held.peer_port))
    }

    /// The same with some fields changed: `Want::new(…).with(|want| want.mode = Some(TransferMode::Pull))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Why a session that wants this ends: if its request has lost its room, that counts before any other reason,
    /// because nothing else tells the request to give its entries back.
    pub(super) fn ends(&self, why: EcError) -> EcError {
        self.claim.as_ref().and_then(Claim::has_ended).unwrap_or(why)
    }
}

/// A command to the machine, given through a handle.
#[derive(Debug)]
pub enum Command {
    /// Opens a session that makes an entry available here.
    Fetch {
        /// The new session's id.
        session: SessionId,
        /// The entry, and the producer from which it is fetched.
        want: Box<Want>,
    },
    /// Opens a session that makes a reserved entry ready. Nothing happens before [`Command::Commit`].
    Save {
        /// The new session's id.
        session: SessionId,
    },
    /// Makes a reserved entry ready once its ready event has passed.
    Commit {
        /// A session that [`Command::Save`] opened.
        session: SessionId,
        /// The entry's reservation, with all of its blocks.
        reservation: Box<Reservation>,
        /// Passes when the bytes of the entry are in place.
        ready: Option<Box<dyn ReadyEvent>>,
    },
    /// The ready event of a reserved entry has failed: the machine discards the reservation, and its blocks are
    /// free.
    CommitFailed {
        /// A session that [`Command::Save`] opened.
        session: SessionId,
        /// The entry's reservation, with all of its blocks.
        reservation: Box<Reservation>,
        /// The error of the ready event.
        error: ReadyEventError,
    },
    /// Ends a session before it is done.
    Abort {
        /// A session of this worker.
        session: SessionId,
    },
    /// The worker drains: sessions that are opened afterwards fail, and requests of peers are refused.
    Drain,
    /// Ends all sessions and tells the peers.
    Shutdown,
}

/// What a session is lent and gives back.
#[derive(Debug)]
pub enum Resource {
    /// The place for an entry that is being fetched: empty when the session is opened; with the entry when the
    /// session has succeeded.
    Slot(Option<EntryGuard>),
    /// The reservation of an entry that is being saved. `None` when the session hands it back after the cache
    /// has taken or discarded the reservation.
    Reservation(Option<Box<Reservation>>),
}

impl SessionResource for Resource {
    const KINDS: &'static [&'static str] = &["blocks"];

    fn amounts(&self) -> Amounts {
        match self {
            Resource::Reservation(Some(reservation)) => Amounts::of(0, reservation.pages().len()),
            // The cache has the blocks.
            Resource::Slot(_) | Resource::Reservation(None) => Amounts::default(),
        }
    }
}

/// The states of a session that fetches or saves an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum EcPoll {
    /// The session failed; [`EcError`](crate::EcError) says why. After a fetch, encode the item locally.
    Failed = 0,
    /// The worker looks up the producer, connects to it, waits for its answer, or pauses before the next try.
    /// A session that saves an entry waits for the ready event.
    Waiting = 1,
    /// A producer has answered, and the bytes move. The state stays if that try fails and another one follows.
    Transferring = 2,
    /// The entry is in the cache of this host. For a session that has fetched the entry, it is pinned until
    /// the [`EntryGuard`](crate::EntryGuard) is dropped.
    Ready = 3,
}

impl fmt::Display for EcPoll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EcPoll::Failed => "Failed",
            EcPoll::Waiting => "Waiting",
            EcPoll::Transferring => "Transferring",
            EcPoll::Ready => "Ready",
        })
    }
}

impl EcPoll {
    /// All states, each at the position of its number.
    const ALL: [EcPoll; 4] = [EcPoll::Failed, EcPoll::Waiting, EcPoll::Transferring, EcPoll::Ready];
}

impl SessionStatus for EcPoll {
    const FAILED: EcPoll = EcPoll::Failed;
    const OPENED: EcPoll = EcPoll::Waiting;

    fn from_u8(number: u8) -> Option<EcPoll> {
        EcPoll::ALL.get(usize::from(number)).copied()
    }

    fn to_u8(self) -> u8 {
        self as u8
    }

    fn is_terminal(self) -> bool {
        matches!(self, EcPoll::Failed | EcPoll::Ready)
    }
}

impl Command {
    /// The entry's reservation, in a command that lends one.
    fn reservation(&self) -> Option<&Reservation> {
        match self {
            Command::Commit { reservation, .. } | Command::CommitFailed { reservation, .. } => {
                Some(reservation)
            }
            _ => None,
        }
    }
}

impl SessionCommand for Command {
    type Resource = Resource;

    fn shutdown() -> Command {
        Command::Shutdown
    }

    fn drain() -> Option<Command> {
        Some(Command::Drain)
    }

    fn abort(session: SessionId) -> Command {
        Command::Abort { session }
    }

    fn address(&mut self, to: SessionId) -> bool {
        let addressee = match self {
            Command::Commit { session, .. } => session,
            Command::CommitFailed { session, .. } => session,
            Command::Abort { session } => session,
            Command::Fetch { .. } | Command::Save { .. } | Command::Drain | Command::Shutdown => {
                return false;
            }
        };
        *addressee = to;
        true
    }

    fn lends(&self) -> Option<Amounts> {
        let blocks = self.reservation().map(|reservation| reservation.pages().len());
        let slot = matches!(self, Command::Fetch { .. }).then_some(0);
        blocks.or(slot).map(|blocks| Amounts::of(0, blocks))
    }

    fn into_resource(self) -> Option<Resource> {
        match self {
            Command::Fetch { .. } => Some(Resource::Slot(None)),
            Command::Commit { reservation, .. } | Command::CommitFailed { reservation, .. } => {
                Some(Resource::Reservation(Some(reservation)))
            }
            Command::Save { .. } | Command::Abort { .. } | Command::Drain | Command::Shutdown => None,
        }
    }

    fn take_ready(&mut self) -> Option<Box<dyn ReadyEvent>> {
        if let Command::Commit { ready, .. } = self { ready.take() } else { None }
    }

    fn not_ready(self, error: ReadyEventError) -> Command {
        let Command::Commit { session, reservation, .. } = self else { return self };
        Command::CommitFailed { session, reservation, error }
    }
}
