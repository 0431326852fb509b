//! The transport of one host: moves KV pages between processes of one Linux host, without a native library
//! ([`LocalTransport`]).
//!
//! A worker puts its pages into an [`Arena`], a sealed memory file. When two workers connect, each
//! maps the other's arenas, and a write or read is one plain copy by the side that posts it. Memory
//! that a server already owns can be [adopted](LocalTransport::adopt) instead; peers reach it with
//! `process_vm_readv` and `process_vm_writev`. Frames travel on the Unix stream socket that also
//! carried the arenas.
//!
//! All work is done in [`poll`](kv_core::Transport::poll), on the thread that owns the transport, a fraction
//! of a millisecond at a time. Posts take turns, so a small post overtakes a large one, and the memory of a
//! cancelled post is free at once. With several connections, the processor time that the frames of each
//! connection take is counted, up to the owner's call of [`wait`](kv_core::Transport::wait), and a connection
//! that takes too much is not read for a while: its socket fills, and its sender waits.
//!
//! A write waits for the peer's permission ([`permit`](kv_core::Transport::permit)). The peer can revoke the
//! right to write at any moment, and the writes then end with an error
//! ([`WriteFence::Revocable`](kv_core::WriteFence)): the two sides of a connection share a page with one word
//! for this.
//!
//! What this crate is not: a transport for other hosts or for device memory; a protocol (the content of
//! frames is opaque); a guard against processes of the same user, which could read this process' memory
//! anyway. Processes of other users are refused.
//!
//! After a `fork` the child must not use the transport: the child does not have the mappings of peers'
//! memory.
//!
//! ```
//! use kv_core::{Descriptor, Op, PeerId, Transport, TransportEvent, Post, PostId, Region, RegionRole, Time};
//! use kv_local::{Arena, LocalConfig, LocalTransport};
//!
//! fn worker(arena: &Arena) -> Result<LocalTransport, Box<dyn std::error::Error>> {
//!     let mut transport = LocalTransport::new(LocalConfig::default())?;
//!     transport.add_arena(arena)?;
//!     transport.register(&Region::dram(RegionRole::Kv, arena.addr(), arena.len() as u64, 4096))?;
//!     Ok(transport)
//! }
//!
//! let (here, there) = (Arena::new(1 << 20)?, Arena::new(1 << 20)?);
//! let (mut prefill, mut decode) = (worker(&here)?, worker(&there)?);
//! here.write(0, b"keys and values")?;
//!
//! let peer = PeerId(1);
//! prefill.connect(peer, &decode.metadata()?)?;
//! // Writes wait until the peer allows them.
//! prefill.permit(peer, Time::MAX);
//! let page = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 4096, len: 4096 };
//! prefill.post(peer, Post { id: PostId(1), op: Op::Write, descriptors: vec![page], notify: None })?;
//!
//! let mut events = Vec::new();
//! while events.is_empty() {
//!     decode.poll(Time::ZERO, &mut Vec::new());
//!     prefill.poll(Time::ZERO, &mut events);
//! }
//! assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
//! let mut page = [0; 15];
//! there.read(4096, &mut page)?;
//! assert_eq!(&page, b"keys and values");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("kv-local needs Linux: memory files, seals, pidfds and process_vm_*");

mod adopt;
mod config;
mod connection;
mod contract;
mod copying;
mod error;
mod framing;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod given;
mod handshake;
mod inbound;
mod link;
mod links;
mod metadata;
mod outbound;
mod pacing;
mod posts;
mod presence;
mod remote;
mod revoking;
mod right;
mod space;
mod sys;
mod table;
mod transfer;
mod transport;
mod watch;

pub use config::LocalConfig;
pub use error::LocalError;
pub use kv_host::{Arena, Limit, Memory, MemoryError, MemoryFile, OsError};
pub use transport::{LocalStats, LocalTransport};
