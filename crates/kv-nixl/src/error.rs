//! Errors while NIXL is found, and while transports and memories are made. Later errors are a
//! [`TransportError`](kv_core::TransportError).

use std::fmt;
use std::path::PathBuf;

use kv_host::{Limit, MemoryError, OsError};

use crate::library::looked::Looked;

/// Why NIXL could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// No usable library was found. The text names every place that was looked at, and how to get NIXL.
    #[error("NIXL's libnixl_capi.so was not found.{}\n{HOW_TO_GET}", Places(.looked))]
    NotFound {
        /// Every place: the path, why the search looked there, and what was there.
        looked: Vec<Looked>,
    },
    /// The library that the user named is not usable. No other place is tried.
    #[error("{asked_by} names {path:?}, which cannot be used: {reason}\n{HOW_TO_GET}")]
    Named {
        /// Where the name came from: the configuration, or an environment variable.
        asked_by: &'static str,
        /// The path of the library.
        path: PathBuf,
        /// What is wrong with the library.
        reason: String,
    },
}

const HOW_TO_GET: &str = "Get it with scripts/setup-nixl.sh, or `pip install nixl-cu12`, or name it: \
                          KV_NIXL_LIB=/path/to/libnixl_capi.so";

struct Places<'a>(&'a [Looked]);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(" Looked for it in:")?;
        for looked in self.0 {
            write!(f, "\n  {looked}")?;
        }
        Ok(())
    }
}

/// Why a transport could not be made, or why memory was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// A call of NIXL failed. NIXL's own log on the standard error may say more.
    #[error("{call} failed: {status}")]
    Call {
        /// The name of NIXL's function, without its prefix.
        call: &'static str,
        /// NIXL's status, in words.
        status: &'static str,
        /// NIXL's number for the status, from `nixl_capi_status_t`; `None` for a backend error, as which the
        /// binding gives several statuses.
        code: Option<i32>,
    },
    /// NIXL has no such backend, or the backend could not start.
    #[error(
        "NIXL's backend {backend:?} could not be started: {}; installed are {installed:?}",
        .reason.as_deref().unwrap_or(.status)
    )]
    Backend {
        /// The backend that the configuration names.
        backend: String,
        /// NIXL's status, in words.
        status: &'static str,
        /// What the loader says of the backend's plugin, if the plugin cannot be loaded: most often the host
        /// lacks a library.
        reason: Option<String>,
        /// The backends whose plugins lie beside NIXL's library.
        installed: Vec<String>,
    },
    /// The memory is refused: the range is impossible, or peers know the transport already.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// NIXL takes several devices only if each is the first port of an RDMA card. Name one device, or set
    /// the environment variable `UCX_NET_DEVICES`.
    #[error("{device:?} of {of} devices is no RDMA card; name one device only, or set UCX_NET_DEVICES")]
    Device {
        /// A device that is no RDMA card.
        device: String,
        /// How many devices the configuration names.
        of: usize,
    },
    /// Pages cannot be moved to and from the file.
    #[error("the file cannot be used: {reason}")]
    File {
        /// What is wrong with the file.
        reason: &'static str,
    },
    /// A field of the configuration is out of its range.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// A call of the operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
}
