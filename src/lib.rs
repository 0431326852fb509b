//! Moves KV caches between the prefill, decode and encode workers of a disaggregated LLM service,
//! and tells their schedulers, through `poll()` calls that never block, when the bytes are there
//! and when the pages may be reused.
//!
//! What it is: one crate to depend on, which re-exports what a server needs of the layers below, and adds
//! [`params`], a [`prelude`], and a [`cookbook`] of recipes. What it is not: an inference engine, or a router.
//! The crate knows pages but no tensors, and knows a request only by its room.
//!
//! | layer | crate | holds |
//! |---|---|---|
//! | scheduler | [`queue`], [`allocator`], [`consensus`] (kv-poll) | the queues of prefill and decode, page allocators, agreement of ranks |
//! | sessions | [`Worker`], [`PollSet`] (kv-poll) | one thread per rank, status cells, bounded rings |
//! | protocol | [`unstable`] (kv-core) | the sans-IO machine, frames, pages → descriptors |
//! | transport | [`local`] (kv-local) | one-sided copies between processes of one host |
//! | transport | [`tcp`] (kv-tcp) | pages and frames between hosts, with nothing installed |
//! | transport | `nixl` (kv-nixl; feature `nixl`) | NVIDIA NIXL: RDMA, shared memory, TCP, NVLink |
//! | transport | `ucx` (kv-ucx; feature `ucx`) | UCX without NIXL: RDMA, TCP |
//! | transport | `fabric` (kv-fabric; feature `fabric`) | libfabric's providers: TCP; EFA, RDMA and Slingshot, which were not run |
//! | transport | [`ways`] (kv-ways) | several of these as one: each peer by the best that leads to it |
//! | rendezvous | [`bootstrap`] (kv-bootstrap) | HTTP registry of ranks, server and client |
//! | encoder cache | `encoder_cache` (kv-ec; feature `encoder-cache`) | embeddings by content hash: region, worker, connector |
//! | dialects | `interop` (kv-interop; feature `interop`) | workers that speak vLLM's or SGLang's protocol to unmodified engines |
//! | observation | `observe` (kv-observe; feature `observe`) | requests as spans of `tracing` and numbers of `metrics` |
//! | observation | `timeline` (kv-timeline; feature `timeline`) | a picture of every request, from records of both sides |
//! | routers | [`params`] | the JSON that carries a request from one side to the other |
//!
//! # Features
//!
//! None is on by default. `docs/OPERATING.md` lists what each needs to build and to run.
//!
//! | feature | adds |
//! |---|---|
//! | `tls` | encryption of the TCP transport: `TcpConfig::tls` |
//! | `nixl`, `ucx`, `fabric` | the modules of these names: transports over libraries that are loaded when a program asks for them, so that one that is missing is an error of that call. `nixl` and `ucx` may be built together. Load NIXL first: `Ucx::load` is then refused. Never load NIXL after UCX |
//! | `interop` | the module `interop`; implies `nixl` |
//! | `encoder-cache` | the module `encoder_cache` |
//! | `observe`, `timeline` | the modules of these names |
//! | `tokio` | the module `tokio`: the readiness of a poll set as tokio's |
//!
//! # What is stable
//!
//! Everything but [`unstable`] keeps to semantic versioning: while the major version is 0, the minor
//! version is raised when a name goes or changes. [`unstable`] holds what transports, bootstrap clients and
//! further services are written with; a release of any kind may change it.
//!
//! Three rules keep servers compiling when something is added:
//!
//! - Enums and structs that will grow are `#[non_exhaustive]`. A `match` on such an enum has a `_` arm;
//!   such a struct is made by a constructor, never by its fields. An enum or struct without the attribute is
//!   complete by its meaning: the states of a session ([`KvPoll`]), the two forms of a [`Room`], the three
//!   [`TransferMode`]s, pairs such as [`PageRun`] and [`CacheGroupSpan`].
//! - Descriptions that are checked as a whole ([`KvArgs`], [`Region`], [`CacheGroup`]) are built by chained
//!   methods.
//! - Every struct of settings ([`SessionOptions`], [`WorkerConfig`], [`Timing`], [`Limits`], [`Layout`],
//!   [`ClientConfig`](bootstrap::ClientConfig), [`LocalConfig`](local::LocalConfig) …), and every struct that
//!   describes a request ([`Incoming`](queue::Incoming), [`RemoteKv`](params::RemoteKv) …), has public fields
//!   and no setters. Such a struct begins as `default()` or `new(…)`, and its fields are assigned: one by
//!   one, or in an expression by the method `with`.
//!
//! ```
//! use std::time::Duration;
//! use kv_transfer::{SessionOptions, TransferMode};
//!
//! let mut options = SessionOptions::default();
//! options.mode = Some(TransferMode::Pull);
//! let patient = options.with(|options| options.deadline = Some(Duration::from_secs(600)));
//! # assert_eq!(patient.mode, Some(TransferMode::Pull));
//! ```
//!
//! # A request, from prefill to decode
//!
//! Both workers run in one process here; in a service each is a process of its own, and nothing
//! else changes. The sessions are polled; an asynchronous server awaits them ([`AwaitSession`]), on any executor.
//!
//! ```
//! use std::time::Duration;
//! use kv_transfer::prelude::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server = KvBootstrapServer::start("127.0.0.1:0")?;
//! let addr = server.local_addr().to_string();
//!
//! // A cache of 8 pages of 4 KiB in shared memory, and a worker that serves it.
//! let start = |engine: &str, role| -> Result<(Worker, Arena), Box<dyn std::error::Error>> {
//!     let arena = Arena::new(8 * 4096)?;
//!     let args = KvArgs::builder(engine, 0)
//!         .pages(8, 16)
//!         .region(Region::dram(RegionRole::Kv, arena.addr(), 8 * 4096, 4096))
//!         .build()?;
//!     let mut transport = LocalTransport::new(LocalConfig::default())?;
//!     transport.add_arena(&arena)?;
//!     let client = HttpBootstrapClient::new(ClientConfig::default())?;
//!     let config = WorkerConfig::new(args, role).with(|config| config.bootstrap = Some(addr.clone()));
//!     Ok((Worker::start(config, transport, Box::new(client))?, arena))
//! };
//! let (prefill, prompt_cache) = start("prefill", WorkerRole::Prefill)?;
//! let (decode, cache) = start("decode", WorkerRole::Decode)?;
//! // Each side picks pages by itself. The pool of its cache makes sure that no page has two owners.
//! let (prompt_pages, pages) = (PagePool::new(8), PagePool::new(8));
//!
//! // The prefill side computes two pages, and sends them.
//! prompt_cache.write(3 * 4096, &[7; 2 * 4096])?;
//! let mut sender = prefill.manager().sender(&addr, Room::Number(42), &[], SessionOptions::default())?;
//! sender.init(2, None)?;
//! sender.send(prompt_pages.adopt(PageList::from_pages([3, 4])?)?)?;
//!
//! // The decode side gives two pages, and waits for the bytes.
//! let mut receiver = decode.manager().receiver(&addr, Room::Number(42), SessionOptions::default())?;
//! receiver.init(pages.adopt(PageList::from_pages([6, 0])?)?, None)?;
//! while !receiver.poll().is_terminal() {
//!     std::thread::sleep(Duration::from_millis(1)); // a server waits on the poll set's descriptor
//! }
//! assert_eq!(receiver.poll(), KvPoll::Success, "{:?}", receiver.failure());
//! let mut page = [0; 4096];
//! cache.read(6 * 4096, &mut page)?;
//! assert_eq!(page, [7; 4096]);
//!
//! // Each page is its scheduler's again as soon as no data operation can touch it. One table may hold
//! // sessions of any kind.
//! let open: [(Box<dyn KvSession>, &PagePool); 2] =
//!     [(Box::new(sender), &prompt_pages), (Box::new(receiver), &pages)];
//! for (mut session, pool) in open {
//!     let reclaimed = loop {
//!         if let Some(reclaimed) = session.reclaim() {
//!             break reclaimed;
//!         }
//!         std::thread::sleep(Duration::from_millis(1));
//!     };
//!     assert_eq!(pool.release(reclaimed.pages)?.len(), 2);
//! }
//! assert_eq!((pages.num_out(), prompt_pages.num_out()), (0, 0));
//! # prefill.stop(Duration::from_secs(1));
//! # decode.stop(Duration::from_secs(1));
//! # server.stop();
//! # Ok(())
//! # }
//! ```
//!
//! # Hybrid models
//!
//! A request may have more than KV pages: slots of recurrent (SSM) layers, the last pages of
//! sliding-window layers, the pages of a draft model. Regions of role [`State`](RegionRole::State) hold
//! them, in groups that both engines describe alike in their [`Layout`]. Each group has indices of its
//! own, and the worker owns the items of a request just as it owns the pages.
//!
//! ```
//! use std::time::Duration;
//! use kv_transfer::prelude::*;
//! use kv_transfer::{CacheGroup, CacheGroupItems, Layout, Reclaimed, RequestCacheGroups};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let server = KvBootstrapServer::start("127.0.0.1:0")?;
//! # let addr = server.local_addr().to_string();
//! const SLOTS: u16 = 0;
//! const WINDOW: u16 = 1;
//! // 8 pages of 4 KiB; 4 slots of 1 KiB; 6 pages of 512 bytes for the sliding-window layers.
//! let start = |engine: &str, role| -> Result<(Worker, Arena), Box<dyn std::error::Error>> {
//!     let arena = Arena::new(8 * 4096 + 4 * 1024 + 6 * 512)?;
//!     let (slots, window) = (arena.addr() + 8 * 4096, arena.addr() + 8 * 4096 + 4 * 1024);
//!     let args = KvArgs::builder(engine, 0)
//!         .pages(8, 16)
//!         .region(Region::dram(RegionRole::Kv, arena.addr(), 8 * 4096, 4096))
//!         .region(Region::dram(RegionRole::State, slots, 4 * 1024, 1024).group(SLOTS))
//!         .region(Region::dram(RegionRole::State, window, 6 * 512, 512).group(WINDOW))
//!         .layout(Layout::default().with(|layout| {
//!             layout.groups = vec![CacheGroup::slots(1, 1), CacheGroup::pages(16, 1, 1)];
//!         }))
//!         .build()?;
//!     // … a transport and a worker, as above.
//! #   let mut transport = LocalTransport::new(LocalConfig::default())?;
//! #   transport.add_arena(&arena)?;
//! #   let client = HttpBootstrapClient::new(ClientConfig::default())?;
//! #   let config = WorkerConfig::new(args, role).with(|config| config.bootstrap = Some(addr.clone()));
//! #   Ok((Worker::start(config, transport, Box::new(client))?, arena))
//! };
//! let (prefill, prompt_cache) = start("prefill", WorkerRole::Prefill)?;
//! let (decode, cache) = start("decode", WorkerRole::Decode)?;
//!
//! # let mint = |pool: &PagePool, pages: &[u32]| Ok::<_, Box<dyn std::error::Error>>(
//! #     pool.adopt(PageList::from_pages(pages.iter().copied())?)?);
//! // The pages of a cache and the items of each group have a pool of their own.
//! let [pages, slots, window] = [8, 4, 6].map(PagePool::new);
//! // A request of 5 pages: one slot, and of the window only the last two pages, numbers 3 and 4.
//! let mut sender = prefill.manager().sender(&addr, Room::Number(7), &[], SessionOptions::default())?;
//! sender.init(5, None)?;
//! sender.send(mint(&pages, &[0, 1, 2])?)?;
//! # prompt_cache.write(8 * 4096 + 2 * 1024, &[5; 1024])?;
//! let mut groups = RequestCacheGroups::none();
//! groups.push(CacheGroupItems::new(SLOTS, mint(&slots, &[2])?))?;
//! groups.push(CacheGroupItems::from_number(WINDOW, 3, mint(&window, &[1, 0])?))?;
//! sender.give_groups(groups)?; // before the last chunk, with which they must be final
//! sender.send(mint(&pages, &[3, 4])?)?;
//!
//! // The decode side names where they shall go, before its pages.
//! let [pages, slots, window] = [8, 4, 6].map(PagePool::new);
//! let mut receiver = decode.manager().receiver(&addr, Room::Number(7), SessionOptions::default())?;
//! let mut groups = RequestCacheGroups::none();
//! groups.push(CacheGroupItems::new(SLOTS, mint(&slots, &[0])?))?;
//! groups.push(CacheGroupItems::from_number(WINDOW, 3, mint(&window, &[4, 5])?))?;
//! receiver.give_groups(groups)?;
//! receiver.init(mint(&pages, &[7, 6, 5, 4, 3])?, None)?;
//! # while !receiver.poll().is_terminal() {
//! #     std::thread::sleep(Duration::from_millis(1));
//! # }
//! # assert_eq!(receiver.poll(), KvPoll::Success, "{:?}", receiver.failure());
//! // Success: pages, slot and window are in place, and all of them come back.
//! let Reclaimed { pages, mut groups, .. } = receiver.reclaim().ok_or("still in use")?;
//! let slot = groups.take(SLOTS).ok_or("no slot")?;
//! assert_eq!((pages.len(), slot.items.len(), groups.len()), (5, 1, 2));
//! # let mut bytes = [0; 1024];
//! # cache.read(8 * 4096, &mut bytes)?;
//! # assert_eq!(bytes, [5; 1024]);
//! # prefill.stop(Duration::from_secs(1));
//! # decode.stop(Duration::from_secs(1));
//! # server.stop();
//! # Ok(())
//! # }
//! ```

