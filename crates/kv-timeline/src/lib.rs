//! A picture of what every request did: records of workers, joined by room and into one clock, as a page for a
//! browser or as a trace for Perfetto.
//!
//! A request of a disaggregated service has two sides on two hosts, and each side knows half of its story. This crate
//! joins the halves. Each worker has a [`Recorder`], which keeps the typed events of the worker's trace in bounded
//! memory. A [`Record`] is saved or sent as one line of JSON. A [`Timeline`] joins the records of any number of
//! workers, and is written as one self-contained HTML page ([`Timeline::html`]) or in Chrome's trace event format
//! ([`Timeline::perfetto`]).
//!
//! What this crate is not: a metrics system, or a log. A recorder keeps the latest requests of one worker, and writes
//! nothing by itself.
//!
//! ```
//! use kv_core::{EngineId, Incarnation, WorkerId};
//! use kv_timeline::{Record, Recorder, Timeline};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let worker = WorkerId { engine: EngineId::new("decode")?, rank: 0 }; // of the worker's `KvArgs`
//! let recorder = Recorder::new(&worker);
//! let listener = recorder.listener(); // for `WorkerConfig::listener`
//! # drop(listener);
//! # let incarnation = Incarnation::from_random(1);
//! // … the worker serves. Its record, of `worker.incarnation()`, is sent to where records are joined:
//! let sent = recorder.record(incarnation).to_json()?;
//!
//! let record = Record::from_json(sent.as_bytes())?; // any bytes: an error says what is wrong with them
//! let timeline = Timeline::join(vec![record])?;
//! let page = timeline.html()?; // std::fs::write("timeline.html", page)
//! # assert!(page.contains("decode/0"));
//! # Ok(())
//! # }
//! ```
//!
//! # What the page shows
//!
//! At the top there are one line of totals, what the router did (`remark`), and **what went wrong**, in the order of
//! time: `prefill/0: the lease of 4 requests has expired before decode/0 had read the pages`. A click on a line shows
//! its requests.
//!
//! Below is the picture, with time from left to right. A chart shows the bytes per second of each pair of workers. The
//! first rows are the workers, with the uncertainty of their clocks, the heartbeats that they sent, and a cross where
//! others noticed that a worker was lost; from there a dashed line goes down through all requests. Then each request
//! has a row for each side: grey while the sides look for each other, yellow while a side waits for its scheduler,
//! light blue while bytes may move, with a dark blue bar for each data operation, and green or red after the end. A
//! violet line is a lease, and its ticks are heartbeats; a violet diamond is a lease that expired, an orange triangle a
//! registration that was sent again, and a red cross with a text a failure and its cause. The side of a worker that left
//! no record, because it was killed, is a dashed frame: from when until when the other side heard of it.
//!
//! Hovering over a row tells the phase, the data operation with its GB/s, and the events near the pointer. A click lists
//! the events of all sides of the request. The tables at the end have each failed session with its cause and advice,
//! and each worker with its clock and with what its record lacks.
//!
//! # Clocks
//!
//! Workers read the clocks of their hosts, which differ by anything. The difference is estimated from messages that one
//! worker has said and the other has heard, in both directions, as in NTP; see [`Clock`]. The uncertainty is half of
//! what the fastest messages there and back took, and what the clocks may have drifted in between. Bars of a shifted
//! clock have whiskers of that length, and where two events of two workers are closer than the uncertainty, the list of
//! events says `≈ order not known` between them.
//!
//! # While a server serves
//!
//! [`Recorder::latest`] is what a worker knows of its latest sessions at one moment, and [`Timeline::join_latest`] joins
//! such records of different moments: a session that is not over lasts until its record ends.
//!
//! # Who is trusted
//!
//! Nobody. A recorder's memory is bounded whatever peers send. A record that is read is bounded in length, and its
//! version is checked before anything else; the worst that its author can do is a false picture. Names that clients and
//! peers choose are text in the page, whatever they contain; and the page loads nothing.
mod clocks;
mod html;
mod incident;
mod lane;
mod note;
mod pairs;
mod perfetto;
mod record;
mod recorder;
mod sentence;
mod text;
mod timeline;
mod view;

pub use clocks::Clock;
pub use incident::{Incident, IncidentKind};
pub use lane::{Lane, Outcome, Phase, PostSpan, Span};
pub use note::{Failure, Message, Note, Side, What};
pub use record::{Lost, MAX_PEERS, MAX_RECORD, PeerNote, Record, RecordError, SessionNotes, VERSION};
pub use recorder::{DEFAULT_BYTES, Recorder};
pub use text::{MAX_TEXT, Text};
pub use timeline::{Actor, JoinError, MAX_RECORDS, Recorded, Request, Timeline};
