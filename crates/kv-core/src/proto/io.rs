//! What goes into the protocol machine, what comes out of it, and what it is told at its start.

use std::time::Duration;

use bytes::Bytes;

use super::spoken::Spoken;
use crate::args::KvArgs;
use crate::command::{Command, Resource};
use crate::error::TransferError;
use crate::id::Incarnation;
use crate::lease::KV_LEASE_DURATION;
use crate::poll::KvPoll;
use crate::record::TransportOffer;

/// Everything that a [`Node`](super::Node) is told.
pub type Input = crate::machine::Input<Command>;

/// Everything that a [`Node`](super::Node) wants done.
pub type Output = crate::machine::Output<KvPoll, Resource, TransferError>;

/// What a [`Node`](super::Node) knows and may do.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// The worker.
    pub args: KvArgs,
    /// This life of it.
    pub incarnation: Incarnation,
    /// The transports of the worker, the preferred one first. Of those that a peer has too, the first that
    /// leads to it is the way of the whole conversation.
    pub transports: Vec<TransportOffer>,
    /// The versions of the wire that are offered to peers: all that this library speaks, or the older of them,
    /// for as long as an upgrade may have to be taken back.
    pub versions: Spoken,
    /// Seed of the node's own random numbers.
    pub seed: u64,
    /// Timing.
    pub timing: Timing,
    /// Bounds.
    pub limits: Limits,
}

impl NodeConfig {
    /// A configuration with one transport and the default timing and limits. The seed follows the incarnation, which
    /// is random.
    pub fn new(args: KvArgs, incarnation: Incarnation, transport: &str, metadata: Bytes) -> NodeConfig {
        NodeConfig {
            args,
            incarnation,
            transports: vec![TransportOffer::new(transport, metadata)],
            versions: Spoken::ALL,
            seed: incarnation.get(),
            timing: Timing::default(),
            limits: Limits::default(),
        }
    }
}

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A session's life, unless it says otherwise (SGLang: 300 s).
    pub session_deadline: Duration,
    /// First repetition of an unanswered frame; doubles from there on.
    pub retry_first: Duration,
    /// Longest pause between repetitions.
    pub retry_max: Duration,
    /// A peer that matters and has been silent for this long is asked for a sign of life.
    pub keepalive: Duration,
    /// A peer that matters and has been silent for this long is given up; three keepalives at least.
    pub peer_timeout: Duration,
    /// How long a peer may write into this worker's memory after each time that it was allowed to. Renewed
    /// three times in this duration while a registration is open.
    pub write_permission: Duration,
    /// First repetition of a failed lookup; doubles from there on, up to `retry_max`.
    pub lookup_retry: Duration,
    /// How long a failed or aborted room is remembered for a receiver that comes late.
    pub failed_room_ttl: Duration,
    /// The lease of pages that wait for a reader, where a session does not say otherwise (vLLM's
    /// `kv_lease_duration`).
    pub kv_lease_duration: Duration,
}

/// The longest time that counts: beyond it nobody waits. Sums and multiples of it are numbers still.
pub(super) const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Timing {
    /// The same, with no pause so short that timers would spin, nor that a live peer seems silent.
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
        }
    }
}

/// Bounds on what peers and schedulers can make a node remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Peers known at once; idle ones make way, busy ones do not.
    pub max_peers: usize,
    /// Registrations waiting for a sender, in all.
    pub max_registrations: usize,
    /// Runs of pages in the waiting registrations, in all: bounds their memory.
    pub max_waiting_runs: usize,
    /// Failed rooms remembered.
    pub max_failed_rooms: usize,
    /// Most bytes in one post: smaller ones let small sessions pass large ones.
    pub max_post_bytes: u64,
    /// Most attempts of one peer that may be open at once.
    pub max_attempts: u64,
    /// Of [`max_registrations`](Limits::max_registrations), [`max_waiting_runs`](Limits::max_waiting_runs)
    /// and the failed rooms that peers have told of: the share of one transport connection, as one in so many.
    pub connections_share: usize,
    /// Incarnations that one transport connection may bring, at once.
    pub max_incarnations: usize,
    /// Addresses of bootstrap servers whose answers are remembered.
    pub max_addresses: usize,
    /// Ended leases remembered, so that a late reader is told what became of its one.
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
