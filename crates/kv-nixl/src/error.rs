//! What can go wrong while NIXL is found, and transports and pools are made; what goes wrong later is a
//! [`TransportError`](kv_core::TransportError).

use std::fmt;
use std::path::PathBuf;

use kv_host::{Limit, MemoryError, OsError};

use crate::library::looked::Looked;

/// Why NIXL could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// No usable library anywhere. Shows every place that was looked at, and how to get one.
    #[error("NIXL's libnixl_capi.so was not found.{}\n{HOW_TO_GET}", Places(.looked))]
    NotFound {
        /// Where, why there, and what was there.
        looked: Vec<Looked>,
    },
    /// The library that was asked for by name is not usable.
    #[error("{asked_by} names {path:?}, which cannot be used: {reason}\n{HOW_TO_GET}")]
    Named {
        /// Who named it: the configuration, or an environment variable.
        asked_by: &'static str,
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
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

/// Why a transport could not be made, or memory not be given to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// A call of NIXL failed. NIXL's own log, on the standard error, may say more.
    #[error("{call} failed: {status}")]
    Call {
        /// The call.
        call: &'static str,
        /// Its status.
        status: &'static str,
    },
    /// NIXL has no such backend, or it could not start.
    #[error("NIXL's backend {backend:?} could not be started: {}; installed are {installed:?}", .reason.as_deref().unwrap_or(.status))]
    Backend {
        /// The backend asked for.
        backend: String,
        /// NIXL's status.
        status: &'static str,
        /// What the loader says of its plugin, if that is what is wrong: most often a library that the
        /// host lacks.
        reason: Option<String>,
        /// The plugins beside the library.
        installed: Vec<String>,
    },
    /// Memory is refused: an impossible range, or peers know the transport already.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// NIXL takes several devices only if each is the first port of an RDMA card. Name one, or set
    /// `UCX_NET_DEVICES`.
    #[error("{device:?} is one of {of} devices, and no RDMA card; name one device, or set UCX_NET_DEVICES")]
    Device {
        /// The device.
        device: String,
        /// How many were named.
        of: usize,
    },
    /// A file that pages cannot be moved to and from.
    #[error("the file cannot be used: {reason}")]
    File {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A limit of the configuration is out of its range.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// The operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
}
