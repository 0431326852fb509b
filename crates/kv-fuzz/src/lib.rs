//! Fuzz targets: plain functions of bytes that panic if a promise is broken.
//!
//! | target | bytes are |
//! |---|---|
//! | `wire` | a frame between two nodes |
//! | `machine` | a script: commands, frames of several peers, ends of posts, lookups, time; see [`machine`] |
//! | `http_requests`, `http_responses`, `rank_record` | what a bootstrap server and its client read |
//! | `local_metadata`, `local_hello`, `local_messages` | what the embedded transport reads |
//! | `nixl_metadata`, `nixl_notification`, `nixl_agent` | what the NIXL transport reads (feature `nixl`) |
//! | `params` | transfer parameters that a router carries |
//!
//! Two things run them: cargo-fuzz, guided by coverage, from the directory `fuzz` at the root of the
//! repository; and the tests of this crate on a stable toolchain, which mutate the corpus of
//! `fuzz/corpus` with a printed seed ([`driver`]).
//!
//! The machine's costs are counted: steps of loops over what others decide the length of, bytes that are
//! allocated, bytes that come out. After every input they are held against the bytes of that input and
//! what the worker's own scheduler has asked for ([`machine::Budget`]).
//!
//! What it is not: a model of two workers that talk to each other. That is `kv-sim`.

pub mod alloc;
mod decoders;
pub mod driver;
pub mod machine;
pub mod worst;

pub use decoders::*;

/// A target: its name, and the function.
pub type Target = (&'static str, fn(&[u8]));

/// All decoders.
pub const DECODERS: &[Target] = &[
    ("wire", wire),
    ("http_requests", http_requests),
    ("http_responses", http_responses),
    ("rank_record", rank_record),
    ("local_metadata", local_metadata),
    ("local_hello", local_hello),
    ("local_messages", local_messages),
    #[cfg(feature = "nixl")]
    ("nixl_metadata", nixl_metadata),
    #[cfg(feature = "nixl")]
    ("nixl_notification", nixl_notification),
    #[cfg(feature = "nixl")]
    ("nixl_agent", nixl_agent),
    ("params", params),
];
