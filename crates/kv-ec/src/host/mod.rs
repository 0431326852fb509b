//! One region for all ranks of a host: the process that owns the region serves a Unix socket, and ranks map the
//! region, reserve blocks, commit entries, pin and unpin through the socket.
//!
//! ```text
//! process that owns the region                       ranks of the same host, one connection each
//! EcRegion ── SharedStore ── HostServer ◀─ socket ─▶ HostClient ── HostReservation, HostPin
//!     ▲                                                  │ maps
//!     └────────── one memory file, passed as a descriptor ┘
//! ```
//!
//! Who may connect: processes of the same user, which the kernel names. The server's first message names the
//! version, the size of the region and the compatibility hash, and passes the descriptor of the memory file.
//! Then a rank sends numbered requests, and the server answers each with one message.
//!
//! # When a rank ends
//!
//! A pin lives no longer than its connection: reading blocks that were reused harms nobody but the reader,
//! which has given up its pin. A reservation that is not committed lives until it is discarded, or until the
//! rank's *process* has ended: blocks that are being written must not be given to another entry, and a rank
//! that closed its connection can still write. The kernel reports the end of a process after it has torn down
//! the memory and closed all files of the process, those of device drivers included, so that neither its
//! threads nor its devices write any more.
//!
//! # Bounds
//!
//! The server holds at most one request and one unsent answer for each connection, and reads no further request
//! while an answer is unsent: a rank that does not read its answers waits for itself, and for nobody else. A
//! turn serves a bounded number of requests of each connection. Connections, and reservations and pins of each
//! connection, have limits ([`HostConfig`]); a request beyond them is refused. A message that is no request ends
//! the connection.
//!
//! Waiting for an entry that is being fetched is not the server's concern: [`pin`](HostClient::pin) of such an
//! entry is refused at once with [`Absent::NotReady`](crate::Absent::NotReady).
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
//! // Another rank reads it.
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
