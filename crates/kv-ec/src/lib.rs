//! The encoder cache: embeddings of images and other media by the hash of their content.
#![forbid(unsafe_code)]

mod cache;
mod compatibility;
pub mod params;
mod region;
mod store;

pub use cache::{
    Absent, CacheGauges, EncoderCache, Eviction, Pin, Reservation, ReserveError, Shape, UnknownEviction,
};
pub use compatibility::Compatibility;
pub use region::{EcRegion, RegionError};
pub use store::{EntryGuard, SharedStore};
