//! How prefill, decode and encode workers find each other: a registry of ranks ([`Registry`]), an HTTP/1.1
//! server around it ([`KvBootstrapServer`]), and a client that never blocks ([`HttpBootstrapClient`]).
//!
//! This crate is **not** a web framework, and not a service directory for a cluster. The server keeps
//! everything in memory; after a restart of the server, ranks register again by themselves.
//!
//! # The record of a rank
//!
//! A worker registers its transports and its *offers*: for each service (a KV cache, an encoder cache, a
//! foreign protocol) the versions that the worker speaks, a compatibility text, and data. A lookup filters by
//! role and service. The server does not look into transport metadata and data: the worker that receives the
//! record compares them with its own. All ranks of an engine offer the same services.
//!
//! # Why there is no HTTP library
//!
//! `httparse` reads the heads of messages; the rest is about 600 lines of this crate. The server's promises
//! need control that the libraries do not give: every byte of an unfinished request counts against its client
//! (429, 503), a slow client is answered 408 at a deadline of its own, a client that is still sending gets
//! its refusal before the connection closes, and no line and no trailer is unbounded or searched twice. The
//! client runs inside a worker's thread; only names are resolved on other threads.
//!
//! | library | why not |
//! |---|---|
//! | hyper 1 | runs without a runtime, but links tokio and ten more crates; its read buffer cannot be counted, a slow head ends without an answer, and every error in a head is 400; its client does not pipeline |
//! | tiny_http, rouille | a thread for each connection, without deadlines or a bound on connections |
//! | ureq, attohttpc, minreq | block: a thread for each server that a worker talks to |
//! | ureq-proto | no I/O of its own, but made for ureq: heads are parsed anew, and chunk lines searched anew, for each piece that arrives; trailers have no bound |
//!
//! # What a client of the server can do
//!
//! Without [`ServerConfig::secret`], every process that can reach the port can **read** every record with its
//! transport metadata, which a decode worker needs to reach a prefill worker (whether the metadata suffices
//! to be let in is for the transport to decide), **register** ranks under any name, and **replace or
//! withdraw** the ranks of others, because records contain the incarnation that a withdrawal needs. So listen
//! on a loopback address, as the examples do, or on a separate network. With a secret, requests to
//! `/v1/ranks` must carry `Authorization: Bearer …` (401 otherwise); workers send [`ClientConfig::secret`].
//! The secret travels in clear text and is no substitute for TLS.
//!
//! SGLang's routes have no credentials. Every process that can reach the port can redirect SGLang's decode
//! workers to another prefill rank, and can have the server open connections to addresses of its network and see
//! whether they succeed. [`ServerConfig::sglang`] switches these routes off, [`ServerConfig::watch`] the
//! connections; [`WatchConfig`] bounds how many there are.
//!
//! The memory of all tables is counted in bytes and bounded, in total and for each client address: 429 when a
//! client's share is full, 507 when the server is full. A registration of one client never removes those of
//! another to make room. [`KvBootstrapServer::gauges`] tells how much is kept.
//!
//! # Two protocols
//!
//! [`KvBootstrapServer`] speaks two protocols side by side, with separate tables:
//!
//! - SGLang's (`/route`, `/register_dp_rank`, `/query_dp_ranks`, `/health`), so that engines of SGLang 0.5.23
//!   find each other through this server unchanged. The engine is ready when all distinct ranks are there. A rank
//!   that registers again at another port has restarted: the entries that its host registered before the rank's
//!   previous one belong to the engine's former life, and leave. While the new life is incomplete, the last
//!   complete set of ranks is answered.
//!
//!   SGLang's requests name no engine, so each listening address serves one: [`ServerConfig::engine_addrs`] adds
//!   addresses. A second engine at the address of a living one is refused with 409.
//!
//!   SGLang's decode workers take `/health` for the health of the prefill engine, because SGLang's own server dies
//!   with it. This server watches the ports of the ranks ([`WatchConfig`]): `/health` and `/route` answer 503, with
//!   the rank in the text, from the death of a rank until the engine has registered again. An entry with the
//!   additional field `lease_ttl_s` goes by its lease. `/v1/health` is the health of the server itself.
//!
//!   A rank record of a prefill worker with an offer [`SGLANG_SERVICE`], whose data are a [`SglangRank`], is served
//!   by `/route` of the address at which it was published, and leaves with its lease.
//! - The library's own (`/v1/ranks`): [`RankJson`] records with leases, incarnations and offers, for
//!   [`HttpBootstrapClient`]. The client also makes SGLang's lookups ([`SglangQuery`]), at this server and at
//!   SGLang's own, and registers a record with an offer [`SGLANG_SERVICE`] with SGLang's own by `PUT /route`.
//!
//! ```text
//! curl -X PUT    host:8998/v1/ranks -d '{"worker":{"engine":"p","rank":0}, … ,"lease_ms":5000}'
//! curl -X POST   host:8998/v1/ranks/renew -d '{"worker":{…},"incarnation":7,"lease_ms":5000}'
//! curl -X DELETE host:8998/v1/ranks -d '{"worker":{…},"incarnation":7}'
//! curl          'host:8998/v1/ranks?role=prefill&modulo=4711'     # or dp_rank=0; &service=kv, &engine=p
//! ```
//!
//! All ranks of a data-parallel replica are answered, in the order of `(pp_rank, pcp_rank, tp_rank)`, or
//! none: 404 if no engine has the role and the service, 503 with `{registered, expected}` while ranks are
//! missing. If several engines have them and the query names no engine, the one with the smallest id whose
//! replica is complete answers; for `modulo`, an engine with all replicas complete comes before those with
//! some.
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
//! let query = RankQuery { role: WorkerRole::Prefill, service: "kv".to_owned(), replica: Replica::Modulo(4711) };
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
mod client_addr;
mod config;
mod connection;
mod error;
mod expiry;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod gauges;
mod http;
#[doc(hidden)]
pub mod net {
    //! Sockets and names that do not block, for other crates of this library. Not a public API.
    pub use crate::client::resolve::{Resolved, Resolver, Target};
    pub use crate::socket::Socket;
}
mod place;
mod record;
mod registry;
mod routes;
#[cfg(test)]
mod samples;
mod secret;
mod server;
mod sglang;
mod socket;
mod watch;

pub use client::{HttpBootstrapClient, SglangQuery};
pub use client_addr::ClientAddr;
pub use config::{ClientConfig, RegistryConfig, ServerConfig, WatchConfig};
pub use error::{BootstrapClientError, BootstrapServerError};
pub use gauges::BootstrapGauges;
pub use record::{
    GrantJson, LeaseJson, NotFoundJson, NotReadyJson, OfferJson, RankJson, RankJsonError, TransportJson,
};
pub use registry::{LeaseError, LookupError, RegisterError, Registry};
pub use secret::{Secret, SecretError};
pub use server::KvBootstrapServer;
pub use sglang::{SGLANG_SERVICE, SglangRank, SglangRankError};