#[cfg(any(doc, doctest))]
#[doc = include_str!("../docs/COOKBOOK.md")]
pub mod cookbook {}
pub mod params;

// Workers, and how schedulers use them.
pub use kv_core::{
    AuxIndex, BootstrapServer, ChunkId, DECODER_KV_BLOCKS_TTL, FinalLayers, KV_LEASE_DURATION, KvManager,
    KvPoll, KvReceiver, KvSender, KvSession, Lease, LeaseRef, ReadyEvent, ReadyWord, Reclaimed,
    RemoteRequest, SessionOptions, TransferMode, WorkerRole,
};
#[cfg(feature = "tokio")]
pub use kv_poll::tokio;
pub use kv_poll::{
    AwaitSession, Change, Changes, CommandRoom, Draining, EngineChanges, EngineDraining, EngineGroup,
    EngineReceiver, EngineSender, EngineSession, Gauges, HeldBytes, Listener, Manager, PollSet, Publication,
    Receiver, Sender, Session, StopReport, Stopping, TakeBack, Until, Worker, WorkerConfig,
};
pub use kv_poll::{Receiving, Sending};
pub use kv_poll::{allocator, consensus, queue};

// Memory, and how pages lie in it.
pub use kv_core::layout;
pub use kv_core::{
    Axis, CacheGroup, Geometry, Holds, KvArgs, KvArgsBuilder, Layout, MAX_REGIONS, MemoryKind, Parallel,
    Region, RegionRole, RegionShape,
};

