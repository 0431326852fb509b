//! The libfabric transport: moves KV pages over libfabric's providers ([`FabricTransport`]).
//!
//! A worker puts its pages into a [`HostMemory`], an [`Arena`], or memory of its own that the transport
//! [adopts](FabricTransport::adopt). The regions that lie there are registered with libfabric, and peers write and read
//! them: with the network card where the provider has one (`efa`, `verbs;ofi_rxm`, `cxi`), over sockets with
//! `tcp;ofi_rxm`. Frames are messages of the same endpoint.
//!
//! libfabric is found and loaded at run time ([`FabricConfig::library`]); nothing of the environment is changed. The build
//! needs libfabric's headers, which `scripts/setup-fabric.sh` unpacks without root. Run and tested is `tcp;ofi_rxm` of
//! libfabric 1.17. The other providers go the same way through this crate, with the memory modes that they ask for,
//! but were not run. `shm` is refused, because it crashes a process whose peer is killed.
//!
//! # Writes are counted where they arrive
//!
//! Each slice of a post is one write of libfabric, which ends here when its bytes are in the peer's memory
//! (`FI_DELIVERY_COMPLETE`). The notify frame of a post is sent ahead, with the number of the post's writes. Each
//! write carries a number of the post to the peer's completion queue (`FI_REMOTE_CQ_DATA`), and the peer gives the frame
//! to its owner when that many have arrived, by whatever devices. So no message has to follow the writes, and their order
//! does not matter.
//! Where the provider's writes carry less than eight bytes of data, the notify frame is sent when all writes have ended
//! ([`FabricTransport::counts_writes`]).
//!
//! # The end of a peer
//!
//! With `tcp;ofi_rxm`, libfabric reports nothing when a peer without operations under way is killed, and opens the
//! connection again when something is sent.
//!
//! - The process of a peer on this host is watched (kv-host's `Life`). When it has ended, bytes of its writes may still
//!   lie in sockets of this process. So this side begins a write of one byte, which nobody can answer: libfabric cancels
//!   that write once it has read the connection up to its end. With several devices this is done on every connection that
//!   the peer may have had. Then the peer is reported [dead](kv_core::WayEnd::Dead), and quiet at once.
//!   A process that has inherited the sockets of the dead peer (libfabric opens them without close-on-exec) keeps such a
//!   connection open: then the peer's end is not told until that process ends, too. So a worker closes all descriptors
//!   between `fork` and `exec`.
//! - A peer of which nothing was heard for [`FabricConfig::silence`], nor in four looks afterwards, which greet it (so a
//!   quarter later at the latest, while this side polls), is [lost](kv_core::WayEnd::Lost); so is a peer to which an
//!   operation has failed. Nothing is proven about a process of another host.
//! - A transport that is dropped sends the frames that it has taken, for 0.4 s at most. Then it takes as long at most to say
//!   farewell to each peer in whose memory none of its writes and reads is under way: that is proof, too.
//!
//! libfabric refuses a peer another connection while it takes the last one for open (`FI_EALREADY`). When a link was cut and
//! the kernel of one end only has given the connection up, that could last for ever: the other end has nothing to send. So
//! the sockets of connections get the kernel's keepalive, a second after their first use: such an end is found within
//! [`FabricConfig::silence`] after the link is mended. The keepalive ends no connection to a process that is only stopped,
//! and none with bytes under way; what is under way to an end that is gone ends when the kernel sends it again.
//!
//! Posts to a peer end before its end is reported. Slices that are under way to a host that is gone end when the kernel
//! gives their connection up (some fifteen minutes): libfabric cannot be told to close one connection of an endpoint.
//!
//! # What is promised about writes
//!
//! A slice is begun only while the permission to write lasts, and while slices to this peer take no longer than the rest
//! of the permission. Once begun, nothing can call it back: with `tcp;ofi_rxm` its bytes are copied by the peer's
//! process, whenever that process looks. The write fence is therefore [`AtDeath`](kv_core::WriteFence::AtDeath).
//!
//! # Several devices
//!
//! A transport has an endpoint on each of [`FabricConfig::devices`], and a region is registered with all of them. Messages
//! go by the first device; slices go by all. Each device is paired with one of the peer's, which may have more or fewer:
//! with one of its own NUMA node if it can, else by their positions. A slice goes by one pair, whose devices are beside the
//! memory here and there if that is known, and then by the one with the fewest bytes under way. Each pair has a window of
//! its own, and the peer counts writes over all its devices. [`Installed::nearest`] has the devices nearest to a GPU.
//!
//! A device other than the first is used for slices to a peer while something was heard from the peer on it in the last
//! second; otherwise the peer is asked first. So a device whose link is down, or that does not lead to the peer at all, gets
//! no more slices, and the other devices go on. Slices that are under way there wait, and so do the ends of their posts:
//! they are not sent again by another device, because their bytes may have arrived, or may still arrive. When the kernel
//! gives such a connection up, the peer is lost, as with one device; connected again, it is reached by the devices that
//! work. Without the link of the first device, the peer is not reached.
//!
//! # The end of a transport
//!
//! libfabric 1.17 crashes if it closes a connection of `tcp;ofi_rxm` by which half of a peer's write has come, or half of
//! the answer to a read, as on a link that is cut. So a transport that is dropped first shuts the sockets of its connections
//! down, and lets libfabric read what is in them, up to their ends: then there is nothing left to close. The sockets are
//! found by `/proc`. If it is not there, or they do not end within five seconds, the endpoint stays open until the process
//! ends.
//!
//! libfabric closes such a connection by itself if another process connects from the address and port of the peer: so the
//! crash is still possible when a host that was cut off in the middle of a write is replaced by one that has both. It
//! also closes such connections by itself where the variable `FI_AV_REMOVE_CLEANUP` is set. So that variable must not be
//! set.
//!
//! # Whom to trust
//!
//! libfabric has no authentication, and trusts the messages of its own protocol. A peer is known by 128 random bits of its
//! metadata, and each way to it by a key that only its two ends know; so a restarted peer is another peer,
//! and frames of another process are never taken for a peer's. But who has the metadata of a worker can write and read its
//! regions, and can write there with another peer's numbers. The network is trusted.
//!
//! What this crate is not: encrypted; a protocol (the content of frames is opaque); for device memory, which
//! kv-nixl and kv-ucx move.
//!
//! ```
//! use kv_core::{Descriptor, Op, PeerId, Transport, TransportEvent, Post, PostId, Region, RegionRole, Time};
//! use kv_fabric::{FabricConfig, FabricTransport, HostMemory};
//!
//! fn worker(memory: &HostMemory) -> Result<FabricTransport, Box<dyn std::error::Error>> {
//!     // A real worker names the address of an interface that other hosts reach.
//!     let mut transport = FabricTransport::new(FabricConfig::new("127.0.0.1".parse()?))?;
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
compile_error!("kv-fabric needs Linux: epoll, pidfd and CLOCK_BOOTTIME");

mod addresses;
mod completing;
mod config;
mod contract;
mod device;
mod ending;
mod error;
mod farewell;
mod ffi;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod given;
mod guest;
mod hearing;
mod incoming;
mod installed;
mod lane;
mod message;
mod metadata;
#[cfg(test)]
mod pair;
mod pairing;
#[cfg(feature = "raw")]
#[doc(hidden)]
pub mod raw;
mod sending;
mod silence;
mod slicing;
mod topology;
mod transfer;
mod transport;
mod watch;
mod way;

pub use config::{FabricConfig, FabricDevice, MAX_DEVICES};
pub use device::DeviceStats;
pub use error::FabricError;
pub use installed::{Installed, installed};
pub use kv_host::{Arena, HostMemory, Limit, Memory, MemoryError, OsError};
pub use transport::{FabricStats, FabricTransport};
