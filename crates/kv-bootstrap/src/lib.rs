//! The rendezvous of prefill and decode workers: a registry of ranks, an HTTP/1.1 server around it,
//! and a client that never blocks.
//!
//! It is **not** a web framework, not a service directory for a cluster, and not a security
//! boundary: whoever can connect can register. It keeps everything in memory; ranks register
//! again by themselves after a restart of the server.
//!
//! [`KvBootstrapServer`] speaks two protocols side by side, with separate tables:
//!
//! - SGLang's (`/route`, `/register_dp_rank`, `/query_dp_ranks`, `/health`), so that engines of
//!   SGLang 0.5.23 find each other through it unchanged. Readiness counts distinct ranks. Entries
//!   do not expire, unless a registration carries the additional field `lease_ttl_s`.
//! - Its own (`/v1/ranks`): [`RankJson`] records with leases, incarnations and plane metadata, used
//!   by [`HttpBootstrapClient`].
//!
//! ```text
//! curl -X PUT    host:8998/v1/ranks -d '{"worker":{"engine":"p","rank":0}, … ,"lease_ms":5000}'
//! curl -X POST   host:8998/v1/ranks/renew -d '{"worker":{…},"incarnation":7,"lease_ms":5000}'
//! curl -X DELETE host:8998/v1/ranks -d '{"worker":{…},"incarnation":7}'
//! curl          'host:8998/v1/ranks?role=prefill&modulo=4711'     # or dp_rank=0; &engine=p
//! ```
//!
//! A replica is answered whole, in the order of `(pp_rank, cp_rank, tp_rank)`, or not at all: 404 if no
//! engine serves the role, 503 with `{registered, expected}` while ranks are missing. If several
//! engines serve the role and the query names none, the complete one with the smallest id answers.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use kv_bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
//! use kv_core::{BootstrapClient, BootstrapError, BootstrapEvent, LookupId, RankQuery, Replica, Time, WorkerRole};
//!
//! let server = KvBootstrapServer::start("127.0.0.1:0")?;
//! let mut client = HttpBootstrapClient::new(ClientConfig::default())?;
//! let start = Instant::now();
//! let now = || Time::ZERO + start.elapsed();
//!
//! let query = RankQuery { role: WorkerRole::Prefill, replica: Replica::Modulo(4711) };
//! client.lookup(now(), LookupId(1), &server.local_addr().to_string(), &query);
//! let event = loop {
//!     // A worker would sleep on `client.as_raw_fd()` until `client.next_timeout()`.
//!     match client.poll(now()) {
//!         Some(event) => break event,
//!         None => std::thread::sleep(Duration::from_millis(1)),
//!     }
//! };
//! let error = BootstrapError::UnknownRank;
//! assert_eq!(event, BootstrapEvent::Failed { lookup: LookupId(1), error });
//! server.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod client;
mod config;
mod connection;
mod dp_ranks;
mod error;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod http;
mod record;
mod registry;
mod routes;
mod server;
mod sglang;

pub use client::HttpBootstrapClient;
pub use config::{ClientConfig, RegistryConfig, ServerConfig};
pub use error::{BootstrapClientError, BootstrapServerError};
pub use record::{GrantJson, LeaseJson, MAX_NAME, NotReadyJson, RankJson, RecordError};
pub use registry::{LeaseError, LookupError, RegisterError, Registry};
pub use server::KvBootstrapServer;
