//! The rendezvous of workers: who serves, where, with which memory.

use std::os::fd::RawFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::BootstrapError;
use crate::record::{RankRecord, WorkerRole};
use crate::time::Time;

/// Which ranks are asked for: those of one data-parallel replica of the engine that is registered
/// with the server in this role and offers this service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RankQuery {
    /// The role.
    pub role: WorkerRole,
    /// The service's name, as in [`ServiceOffer::service`](crate::ServiceOffer::service).
    pub service: String,
    /// Which replica.
    pub replica: Replica,
}

/// Which data-parallel replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replica {
    /// The one with this rank.
    Rank(u32),
    /// The one with rank `number % dp_size`: how SGLang follows the bootstrap room.
    Modulo(u64),
}

/// A number by which an answer is matched to its question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LookupId(pub u64);

/// The client side of a bootstrap server. Nothing in it blocks: questions are answered by events.
/// Owned by the worker's thread.
pub trait BootstrapClient: Send {
    /// Registers this worker at the server at `addr` (`host:port`), and keeps the registration
    /// alive until `withdraw`. A server that is not there yet is tried again.
    fn publish(&mut self, now: Time, addr: &str, record: RankRecord);

    /// Ends all registrations made by `publish`, as far as the servers can be reached.
    fn withdraw(&mut self, now: Time);

    /// Asks the server at `addr`. Exactly one event with this id follows.
    fn lookup(&mut self, now: Time, lookup: LookupId, addr: &str, query: &RankQuery);

    /// Makes progress; the next event, if there is one.
    fn poll(&mut self, now: Time) -> Option<BootstrapEvent>;

    /// When `poll` wants to be called again without any descriptor having become readable.
    fn next_timeout(&self) -> Option<Time>;

    /// A descriptor that is readable when `poll` has something to do.
    fn as_raw_fd(&self) -> Option<RawFd>;
}

/// What a bootstrap client reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BootstrapEvent {
    /// The ranks of the replica asked for, in rank order; all of them, never some.
    Found {
        /// The question.
        lookup: LookupId,
        /// The answer.
        ranks: Vec<RankRecord>,
    },
    /// No answer, or a negative one.
    Failed {
        /// The question.
        lookup: LookupId,
        /// Why.
        error: BootstrapError,
    },
    /// A registration was accepted for the first time.
    Published {
        /// The server.
        addr: String,
    },
    /// A registration was refused; it is tried again after `retry_in`.
    PublishFailed {
        /// The server.
        addr: String,
        /// Why.
        error: BootstrapError,
        /// When it is tried again.
        retry_in: Duration,
    },
}

/// A bootstrap server that can be started and stopped (seed: `KVBootstrapServer`).
pub trait BootstrapServer: Sized {
    /// Why it could not start.
    type Error: std::error::Error;

    /// Binds `addr` (`host:port`; port 0 picks one) and serves until stopped.
    fn start(addr: &str) -> Result<Self, Self::Error>;

    /// Where it listens.
    fn local_addr(&self) -> std::net::SocketAddr;

    /// Stops serving and waits for the end.
    fn stop(self);
}
