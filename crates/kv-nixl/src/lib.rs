//! The NIXL transport: moves KV pages with NVIDIA NIXL (UCX: RDMA, shared memory, TCP, NVLink).
//!
//! A [`NixlTransport`] is one NIXL agent. A worker puts its pages into a [`HostPool`], or lets the transport
//! [adopt](NixlTransport::adopt) memory that its server owns; regions of it are registered with NIXL, and
//! connected peers read and write them one-sidedly. Frames are NIXL notifications.
//!
//! # Why it is written the way it is
//!
//! - NIXL is loaded at run time ([`Nixl::load`]): a program that never uses this transport runs without
//!   it, and one that does is told what is missing ([`DiscoveryError`]).
//! - UCX reads its settings from the environment when it starts; some defaults harm a long-running
//!   server. [`guards`] sets those that the user did not set.
//! - There is no progress thread. The owner's thread polls, closely while something is expected and
//!   seldom otherwise.
//! - UCX may do a whole copy inside the call that posts it. Posts are therefore cut into slices of
//!   about a millisecond, at the speed that is measured, and posts take turns; short ones to the same
//!   peer share a request.
//! - Descriptors of single items (pages, or layers' pieces of them) are named by their numbers in lists
//!   that NIXL prepares when a peer is connected. That is one call, in which no heartbeat is answered, so
//!   only caches of at most [`NixlConfig::prepared_items`] have lists; the binding has no strided ones.
//! - A request that is given up goes on writing. So a cancelled post ends when its last request in
//!   flight has ended.
//! - A request that NIXL calls failed may go on writing as well: NIXL looks at the last of its
//!   pieces only, and at none once another request has failed. So a post to a peer whose connection
//!   has failed ends when the peer's process is seen dead, or when UCX has closed the connection and
//!   [`NixlConfig::settle`] has passed.
//! - A write waits until its peer permits it, and CLOCK_BOOTTIME is read before each slice.
//! - Whatever UCX chooses, some processor copies or at least posts the bytes, and goes on where it was
//!   after a stop. So nothing but a peer's proven death ends the danger of its writes, unless the
//!   owner says otherwise of RDMA ([`NixlConfig::rdma_bound`]).
//!
//! - Agents of other programs, such as vLLM's and SGLang's workers, can be peers too ([`foreign`]).
//!
//! # Where things are
//!
//! A [`NixlTransport`] is one object. A file of the crate adds the methods of one idea to it, or is a value or a
//! rule that stands alone; `transport/mod.rs` says which file calls which.
//!
//! ```text
//! transport/           the transport: what it has (mod), the Transport trait (contract), when its owner may sleep (pace)
//! foreign/         agents of other programs: their metadata, their regions, the way to them
//! notifications/   frames and raw notifications: out, in, how they look, how many may wait
//! transfers/       posts: cut into slices, whose turn it is, what is under way, how it ends
//! connections/     peers' agents: opened by a transport's metadata, closed when nothing touches memory any more
//! regions/         where regions are, lists of their items that NIXL prepares, files
//! agent/           the NIXL agent: what of nixl-sys is called, and the agent's name
//! library/         finding and loading NIXL, and the settings that UCX should have
//! ffi/             everything unsafe
//! config, error
//! ```
//!
//! What it is not: a way to use NIXL's etcd or listener metadata exchange (the bootstrap server
//! carries metadata), its telemetry, or its object stores.
//!
//! ```no_run
//! use kv_core::{Desc, Op, PeerId, Transport, Post, PostId, Region, RegionRole, Time};
//! use kv_nixl::{HostPool, Nixl, NixlConfig, NixlTransport, Search};
//!
//! # let metadata_of_the_peer = Vec::new();
//! // First thing in `main`, before other threads run.
//! let nixl = Nixl::load(&Search::default())?;
//!
//! let pool = HostPool::new(64 << 20)?;
//! let mut transport = NixlTransport::new(&nixl, NixlConfig::default())?;
//! transport.add_pool(&pool)?;
//! transport.register(&Region::dram(RegionRole::Kv, pool.addr(), 64 << 20, 1 << 20))?;
//!
//! transport.connect(PeerId(1), &metadata_of_the_peer)?;
//! // The peer has said so; until then, writes wait.
//! transport.permit(PeerId(1), Time::MAX);
//! let page = Desc { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 1 << 20 };
//! transport.post(PeerId(1), Post { id: PostId(1), op: Op::Write, descs: vec![page], notify: None })?;
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
pub use kv_host::{HostPool, Limit, MemoryError, OsError};
pub use library::discovery::{Nixl, Search};
pub use library::guards;
pub use library::looked::{Looked, Outcome};
pub use library::warnings::{NotSet, SettingWarning};
pub use notifications::inbox::RawNotification;
pub use transport::{NixlStats, NixlTransport};
