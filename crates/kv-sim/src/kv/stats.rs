//! Counters of sessions over a campaign: how many, how they ended, and which interesting situations they met.

use kv_core::Cause;

use crate::counters::Tally;
use crate::counters::counters;

counters! {
/// Counts of sessions and requests in one world, or in many.
KvCounters {
    /// Requests that were sent to the hosts.
    requests: "requests",
    /// Sessions that schedulers opened.
    sessions: "sessions opened",
    /// Sessions that ended with success.
    successes: "sessions succeeded",
    /// Sessions that ended with a failure.
    failed: "sessions failed",
    /// Requests of healed worlds that were served.
    served: "requests served after healing",
    /// Peers that send valid frames with false content.
    liars: "fault: peers that lie",
    /// Frames that these peers sent.
    lies: "fault: valid frames that lie",
    /// Sessions that were aborted by their scheduler.
    aborts: "cover: aborts",
    /// Aborts of sessions with posts in flight.
    abort_in_flight: "cover: aborts with posts in flight",
    /// Registrations that arrived after the abort of the same attempt.
    register_after_abort: "cover: Register handled after Abort of its attempt",
    /// Completion notices that were delivered twice.
    done_twice: "cover: the same notice of a part handled twice",
    /// Completion notices that were delivered out of order.
    done_reordered: "cover: notices of parts handled out of order",
    /// Completion notices after the session had ended.
    done_late: "cover: notice of a part handled after its session's end",
    /// Sessions that took several posts.
    multi_part: "cover: sessions with several posts",
    /// Worlds whose two engines hold the cache differently.
    unequal: "cover: worlds of unequal engines",
    /// Receivers with several sources that succeeded.
    gathered: "cover: receivers served by several ranks",
    /// Senders with several receivers that succeeded.
    scattered: "cover: senders that served several ranks",
    /// Receivers with sources on several pipeline stages that succeeded.
    staged: "cover: receivers served by several stages",
    /// Successful receivers whose pages came from several ranks that hold the same pages.
    shared: "cover: receivers served by context-parallel ranks",
    /// Successful receivers whose engine distributes pages over another number of ranks than the sending
    /// engine.
    dealt: "cover: receivers of pages dealt otherwise",
    /// Senders given other pages than their siblings.
    miscounted: "cover: senders with other pages than their siblings",
    /// Receivers with several sources and items of cache groups that succeeded.
    gathered_state: "cover: receivers of state served by several ranks",
    /// Chunks that were given before they were computed.
    begun: "cover: chunks given before they are computed",
    /// Announcements of final layers.
    announced: "cover: announcements of layers",
    /// Senders that were opened before their registration arrived.
    sender_first: "cover: sender opened first",
    /// Registrations that arrived before their sender was opened.
    receiver_first: "cover: receiver opened first",
    /// Successful requests whose two halves have ids with different suffixes.
    base_match: "cover: success between different ids of one base",
    /// Requests that were tried again under the same base id.
    retries: "cover: request retried under its base id",
    /// Retries while the former half still was open.
    ambiguous: "cover: opened while the same base was open",
    /// Requests with a twin, whose id has the same base.
    twins: "cover: requests with a twin of the same base",
    /// Requests with two receivers.
    two_receivers: "cover: requests with two receivers",
    /// Requests whose pages are read (pull).
    pulled: "cover: requests that are pulled",
    /// Requests of which only one side opens a session.
    one_sided: "cover: requests with one half only",
    /// Requests whose halves disagree about pages.
    disagreeing: "cover: requests whose halves disagree",
    /// Commands with arguments that cannot be right.
    misuses: "cover: commands with wrong arguments",
    /// Pages given back long after the failure.
    quarantined: "cover: pages held beyond the end of their session",
    /// Chunks that had to wait for pages.
    starved: "cover: schedulers short of pages",
    /// Halves of requests with items of cache groups.
    stateful: "cover: halves with items of cache groups",
    /// Optional groups that a sender did not have.
    skipped: "cover: groups left out",
    /// Halves of requests that a host did not open, because it drains.
    turned_away: "cover: halves that a host that drains does not open",
    /// Receivers that registered in vain at a host that drains, and had to be refused at once.
    refused_by_drains: "cover: receivers that a host that drains had to refuse",
    /// Ends of halves that the other side had to be told.
    told: "cover: ends that had to be told",
    /// Worlds that lose frames, and nothing else.
    drizzle: "cover: worlds in which requests must be served under loss",
    /// Worlds in which no frame is lost and no host fails.
    lossless: "cover: worlds without loss",
    /// Worlds in which connections between living hosts break, and no host fails.
    frayed: "cover: worlds in which connections break and no host fails",
}
    /// Failed sessions by the name of their cause.
    failures: Tally,
}

/// The name of a failure's cause as in the enum: `PageCount`, or `ByPeer: PageCount`.
pub fn cause_name(cause: &Cause) -> String {
    let text = format!("{cause:?}");
    let name = text.split(|letter: char| !letter.is_alphanumeric() && letter != '(').next();
    name.unwrap_or_default().trim_end_matches('(').replace('(', ": ")
}
