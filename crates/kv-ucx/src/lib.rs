//! The UCX transport: moves KV pages between workers with UCX alone ([`UcxTransport`]).
//!
//! A transport is one UCX context and one UCX worker, which one thread drives. A worker of the service puts its pages
//! into a [`HostMemory`], an [`Arena`], or memory of its own that the transport [adopts](UcxTransport::adopt_regions).
//! Peers write the regions that lie there (`ucp_put_nbx`), and read them where that is safe (`ucp_get_nbx`). Frames are
//! active messages. UCX chooses the way to a peer among those that both have: RDMA cards, TCP, or copies within a host by
//! the kernel or by a GPU.
//!
//! # Why it is written the way it is
//!
//! - UCX is loaded at run time ([`Ucx::load`]): a program that never uses this transport runs without UCX, and one that
//!   uses it is told what is missing ([`LoadError`]). The build needs UCX's headers, and libclang.
//! - A process has one copy of UCX, and NIXL brings its own copy. Where both may be wanted, load NIXL first:
//!   [`Ucx::load`] is then refused, and the program goes on without this transport. NIXL does not look whether UCX is
//!   loaded, so never load NIXL after UCX.
//! - UCX's settings are given to it by calls, so that other threads may run. UCX's environment variables count, too.
//! - One setting is for the operator to make, in the environment: `UCX_MEM_MMAP_HOOK_MODE=none`, which UCX reads while it
//!   is being loaded. Otherwise UCX overwrites the code of `mmap`, `munmap` and their like, which takes half a second, and
//!   which other threads may be running. The transport does not need that, because its memory stays mapped.
//! - GPU memory of two processes of one host: a WRITE is a copy by the GPU, through a handle that CUDA makes for memory of
//!   `cuMemAlloc`, not for memory of `cuMemAllocAsync`. A READ is such a copy, too, if all memory of both sides is GPU memory
//!   and `UCX_CUDA_IPC_ENABLE_GET_ZCOPY` is `on`, as this transport sets it. Between GPU memory and host memory of one host
//!   UCX uses TCP. Such a WRITE is refused unless [`UcxConfig::gpu_over_tcp`] is set: UCX has the peer's processor put the
//!   bytes in place, at some 0.5 GB/s (measured with UCX 1.22 on one H200), and a writer that dies may take down the peer.
//! - UCX writes its log to the standard error here, not to the standard output, unless `UCX_LOG_FILE` says otherwise.
//! - There is no progress thread. The owner's thread polls, and sleeps on one descriptor that UCX makes readable.
//! - A post is cut into slices, which take turns. A slice is a list of puts and a flush after them, whose end says that
//!   the bytes are in place at the peer. The notify frame is sent when the last slice's flush has ended.
//! - A write waits until its peer permits it, and CLOCK_BOOTTIME is read before each slice. What UCX has been given
//!   cannot be called back: it writes when it can, and goes on after a stop where it was. So a cancelled post ends when
//!   its slices have ended, and the write fence is [`AtDeath`](kv_core::WriteFence::AtDeath).
//! - READ over TCP is refused ([`Directions::WRITE`](kv_core::Directions::WRITE)), unless
//!   [`UcxConfig::reads_over_tcp`] is set: UCX serves such a READ by software, and of 100 readers that were killed in the
//!   middle, three took down the process that they read from (UCX 1.22). Of 20 killed writers none did.
//!
//! # The end of a peer
//!
//! UCX says when a connection has failed, and the kernel says when a process of this host has ended. A peer is
//! [dead](kv_core::WayEnd::Dead) only if its process has ended on this host, in this network namespace, or if its
//! transport has said farewell. A transport that is dropped starts no more slices, and takes a second and a tenth at most
//! for those under way, for the frames that it has accepted, and until its peers have taken these. It says farewell to each
//! peer to which nothing of it is under way. (UCX may take half a second more to close its connections.)
//!
//! What a dead process has left in its sockets may still arrive, and UCX would put it in place. So a death, also one
//! that a farewell has told, is reported once every TCP connection of this process whose other end has no process any
//! more has been read to its end. A thread looks for such connections in `/proc`, at pauses that grow to 100 ms, while
//! a peer that has died waits to be told. UCX does not say which connections are its own, so those of other libraries
//! count, too. A death is not told while this process leaves bytes unread that a process of this host may have sent: on
//! a connection that was reset, of which the kernel does not say where it led to, or on one to a mapped port of this
//! host, behind which a process of another network namespace is. Nor is it told where `/proc` cannot be read.
//!
//! Otherwise the way is [lost](kv_core::WayEnd::Lost): at once if nothing was under way, or else after
//! [`UcxConfig::settle`], by when what was under way has arrived or never will. A peer on another host that does not
//! answer is noticed, over TCP, by the kernel: half a minute after the last bytes if all have arrived
//! (`UCX_TCP_KEEPIDLE`), and otherwise when the kernel gives up sending them again (`net.ipv4.tcp_retries2`), some
//! fifteen minutes later by its default. Until then, posts that were under way do not end.
//!
//! UCX may end the endpoint of one side only. The peer's endpoint then goes on, but UCX drops what the peer sends by it, or
//! a part of that. So this side tells the peer that the way has ended, by the next endpoint that it opens to the peer; it
//! opens one for this when a frame of an ended session comes. The message holds a secret that the peer has given, so that
//! nobody else can end the way. The peer then reports the way as lost, and can connect again. Without the message, UCX would
//! find out after some `UCX_KEEPALIVE_INTERVAL` (20 s).
//!
//! # What a network without encryption can prove
//!
//! A transport has a name: 128 random bits, its incarnation, and the address of its UCX worker. Metadata carry the
//! name. A way begins with a hello, which says who asks for whom, with a hash of the metadata asked for. The answer, with
//! a secret of the session and the keys of the memory, goes to the address in the asking transport's name. So a frame
//! comes from the worker of its [origin](kv_core::Transport::may_speak_for)'s name, and a restarted worker is another
//! peer.
//!
//! UCX itself believes what comes over the network: over TCP, who reaches a worker's port can write into its process, and
//! can end it. Metadata of peers hold addresses and keys that only UCX can read, and UCX does not expect them to be
//! damaged. So the network and the bootstrap server are trusted; let UCX listen on devices of a network that only the
//! workers of the service reach ([`UcxConfig::devices`]).
//!
//! UCX's sockets stay open in processes that the worker's process starts, unless these close what they inherit. Suppose
//! that such a child lives on when its worker dies. The child keeps the worker's connections, so they do not look like
//! connections whose other end has no process. The worker's peers then do not wait for what is left in these connections:
//! they report the worker as dead at once, and its last bytes may arrive after that, in pages that have been given back. So
//! a worker must start no process that keeps its sockets: close all descriptors between `fork` and `exec` (`close_range`;
//! `close_fds` in Python, where it is the default), and do not fork without `exec`.
//!
//! What this crate is not: encrypted; a protocol, because the content of frames is opaque to it. Between host memory
//! of one host use kv-local: this transport refuses READ there, too, because a part of what UCX sends within a host goes over
//! TCP.
//!
//! ```no_run
//! use kv_core::{Descriptor, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport};
//! use kv_ucx::{HostMemory, Ucx, UcxConfig, UcxTransport};
//!
//! # let metadata_of_the_peer = Vec::new();
//! let ucx = Ucx::load(None)?;
//! let memory = HostMemory::new(64 << 20)?;
//! let config = UcxConfig::default().with(|config| config.devices = vec!["mlx5_0:1".to_owned()]);
//! let mut transport = UcxTransport::new(ucx, config)?;
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
compile_error!("kv-ucx needs Linux: epoll, process descriptors and CLOCK_BOOTTIME");

mod adopt;
mod config;
mod contract;
mod ending;
mod error;
mod farewell;
mod ffi;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod given;
mod library;
mod message;
mod metadata;
mod opening;
mod parted;
mod quiet;
#[cfg(feature = "raw")]
#[doc(hidden)]
pub mod raw;
mod remote;
mod scans;
mod serving;
mod slicing;
mod sockets;
mod transfer;
mod transport;
mod watch;
mod way;

pub use config::UcxConfig;
pub use error::{LoadError, UcxError};
pub use kv_host::{Arena, HostMemory, Limit, Memory, MemoryError, OsError};
pub use library::Ucx;
pub use transport::{UcxStats, UcxTransport};
