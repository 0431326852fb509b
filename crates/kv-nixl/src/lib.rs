//! The NIXL transport: moves KV pages with NVIDIA NIXL (UCX: RDMA, copies between processes, TCP, NVLink).
//!
//! A [`NixlTransport`] is one NIXL agent. A worker puts its pages into a [`HostMemory`], or lets the
//! transport [adopt](NixlTransport::adopt) memory that the server owns. Regions of that memory are registered
//! with NIXL, and connected peers read and write the regions one-sidedly. Frames are NIXL notifications; most of
//! those to peers of the same host are datagrams beside NIXL. The project's glossary, `docs/GLOSSARY.md`, says what
//! SGLang and vLLM call these things.
//!
//! # Why it is written the way it is
//!
//! - NIXL is loaded at run time ([`Nixl::load`]): a program that never uses this transport runs without NIXL,
//!   and a program that uses the transport is told what is missing ([`DiscoveryError`]).
//! - UCX reads its settings when it starts, and some defaults harm a long-running server. [`guards`] lists
//!   the settings that are made unless the user has set them, with or without other threads;
//!   [`Nixl::warnings`] names settings that could not be made.
//! - There is no progress thread. The owner's thread polls: often while something is expected of NIXL, seldom
//!   otherwise.
//! - UCX may do a whole copy inside the call that posts the copy. Posts are therefore cut into slices of
//!   [`NixlConfig::slice_time`] at the measured speed, and posts take turns; short posts to the same peer share a
//!   request.
//! - Between processes of one host, UCX copies pages by the kernel, but sends notifications over TCP. That costs tens of
//!   microseconds at each end; and UCX calls a copy over only when the peer has confirmed the notifications before the
//!   copy. So frames to a peer of this host, and confirmations of frames, are datagrams of a Unix socket, which also wake
//!   the peer. What one turn has to say to a peer goes together. By NIXL goes what the peer's queue has no room for, what
//!   is longer than a datagram (16 KiB), and what tries a connection out or proves something: probes and farewells.
//!   An empty datagram wakes the peer of a short copy before the copy begins, because a processor takes as long to wake.
//!   Datagrams do not show that the connection has broken. So a read of no bytes tries out each connection on which nothing
//!   goes by NIXL once a second (more than 64 take longer). Where both ends have an RDMA card, or the backend is not UCX,
//!   all frames go by NIXL, and a datagram of one byte, a ring, wakes the peer.
//! - UCX can send notifications by shared memory, too, if `UCX_POSIX_ERROR_HANDLING=y` or its like allows that. A server
//!   must not allow it: all local senders share a receiver's one queue, and a sender that is killed in the middle of a
//!   notification stops the queue for all of them for good. In a trial that killed senders which sent without a pause,
//!   it took 13, 1, 54 and 7 kills.
//! - Descriptors of single items (pages, or layers' shares of pages) are named by their numbers in lists that
//!   NIXL prepares when a peer is connected. Preparing is one call, in which no heartbeat is answered, so
//!   only caches of at most [`NixlConfig::prepared_items`] have lists. The binding has no strided lists.
//! - A request that is given up goes on writing. So a cancelled post ends when its last request in flight has
//!   ended.
//! - A request that NIXL calls failed may go on writing as well: NIXL looks at the last descriptor of the
//!   request only, and at none once another request has failed. So a post to a peer whose connection has
//!   failed ends when the peer's process is seen dead, or when UCX has closed the connection and
//!   [`NixlConfig::settle`] has passed.
//! - A write waits until its peer permits the write, and CLOCK_BOOTTIME is read before each slice.
//! - Whatever route UCX chooses, a processor copies or at least posts the bytes, and goes on after a stop
//!   where it was before. So only a peer's proven death ends the danger of the peer's writes, unless the
//!   owner says otherwise of RDMA ([`NixlConfig::rdma_bound`]).
//! - UCX's sockets stay open in processes that the server starts, unless these close what they inherit. A
//!   process that outlives its worker in this way keeps the worker's TCP connections, and peers on other hosts
//!   may not see the worker's end. So a worker closes all descriptors between `fork` and `exec`.
//! - Agents of other programs, such as vLLM's and SGLang's workers, can be peers too ([`foreign`]).
//!
//! # Where things are
//!
//! A [`NixlTransport`] is one object. A file of the crate adds the methods of one idea to the transport, or
//! holds a value or a rule that stands alone; `transport/mod.rs` says which file calls which.
//!
//! ```text
//! transport/       the transport's fields (mod), the Transport trait (contract), how long to sleep (pace)
//! foreign/         agents of other programs: their metadata, their regions, connections to them
//! notifications/   frames and raw notifications: sending, receiving, their form, how many may wait
//! transfers/       posts: cut into slices, whose turn is next, what is under way, how posts end
//! connections/     peers' agents: opened by a transport's metadata, closed when no memory is touched
//! regions/         where regions are, lists of their items that NIXL prepares, files
//! agent/           the NIXL agent: the calls of nixl-sys that are made, and the agent's name
//! library/         finding and loading NIXL, and the settings that UCX should have
//! ffi/             everything unsafe
//! config, error
//! ```
//!
//! The crate does not use NIXL's etcd, NIXL's telemetry, or NIXL's object stores, and its agent has no
//! listener for metadata: the bootstrap server carries metadata.
//!
//! ```no_run
//! use kv_core::{Descriptor, Op, PeerId, Transport, Post, PostId, Region, RegionRole, Time};
//! use kv_nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};
//!
//! # let metadata_of_the_peer = Vec::new();
//! let nixl = Nixl::load(&Search::default())?;
//! for warning in nixl.warnings() {
//!     eprintln!("{warning}");
//! }
//!
//! let memory = HostMemory::new(64 << 20)?;
//! let mut transport = NixlTransport::new(&nixl, NixlConfig::default())?;
//! transport.add_memory(&memory)?;
//! transport.register(&Region::dram(RegionRole::Kv, memory.addr(), 64 << 20, 1 << 20))?;
//!
//! transport.connect(PeerId(1), &metadata_of_the_peer)?;
//! // The peer has said that writes may begin; until then, writes wait.
//! transport.permit(PeerId(1), Time::MAX);
//! let page = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 1 << 20 };
//! transport.post(PeerId(1), Post { id: PostId(1), op: Op::Write, descriptors: vec![page], notify: None })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("kv-nixl needs Linux: NIXL does");

mod agent;
mod config;
mod connections;
mod error;
mod ffi;
pub mod foreign;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod library;
mod notifications;
mod regions;
mod transfers;
mod transport;

#[cfg(test)]
mod testing;

pub use config::NixlConfig;
pub use connections::route::Route;
pub use error::{DiscoveryError, NixlError};
pub use foreign::error::ForeignError;
pub use foreign::region::ForeignRegion;
pub use kv_host::{HostMemory, Limit, Memory, MemoryError, OsError};
pub use library::discovery::Nixl;
pub use library::guards;
pub use library::looked::{Looked, Outcome};
pub use library::places::Search;
pub use library::warnings::{NotSet, SettingWarning};
pub use notifications::inbox::RawNotification;
pub use transport::{NixlStats, NixlTransport};
