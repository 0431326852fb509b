//! The core of kv-transfer: its vocabulary, its traits and its protocol.
//!
//! What it is: the words that every other crate is written in ([`KvArgs`], [`KvPoll`], [`Room`],
//! [`Pages`], [`TransferError`] …), the traits that servers program against ([`KvManager`],
//! [`KvSender`], [`KvReceiver`]), the traits that transports and bootstrap clients implement
//! ([`Transport`], [`BootstrapClient`]), the trait of a service's machine ([`machine::Machine`]),
//! the arithmetic from pages to descriptors ([`layout`], [`plan`]), the frames on the wire
//! ([`wire`]), the protocol machine of the KV cache ([`proto::Node`]), and the events by which a
//! machine tells what happens in it ([`trace`]).
//!
//! What it is not: this crate does no I/O, starts no thread, reads no clock, draws no global
//! randomness and contains no `unsafe`. The same seed and the same order of inputs always give the
//! same outputs; the simulator relies on that. The crate `kv-poll` runs the machine on a thread,
//! over a transport such as that of `kv-local`.
//!
//! `docs/GLOSSARY.md` of the repository says in one sentence what each word means, and what SGLang,
//! vLLM and NIXL call the same thing.
//!
//! A server depends on `kv-transfer`, which re-exports this crate: at its root what is stable, in its
//! module `unstable` the rest. Stable are the vocabulary and the traits that servers program against,
//! [`layout`], [`trace`], and of [`proto`] the settings ([`Timing`](proto::Timing),
//! [`Limits`](proto::Limits), [`Spoken`](proto::Spoken)). **Unstable** are [`machine`], [`plan`], [`wire`],
//! the rest of [`proto`], and the contracts of transports and bootstrap clients ([`Transport`],
//! [`BootstrapClient`], [`RankRecord`] and the types in them): a release of any kind may change these.
//!
//! ```
//! use kv_core::proto::{Command, Input, Node, NodeConfig, Output};
//! use kv_core::{Incarnation, KvArgs, KvPoll, Region, RegionRole, Room, SessionId, Time};
//!
//! // A cache of 64 pages of 16 tokens; one K and one V region.
//! let args = KvArgs::builder("prefill-0", 0)
//!     .pages(64, 16)
//!     .region(Region::dram(RegionRole::Kv, 0x10_0000, 64 * 4096, 4096).layer(0))
//!     .region(Region::dram(RegionRole::Kv, 0x20_0000, 64 * 4096, 4096).layer(0))
//!     .build()?;
//! let mut node = Node::new(NodeConfig::new(args, Incarnation::from_random(1), "local", Default::default()));
//!
//! // A scheduler opens the sending half of request 42 …
//! let open = Command::OpenSender {
//!     session: SessionId(1), room: Room::Number(42), receivers: 1, options: Default::default(),
//! };
//! node.handle(Time::ZERO, Input::Command(open));
//! let status = Output::Status { session: SessionId(1), poll: KvPoll::Bootstrapping, failure: None };
//! assert_eq!(node.poll_output(), Some(status));
//! // … and the machine says when the session must have ended.
//! assert!(node.next_timeout().is_some());
//! # Ok::<(), kv_core::ArgsError>(())
//! ```
#![forbid(unsafe_code)]

mod announce;
mod args;
mod asked;
mod bootstrap;
mod command;
mod content;
mod error;
#[doc(hidden)]
pub mod few;
mod groups;
mod growing;
#[doc(hidden)]
pub mod hash;
mod id;
#[doc(hidden)]
pub mod in_order;
mod kv_offer;
pub mod layout;
mod lease;
pub mod machine;
#[cfg(feature = "meter")]
pub mod meter;
#[cfg(not(feature = "meter"))]
mod meter;
mod names;
mod offer;
mod packed;
mod page_ledger;
mod page_list;
mod page_pool;
mod pages;
pub mod plan;
mod poll;
pub mod proto;
mod quarantine;
#[doc(hidden)]
pub mod random;
mod record;
mod remote_request;
mod session;
mod session_options;
mod time;
pub mod trace;
mod transport;
pub mod wire;

pub use announce::{FinalLayers, LayersError, ReadyEvent, ReadyEventError, ReadyWord};
pub use args::{KvArgs, KvArgsBuilder};
pub use asked::{Asked, ContentRequest, Service};
pub use bootstrap::{BootstrapClient, BootstrapEvent, BootstrapServer, LookupId, RankQuery, Replica};
pub use content::{ContentHash, MAX_CONTENT_HASH};
pub use error::{
    ArgsError, Backpressure, BootstrapError, Cause, IdError, Mismatch, Obstacle, OpenError, OsError,
    PagesError, PeerCause, Phase, Recovery, TransferError,
};
pub use groups::{
    CacheGroupItems, CacheGroupList, CacheGroupLists, CacheGroupRefused, CacheGroupSpan,
    MAX_REQUEST_CACHE_GROUPS, RequestCacheGroups, RequestCacheGroupsError,
};
pub use id::{
    Attempt, AuxIndex, ChunkId, EngineId, Incarnation, MAX_ENGINE_ID, MAX_REQUEST_ID, PeerId, PostId,
    RequestId, Room, SessionId, WorkerId,
};
pub use kv_offer::{KV_SERVICE, KV_VERSIONS, KvDataError};
pub use layout::{
    Axis, CacheGroup, Geometry, Holds, Layout, MAX_REGIONS, MemoryKind, Parallel, Region, RegionRole,
    RegionShape,
};
pub use lease::{DECODER_KV_BLOCKS_TTL, KV_LEASE_DURATION, Lease, LeaseRef, TransferMode, UnknownMode};
pub use offer::{Chosen, OfferError, Wanted};
pub use page_ledger::AdoptError;
pub use page_list::{MAX_PAGES, PageList, PageRun};
pub use page_pool::{PagePool, ReleaseError};
pub use pages::Pages;
pub use poll::KvPoll;
pub use quarantine::{Quarantine, QuarantineReason};
pub use record::{
    MAX_NAME, MAX_OFFER_BYTES, MAX_OFFERS, RankRecord, RecordError, ServiceOffer, TRANSPORT_VERSION,
    TransportOffer, WorkerRole,
};
pub use remote_request::RemoteRequest;
pub use session::{KvManager, KvReceiver, KvSender, KvSession, Reclaimed};
pub use session_options::SessionOptions;
pub use time::Time;
pub use transport::{
    Descriptor, Directions, MAX_FRAME, Op, Origin, Post, Transport, TransportError, TransportEvent,
    TransportWait, WayEnd, WriteFence,
};
