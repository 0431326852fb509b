//! The metrics by name: kind, labels, unit, buckets, and what vLLM and SGLang call the same thing.

use metrics::Unit;

/// One metric of this crate. [`METRICS`] lists all.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Metric {
    /// The name, which begins with `kv_transfer_`.
    pub name: &'static str,
    /// Whether the value only rises, rises and falls, or is a distribution.
    pub kind: Kind,
    /// The names of the labels, in the order in which they are written. The first label is always `worker`.
    pub labels: &'static [&'static str],
    /// The unit of the value.
    pub unit: Unit,
    /// What the value says, in one sentence.
    pub help: &'static str,
    /// Upper bounds of buckets that suit the values of a distribution, rising; empty for other kinds. Exporters
    /// take them from here (`set_buckets_for_metric` of metrics-exporter-prometheus).
    pub buckets: &'static [f64],
    /// The metrics of vLLM 0.33 that say the same or nearly the same; empty if there is none.
    pub vllm: &'static str,
    /// The metrics of SGLang 0.5.23 that say the same or nearly the same; empty if there is none.
    pub sglang: &'static str,
}

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A count that only rises while the process lives.
    Counter,
    /// A number that rises and falls. All gauges are [sampled](crate::Sample).
    Gauge,
    /// A distribution of values.
    Histogram,
}

const SECONDS: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0,
];
const BYTES: &[f64] = &[
    4096.0,
    65536.0,
    1048576.0,
    4194304.0,
    16777216.0,
    67108864.0,
    268435456.0,
    1073741824.0,
    4294967296.0,
    17179869184.0,
];
const BYTES_PER_SECOND: &[f64] = &[1e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 5e10, 1e11, 2e11, 4e11];
const DESCRIPTORS: &[f64] = &[1.0, 4.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 50000.0];

const fn metric(
    name: &'static str,
    kind: Kind,
    unit: Unit,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind, labels, unit, help, buckets: &[], vllm: "", sglang: "" }
}

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    metric(name, Kind::Counter, Unit::Count, labels, help)
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    metric(name, Kind::Gauge, Unit::Count, labels, help)
}

