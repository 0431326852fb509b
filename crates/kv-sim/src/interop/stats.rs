//! Counters of worlds of dialects over a campaign.

use crate::counters::{Tally, counters};

counters! {
/// Counts of what happened in one world of a dialect, or in many.
DialectCounters {
    /// Worlds that were run.
    worlds: "dialects: worlds",
    /// Inputs that machines were given.
    inputs: "dialects: inputs of machines",
    /// Sessions that were opened.
    sessions: "dialects: sessions opened",
    /// Sessions that succeeded.
    succeeded: "dialects: sessions that succeeded",
    /// Sessions that failed.
    failed: "dialects: sessions that failed",
    /// Receiving sessions that succeeded.
    received: "dialects: receivers that succeeded",
    /// Data operations.
    posts: "dialects: posts",
    /// Messages of side channels that arrived.
    messages: "dialects: messages of side channels",
    /// Notifications that arrived.
    notifications: "dialects: notifications",
    /// Notifications that were lost.
    notifications_lost: "dialects: notifications lost",
    /// Side channels that ended with the proof of a death.
    deaths: "dialects: deaths proven by a side channel",
    /// Ways that were lost.
    lost: "dialects: ways lost",
    /// Engines that were killed.
    kills: "dialects: engines killed",
    /// Hosts that were stopped.
    stops: "dialects: hosts stopped",
    /// Pairs of hosts that were parted.
    partitions: "dialects: partitions",
    /// Connections of side channels that were broken.
    breaks: "dialects: connections broken",
    /// Engines whose side channel's thread has ended while the engine lived.
    deafs: "dialects: side channels ended in living engines",
    /// Aborts of sessions that had not ended.
    aborts: "dialects: aborts",
    /// Sessions whose pages came back later than their end.
    quarantined: "dialects: sessions with pages in quarantine",
    /// Slices of reads from pages that their owner could not protect any more.
    late_reads: "dialects: cover: slices read after the bound",
    /// Slices of posts after the end of the session that had posted.
    after_end: "dialects: cover: slices moved after the session's end",
    /// Requests that came again under the same name.
    retries: "dialects: cover: requests under a name that was used",
    /// Slices read from a process that has taken the place of the one whose pages were meant, unknown to the reader.
    strange_reads: "dialects: cover: slices read from an unknown successor",
    /// Requests that the healed worlds served.
    served: "dialects: requests served after healing",
    /// Sessions whose pages no message of the protocol could free while the peer lived.
    unpromised: "dialects: quarantines that only the peer's death ends",
}
    /// Failed sessions by the name of their cause.
    failures: Tally,
}
