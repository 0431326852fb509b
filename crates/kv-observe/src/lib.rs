//! What happened to each request: the trace events of workers as spans and events of [`tracing`], and as numbers of
//! the facade [`metrics`].
//!
//! What this crate is: two listeners for a worker ([`Metrics::listener`], and [`spans()`] or [`queued()`]) and the
//! sampling of a worker's gauges ([`Metrics::sample`]). What it is not: an exporter or a subscriber. A server brings
//! the recorder (`metrics-exporter-prometheus`, for example) and the subscriber (`tracing-subscriber`,
//! OpenTelemetry) that it has anyway, and `docs/grafana.json` is a dashboard for these numbers.
//!
//! ```
//! use std::sync::Arc;
//! use kv_core::trace::{Event, KvWhat};
//! use kv_core::{KvArgs, KvManager, PagePool, Region, RegionRole, WorkerRole};
//! use kv_observe::Metrics;
//! use kv_poll::{Manager, WorkerConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let recorder = Arc::new(metrics_util::debugging::DebuggingRecorder::new());
//! # let region = Region::dram(RegionRole::Kv, 0x1000, 8 * 4096, 4096);
//! # let args = KvArgs::builder("decode", 0).pages(8, 16).region(region).build()?;
//! let metrics = Metrics::to(recorder); // or `Metrics::global()`, once the process's recorder is installed
//! let listener = metrics.listener().and(kv_observe::spans());
//! let config = WorkerConfig::new(args, WorkerRole::Decode).with(|config| config.listener = Some(listener));
//! // let worker = Worker::start(config, transport, client)?;
//!
//! // On each scrape: what has a value at every moment.
//! fn scraped(metrics: &Metrics, manager: &Manager, pages: &PagePool) {
//!     metrics.sample(manager.args().worker()).manager(manager).pool("kv", pages);
//! }
//! # let _ = (config, scraped);
//! # Ok(())
//! # }
//! ```
//!
//! # Every kind of worker
//!
//! | worker | where its listener goes |
//! |---|---|
//! | KV cache | `WorkerConfig::listener` |
//! | vLLM's or SGLang's dialect (kv-interop) | `VllmConfig::listener`, `SglangConfig::listener` |
//! | encoder cache (kv-ec) | `EcConfig::listeners` |
//!
//! All of them tell the same events ([`KvWhat`](kv_core::trace::KvWhat)). A dialect tells fewer: the engine at the
//! other end has no name there, so the label `peer` of bytes is `unknown`; its data operations name no session, so
//! the bytes of a request are not known, and the phase `transfer` begins with the state `Transferring`. An entry of
//! the encoder cache that is fetched is a session that receives, and a peer's fetch is a session that sends; their
//! room is a number that the worker has drawn.
//!
//! # Spans
//!
//! One span for each session, `kv_request`, from its opening until nothing is left of it: `worker`, `session`,
//! `room`, `half`, `peer`, and at the end `outcome`, `cause`, `phase` (how far a failed session had come), `bytes`,
//! `descriptors` and `seconds`. The events of the session are inside of the span.
//!
//! | level | what |
//! |---|---|
//! | `warn` | a session that failed; a quarantine that lasted a second or longer; a peer that is dead (or has stopped in good order: a transport tells no difference), restarted, given up, refuses, or cannot be reached; lost events |
//! | `info` | a session that succeeded or was aborted: one line for each half of a request; a peer that is back |
//! | `debug` | quarantine (every abort has a short one), states, lookups, chunks, data operations, permissions, leases that ran out, ignored frames, peers |
//! | `trace` | messages; pages that come back |
//!
//! Events of a session have the target [`REQUEST`], those that belong to no session have the target [`WORKER`].
//! Lines at `info` and `warn` about peers are at most 16 in a second for each worker.
//!
//! # What an event costs
//!
//! A listener is called on the worker's thread. `cargo bench --bench observe` measures the nanoseconds of a whole
//! request on both sides, and of an event: without a listener, with metrics, with a queue, and with subscribers.
//! A pushed request of one chunk has 24 events on both sides together. Measured on a cloud machine, where such a request
//! takes 6.5 µs of protocol: an event that is told to somebody costs 40 ns, counting it 150 ns, queueing it 90 ns, and a
//! log at `info` 360 ns (most of it two lines for each request); with nobody listening it costs nothing.
#![doc = ""]
#![doc = include_str!("../METRICS.md")]

mod budget;
mod counting;
mod levels;
mod peers;
mod queued;
mod recording;
mod sink;
mod spans;
mod story;
mod table;

pub use counting::{Metrics, Sample};
pub use queued::{Queued, queued};
pub use spans::{REQUEST, WORKER, spans};
pub use table::{Kind, METRICS, Metric};

#[cfg(test)]
mod tests;