impl Metric {
    const fn histogram(
        name: &'static str,
        (unit, buckets): (Unit, &'static [f64]),
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Metric {
        Metric { buckets, ..metric(name, Kind::Histogram, unit, labels, help) }
    }

    const fn bytes(self) -> Metric {
        Metric { unit: Unit::Bytes, ..self }
    }

    const fn vllm(self, names: &'static str) -> Metric {
        Metric { vllm: names, ..self }
    }

    const fn sglang(self, names: &'static str) -> Metric {
        Metric { sglang: names, ..self }
    }
}

/// Declares the metrics, each under the name by which this crate uses it, and the list of all.
macro_rules! metrics {
    ($($item:ident = $metric:expr;)+) => {
        $(pub(crate) static $item: Metric = $metric;)+

        /// All metrics, in the order in which `docs/METRICS.md` describes them.
        pub static METRICS: &[&Metric] = &[$(&$item,)+];
    };
}

metrics! {
    // ---- requests -------------------------------------------------------------------------------
    REQUESTS = counter("kv_transfer_requests_total", &["worker", "half", "outcome"],
        "Sessions that have ended, one for each half of a request: `success`, `aborted` or `failed`.");
    FAILURES = counter("kv_transfer_failures_total", &["worker", "half", "cause", "told_by", "peer"],
        "Sessions that have failed or were aborted, by cause, by the side that told the cause, and by peer.")
        .vllm("vllm:nixl_num_failed_transfers")
        .sglang("sglang:num_bootstrap_failed_reqs_total, sglang:num_transfer_failed_reqs_total");
    PHASE = Metric::histogram("kv_transfer_phase_seconds", (Unit::Seconds, SECONDS),
        &["worker", "half", "phase"], "Time that a successful session spent in each phase, and `whole`.")
        .sglang("sglang:kv_transfer_bootstrap_ms, sglang:kv_transfer_alloc_ms, sglang:kv_transfer_latency_ms");
    FAILED_AFTER = Metric::histogram("kv_transfer_failed_after_seconds", (Unit::Seconds, SECONDS),
        &["worker", "half"], "Time from the opening of a session to its failure.");
    REQUEST_BYTES = Metric::histogram("kv_transfer_request_bytes", (Unit::Bytes, BYTES), &["worker", "half"],
        "Bytes that a successful session has moved, on the side that moves them.")
        .sglang("sglang:kv_transfer_total_mb");
    REQUEST_SPEED = Metric::histogram("kv_transfer_request_bytes_per_second",
        (Unit::CountPerSecond, BYTES_PER_SECOND), &["worker", "half"],
        "Bytes of a successful session, divided by the time for which data operations of it were in flight.")
        .sglang("sglang:kv_transfer_speed_gb_s");

    // ---- data operations ------------------------------------------------------------------------
    MOVED = counter("kv_transfer_bytes_total", &["worker", "op", "peer", "transport"],
        "Bytes that data operations of this worker have moved, by direction, peer and transport.").bytes();
    POST_SECONDS = Metric::histogram("kv_transfer_post_seconds", (Unit::Seconds, SECONDS), &["worker", "op"],
        "Time that a successful data operation took.")
        .vllm("vllm:nixl_xfer_time_seconds");
    POST_BYTES = Metric::histogram("kv_transfer_post_bytes", (Unit::Bytes, BYTES), &["worker", "op"],
        "Bytes of a data operation.")
        .vllm("vllm:nixl_bytes_transferred");
    POST_DESCRIPTORS = Metric::histogram("kv_transfer_post_descriptors", (Unit::Count, DESCRIPTORS),
        &["worker", "op"], "Descriptors of a data operation.")
        .vllm("vllm:nixl_num_descriptors");
    POSTS_FAILED = counter("kv_transfer_posts_failed_total", &["worker", "op"],
        "Data operations that have ended with an error.")
        .vllm("vllm:nixl_num_failed_transfers");
    POSTS_IN_FLIGHT = gauge("kv_transfer_posts_in_flight", &["worker"], "Data operations that have not ended.");

    // ---- messages, leases, lookups, peers -------------------------------------------------------
    MESSAGES = counter("kv_transfer_messages_total", &["worker", "direction", "message"],
        "Messages of the protocol, heartbeats among them, by kind: `sent` or `received`.");
    LEASE_RENEWALS = counter("kv_transfer_lease_renewals_total", &["worker", "direction"],
        "Leases that answers to heartbeats have extended: `sent` by the holder, `received` by the reader.");
    LEASES_EXPIRED = counter("kv_transfer_leases_expired_total", &["worker"],
        "Leases that ran out before every reader had read the pages.")
        .vllm("vllm:nixl_num_kv_expired_reqs");
    LOOKUPS = counter("kv_transfer_lookups_total", &["worker", "result"],
        "Questions to the bootstrap server: `asked`, `asked_again`, `answered`, `not_answered`.");
    PEER_EVENTS = counter("kv_transfer_peer_events_total", &["worker", "event"],
        "What happened to peers: met, silent, given up, dead, restarted, a way lost …");
    PEERS = gauge("kv_transfer_peers", &["worker", "transport"],
        "Peers that are connected over each transport of a worker with several.");
    WAYS_FAILED = counter("kv_transfer_ways_failed_total", &["worker", "transport", "fault"],
        "Transports of a worker with several that were left alone for a peer: `refused`, `lost`, `silent` or `another_life`.");
    FRAMES_IGNORED = counter("kv_transfer_frames_ignored_total", &["worker", "reason"],
        "Frames that arrived and were ignored, by reason.")
        .vllm("vllm:nixl_num_notifications_after_expiry");
    FRAMES = counter("kv_transfer_frames_total", &["worker", "direction"],
        "Frames that the transport has `sent`, `received`, or not taken (`dropped`).")
        .vllm("vllm:nixl_num_failed_notifications");

    // ---- what is held ---------------------------------------------------------------------------
    SESSIONS = gauge("kv_transfer_sessions", &["worker", "state"],
        "Sessions that are `open`, and sessions whose pages were `lost` because the worker stopped.");
    HELD_BYTES = gauge("kv_transfer_held_bytes", &["worker", "state"],
        "Bytes of pages that sessions hold: `in_transfer`, `leased`, `quarantined`, `orphaned`.").bytes();
    HELD_PAGES = gauge("kv_transfer_held_pages", &["worker", "state"], "The same in pages.");
    HELD_ITEMS = gauge("kv_transfer_held_items", &["worker", "state"],
        "Items of cache groups that sessions hold: `in_transfer`, `quarantined`, `orphaned`.");
    QUARANTINE_BYTES = gauge("kv_transfer_quarantine_bytes", &["worker", "reason"],
        "Bytes of pages in quarantine, by what they wait for.").bytes();
    QUARANTINE_SECONDS = Metric::histogram("kv_transfer_quarantine_seconds", (Unit::Seconds, SECONDS),
        &["worker", "reason"], "How long a quarantine lasted, by the reason with which it began.");
    POOL_PAGES = gauge("kv_transfer_pool_pages", &["worker", "pool", "state"],
        "Pages of a page pool: `in` the hands of the server's allocator, given `out`, or `lost`.");
    QUEUE = gauge("kv_transfer_queue_requests", &["worker", "queue"],
        "Requests in each scheduler queue of prefill and decode.")
        .vllm("vllm:num_requests_waiting_by_reason")
        .sglang("sglang:num_prefill_bootstrap_queue_reqs, sglang:num_prefill_inflight_queue_reqs, \
            sglang:num_decode_prealloc_queue_reqs, sglang:num_decode_transfer_queue_reqs, sglang:num_queue_reqs");

    // ---- the worker itself ----------------------------------------------------------------------
    PUBLISHED = gauge("kv_transfer_published", &["worker"],
        "1 if peers can find the worker at the bootstrap server, otherwise 0.");
    TURNS = counter("kv_transfer_worker_turns_total", &["worker"], "Turns of the worker's loop.");
    WAKE_UPS = counter("kv_transfer_worker_wake_ups_total", &["worker"],
        "Turns that began with waking up from a sleep.");
    COMMANDS = counter("kv_transfer_commands_total", &["worker"], "Commands taken from session handles.");
    EVENTS_LOST = counter("kv_transfer_events_lost_total", &["worker"],
        "Events that were lost before they could be counted: the counters above lack them.");
}
