//! What a campaign has seen: how much, which faults, which interesting events.

use std::collections::BTreeMap;

use kv_core::{Cause, PeerCause};

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident: $label:literal,)*) => {
        /// Counts of one world, or of many.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $field: u64,)*
            /// Failed sessions by cause.
            pub failures: BTreeMap<&'static str, u64>,
            /// Frames by kind.
            pub frames_by_kind: BTreeMap<&'static str, u64>,
        }

        impl Counters {
            /// Adds the counts of another world.
            pub fn merge(&mut self, other: &Counters) {
                $(self.$field += other.$field;)*
                for (cause, count) in &other.failures {
                    *self.failures.entry(cause).or_default() += count;
                }
                for (kind, count) in &other.frames_by_kind {
                    *self.frames_by_kind.entry(kind).or_default() += count;
                }
            }

            /// Every count with its name.
            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$(($label, self.$field)),*]
            }
        }
    };
}

counters! {
    /// Worlds.
    seeds: "seeds",
    /// Events.
    events: "events",
    /// Inputs given to nodes.
    inputs: "inputs to nodes",
    /// Requests.
    requests: "requests",
    /// Sessions opened.
    sessions: "sessions opened",
    /// Sessions that succeeded.
    successes: "sessions succeeded",
    /// Sessions that failed.
    failed: "sessions failed",
    /// Sessions that died with their host.
    died: "sessions lost with their host",
    /// Requests of healed worlds that were served.
    served: "requests served after healing",
    /// Frames sent.
    frames: "frames sent",
    /// Data operations.
    posts: "posts",
    /// Bytes moved.
    bytes_moved: "bytes moved",
    /// Lookups.
    lookups: "lookups",
    /// Frames lost.
    dropped: "fault: frames dropped",
    /// Frames delivered twice.
    duplicated: "fault: frames duplicated",
    /// Frames delayed by more than a retry.
    delayed: "fault: frames delayed past a retry",
    /// Frames lost to a partition.
    partitioned: "fault: frames lost to partitions",
    /// Partitions.
    partitions: "fault: partitions",
    /// Crashes.
    crashes: "fault: crashes",
    /// Restarts.
    restarts: "fault: restarts",
    /// Pauses.
    pauses: "fault: pauses",
    /// Peers that lie.
    liars: "fault: peers that lie",
    /// What they said.
    lies: "fault: valid frames that lie",
    /// Clocks that went on ahead of what they showed.
    jumps: "fault: clocks that jumped ahead",
    /// Connections broken between living hosts.
    breaks: "fault: connections broken",
    /// Ways lost to peers about which nothing is proven.
    ways_lost: "fault: ways reported lost, nothing proven",
    /// Posts that did not end before their world was healed.
    stuck: "fault: posts that do not end",
    /// Shutdowns.
    shutdowns: "fault: shutdowns",
    /// Posts that failed.
    dma_errors: "fault: posts failed",
    /// Posts refused by the plane.
    dma_refused: "fault: posts refused",
    /// Slow posts.
    dma_slow: "fault: posts slower than a deadline",
    /// Cancels honoured.
    cancels_honoured: "fault: cancels honoured",
    /// Cancels ignored.
    cancels_ignored: "fault: cancels ignored",
    /// Connects that failed.
    connect_failures: "fault: connects failed",
    /// Peers reported gone.
    peers_gone: "fault: peers reported gone",
    /// Lookups that failed.
    lookup_failures: "fault: lookups failed",
    /// Lookups answered from the past.
    lookup_stale: "fault: lookups answered with dead ranks",
    /// Garbage frames.
    garbage: "fault: garbage frames",
    /// Spurious timeouts.
    spurious_timeouts: "fault: spurious timeouts",
    /// Frames handed to a later life of their addressee.
    misdelivered: "fault: frames to a former life delivered",
    /// Frames of a dead life delivered.
    posthumous: "fault: frames of a dead life delivered",
    /// Sessions aborted by their scheduler.
    aborts: "cover: aborts",
    /// Aborts while posts were in flight.
    abort_in_flight: "cover: aborts with posts in flight",
    /// Registrations that arrived after the abort of the same attempt.
    register_after_abort: "cover: Register handled after Abort of its attempt",
    /// Completion notices delivered twice.
    done_twice: "cover: the same Done handled twice",
    /// Completion notices delivered out of order.
    done_reordered: "cover: Done handled out of order",
    /// Completion notices after the session had ended.
    done_late: "cover: Done handled after its session's end",
    /// Crashes while posts were in flight.
    crash_in_flight: "cover: crash of a writer in mid-transfer",
    /// Crashes of a destination while posts were in flight.
    crash_target: "cover: crash of a destination in mid-transfer",
    /// Writes of the dead.
    stray_writes: "cover: pieces written by a dead host",
    /// Permissions told to planes.
    permits: "cover: permissions to write",
    /// Writes that waited for one.
    unpermitted: "cover: slices that waited for a permission",
    /// Slices of revoked ways that did not begin.
    refused_slices: "cover: slices refused after a revocation",
    /// Revocations.
    revocations: "cover: revocations",
    /// Slices that ended after the permission under which they began.
    late_slices: "cover: slices that ended after their permission",
    /// Sessions served with several posts.
    multi_part: "cover: sessions with several posts",
    /// Worlds of hosts that run the worker's own loop.
    driven: "cover: worlds that run the worker's loop",
    /// Worlds of engines that differ.
    unequal: "cover: worlds of unequal engines",
    /// Receivers with several sources that succeeded.
    gathered: "cover: receivers served by several ranks",
    /// Sender with several receivers that succeeded.
    scattered: "cover: senders that served several ranks",
    /// Receivers with sources on several pipeline stages that succeeded.
    staged: "cover: receivers served by several stages",
    /// Receivers with pages from several ranks that hold the same ones that succeeded.
    shared: "cover: receivers served by context-parallel ranks",
    /// Receivers whose pages were dealt to other numbers of ranks here and there that succeeded.
    dealt: "cover: receivers of pages dealt otherwise",
    /// Senders given other pages than their siblings.
    miscounted: "cover: senders with other pages than their siblings",
    /// Receivers with several sources and items of state groups that succeeded.
    gathered_state: "cover: receivers of state served by several ranks",
    /// Chunks given before they were computed.
    begun: "cover: chunks given before they are computed",
    /// Layers called final.
    announced: "cover: announcements of layers",
    /// Sender opened before the registration.
    sender_first: "cover: sender opened first",
    /// Registration before the sender.
    receiver_first: "cover: receiver opened first",
    /// Requests matched by base id.
    base_match: "cover: success between different ids of one base",
    /// Retries under the same base id.
    retries: "cover: request retried under its base id",
    /// Retries while the former half still was open.
    ambiguous: "cover: opened while the same base was open",
    /// Requests with another one of the same base.
    twins: "cover: requests with a twin of the same base",
    /// Requests with two receivers.
    two_receivers: "cover: requests with two receivers",
    /// Requests whose pages are read.
    pulled: "cover: requests that are pulled",
    /// Bytes that were read, not written.
    bytes_read: "cover: bytes read",
    /// Pieces read from pages that were given away meanwhile.
    torn_reads: "cover: pieces read from pages that were given away",
    /// Requests without a second half.
    one_sided: "cover: requests with one half only",
    /// Requests whose halves disagree.
    disagreeing: "cover: requests whose halves disagree",
    /// Arguments that cannot be right.
    misuses: "cover: commands with wrong arguments",
    /// Pages given back long after the failure.
    quarantined: "cover: pages held beyond the end of their session",
    /// Chunks that had to wait for pages.
    starved: "cover: schedulers short of pages",
    /// Halves with items of state groups.
    stateful: "cover: halves with items of state groups",
    /// Optional groups that a sender did not have.
    skipped: "cover: groups left out",
    /// Failures checked to be told.
    told: "cover: failures that had to be told",
    /// Worlds that lose frames, and nothing else.
    drizzle: "cover: worlds in which requests must be served under loss",
    /// Worlds without loss.
    lossless: "cover: worlds without loss",
}

