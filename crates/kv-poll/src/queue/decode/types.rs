//! The types that a decode server gives to its queues, and gets from them.

use kv_core::{KvArgs, Pages, RegionRole, RequestCacheGroups, Room, SessionOptions};

use crate::allocator::FreeReason;
use crate::consensus::RequestKey;
use crate::queue::admission::{AdmissionRule, Demand};
use crate::queue::error::RequestError;
use crate::queue::quarantine::QuarantineRule;

/// The settings of decode queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecodeConfig {
    /// Decides when the cache has room for another request.
    pub rule: AdmissionRule,
    /// Number of aux rows. Each request in transfer takes one; zero if requests have no aux data.
    pub aux_rows: u32,
    /// Decides how much of the cache may be in quarantine before no new request gets pages.
    pub quarantine: QuarantineRule,
}

impl DecodeConfig {
    /// Admission by this rule, for requests without aux data. Half of the cache may be in quarantine.
    pub const fn new(rule: AdmissionRule) -> DecodeConfig {
        DecodeConfig { rule, aux_rows: 0, quarantine: QuarantineRule::HALF }
    }

    /// SGLang's numbers for a worker with these arguments: 512 tokens reserved for each request, estimates
    /// clipped at 4096 tokens, running requests can be retracted. There are as many aux rows as the smallest
    /// aux region holds, and half of the cache may be in quarantine.
    pub fn for_args(args: &KvArgs) -> DecodeConfig {
        let aux = args.regions().iter().filter(|region| region.role == RegionRole::Aux);
        let rows = aux.map(|region| region.items()).min().unwrap_or(0);
        let aux_rows = u32::try_from(rows).unwrap_or(u32::MAX);
        DecodeConfig { aux_rows, ..DecodeConfig::new(AdmissionRule::new(args.geometry().page_tokens())) }
    }

    /// The same with some fields changed: `DecodeConfig::for_args(&args).with(|config| config.aux_rows = 8)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// What [`DecodeQueues::push`](super::DecodeQueues::push) needs to open a request's receiver.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Incoming<'a> {
    /// The room that the router gave the request.
    pub room: Room,
    /// The bootstrap server of the prefill engine, as `host:port`.
    pub bootstrap_addr: &'a str,
    /// Pages to receive, and tokens to generate.
    pub demand: Demand,
    /// The session's options: deadline, the prefill side's replica and leases, transfer mode, cached prefix.
    pub options: SessionOptions,
    /// Requests with a higher priority go first; equal ones go in the order of `push`. Where ranks go at their own speeds,
    /// the rank that is ahead decides by its line.
    pub priority: i32,
}

impl<'a> Incoming<'a> {
    /// A request with the default options and priority 0.
    pub fn new(bootstrap_addr: &'a str, room: Room, demand: Demand) -> Incoming<'a> {
        Incoming { room, bootstrap_addr, demand, options: SessionOptions::default(), priority: 0 }
    }

    /// The same with some fields changed: `incoming.with(|incoming| incoming.priority = 1)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// A request that may run, with its pages.
#[derive(Debug)]
#[non_exhaustive]
pub struct Ready<R> {
    /// The key that `push` returned.
    pub key: RequestKey,
    /// The server's request, as given to `push`.
    pub request: R,
    /// The request's pages, which belong to the server from now on.
    pub pages: Pages,
    /// The items of the request's cache groups, which belong to the server again. None after a retraction.
    pub groups: RequestCacheGroups,
    /// Numbers of the optional cache groups that the prefill side did not have: nothing was written to their
    /// items.
    pub skipped: Vec<u16>,
    /// Where the content of the pages comes from.
    pub origin: Origin,
}

/// Where the content of a ready request's pages comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// From the prefill side: the KV is in the pages.
    Transferred,
    /// The request was retracted: the pages are new and empty, and the server fills them again.
    Retracted,
}

/// A request that has failed. The queues keep its pages until they are free again.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failed<R> {
    /// The key that `push` returned.
    pub key: RequestKey,
    /// The server's request, as given to `push`.
    pub request: R,
    /// Why the request has failed.
    pub error: RequestError,
}

/// How many requests are in each stage of decode queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DecodeCounts {
    /// Requests whose handshake with the prefill side is not complete.
    pub handshake: usize,
    /// Requests whose handshake is complete, and that wait for pages.
    pub ready: usize,
    /// Requests that have pages and are in transfer.
    pub transfer: usize,
    /// Requests that wait for `pop_waiting`.
    pub waiting: usize,
    /// Requests that the server runs.
    pub running: usize,
    /// Requests that were retracted and wait for pages.
    pub retracted: usize,
    /// Sessions of failed requests whose pages are in quarantine.
    pub quarantined: usize,
}

/// The request that waits for room, and what it lacks. A server may evict or
/// [`retract`](super::DecodeQueues::retract) to make room; nothing overtakes the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocked {
    /// The key of the request whose turn it is: the first in line, or one that another rank has passed before.
    pub key: RequestKey,
    /// What the request lacks.
    pub shortage: Shortage,
}

/// What a request lacks that waits for room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shortage {
    /// So many more free pages are needed.
    Pages(usize),
    /// Items of cache groups: [`AuxMemory::take_groups`](super::super::AuxMemory::take_groups) had too few.
    RequestCacheGroups,
    /// An aux row: as many requests are in transfer as there are rows.
    AuxRow,
}

/// A retraction that was refused, with the request and the pages.
#[non_exhaustive]
pub struct RetractError<R> {
    /// The server's request, as given to `retract`.
    pub request: R,
    /// The pages that were given to `retract`.
    pub pages: Pages,
    /// Why the retraction was refused.
    pub reason: RetractRefusal,
}

/// Why a retraction was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetractRefusal {
    /// The request is not running: it did not come out of `pop_waiting`, or has been finished or retracted.
    #[error("request {key} is not running")]
    NotRunning {
        /// The key that was given.
        key: RequestKey,
    },
    /// The request could never come back. Finish it instead.
    #[error("the request needs {needed} pages to resume; the cache has {capacity}")]
    TooLarge {
        /// Pages that the request needs to go on.
        needed: usize,
        /// Pages of the whole cache.
        capacity: usize,
    },
    /// The pages cannot be taken back: they are more than the server has, or not of this cache.
    #[error(transparent)]
    Pages(#[from] FreeReason),
}

impl<R> std::fmt::Debug for RetractError<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("RetractError");
        debug.field("pages", &self.pages).field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<R> std::fmt::Display for RetractError<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the request was not retracted: {}", self.reason)
    }
}

impl<R> std::error::Error for RetractError<R> {}
