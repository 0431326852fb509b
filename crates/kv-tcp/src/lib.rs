//! The TCP transport: moves KV pages between hosts with nothing installed ([`TcpTransport`]).
//!
//! A worker puts its pages into a [`HostMemory`], an [`Arena`], or memory of its own that the transport
//! [adopts](TcpTransport::adopt). Peers write and read the regions that lie there. To the owner these are
//! one-sided operations. In truth the peer's transport takes part in each: its thread puts the pages of a write
//! into their places, and sends the pages of a read. So a worker moves bytes for its peers only while its
//! thread polls.
//!
//! Without TLS, pages go from the memory of one side into the memory of the other without a copy in user space
//! (`sendmsg` gathers them from the regions, and `recvmsg` scatters them into the regions). A way to a peer is
//! one connection for frames and one or more for pages. All of them are dialed by the side that has
//! connected the peer; a peer that has connected this side has connections of its own.
//!
//! # Slices and their time
//!
//! A post is cut into slices, and posts take turns slice by slice. The receiving side answers each slice. A
//! post succeeds when all its slices are answered, and its notify frame is delivered when all its bytes are in
//! place, whatever connections they took.
//!
//! Bytes wait in the buffers of sockets, and nothing can call them back. So every slice says until when it may
//! touch memory, by the clock of the receiving host. That is the end of the permission to
//! write, and at most [`TcpConfig::slice_time`] from now. The receiving thread reads its clock before each
//! piece, and throws away what comes too late. The slice is then sent again, if the permission allows it. Each
//! answer bounds the difference of the two clocks, and the sending side assumes the smallest difference that the
//! answers leave possible. So no slice lives too long, and one may end too early by the time that a message travels.
//!
//! What follows from that:
//!
//! - No byte of a write lands after the permission to write has ended.
//! - A post that was cancelled, or whose peer was lost, ends when its slices are answered or their time is over,
//!   even if the peer's process is stopped. Its memory is quiet then, on both sides.
//! - The write fence is [`Revocable`](kv_core::WriteFence::Revocable), and is closed at once: this side's thread
//!   does all the copying of a peer's writes, and [`revoke`](kv_core::Transport::revoke) tells it to throw them away.
//!
//! # The end of a peer
//!
//! The kernel of a process that ends closes its connections. This side then dials the peer's addresses again.
//! If nothing listens there, or another transport does, the peer is [dead](kv_core::WayEnd::Dead): its
//! listening socket has ended with it, and everything that had come from it is thrown away. If the peer
//! answers, or nothing answers, the way is [lost](kv_core::WayEnd::Lost), as it is when the peer's host has
//! been silent for [`TcpConfig::silence`].
//!
//! # What a network without encryption can prove
//!
//! A transport has a name of 128 random bits, its incarnation, which is part of its metadata. Both sides of
//! every connection say whom they take the other for and who they are, each with a hash of its metadata.
//!
//! - A transport that answers at an address of the metadata, with the name and the hash of the metadata, is
//!   taken for the peer. A restarted peer on the same port has another name, and is another peer.
//! - A process that dials is taken for the transport that it says it is. It has proven that it knows this
//!   transport's metadata, and nothing else. [`may_speak_for`](kv_core::Transport::may_speak_for) says no more. What this
//!   side sends to a peer goes to the addresses of the metadata, never to whoever has dialed.
//!
//! So the network is trusted: who has the metadata of a worker can read and write its registered regions,
//! and who can see or change packets can do the same. Bind to an address of a network that only the workers of
//! the service reach. A stranger who does not have the metadata costs one connection of a bounded number, for
//! a bounded time, and the memory of one greeting.
//!
//! # TLS
//!
//! With the feature `tls` and `TcpConfig::tls`, every connection is encrypted, with certificates on both sides,
//! and greetings travel encrypted, too. Nobody who lacks a key that the service's authority has certified reads,
//! changes or sends a byte. Among the workers of the service nothing is different: each of them is trusted as
//! above. A stranger then costs the memory and the time of a handshake, which are bounded as well.
//!
//! A stream that ends without TLS's `close_notify` is not believed to be complete. The way has ended then as it does
//! when a connection is cut: the peer is dead if nothing listens at its addresses any more, and lost otherwise.
//! Whether a transport has TLS is in its metadata: one with TLS and one without refuse to connect to each other.
//!
//! Pages are copied once on each side, between their regions and the records that are encrypted.
//!
//! What this crate is not: a protocol, because the content of frames is opaque to it; a transport for a device's
//! memory.
//!
//! ```
//! use kv_core::{Descriptor, Op, PeerId, Transport, TransportEvent, Post, PostId, Region, RegionRole, Time};
//! use kv_tcp::{HostMemory, TcpConfig, TcpTransport};
//!
//! fn worker(memory: &HostMemory) -> Result<TcpTransport, Box<dyn std::error::Error>> {
//!     // A real worker binds to an address by which other hosts reach it.
//!     let mut transport = TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse()?))?;
//!     transport.add_memory(memory)?;
//!     transport.register(&Region::dram(RegionRole::Kv, memory.addr(), memory.len() as u64, 4096))?;
//!     Ok(transport)
//! }
//!
//! let (here, there) = (HostMemory::new(1 << 20)?, HostMemory::new(1 << 20)?);
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
compile_error!("kv-tcp needs Linux: epoll and CLOCK_BOOTTIME");

mod adopt;
mod answers;
mod config;
mod connection;
mod contract;
mod dialing;
mod ending;
mod error;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod given;
mod guest;
mod hello;
mod inbound;
mod listening;
mod message;
mod metadata;
mod outbound;
mod peer_clock;
#[cfg(test)]
mod scripted;
mod serving;
mod slicing;
mod socket;
mod sockets;
mod sys;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "tls/absent.rs"]
mod tls;
mod transfer;
mod transport;
mod watch;
mod way;

pub use config::TcpConfig;
pub use error::TcpError;
pub use kv_host::{Arena, HostMemory, Limit, Memory, MemoryError, OsError};
#[cfg(feature = "tls")]
pub use tls::{Tls, TlsError};
pub use transport::{TcpStats, TcpTransport};
