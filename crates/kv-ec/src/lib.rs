//! The encoder cache: embeddings of images and other media by the hash of their content.
#![forbid(unsafe_code)]

mod cache;
mod store;

pub use cache::{
    Absent, CacheGauges, EncoderCache, Eviction, Pin, Reservation, ReserveError, Shape, UnknownEviction,
};
pub use store::{EntryGuard, SharedStore};
