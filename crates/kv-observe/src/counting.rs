//! The listener that counts, and the numbers that a server samples.

use std::sync::{Arc, Mutex, PoisonError};

use kv_core::trace::KvWhat;
use kv_core::{KvManager, PagePool, QuarantineReason, WorkerId};
use kv_poll::queue::{DecodeCounts, PrefillCounts};
use kv_poll::worker::{self, Listener};
use kv_poll::{Manager, Publication};
use metrics::{Counter, Gauge, Recorder};

use crate::recording::Recordings;
use crate::sink::{Handle, Home, Sink};
use crate::table::{self, Metric};

/// Turns the events of workers into metrics. Cheap to clone.
///
/// [`listener`](Metrics::listener) counts what happens, and [`sample`](Metrics::sample) takes the numbers that
/// have a value at every moment. No thread is started.
///
/// # Bounds
///
/// A worker's listener remembers about 200 bytes for each open session, from its opening to its end, and an id for
/// each data operation in flight. If events are lost ([`Event::missed`](kv_core::trace::Event::missed)), the
/// listener forgets all open sessions, because the events of their ends may be among the lost ones; these sessions
/// are counted without their half and their times when they end.
///
/// All values of labels are texts of this library or names of the server's own workers, except `peer`:
/// [`max_peers`](Metrics::max_peers) peers have a label with their name, in the order in which they were met,
/// and the others share `other`; the same holds for the transports of `transport`, of which 16 have a label.
/// Rooms and request ids are never labels. A worker has at most about 300 series whose labels name no peer, and
/// at most about 200 more for each peer with a name, most of them failures of kinds that never happen.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Metrics {
    /// Most peers whose name is a value of the label `peer`, for each worker (default 64).
    pub max_peers: usize,
    sink: Sink,
}

impl Metrics {
    /// Metrics in the process's recorder. The recorder must be installed before: handles that are made earlier
    /// count nothing, for good.
    pub fn global() -> Metrics {
        Metrics::of(Sink::Global)
    }

    /// Metrics in this recorder, which need not be the process's.
    ///
    /// The handles are kept as long as their worker lives: a recorder that drops metrics which have been idle
    /// for a while (`idle_timeout`) would lose what is counted afterwards.
    pub fn to(recorder: Arc<dyn Recorder + Send + Sync>) -> Metrics {
        Metrics::of(Sink::Own(recorder))
    }

    fn of(sink: Sink) -> Metrics {
        sink.describe();
        Metrics { max_peers: 64, sink }
    }

    /// The same with another field: `Metrics::global().with(|metrics| metrics.max_peers = 8)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// A listener for one worker. An event costs a few lookups in small tables and one or two additions to
    /// atomics; a metric is registered when it is first counted.
    ///
    /// What the listener remembers goes with the listener, so a worker that is started again gets a new one. If two
    /// workers share a listener, their events are kept apart.
    pub fn listener(&self) -> Listener<KvWhat> {
        let recordings = Mutex::new(Recordings::new(self.sink.clone(), self.max_peers));
        Listener::new(move |worker, event| {
            recordings.lock().unwrap_or_else(PoisonError::into_inner).hear(worker, event);
        })
    }

    /// Samples numbers of this worker: a server calls this when it is scraped.
    pub fn sample(&self, worker: &WorkerId) -> Sample {
        Sample { home: Home::new(self.sink.clone(), worker) }
    }
}

/// Sets the gauges of one worker to what they are now. Each method is a few microseconds of the caller's time and
/// does not wait for the worker.
///
/// A server with an [`EngineGroup`](kv_poll::EngineGroup) samples each of its managers. A worker of the encoder
/// cache is sampled by [`gauges`](Sample::gauges), with the gauges of its port.
#[derive(Debug)]
pub struct Sample {
    home: Home,
}

