//! Counters of networks over a campaign: how much happened, and which faults.

use crate::counters::Kinds;
use crate::counters::counters;

counters! {
/// Counts of network events in one world, or in many.
NetCounters {
    /// Worlds that were run to their end.
    seeds: "seeds",
    /// Events of the calendar that took place.
    events: "events",
    /// Inputs that were given to machines.
    inputs: "inputs to nodes",
    /// Sessions that ended because their host died.
    died: "sessions lost with their host",
    /// Frames that machines sent.
    frames: "frames sent",
    /// Data operations that machines posted.
    posts: "posts",
    /// Bytes that reads and writes have moved.
    bytes_moved: "bytes moved",
    /// Lookups at bootstrap servers.
    lookups: "lookups",
    /// Frames that the network lost.
    dropped: "fault: frames dropped",
    /// Frames that the network delivered twice.
    duplicated: "fault: frames duplicated",
    /// Frames delayed by more than a retry.
    delayed: "fault: frames delayed past a retry",
    /// Frames that were sent over a connection that carries nothing in their direction.
    swallowed: "fault: frames swallowed by one-way connections",
    /// Frames that were lost to a partition.
    partitioned: "fault: frames lost to partitions",
    /// Partitions between two hosts.
    partitions: "fault: partitions",
    /// Crashes of living hosts.
    crashes: "fault: crashes",
    /// Restarts of hosts after a crash.
    restarts: "fault: restarts",
    /// Pauses of living hosts.
    pauses: "fault: pauses",
    /// Clocks that jumped forward.
    jumps: "fault: clocks that jumped ahead",
    /// Connections broken between living hosts.
    breaks: "fault: connections broken",
    /// Ways lost to peers about which nothing is proven.
    ways_lost: "fault: ways reported lost, nothing proven",
    /// Posts that did not end before their world was healed.
    stuck: "fault: posts that do not end",
    /// Hosts that were shut down by their scheduler.
    shutdowns: "fault: shutdowns",
    /// Hosts that were told to drain.
    drains: "cover: hosts that drain",
    /// Hosts that were empty before they were stopped.
    drained: "cover: hosts that drained until they were empty",
    /// Posts that ended with an error.
    dma_errors: "fault: posts failed",
    /// Posts that the transport refused.
    dma_refused: "fault: posts refused",
    /// Posts that took longer than a deadline.
    dma_slow: "fault: posts slower than a deadline",
    /// Cancellations that took effect at once.
    cancels_honoured: "fault: cancels honoured",
    /// Cancellations that had no effect.
    cancels_ignored: "fault: cancels ignored",
    /// Connections that failed when they were opened.
    connect_failures: "fault: connects failed",
    /// Peers that transports reported gone.
    peers_gone: "fault: peers reported gone",
    /// Lookups that ended with an error.
    lookup_failures: "fault: lookups failed",
    /// Lookups whose answer names a dead life.
    lookup_stale: "fault: lookups answered with dead ranks",
    /// Garbage frames that reached a machine.
    garbage: "fault: garbage frames",
    /// Timeouts that no machine had asked for.
    spurious_timeouts: "fault: spurious timeouts",
    /// Frames for a former life that reached its successor.
    misdelivered: "fault: frames to a former life delivered",
    /// Frames of a dead life that were delivered.
    posthumous: "fault: frames of a dead life delivered",
    /// Crashes of hosts with posts in flight.
    crash_in_flight: "cover: crash of a writer in mid-transfer",
    /// Crashes of a destination while posts were in flight.
    crash_target: "cover: crash of a destination in mid-transfer",
    /// Pieces that were written for a life that was dead.
    stray_writes: "cover: pieces written by a dead host",
    /// Permissions to write that transports were told.
    permits: "cover: permissions to write",
    /// Slices that waited for a permission.
    unpermitted: "cover: slices that waited for a permission",
    /// Slices of revoked ways that did not begin.
    refused_slices: "cover: slices refused after a revocation",
    /// Revocations of the right to write.
    revocations: "cover: revocations",
    /// Slices that ended after the permission under which they began.
    late_slices: "cover: slices that ended after their permission",
    /// Worlds of hosts that run the worker's own loop.
    driven: "cover: worlds that run the worker's loop",
    /// Ways by the second of two transports.
    second_ways: "cover: ways by a second transport",
    /// Bytes that were moved by reads.
    bytes_read: "cover: bytes read",
    /// Pieces read from pages that were given away meanwhile.
    torn_reads: "cover: pieces read from pages that were given away",
}
    /// Frames by their kind.
    frames_by_kind: Kinds,
}
