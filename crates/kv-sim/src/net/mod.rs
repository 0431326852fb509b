//! The virtual network: hosts, connections, frames, reads and writes, clocks and faults, for the machines of
//! any service.
//!
//! ```text
//! service.rs   the interface of a service                  world.rs   one world and its calendar
//! step.rs      one step of one machine                     host.rs    one life of one host
//! transport.rs     connections and frames                      posts.rs, slices.rs, ways.rs  reads and writes
//! chaos.rs     faults with a moment                        deaths.rs  how lives end
//! lookups.rs   bootstrap servers                           rig.rs     the worker's own loop
//! ```
//!
//! A service brings its machine, its memory, its workload and its invariants ([`Service`]). The network knows
//! nothing else of the service, and the service nothing of the network.

pub(crate) mod calendar;
mod chaos;
pub(crate) mod cost;
mod deaths;
pub(crate) mod drains;
pub(crate) mod fact;
pub(crate) mod flight;
pub(crate) mod host;
pub(crate) mod lives;
mod lookups;
pub(crate) mod memory;
pub(crate) mod params;
mod posts;
mod rendezvous;
pub(crate) mod rig;
mod roads;
pub(crate) mod service;
mod slices;
pub(crate) mod stats;
mod step;
mod transport;
pub(crate) mod way;
mod ways;
pub(crate) mod world;

pub use cost::{Cost, Held};
pub use fact::{Effects, Fact};
pub use flight::Piece;
pub use host::Host;
pub use lives::{HoldId, LifeId, LifeRecord, Slot, TRANSPORT, metadata};
pub use memory::Memory;
pub use params::{ChaosParams, DmaParams, LookupParams, NetParams, Physics, WayParams};
pub use service::{FailureOf, InputOf, OutputOf, ResourceOf, Service, StatusOf};
pub use stats::NetCounters;
pub use world::{HostOf, Outcome, World};
