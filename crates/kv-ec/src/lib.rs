//! The encoder cache: an encode worker computes the embedding of an image or another medium once, and prefill
//! workers fetch the embedding by the hash of its content.
//!
//! ```text
//! encode worker (producer)                                prefill worker (consumer)
//!   reserve → write → save                                  ensure_cache_available(want)
//!        │                                                     │ here: pinned at once
//!        ▼                                                     ▼ not here: a session, polled
//!   cache ◀── EcMachine ◀── XferReq{attempt, hash, …} ──── EcMachine ──▶ cache
//!   pins the entry   │                                         ▲        blocks reserved, then committed
//!                    └── WRITE, or lease and READ ─────────────┘
//! ```
//!
//! | part | what it is |
//! |---|---|
//! | [`EcRegion`] | the memory of a host's entries, in blocks; one process owns and registers it, all ranks map it |
//! | [`EncoderCache`], [`SharedStore`] | which entry has which blocks, which entries are in use, which entries are evicted first |
//! | [`EcMachine`] | answers peers and fetches from peers; sans-IO, on the protocol machine of the KV cache |
//! | [`EcWorker`], [`EcConnector`], [`Request`] | a thread that runs the machine, and what a server calls |
//! | [`Compatibility`] | a hash over everything that changes an embedding |
//! | [`params`] | `ec_transfer_params`, by which routers tell consumers where entries are |
//!
//! What this crate is not: an encoder, or a second protocol. Peers are met, bytes are moved, leases are
//! kept, and blocks of lost peers are quarantined by `kv-core`, as for the KV cache. vLLM's own wire for
//! encoder caches is not spoken. `docs/GLOSSARY.md` of the repository explains the words (entry, block, reservation, pin).
//!
//! # What the caller can rely on
//!
//! - An entry that is [`Ready`](EcPoll::Ready) has the bytes that were saved under its hash, and keeps these
//!   bytes while its [`EntryGuard`] lives.
//! - A block is given to another entry only when no data operation can write into the block, and no reader relies
//!   on what is read from the block. Entries that are being filled, sent to a peer, or read are never evicted.
//! - Every fetch ends within its budget: with the entry, or with an error that names the reason. After an
//!   error the caller encodes the item locally.
//! - Sessions of one worker that want the same entry share one transfer.
//! - Requests that do not fit the cache together have their entries one after the other, in the order in which they
//!   were made: a [`Request`] takes room for all of its entries at once, or has none.
//!
//! ```
//! use kv_bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
//! use kv_ec::{ContentHash, EcConfig, EcRegion, EcWorker, RequestPoll, Want};
//! use kv_local::{LocalConfig, LocalTransport};
//!
//! /// A worker with a region of 64 blocks of 4096 bytes, over kv-local.
//! fn start(config: EcConfig) -> Result<EcWorker, Box<dyn std::error::Error>> {
//!     let region = EcRegion::create(64, 4096)?;
//!     let mut transport = LocalTransport::new(LocalConfig::default())?;
//!     transport.add_arena(region.arena().ok_or("this process made the region")?)?;
//!     let client = Box::new(HttpBootstrapClient::new(ClientConfig::default())?);
//!     Ok(EcWorker::start(config, &region, transport, client)?)
//! }
//!
//! let server = KvBootstrapServer::start("127.0.0.1:0")?;
//! let addr = server.local_addr().to_string();
//! let encoder = start(EcConfig::new("encoder", "model v1").with(|config| config.publish = Some(addr.clone())))?;
//! let prefill = start(EcConfig::new("prefill", "model v1"))?;
//!
//! // The encode worker saves an embedding.
//! let (image, embedding) = (ContentHash::new("3f9a")?, vec![7; 10_000]);
//! let connector = encoder.connector();
//! let reservation = connector.reserve(&image, 10_000)?;
//! connector.write(&reservation, 0, &embedding)?;
//! connector.save(reservation)?;
//!
//! // The prefill worker's scheduler defers a request until its entries are here.
//! let connector = prefill.connector();
//! let mut request = connector.request([Want::new(image, 10_000, addr)])?;
//! while request.poll() == RequestPoll::Deferred {
//!     std::thread::yield_now(); // other work
//! }
//! assert_eq!(request.missing().count(), 0, "{:?}", request.missing().next());
//! let mut bytes = vec![0; 10_000];
//! for (_, entry) in request.entries() {
//!     connector.read(entry, 0, &mut bytes)?;
//! }
//! assert_eq!(bytes, embedding);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod awaiting;
mod cache;
mod claims;
mod compatibility;
mod connector;
pub mod host;
mod machine;
pub mod params;
mod region;
mod request;
mod room;
mod store;
mod traffic;
mod worker;

pub use awaiting::{FetchUntil, RequestFinished};
#[cfg(feature = "model")]
pub use cache::CommittedEntry;
pub use cache::{
    Absent, CacheGauges, EncoderCache, Eviction, Pin, Reservation, ReserveError, Shape, UnknownEviction,
};
pub use compatibility::Compatibility;
pub use connector::{
    Availability, EcConnector, EcGauges, EcPollSet, EcPort, Fetch, FetchFailure, NotSaved, SaveError,
};
pub use kv_core::ContentHash;
pub use kv_poll::worker::StopReport;
pub use machine::{
    Command, EC_SERVICE, EcError, EcMachine, EcMachineGauges, EcPoll, MachineConfig, Resource, Want,
};
pub use region::{EcRegion, RegionError};
pub use request::{FillError, NotFilled, Request, RequestPoll};
pub use store::{EntryGuard, SharedStore};
pub use traffic::Traffic;
pub use worker::{EcConfig, EcDraining, EcStartError, EcStopping, EcWorker};