// Pages, and the items of cache groups.
pub use kv_core::{
    CacheGroupItems, CacheGroupRefused, MAX_PAGES, MAX_REQUEST_CACHE_GROUPS, PageList, PagePool, PageRun,
    Pages, RequestCacheGroups,
};

// Names of things, and times.
pub use kv_core::{
    Attempt, EngineId, Incarnation, LookupId, MAX_ENGINE_ID, MAX_REQUEST_ID, PeerId, PostId, RequestId, Room,
    SessionId, Time, WorkerId,
};

// Settings of the protocol.
pub use kv_core::proto::{Limits, Spoken, SpokenError, Timing};
pub use kv_core::wire::{VERSIONS, Versions};

// The names of what a server hands to a worker; writing one's own is unstable.
pub use kv_core::{BootstrapClient, CacheGroupSpan, Directions, Op, RecordError, Transport, WriteFence};

// What goes wrong, and what is told of a worker.
pub use kv_core::trace;
pub use kv_core::{
    AdoptError, ArgsError, Backpressure, BootstrapError, Cause, IdError, LayersError, Mismatch, Obstacle,
    OpenError, OsError, PagesError, PeerCause, Phase, Quarantine, QuarantineReason, ReadyEventError,
    Recovery, ReleaseError, RequestCacheGroupsError, TransferError, TransportError, UnknownMode,
};
pub use kv_poll::{EngineGroupError, StartError};

