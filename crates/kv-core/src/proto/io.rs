//! The inputs, the outputs and the configuration of the protocol machine.

use std::time::Duration;

use bytes::Bytes;

use super::spoken::Spoken;
use crate::args::KvArgs;
use crate::asked::Service;
use crate::command::{Command, Resource};
use crate::error::TransferError;
use crate::id::Incarnation;
use crate::lease::KV_LEASE_DURATION;
use crate::poll::KvPoll;
use crate::record::TransportOffer;

/// Everything that a worker tells a [`Node`](super::Node).
pub type Input = crate::machine::Input<Command>;

/// Everything that a [`Node`](super::Node) asks its worker to do.
pub type Output = crate::machine::Output<KvPoll, Resource, TransferError>;

/// The configuration of a [`Node`](super::Node).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeConfig {
    /// The worker's description of itself: memory, geometry and limits.
    pub args: KvArgs,
    /// The incarnation of the worker.
    pub incarnation: Incarnation,
    /// The transports of the worker, the preferred one first. The first of them that a peer has,
    /// too, and that leads to the peer, carries the whole conversation.
    pub transports: Vec<TransportOffer>,
    /// The service whose machine this is.
    pub service: Service,
    /// The versions of the wire that are offered to peers. While an upgrade may still have to be
    /// undone, offer only the older versions of those that this library speaks.
    pub versions: Spoken,
    /// Seed of the machine's own random numbers.
    pub seed: u64,
    /// Durations: deadlines, repetitions, leases.
    pub timing: Timing,
    /// Bounds on what peers and schedulers can make the machine remember.
    pub limits: Limits,
}

impl NodeConfig {
    /// A configuration with one transport, all versions, and the default timing and limits. The
    /// seed is the incarnation, which is random.
    pub fn new(args: KvArgs, incarnation: Incarnation, transport: &str, metadata: Bytes) -> NodeConfig {
        NodeConfig::over(args, incarnation, vec![TransportOffer::new(transport, metadata)])
    }

    /// The same with several transports, the preferred one first.
    pub fn over(args: KvArgs, incarnation: Incarnation, transports: Vec<TransportOffer>) -> NodeConfig {
        NodeConfig {
            args,
            incarnation,
            transports,
            service: Service::kv(),
            versions: Spoken::ALL,
            seed: incarnation.get(),
            timing: Timing::default(),
            limits: Limits::default(),
        }
    }

    /// The same with some fields changed: `NodeConfig::new(…).with(|config| config.seed = 7)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timing {
    /// How long a session may take, unless its options say otherwise (default 300 s, as in SGLang).
    pub session_deadline: Duration,
    /// The pause before the first repetition of an unanswered frame, and before a lost way to a peer
    /// is opened again (default 200 ms); the pause doubles up to `retry_max`.
    pub retry_first: Duration,
    /// The longest pause between repetitions, and between tries to open a lost way (default 2 s).
    pub retry_max: Duration,
    /// A peer that a session depends on is sent a heartbeat after this much silence (default 1 s).
    pub keepalive: Duration,
    /// A peer that a session depends on is given up after this much silence (default 5 s); at least
    /// three times `keepalive`.
    pub peer_timeout: Duration,
    /// How long a peer may begin writes into this worker's memory after each permission (default
    /// 10 s). Permissions are renewed three times in this duration while a registration is open.
    pub write_permission: Duration,
    /// The pause before the first repetition of a failed lookup (default 100 ms); the pause doubles
    /// up to `retry_max`.
    pub lookup_retry: Duration,
    /// How long a failed or aborted room is remembered for a receiver or sender that comes late
    /// (default 60 s).
    pub failed_room_ttl: Duration,
    /// The duration of the lease on pages that wait for a reader, unless the session's options say
    /// otherwise (default 30 s; vLLM: `kv_lease_duration`).
    pub kv_lease_duration: Duration,
    /// How long a transport that has failed for a peer is left alone, if both workers have another
    /// (default 1 s); the pause doubles with each failure up to `way_retry_max`.
    pub way_retry_first: Duration,
    /// The longest pause after which a transport that has failed for a peer is tried again, beside the
    /// one that works (default 60 s).
    pub way_retry_max: Duration,
}

/// The longest duration that counts; longer ones are cut to it, so that sums and multiples do not
/// overflow.
pub(super) const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Timing {
    /// The same with some fields changed: `Timing::default().with(|timing| timing.retry_first = SECOND)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The same timing, corrected so that no timer spins and no live peer seems silent.
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
            &mut self.way_retry_first,
            &mut self.way_retry_max,
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
            way_retry_first: Duration::from_secs(1),
            way_retry_max: Duration::from_secs(60),
        }
    }
}

/// Bounds on what peers and schedulers can make a node remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Most peers known at once (default 1024). Idle peers are forgotten to make room for new ones;
    /// busy peers are not.
    pub max_peers: usize,
    /// Most registrations that wait for a sender, of all peers together (default 131 072).
    pub max_registrations: usize,
    /// Most runs of pages in waiting registrations, of all peers together (default 2^22). Bounds the
    /// memory of these registrations.
    pub max_waiting_runs: usize,
    /// Most failed rooms that are remembered (default 65 536).
    pub max_failed_rooms: usize,
    /// Most bytes in one post (default 8 MiB). Smaller posts let small sessions pass large ones.
    pub max_post_bytes: u64,
    /// Most attempts of one peer that may be open at once (default 262 144).
    pub max_attempts: u64,
    /// One transport connection may take up one part in this many (default 8) of
    /// [`max_registrations`](Limits::max_registrations), of
    /// [`max_waiting_runs`](Limits::max_waiting_runs), and of the failed rooms that peers have told.
    pub connections_share: usize,
    /// Most incarnations that one transport connection may introduce at once (default 4).
    pub max_incarnations: usize,
    /// Most addresses of bootstrap servers whose answers are remembered (default 1024).
    pub max_addresses: usize,
    /// Most ended leases that are remembered, so that a late reader is told what became of its
    /// lease (default 65 536).
    pub max_ended_leases: usize,
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
            max_ended_leases: 1 << 16,
        }
    }
}

impl Limits {
    /// The same with some fields changed: `Limits::default().with(|limits| limits.max_peers = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
