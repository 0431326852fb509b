//! The rendezvous of prefill and decode workers: a registry of ranks, an HTTP/1.1 server around it,
//! and a client that never blocks.
//!
//! It is **not** a web framework and not a service directory for a cluster. It keeps everything in
//! memory; ranks register again by themselves after a restart of the server.
//!
//! # The record of a rank
//!
//! A worker registers its transports and its *offers*: for each service (a KV cache, an encoder cache, a
//! foreign dialect) the versions it speaks, a compatibility text, and data. The server filters by role and
//! service. Metadata and data are opaque to the server: the service's machine at the other end matches
//! them. All ranks of an engine offer the same services.
//!
//! # Why there is no HTTP library
//!
//! `httparse` reads the heads of messages; the rest is about 400 lines of this crate. What the server
//! promises needs control that the libraries keep to themselves: every byte of an unfinished request counts
//! against its client (429, 503), a client that is slow is told so (408) at a deadline of its own, a client
//! that is still sending gets its refusal before the connection closes, and neither a line nor a trailer
//! is unbounded or read twice. The client lives inside a worker's thread and owns no other.
//!
//! | library | why not |
//! |---|---|
//! | hyper 1 | runs without a runtime, but links tokio and ten more crates; its read buffer cannot be counted, a slow head ends without an answer, and whatever is wrong with a head is 400; its client does not pipeline |
//! | tiny_http, rouille | a thread for each connection, without deadlines or a bound on connections |
//! | ureq, attohttpc, minreq | block: a thread for each server that a worker talks to |
//! | ureq-proto | no I/O of its own, but made for ureq: heads are parsed anew, and chunk lines searched anew, for each piece that arrives; trailers have no bound |
//!
//! # Who can do what
//!
//! Whoever can reach the port can, unless [`ServerConfig::secret`] is set, **read** every record with
//! its transport metadata, which is what a decode worker needs to reach a prefill worker (whether it
//! suffices to be let in there is the transport's affair), **register** ranks of any name, and **replace
//! or withdraw** those of others, since records carry the incarnation that this takes. So listen on a
//! loopback address, as the examples do, or on a network of its own. With a secret, `/v1/ranks` asks for
//! `Authorization: Bearer …` (401 otherwise); workers show it if [`ClientConfig::secret`] has it. It
//! travels in clear text: it is no substitute for TLS.
//!
//! SGLang's routes know no credentials. Whoever can reach the port can redirect SGLang's decode
//! workers to another prefill rank; [`ServerConfig::sglang`] switches these routes off.
//!
//! What is kept is counted in bytes and bounded, over all and for each client address: 429 when a
//! client's share is full, 507 when the server is. No registration of one client makes room at the
//! expense of another's. [`KvBootstrapServer::gauges`] tells how much there is.
//!
//! [`KvBootstrapServer`] speaks two protocols side by side, with separate tables:
//!
//! - SGLang's (`/route`, `/register_dp_rank`, `/query_dp_ranks`, `/health`), so that engines of
//!   SGLang 0.5.23 find each other through it unchanged. Readiness counts distinct ranks. SGLang's
//!   ranks register once, so that their entries end by replacement (or by a lease, if a registration
//!   carries the additional field `lease_ttl_s`): a rank that comes again at another port takes with
//!   it what its host had registered before the rank's former registration. While the new life is incomplete, the last
//!   complete set of ranks is answered. One engine is served at a time.
//! - Its own (`/v1/ranks`): [`RankJson`] records with leases, incarnations and offers, used
//!   by [`HttpBootstrapClient`].
//!
//! ```text
//! curl -X PUT    host:8998/v1/ranks -d '{"worker":{"engine":"p","rank":0}, … ,"lease_ms":5000}'
//! curl -X POST   host:8998/v1/ranks/renew -d '{"worker":{…},"incarnation":7,"lease_ms":5000}'
//! curl -X DELETE host:8998/v1/ranks -d '{"worker":{…},"incarnation":7}'
//! curl          'host:8998/v1/ranks?role=prefill&modulo=4711'     # or dp_rank=0; &service=kv, &engine=p
//! ```
//!
//! A replica is answered whole, in the order of `(pp_rank, pcp_rank, tp_rank)`, or not at all: 404 if no
//! engine serves the role with the service, 503 with `{registered, expected}` while ranks are missing. If
//! several engines do and the query names none, the complete one with the smallest id answers; for
//! `modulo`, one with all replicas complete comes before those with some.
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

pub use client::HttpBootstrapClient;
pub use client_addr::ClientAddr;
pub use config::{ClientConfig, RegistryConfig, ServerConfig};
pub use error::{BootstrapClientError, BootstrapServerError};
pub use gauges::BootstrapGauges;
pub use record::{GrantJson, LeaseJson, NotReadyJson, OfferJson, RankJson, RankJsonError, TransportJson};
pub use registry::{LeaseError, LookupError, RegisterError, Registry};
pub use secret::{Secret, SecretError};
pub use server::KvBootstrapServer;
