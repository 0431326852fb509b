//! A small third service: a holder leases numbers to clients, and each number returns to the holder when
//! its lease has run out. Written against public API only, and the machine against nothing but the trait
//! [`Machine`](kv_transfer::unstable::machine::Machine), so that a worker and a simulator drive the same code.
//!
//! Client and holder agree on time without comparing clocks: the holder says how long a lease lasts from
//! its answer on, and the client counts that from the moment of the question that is answered, which was earlier.
//!
//! `machine.rs` is the machine, and `wire.rs` its two messages. Beside this folder, `main.rs` runs the machine under a
//! worker, `world.rs` says what a simulated world of the service promises, and `simulated.rs` runs such worlds.

// Either test uses a part of it.
#![allow(dead_code)]

pub mod machine;
pub mod wire;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use kv_transfer::unstable::machine::{Amounts, SessionCommand, SessionResource, SessionStatus};
use kv_transfer::unstable::{RankRecord, RecordError, ServiceOffer, TransportOffer};
use kv_transfer::{Incarnation, Parallel, ReadyEvent, ReadyEventError, SessionId, WorkerId, WorkerRole};

/// The service's name in rank records.
pub const SERVICE: &str = "counter";
/// The role of every worker of the service.
pub const ROLE: WorkerRole = WorkerRole::Encode;

/// The record of a worker at the bootstrap server: one transport, with this metadata.
pub fn record(
    (worker, incarnation): (WorkerId, Incarnation),
    transport: &str,
    metadata: Bytes,
) -> Result<RankRecord, RecordError> {
    let transport = TransportOffer { name: transport.to_owned(), version: 1, metadata };
    let (service, compatibility) = (SERVICE.to_owned(), String::new());
    let offer = ServiceOffer { service, min: 1, max: 1, compatibility, data: Bytes::new() };
    RankRecord::new((worker, incarnation), ROLE, Parallel::default(), vec![transport], vec![offer])
}

/// The holder that a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whom {
    /// The worker with this transport metadata.
    Worker(Bytes),
    /// The holder that this bootstrap server knows, in whatever incarnation.
    Registered(String),
}

/// The commands of handles.
#[derive(Debug)]
pub enum Command {
    /// Opens the session of a holder, and lends it its numbers.
    Hold {
        session: SessionId,
        numbers: Vec<u64>,
        lease: Duration,
    },
    /// Opens the session of a client. Nothing is asked before [`Command::Ask`].
    Open {
        session: SessionId,
    },
    /// Asks a holder for a number, once the event has passed.
    Ask {
        session: SessionId,
        whom: Whom,
        slot: Slot,
        within: Duration,
        ready: Option<Box<dyn ReadyEvent>>,
    },
    /// A command whose ready event never passes.
    NotReady {
        session: SessionId,
        slot: Slot,
        error: ReadyEventError,
    },
    Abort {
        session: SessionId,
    },
    Shutdown,
}

/// The place for a client's number: empty when lent, filled when it comes back after success.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Slot(pub Option<u64>);

/// What is lent to a session.
#[derive(Debug, PartialEq, Eq)]
pub enum Resource {
    Numbers(Vec<u64>),
    Slot(Slot),
}

/// The states of a session. A holder's session is `Open` until it is aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Failed,
    Waiting,
    Open,
    Over,
}

/// Why a session failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    Aborted,
    /// The holder had no free number, or was not heard of in time, for so long.
    NoNumber(Duration),
    HolderGone,
    NotReady(ReadyEventError),
    Stopped,
}

/// Numbers of a holder that has closed, and that clients may still use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leased {
    pub numbers: usize,
}

impl SessionCommand for Command {
    type Resource = Resource;

    fn abort(session: SessionId) -> Command {
        Command::Abort { session }
    }

    fn shutdown() -> Command {
        Command::Shutdown
    }

    fn address(&mut self, to: SessionId) -> bool {
        match self {
            Command::Ask { session, .. } | Command::NotReady { session, .. } | Command::Abort { session } => {
                *session = to;
                true
            }
            Command::Hold { .. } | Command::Open { .. } | Command::Shutdown => false,
        }
    }

    fn lends(&self) -> Option<Amounts> {
        match self {
            Command::Hold { numbers, .. } => Some(Amounts::of(0, numbers.len())),
            Command::Ask { .. } | Command::NotReady { .. } => Some(Amounts::of(1, 1)),
            _ => None,
        }
    }

    fn into_resource(self) -> Option<Resource> {
        match self {
            Command::Hold { numbers, .. } => Some(Resource::Numbers(numbers)),
            Command::Ask { slot, .. } | Command::NotReady { slot, .. } => Some(Resource::Slot(slot)),
            _ => None,
        }
    }

    fn take_ready(&mut self) -> Option<Box<dyn ReadyEvent>> {
        match self {
            Command::Ask { ready, .. } => ready.take(),
            _ => None,
        }
    }

    fn not_ready(self, error: ReadyEventError) -> Command {
        match self {
            Command::Ask { session, slot, .. } => Command::NotReady { session, slot, error },
            command => command,
        }
    }
}

impl SessionResource for Resource {
    const KINDS: &'static [&'static str] = &["numbers", "slots"];

    fn amounts(&self) -> Amounts {
        match self {
            Resource::Numbers(numbers) => Amounts::of(0, numbers.len()),
            Resource::Slot(_) => Amounts::of(1, 1),
        }
    }
}

impl SessionStatus for Status {
    const OPENED: Status = Status::Waiting;
    const FAILED: Status = Status::Failed;

    fn is_terminal(self) -> bool {
        matches!(self, Status::Failed | Status::Over)
    }

    fn to_u8(self) -> u8 {
        self as u8
    }

    fn from_u8(number: u8) -> Option<Status> {
        [Status::Failed, Status::Waiting, Status::Open, Status::Over].get(usize::from(number)).copied()
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Aborted => f.write_str("aborted"),
            Failure::NoNumber(within) => write!(f, "no number within {within:?}"),
            Failure::HolderGone => f.write_str("the holder is gone"),
            Failure::NotReady(error) => write!(f, "its event will never pass: {error}"),
            Failure::Stopped => f.write_str("the worker stops"),
        }
    }
}

impl std::error::Error for Failure {}