// Transports, and where ranks find each other.
pub use kv_bootstrap as bootstrap;
#[cfg(feature = "encoder-cache")]
pub use kv_ec as encoder_cache;
#[cfg(feature = "fabric")]
pub use kv_fabric as fabric;
#[cfg(feature = "interop")]
pub use kv_interop as interop;
pub use kv_local as local;
#[cfg(feature = "nixl")]
pub use kv_nixl as nixl;
#[cfg(feature = "observe")]
pub use kv_observe as observe;
pub use kv_tcp as tcp;
#[cfg(feature = "timeline")]
pub use kv_timeline as timeline;
#[cfg(feature = "ucx")]
pub use kv_ucx as ucx;
pub use kv_ways as ways;

pub mod unstable;

/// What a server needs that pushes KV between workers of one host: `use kv_transfer::prelude::*`.
///
/// Everything else is named by its module, or by the root of the crate.
pub mod prelude {
    pub use kv_bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
    pub use kv_core::{
        Backpressure, BootstrapServer, KvArgs, KvManager, KvPoll, KvReceiver, KvSender, KvSession, PageList,
        PagePool, Pages, Reclaimed, Recovery, Region, RegionRole, Room, SessionOptions, WorkerRole,
    };
    pub use kv_local::{Arena, LocalConfig, LocalTransport};
    pub use kv_poll::{AwaitSession, Worker, WorkerConfig};
}
