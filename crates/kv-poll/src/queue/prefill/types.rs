//! The types that a prefill server gives to its queues, and gets from them.

use kv_core::{Pages, RequestCacheGroups, Room, SessionOptions};

use crate::consensus::RequestKey;
use crate::queue::error::RequestError;
use crate::queue::quarantine::QuarantineRule;

/// The settings of prefill queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PrefillConfig {
    /// Decides when the forward pass of a request may begin.
    pub policy: PrefillPolicy,
    /// Decides how much of the cache may be in quarantine before no request is offered.
    pub quarantine: QuarantineRule,
}

impl PrefillConfig {
    /// Forward passes by this policy. Half of the cache may be in quarantine.
    pub const fn new(policy: PrefillPolicy) -> PrefillConfig {
        PrefillConfig { policy, quarantine: QuarantineRule::HALF }
    }

    /// The same with some fields changed:
    /// `PrefillConfig::new(policy).with(|config| config.quarantine = QuarantineRule::at(70))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// When the forward pass of a request may begin.
///
/// Two engines can wait for each other's room: the prefill side has room only for requests that wait for a decode side
/// without room, and that side only for requests that are not computed yet. Then both wait until deadlines of sessions
/// make room. It takes requests that are computed before the decode side has pages, which are those of
/// [`Eager`](PrefillPolicy::Eager) and, under either policy, those that may be pulled, beside requests that are pushed
/// after it has pages. Serve such kinds by engines of their own, or give each kind a part of the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PrefillPolicy {
    /// After the decode side has registered its pages, as in SGLang: no prompt is computed that no decode
    /// worker will fetch.
    #[default]
    AfterBootstrap,
    /// At once, as soon as all ranks have the request. The decode side may register while the prompt is computed.
    Eager,
}

/// What [`PrefillQueues::push`](super::PrefillQueues::push) needs to open a request's sender.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Outgoing<'a> {
    /// The room that the router gave the request.
    pub room: Room,
    /// The bootstrap server where this worker is registered, as `host:port`.
    pub bootstrap_addr: &'a str,
    /// The decode ranks that register for the room. Only the length of the list counts: which ranks register is
    /// not checked. An empty list stands for [`KvArgs::num_receivers`](kv_core::KvArgs::num_receivers) ranks.
    pub dest_ranks: &'a [u32],
    /// The session's options: deadline, the lease that it grants, transfer mode.
    pub options: SessionOptions,
    /// Requests with a higher priority go first; equal ones go in the order of `push`. Where ranks go at their own speeds,
    /// the rank that is ahead decides by its line.
    pub priority: i32,
}

impl<'a> Outgoing<'a> {
    /// A request with the default options, priority 0, and as many decode ranks as the worker was configured
    /// for.
    pub fn new(bootstrap_addr: &'a str, room: Room) -> Outgoing<'a> {
        Outgoing { room, bootstrap_addr, dest_ranks: &[], options: SessionOptions::default(), priority: 0 }
    }

    /// The same with some fields changed: `outgoing.with(|outgoing| outgoing.priority = 1)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// A request that has ended, and whose pages are free again.
#[derive(Debug)]
#[non_exhaustive]
pub struct Finished<R> {
    /// The key that `push` returned.
    pub key: RequestKey,
    /// The server's request, as given to `push`.
    pub request: R,
    /// All pages given with `send_chunk` and `begin_chunk`, in the order in which they were given.
    pub pages: Pages,
    /// The items given with `give_groups`.
    pub groups: RequestCacheGroups,
    /// `Ok` if the decode side has all pages, else why the request failed.
    pub outcome: Result<(), RequestError>,
}

/// How many requests are in each stage of prefill queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PrefillCounts {
    /// Requests that wait for the decode side to register.
    pub bootstrap: usize,
    /// Requests that wait for `pop_waiting`.
    pub waiting: usize,
    /// Requests that were popped and not finished with `finish`.
    pub forward: usize,
    /// Requests that were finished with `finish` and whose transfer has not ended.
    pub inflight: usize,
    /// Requests that have failed and whose pages are not free yet.
    pub failing: usize,
}
