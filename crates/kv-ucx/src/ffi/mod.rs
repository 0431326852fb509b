//! Everything that calls UCX: the only unsafe code of the crate beside `adopt` and `sockets`.
//!
//! ```text
//! bindings    UCX's functions and types, made by bindgen when the crate is built
//! api         the loaded library
//! log         where the library writes its log
//! status      UCX's status codes as values
//! shared      what UCX's callbacks leave for the transport
//! flight      operations on their way
//! endpoint    one endpoint, with the keys of the peer's memory
//! engine      one context and one worker, with all of the above
//! ```
#![allow(unsafe_code)]

pub(crate) mod api;
pub(crate) mod bindings;
mod endpoint;
pub(crate) mod engine;
mod flight;
mod log;
mod shared;
pub(crate) mod status;