/// A short name of a failure's cause.
pub fn cause_name(cause: &Cause) -> &'static str {
    match cause {
        Cause::Aborted => "aborted here",
        Cause::WorkerStopped => "worker stopped",
        Cause::DeadlineExceeded { .. } => "deadline exceeded",
        Cause::Bootstrap(_) => "bootstrap",
        Cause::Connect(_) => "connect",
        Cause::Incompatible(_) => "incompatible",
        Cause::PeerLost => "peer lost",
        Cause::PeerRestarted => "peer restarted",
        Cause::PeerUnresponsive { .. } => "peer unresponsive",
        Cause::ByPeer(cause) => peer_cause_name(cause),
        Cause::PageCount { .. } => "page count",
        Cause::TooManyPages { .. } => "too many pages",
        Cause::InitOrder => "init order",
        Cause::BadPages(_) => "bad pages",
        Cause::BadAux { .. } => "bad aux",
        Cause::AuxOneSided { .. } => "aux one-sided",
        Cause::GroupItems { .. } => "group items",
        Cause::Post(_) => "post",
        Cause::LeaseExpired => "lease expired",
        Cause::StaleGrant { .. } => "stale grant",
        Cause::Protocol(_) => "protocol",
        _ => "other",
    }
}

fn peer_cause_name(cause: &PeerCause) -> &'static str {
    match cause {
        PeerCause::Aborted => "by peer: aborted",
        PeerCause::WorkerStopped => "by peer: stopped",
        PeerCause::DeadlineExceeded => "by peer: deadline",
        PeerCause::PageCount { .. } => "by peer: page count",
        PeerCause::AuxOneSided { .. } => "by peer: aux one-sided",
        PeerCause::BadArguments => "by peer: bad arguments",
        PeerCause::DataOperation => "by peer: data operation",
        PeerCause::OtherRankLost => "by peer: other rank lost",
        PeerCause::Incompatible(_) => "by peer: incompatible",
        PeerCause::OutOfRange => "by peer: out of range",
        PeerCause::Overloaded => "by peer: overloaded",
        PeerCause::Unknown => "by peer: unknown",
        PeerCause::LeaseExpired => "by peer: lease expired",
        PeerCause::UnknownGrant { .. } => "by peer: unknown grant",
        PeerCause::GrantConsumed { .. } => "by peer: grant consumed",
        PeerCause::Mode { .. } => "by peer: mode",
        PeerCause::Protocol => "by peer: protocol",
        PeerCause::Internal => "by peer: internal",
        _ => "by peer: other",
    }
}
