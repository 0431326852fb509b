//! The rendezvous of workers at a bootstrap server: which ranks serve, and how to reach them.

use std::os::fd::RawFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::BootstrapError;
use crate::record::{RankRecord, WorkerRole};
use crate::time::Time;

/// A question for ranks: those of one data-parallel replica of the engine that is registered with
/// the server in this role and that offers this service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RankQuery {
    /// The role in which the engine has registered.
    pub role: WorkerRole,
    /// The service's name, as in [`ServiceOffer::service`](crate::ServiceOffer::service).
    pub service: String,
    /// The data-parallel replica of the engine.
    pub replica: Replica,
}

/// Names one data-parallel replica of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replica {
    /// The replica with this `dp_rank`.
    Rank(u32),
    /// The replica with `dp_rank = number % dp_size`. SGLang chooses the replica from the bootstrap
    /// room in this way.
    Modulo(u64),
}

/// The number by which an answer is matched to its question. The machine draws it and never reuses
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LookupId(pub u64);

/// The client side of a bootstrap server, owned by the worker's thread. No call blocks: the answers
/// are events.
pub trait BootstrapClient: Send {
    /// Registers this worker with the server at `addr` (`host:port`), and keeps the registration
    /// alive until `withdraw`. A server that cannot be reached yet is tried again.
    fn publish(&mut self, now: Time, addr: &str, record: RankRecord);

    /// Tells every server that this worker awaits no further peers. A replica is no longer found once all of
    /// its ranks have left, and its registrations are kept alive until `withdraw`, so that its other ranks
    /// are found as long as one of them awaits peers. A client that cannot leave does nothing: its worker is
    /// found until `withdraw`, and refuses what is asked for.
    fn leave(&mut self, now: Time) {
        let _ = now;
    }

    /// Ends all registrations made by `publish`, at every server that can be reached.
    fn withdraw(&mut self, now: Time);

    /// Asks the server at `addr` (`host:port`). Exactly one event with this id follows: `Found` or
    /// `Failed`.
    fn lookup(&mut self, now: Time, lookup: LookupId, addr: &str, query: &RankQuery);

    /// Makes progress and returns the next event, if there is one.
    fn poll(&mut self, now: Time) -> Option<BootstrapEvent>;

    /// When `poll` must be called again even if the descriptor has not become readable.
    fn next_timeout(&self) -> Option<Time>;

    /// A descriptor that becomes readable when `poll` has something to do.
    fn as_raw_fd(&self) -> Option<RawFd>;
}

/// What a bootstrap client reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BootstrapEvent {
    /// The ranks of the replica asked for, in rank order. The list is never incomplete.
    Found {
        /// The lookup that is answered.
        lookup: LookupId,
        /// The records of all ranks of the replica.
        ranks: Vec<RankRecord>,
    },
    /// The lookup failed: the server did not answer, or refused.
    Failed {
        /// The lookup that failed.
        lookup: LookupId,
        /// The reason, which also says whether asking again may help.
        error: BootstrapError,
    },
    /// A registration was accepted for the first time.
    Published {
        /// The address of the server, as given to `publish`.
        addr: String,
    },
    /// A registration was refused. The client tries again after `retry_in`.
    PublishFailed {
        /// The address of the server, as given to `publish`.
        addr: String,
        /// The reason of the server or of the network.
        error: BootstrapError,
        /// How long the client waits before the next try.
        retry_in: Duration,
    },
}

/// A bootstrap server that can be started and stopped (SGLang: `KVBootstrapServer`).
pub trait BootstrapServer: Sized {
    /// The error with which a server fails to start.
    type Error: std::error::Error;

    /// Binds `addr` (`host:port`; port 0 lets the system pick one) and serves until stopped.
    fn start(addr: &str) -> Result<Self, Self::Error>;

    /// The address and port on which the server listens.
    fn local_addr(&self) -> std::net::SocketAddr;

    /// Stops serving, and returns when the server has ended.
    fn stop(self);
}
