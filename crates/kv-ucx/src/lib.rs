//! UCX directly.
#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("kv-ucx needs Linux: epoll, process descriptors and CLOCK_BOOTTIME");

mod adopt;
mod config;
mod contract;
mod ending;
mod error;
mod ffi;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod given;
mod latency;
mod library;
mod message;
mod metadata;
mod opening;
mod posts;
mod quiet;
mod remote;
mod serving;
mod slicing;
mod sockets;
mod transfer;
mod transport;
mod watch;
mod way;

pub use config::UcxConfig;
pub use error::{LoadError, UcxError};
pub use kv_host::{Arena, HostMemory, Limit, Memory, MemoryError, OsError};
pub use library::Ucx;
pub use transport::{UcxStats, UcxTransport};
