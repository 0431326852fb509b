//! The encoder cache: embeddings of images and other media by the hash of their content.
#![forbid(unsafe_code)]

mod cache;
mod compatibility;
mod connector;
mod machine;
pub mod params;
mod region;
mod store;
mod worker;

pub use cache::{
    Absent, CacheGauges, EncoderCache, Eviction, Pin, Reservation, ReserveError, Shape, UnknownEviction,
};
pub use compatibility::Compatibility;
pub use connector::{Availability, EcConnector, EcGauges, Fetch, FetchFailure, NotSaved, SaveError};
pub use machine::{
    Command, EC_SERVICE, EcError, EcMachine, EcMachineGauges, EcPoll, MachineConfig, Resource, Want,
};
pub use region::{EcRegion, RegionError};
pub use store::{EntryGuard, SharedStore};
pub use worker::{EcConfig, EcStartError, EcWorker};