impl Sample {
    /// Takes the numbers of a worker of the KV cache: sessions, what they hold, quarantine, publication.
    pub fn manager(&self, manager: &Manager) -> &Sample {
        let gauges = manager.gauges();
        self.gauges(&gauges);
        let held = gauges.held_bytes();
        let bytes = [
            ("in_transfer", held.in_transfer),
            ("leased", held.leased),
            ("quarantined", held.quarantined),
            ("orphaned", held.orphaned),
        ];
        for (state, bytes) in bytes {
            self.set(&table::HELD_BYTES, [state], bytes as f64);
        }
        let pages = [
            ("in_transfer", gauges.pages_in_transfer().saturating_sub(gauges.pages_leased())),
            ("leased", gauges.pages_leased()),
            ("quarantined", gauges.pages_quarantined()),
            ("orphaned", gauges.pages_orphaned()),
        ];
        self.set_all(&table::HELD_PAGES, pages);
        let items = [
            ("in_transfer", gauges.items_in_transfer()),
            ("quarantined", gauges.items_quarantined()),
            ("orphaned", gauges.items_orphaned()),
        ];
        self.set_all(&table::HELD_ITEMS, items);
        let quarantine = manager.quarantine();
        for reason in QuarantineReason::ALL {
            let pages: usize =
                quarantine.iter().filter(|entry| entry.reason == *reason).map(|entry| entry.pages).sum();
            let bytes = gauges.bytes_per_page.saturating_mul(pages as u64);
            self.set(&table::QUARANTINE_BYTES, [reason.name()], bytes as f64);
        }
        let published = manager.publication() == Publication::Published;
        self.set(&table::PUBLISHED, [], f64::from(u8::from(published)));
        self
    }

    /// Takes the numbers that every worker has, whatever its service.
    pub fn gauges(&self, gauges: &worker::Gauges) -> &Sample {
        self.set_all(&table::SESSIONS, [("open", gauges.sessions_open), ("lost", gauges.sessions_lost)]);
        self.set(&table::POSTS_IN_FLIGHT, [], gauges.posts_in_flight as f64);
        let frames = [
            ("sent", gauges.frames_sent),
            ("received", gauges.frames_received),
            ("dropped", gauges.frames_dropped),
        ];
        for (direction, frames) in frames {
            self.raise(&table::FRAMES, [direction], frames);
        }
        self.raise(&table::TURNS, [], gauges.turns);
        self.raise(&table::WAKE_UPS, [], gauges.wake_ups);
        self.raise(&table::COMMANDS, [], gauges.commands);
        self
    }

    /// Takes the number of peers that are connected over each transport of a worker with several, as
    /// `kv_ways::Standing::peers` has them.
    pub fn peers(&self, peers: impl IntoIterator<Item = (&'static str, usize)>) -> &Sample {
        for (transport, peers) in peers {
            self.set(&table::PEERS, [transport], peers as f64);
        }
        self
    }

    /// Takes the lengths of the queues of a prefill scheduler.
    pub fn prefill(&self, counts: &PrefillCounts) -> &Sample {
        let PrefillCounts { bootstrap, waiting, forward, inflight, failing, .. } = *counts;
        let queues = [
            ("bootstrap", bootstrap),
            ("waiting", waiting),
            ("forward", forward),
            ("inflight", inflight),
            ("failing", failing),
        ];
        self.set_all(&table::QUEUE, queues)
    }

    /// Takes the lengths of the queues of a decode scheduler.
    pub fn decode(&self, counts: &DecodeCounts) -> &Sample {
        let DecodeCounts { handshake, ready, transfer, waiting, running, retracted, quarantined, .. } =
            *counts;
        let queues = [
            ("handshake", handshake),
            ("ready", ready),
            ("transfer", transfer),
            ("waiting", waiting),
            ("running", running),
            ("retracted", retracted),
            ("quarantined", quarantined),
        ];
        self.set_all(&table::QUEUE, queues)
    }

    /// Takes the pages of a pool, which the server calls by this name: `kv` for the pool of the KV pages.
    pub fn pool(&self, name: &'static str, pool: &PagePool) -> &Sample {
        let (lost, out) = (pool.lost().len(), pool.num_out());
        let inside = pool.range().len().saturating_sub(out);
        for (state, pages) in [("in", inside), ("out", out.saturating_sub(lost)), ("lost", lost)] {
            self.set(&table::POOL_PAGES, [name, state], pages as f64);
        }
        self
    }

    fn set_all<const N: usize>(
        &self,
        metric: &'static Metric,
        values: [(&'static str, usize); N],
    ) -> &Sample {
        for (label, value) in values {
            self.set(metric, [label], value as f64);
        }
        self
    }

    fn set<const N: usize>(&self, metric: &'static Metric, labels: [&'static str; N], value: f64) {
        self.handle::<Gauge, N>(metric, labels).set(value);
    }

    fn raise<const N: usize>(&self, metric: &'static Metric, labels: [&'static str; N], value: u64) {
        self.handle::<Counter, N>(metric, labels).absolute(value);
    }

    fn handle<H: Handle, const N: usize>(&self, metric: &'static Metric, labels: [&'static str; N]) -> H {
        self.home.handle(metric, labels.map(Into::into).into())
    }
}
