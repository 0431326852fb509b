//! Worlds of the encoder cache: producers that save entries, and consumers that fetch them by the hash of
//! their content, with the real machine ([`kv_ec::EcMachine`]) and the real cache over real bytes.
//!
//! ```text
//! params.rs    what a seed decides                  service.rs   the interface to the network
//! boot.rs      one life of one host                 workload.rs  what encoders and schedulers do
//! ledger.rs    what is known from outside           oracle.rs    what must be true
//! books.rs     who has which block                  planted.rs   bugs that the oracle must find
//! rounds.rs    what a healed world must do          drains.rs    what must be true of hosts that drain
//! stats.rs     counts
//! ```
//!
//! Contents are made from the hash of their entry, so that the oracle knows what every committed entry must
//! hold, whichever way its bytes came. Blocks are overwritten in the moment in which they become free.

mod books;
mod boot;
mod drains;
pub(crate) mod ledger;
mod oracle;
pub(crate) mod params;
mod planted;
mod rounds;
pub(crate) mod service;
pub(crate) mod stats;
pub(crate) mod workload;

pub(crate) use planted::provoke;
