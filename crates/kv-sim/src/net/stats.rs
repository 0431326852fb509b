//! What a campaign has seen of its networks: how much, and which faults.

use crate::counters::Kinds;
use crate::counters::counters;

counters! {
/// What was seen of the network of one world, or of many.
NetCounters {
    /// Worlds.
    seeds: "seeds",
    /// Events.
    events: "events",
    /// Inputs given to nodes.
    inputs: "inputs to nodes",
    /// Sessions that died with their host.
    died: "sessions lost with their host",
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
    /// Posts refused by the transport.
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
    /// Crashes while posts were in flight.
    crash_in_flight: "cover: crash of a writer in mid-transfer",
    /// Crashes of a destination while posts were in flight.
    crash_target: "cover: crash of a destination in mid-transfer",
    /// Writes of the dead.
    stray_writes: "cover: pieces written by a dead host",
    /// Permissions told to transports.
    permits: "cover: permissions to write",
    /// Writes that waited for one.
    unpermitted: "cover: slices that waited for a permission",
    /// Slices of revoked ways that did not begin.
    refused_slices: "cover: slices refused after a revocation",
    /// Revocations.
    revocations: "cover: revocations",
    /// Slices that ended after the permission under which they began.
    late_slices: "cover: slices that ended after their permission",
    /// Worlds of hosts that run the worker's own loop.
    driven: "cover: worlds that run the worker's loop",
    /// Ways by the second of two transports.
    second_ways: "cover: ways by a second transport",
    /// Bytes that were read, not written.
    bytes_read: "cover: bytes read",
    /// Pieces read from pages that were given away meanwhile.
    torn_reads: "cover: pieces read from pages that were given away",
}
    /// Frames by kind.
    frames_by_kind: Kinds,
}
