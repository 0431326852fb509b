//! One region for all ranks of a host: the process that owns the region serves a Unix socket. Through the
//! socket, ranks map the region, reserve blocks, commit entries, and pin and unpin entries.
//!
//! ```text
//! process that owns the region                       ranks of the same host, one connection each
//! EcRegion ── SharedStore ── HostServer ◀─ socket ─▶ HostClient ── HostReservation, HostPin
//!     ▲                                                  │ maps
//!     └────────── one memory file, passed as a descriptor ┘
//! ```
//!
//! Only processes of the same user may connect; the kernel tells the server the user. The server's first message
//! has the version of the protocol, the size of the region and the compatibility hash, and carries the
//! descriptor of the memory file. Then a rank sends numbered requests, and the server answers each with one
//! message.
//!
//! # When a rank ends
//!
//! A pin ends with its connection, at the latest: a rank that reads without a pin may read the bytes of another
//! entry, and is told so by [`HostPin::read`]. A reservation that is not committed lasts until the rank discards the
//! reservation, or until the rank's *process* has ended: a rank that has closed its connection can still write
//! into the blocks, so no other entry may have them. The kernel reports the end of a process after the memory of
//! the process is unmapped and all of its files are closed, those of device drivers included, so neither the
//! threads nor the devices of the process write any more.
//!
//! # Bounds
//!
//! The server holds at most one request and one unsent answer for each connection, and reads no further request
//! while an answer is unsent: a rank that does not read its answers delays no other rank. A turn of the server
//! serves a bounded number of requests of each connection. [`HostConfig`] limits the number of connections, and
//! the number of reservations and pins of each connection; a request beyond a limit is refused. A message that
//! cannot be decoded ends the connection.
//!
//! The server never waits for an entry: [`pin`](HostClient::pin) of an entry that is not committed yet is
//! refused at once with [`Absent::NotReady`](crate::Absent::NotReady).
//!
//! ```
//! use std::time::Duration;
//! use kv_core::ContentHash;
//! use kv_ec::{EcRegion, EncoderCache, Eviction, SharedStore};
//! use kv_ec::host::{HostAddress, HostClient, HostConfig, HostServer};
//!
//! // The process that owns the region.
//! let region = EcRegion::create(64, 4096)?;
//! let store = SharedStore::new(EncoderCache::new(64, 4096, Eviction::Lru));
//! let address: HostAddress = format!("@kv-ec-doc-{}", std::process::id()).parse()?;
//! let server = HostServer::bind(&address, &region, &store, HostConfig::default())?.spawn()?;
//!
//! // A rank writes an entry, and the worker of the other process finds it.
//! let rank = HostClient::connect(&address, "", Duration::from_secs(10))?;
//! let image = ContentHash::new("3f9a")?;
//! let reservation = rank.reserve(&image, 10_000)?;
//! reservation.write(0, &[7; 10_000])?;
//! reservation.commit()?;
//! assert_eq!(store.contains(&image), Some(true));
//!
//! // Another rank reads the entry.
//! let other = HostClient::connect(&address, "", Duration::from_secs(10))?;
//! let pin = other.pin(&image)?;
//! let mut end = [0; 2];
//! pin.read(9_998, &mut end)?;
//! assert_eq!(end, [7, 7]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod address;
mod client;
mod connection;
mod error;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod message;
mod server;
#[cfg(test)]
mod tests;
mod thread;
mod watch;

pub use address::HostAddress;
pub use client::{HostClient, HostPin, HostReservation};
pub use error::{HostError, Refusal};
pub use server::{HostConfig, HostGauges, HostServer};
pub use thread::HostThread;
