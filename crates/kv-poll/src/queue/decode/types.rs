//! What goes into decode queues, and what comes out.

use kv_core::{KvArgs, Pages, RegionRole, RequestGroups, Room, SessionOptions};

use crate::allocator::FreeReason;
use crate::consensus::RequestKey;
use crate::queue::admission::{AdmissionRule, Demand};
use crate::queue::error::RequestError;
use crate::queue::quarantine::QuarantineRule;

/// How decode queues admit requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeConfig {
    /// When the cache has room for another request.
    pub rule: AdmissionRule,
    /// Aux rows, each for one request in transfer; zero if requests have no aux data.
    pub aux_rows: u32,
    /// How much of the cache may be in quarantine before no new request gets pages.
    pub quarantine: QuarantineRule,
}

impl DecodeConfig {
    /// SGLang's numbers for this worker: 512 tokens reserved, estimates clipped at 4096, running
    /// requests retractable, and as many aux rows as the smallest aux region holds. Half of the cache may
    /// be in quarantine.
    pub fn for_args(args: &KvArgs) -> DecodeConfig {
        let aux = args.regions().iter().filter(|region| region.role == RegionRole::Aux);
        let rows = aux.map(|region| region.items()).min().unwrap_or(0);
        DecodeConfig {
            rule: AdmissionRule {
                page_size: args.geometry().page_tokens(),
                reserved_tokens: 512,
                clip_new_tokens: 4096,
                retraction: true,
            },
            aux_rows: u32::try_from(rows).unwrap_or(u32::MAX),
            quarantine: QuarantineRule::HALF,
        }
    }
}

/// A request as its receiver needs to know it.
#[derive(Debug, Clone)]
pub struct Incoming<'a> {
    /// The room that the router gave it.
    pub room: Room,
    /// The bootstrap server of the prefill engine.
    pub bootstrap_addr: &'a str,
    /// Pages and tokens it needs.
    pub demand: Demand,
    /// Deadline and the like.
    pub options: SessionOptions,
    /// Higher goes first; equal ones in order of `push`.
    pub priority: i32,
}

impl<'a> Incoming<'a> {
    /// A request with the worker's defaults.
    pub fn new(bootstrap_addr: &'a str, room: Room, demand: Demand) -> Incoming<'a> {
        Incoming { room, bootstrap_addr, demand, options: SessionOptions::default(), priority: 0 }
    }
}

/// A request that may run: its KV is in its pages.
#[derive(Debug)]
pub struct Ready<R> {
    /// Its key.
    pub key: RequestKey,
    /// The request.
    pub request: R,
    /// Its pages, now the server's.
    pub pages: Pages,
    /// The items of its cache groups, likewise; none after a retraction.
    pub groups: RequestGroups,
    /// Optional groups among them that the prefill side did not have: their items were not written.
    pub skipped: Vec<u16>,
    /// Where the content of the pages comes from.
    pub origin: Origin,
}

/// Where the content of a ready request's pages comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// From the prefill side: it is there.
    Transferred,
    /// The request was retracted: the pages are new, and the server fills them again.
    Retracted,
}

/// A request that has failed. Its pages, if it had any, are the queue's business.
#[derive(Debug)]
pub struct Failed<R> {
    /// Its key.
    pub key: RequestKey,
    /// The request.
    pub request: R,
    /// Why.
    pub error: RequestError,
}

/// How many requests are where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DecodeCounts {
    /// Handshake not done.
    pub handshake: usize,
    /// Handshake done, waiting for pages.
    pub ready: usize,
    /// In transfer.
    pub transfer: usize,
    /// Waiting for `pop_waiting`.
    pub waiting: usize,
    /// With the server.
    pub running: usize,
    /// Retracted, waiting for pages.
    pub retracted: usize,
    /// Failed, pages in quarantine.
    pub quarantined: usize,
}

/// The request that waits for room, and what it lacks. A server may evict or
/// [`retract`](super::DecodeQueues::retract) to make room; nothing overtakes the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocked {
    /// The request.
    pub key: RequestKey,
    /// What it lacks.
    pub shortage: Shortage,
}

/// What a request lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// So many free pages more.
    Pages(usize),
    /// Items of cache groups: [`AuxMemory::take_groups`](super::super::AuxMemory::take_groups) had too few.
    RequestGroups,
    /// An aux row: as many requests are in transfer as there are rows.
    AuxRow,
}

/// A retraction that was refused, with everything that was given.
pub struct RetractError<R> {
    /// The request.
    pub request: R,
    /// Its pages.
    pub pages: Pages,
    /// Why.
    pub reason: RetractRefusal,
}

/// Why a retraction was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetractRefusal {
    /// The request is not running.
    #[error("request {key} is not running")]
    NotRunning {
        /// The request.
        key: RequestKey,
    },
    /// The request could never come back.
    #[error("{needed} pages are needed to resume; the cache has {capacity}")]
    TooLarge {
        /// Pages asked for.
        needed: usize,
        /// Pages of the cache.
        capacity: usize,
    },
    /// The pages are not its own.
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
