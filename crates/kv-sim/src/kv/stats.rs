//! What a campaign has seen of its sessions: how much, and which interesting events.

use kv_core::Cause;

use crate::counters::Tally;
use crate::counters::counters;

counters! {
/// What was seen of the sessions of one world, or of many.
KvCounters {
    /// Requests.
    requests: "requests",
    /// Sessions opened.
    sessions: "sessions opened",
    /// Sessions that succeeded.
    successes: "sessions succeeded",
    /// Sessions that failed.
    failed: "sessions failed",
    /// Requests of healed worlds that were served.
    served: "requests served after healing",
    /// Peers that lie.
    liars: "fault: peers that lie",
    /// What they said.
    lies: "fault: valid frames that lie",
    /// Sessions aborted by their scheduler.
    aborts: "cover: aborts",
    /// Aborts while posts were in flight.
    abort_in_flight: "cover: aborts with posts in flight",
    /// Registrations that arrived after the abort of the same attempt.
    register_after_abort: "cover: Register handled after Abort of its attempt",
    /// Completion notices delivered twice.
    done_twice: "cover: the same notice of a part handled twice",
    /// Completion notices delivered out of order.
    done_reordered: "cover: notices of parts handled out of order",
    /// Completion notices after the session had ended.
    done_late: "cover: notice of a part handled after its session's end",
    /// Sessions served with several posts.
    multi_part: "cover: sessions with several posts",
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
    /// Receivers with several sources and items of cache groups that succeeded.
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
    /// Halves with items of cache groups.
    stateful: "cover: halves with items of cache groups",
    /// Optional groups that a sender did not have.
    skipped: "cover: groups left out",
    /// Failures checked to be told.
    told: "cover: failures that had to be told",
    /// Worlds that lose frames, and nothing else.
    drizzle: "cover: worlds in which requests must be served under loss",
    /// Worlds without loss.
    lossless: "cover: worlds without loss",
}
    /// Failed sessions by cause.
    failures: Tally,
}

/// A short name of a failure's cause, as the list of causes has it: `PageCount`, or `ByPeer: PageCount`.
pub fn cause_name(cause: &Cause) -> String {
    let text = format!("{cause:?}");
    let name = text.split(|letter: char| !letter.is_alphanumeric() && letter != '(').next();
    name.unwrap_or_default().trim_end_matches('(').replace('(', ": ")
}
