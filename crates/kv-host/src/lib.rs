//! What the transports on a Linux host share: memory that peers may reach, file descriptors passed over
//! sockets, proof of a process's death, the host's clock, and the checks that every transport makes.
//!
//! | module or type | what a transport gets from it |
//! |---|---|
//! | [`Arena`], [`HostMemory`] | memory to register: a sealed memory file that peers can map; private memory on huge pages |
//! | [`Memory`], [`Mapping`], [`MemoryFile`] | ranges, mappings and files; the private module `sys` below them holds every `unsafe` block of this crate |
//! | [`descriptors`] | file descriptors that travel in a message of a Unix socket |
//! | [`Host`], [`ProcessIdentity`], [`Process`], [`Life`] | which process a peer is, and whether that process has ended |
//! | [`clock`] | the clock in which leases and permissions to write are measured |
//! | [`check`] | bounds of frames, data-operation descriptors, limits and address ranges |
//! | [`Parked`] | notify frames that wait for room behind their posts |
//! | [`Posts`] | the posts that have not ended, of transports with a way to each peer, and the events for the owner |
//! | [`Turns`] | of which of these posts the next slice to a peer is |
//! | [`Timers`] | when each way is looked at again |
//! | [`wake`] | when a peer is woken before a copy, and how long it stays awake |
//! | [`Latency`] | how long the next slice to a peer is expected to take |
//! | [`metadata`] | the form of the metadata that peers are given |
//! | [`Frozen`] | metadata that is made once, and after which memory and regions cannot change |
//! | [`check_owner`] | whether another user could have put a library where it was found |
//! | [`printed`] | what a C library prints, as text |
//! | [`random()`] | tokens and names that nobody can guess |
//!
//! What this crate is not: a transport. The crate opens no connection, knows no peer's memory layout and no
//! message format, and starts no thread. Of this workspace it depends on kv-core only.
//!
//! Crates that are no transports of KV take single parts of it. The worker (kv-poll) reads [`clock`], because the worker
//! and its transport must read the same clock, and kv-core reads none by design. The simulated transport (kv-sim) uses
//! [`check`], so that it refuses what a real transport refuses. The encoder cache (kv-ec) keeps its region in a memory
//! file, and watches the processes of its ranks. The foreign dialects (kv-interop) use [`clock`] and [`random()`].
//!
//! ```
//! use std::io::IoSlice;
//! use std::os::fd::AsFd;
//! use std::os::unix::net::UnixStream;
//!
//! use kv_host::{Arena, MemoryFile, descriptors};
//!
//! // One process allocates memory and sends the descriptor of its file.
//! let arena = Arena::new(1 << 20)?;
//! arena.write(4096, b"keys and values")?;
//! let (ours, theirs) = UnixStream::pair()?;
//! descriptors::send(ours.as_fd(), &[IoSlice::new(b"!")], &[arena.file().as_fd()])?;
//!
//! // The other process takes the descriptor, sees that the file cannot shrink, and maps it.
//! let (mut byte, mut lent) = ([0; 1], Vec::new());
//! descriptors::receive(theirs.as_fd(), &mut byte, &mut lent, 1)?;
//! let file = MemoryFile::received(lent.remove(0)).ok_or("no sealed memory file")?;
//! let mapped = file.memory()?;
//! let mut page = [0; 15];
//! mapped.read(4096, &mut page)?;
//! assert_eq!(&page, b"keys and values");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("kv-host needs Linux: memory files, seals and process descriptors");

mod arena;
pub mod check;
pub mod clock;
pub mod descriptors;
mod error;
mod file;
mod frozen;
mod host_memory;
mod identity;
mod latency;
pub mod metadata;
mod owner;
mod parked;
mod posts;
mod process;
mod random;
mod sys;
mod timers;
mod token;
mod turns;
pub mod wake;

pub use arena::Arena;
pub use error::{Limit, MemoryError, OsError, OwnerError, PeerError};
pub use file::MemoryFile;
pub use frozen::Frozen;
pub use host_memory::HostMemory;
pub use identity::{Host, Life, ProcessIdentity, Proof};
pub use latency::Latency;
pub use owner::check_owner;
pub use parked::Parked;
pub use posts::{OfWay, Posts, TransferId};
pub use process::{Process, check_user};
pub use random::random;
pub use sys::{Mapping, Memory, printed};
pub use timers::Timers;
pub use token::Token;
pub use turns::Turns;
