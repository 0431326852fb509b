//! The errors of loading UCX, of making a transport, and of giving it memory. Later errors are a
//! [`TransportError`](kv_core::TransportError).

use std::path::PathBuf;

use kv_core::MemoryKind;
use kv_host::{Limit, MemoryError, OsError, OwnerError};

/// How to get UCX, for every error that says that UCX is missing.
const HELP: &str = "to get UCX: scripts/setup-ucx.sh of this project, or apt-get install libucx0, or pip install \
                    libucx-cu12; KV_UCX_LIB names a library elsewhere";

/// Why UCX's library could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library is in none of the places.
    #[error("UCX (libucp.so.0) is missing; looked at {}; {HELP}", list(looked))]
    Missing {
        /// The places, in the order of the search.
        looked: Vec<PathBuf>,
    },
    /// The only library lies in a folder `target/ucx`, and another user could have put it there.
    #[error("UCX's library is not loaded: {0}; {HELP}")]
    Owner(OwnerError),
    /// There is a file, and the dynamic loader refuses it.
    #[error("UCX's library {path:?} cannot be used: {reason}; {HELP}")]
    Unusable {
        /// The file that was to be loaded.
        path: PathBuf,
        /// What the loader says of the failure.
        reason: String,
    },
    /// The library is older than the headers with which this crate was built, or of another major version.
    #[error(
        "UCX's library {path:?} has version {}.{}, and this program was built for {}.{} or later of the same \
         major version; build with the headers of that library (KV_UCX_INCLUDE), or use a later library; {HELP}",
        version.0, version.1, built_for.0, built_for.1
    )]
    Version {
        /// The file that was to be loaded.
        path: PathBuf,
        /// The library's version: major, minor.
        version: (u32, u32),
        /// The version of the headers: major, minor.
        built_for: (u32, u32),
    },
    /// Another copy of UCX is loaded in this process: NIXL brings its own. Two copies are not known to work in one
    /// process. Use NIXL for both, or two processes.
    #[error(
        "this process has loaded another copy of UCX already ({path:?}; NIXL brings one), and two copies are not \
         known to work in one process; use this transport or NIXL, not both"
    )]
    Another {
        /// The file of the other copy.
        path: PathBuf,
    },
}

/// Why a transport could not be made, or could not be given memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UcxError {
    /// UCX could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// UCX refuses one of [`UcxConfig::settings`](crate::UcxConfig::settings), of `transports`, or of `devices`.
    #[error("UCX refuses the setting {name}={value}: {status}")]
    Setting {
        /// UCX's name of the setting, without the prefix `UCX_`.
        name: String,
        /// The value that UCX has refused.
        value: String,
        /// What UCX says of the value.
        status: &'static str,
    },
    /// This host does not have one of the devices. UCX alone would warn, and go on without the device.
    #[error("devices has {device}, and this host has {}", has.join(", "))]
    Device {
        /// The name in [`UcxConfig::devices`](crate::UcxConfig::devices).
        device: String,
        /// The network devices and cards of this host.
        has: Vec<String>,
    },
    /// A call of UCX failed. With no transport for the devices, it is `ucp_worker_create` or `ucp_init` that fails.
    #[error("{call} failed with {status} ({code}); devices are {devices:?}, transports are {transports:?}")]
    Call {
        /// The function of UCX that failed.
        call: &'static str,
        /// What UCX says of the failure.
        status: &'static str,
        /// UCX's number of the status.
        code: i32,
        /// The devices that were asked for: [`UcxConfig::devices`](crate::UcxConfig::devices).
        devices: Vec<String>,
        /// The transports that were asked for: [`UcxConfig::transports`](crate::UcxConfig::transports).
        transports: Vec<String>,
    },
    /// The memory is refused: the range is impossible, or the metadata has been asked for already.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A region lies in memory of a kind that UCX cannot move here: device memory needs a UCX whose CUDA module
    /// could be loaded, and files are none of its kinds.
    #[error("regions[{region}] is in {memory:?} of device {device}, which UCX does not move in this process")]
    Kind {
        /// Position of the region in the list.
        region: usize,
        /// The kind of the region's memory.
        memory: MemoryKind,
        /// The region's device number.
        device: u64,
    },
    /// A field of the configuration is out of its range.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// The operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}
