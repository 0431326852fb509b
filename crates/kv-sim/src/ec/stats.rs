//! Counters of worlds of the encoder cache over a campaign.

use crate::counters::{Tally, counters};

counters! {
/// Counts of what happened to entries in one world of the encoder cache, or in many.
EcCounters {
    /// Entries that encoders reserved.
    saves: "ec: entries reserved by encoders",
    /// Entries that encoders saved.
    saved: "ec: entries saved",
    /// Entries that encoders gave up.
    given_up: "ec: entries given up by encoders",
    /// Reservations that found no room.
    full: "ec: reservations without room",
    /// Entries that were evicted to make room.
    evictions: "ec: entries evicted",
    /// Sessions that wanted an entry.
    sessions: "ec: sessions opened",
    /// Sessions that got their entry.
    ready: "ec: sessions ready",
    /// Sessions that failed.
    failed: "ec: sessions failed",
    /// Entries that were here when they were wanted.
    hits: "ec: local hits",
    /// Sessions that wanted what another session of their host already wanted.
    joined: "ec: sessions that joined a fetch",
    /// Requests that consumers made of producers, repetitions not counted.
    requests: "ec: requests",
    /// Requests that producers refused.
    refused: "ec: requests refused",
    /// Sessions that schedulers aborted.
    aborts: "ec: cover: aborts",
    /// Aborts of sessions whose blocks were being written or read.
    abort_in_flight: "ec: cover: aborts with posts in flight",
    /// Reservations while a transfer was given up whose blocks were not back.
    pressed: "ec: cover: reservations beside blocks in quarantine",
    /// Evictions while posts were in flight at the host.
    evicted_in_flight: "ec: cover: evictions with posts in flight",
    /// Entries that the healed worlds gave to the sessions that wanted them.
    served: "ec: sessions served after healing",
}
    /// Failed sessions by the name of their cause.
    failures: Tally,
}
