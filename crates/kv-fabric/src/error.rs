//! The errors of making a transport and of giving it memory. Later errors are a
//! [`TransportError`](kv_core::TransportError).

use std::net::IpAddr;
use std::path::PathBuf;

use kv_core::{MemoryKind, TransportError};
use kv_host::{Limit, MemoryError, OsError};

/// Why a transport could not be made, or could not be given memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// libfabric is not there, or cannot be loaded. Install it, or name its file in `KV_FABRIC_LIB` or
    /// [`FabricConfig::library`](crate::FabricConfig::library); `scripts/setup-fabric.sh` unpacks one without root.
    #[error("libfabric cannot be loaded from {}: {cause}", path.display())]
    Library {
        /// The file that was asked for, or the name by which the dynamic loader was asked.
        path: PathBuf,
        /// What the dynamic loader says.
        cause: String,
    },
    /// The file is no libfabric: it lacks a function.
    #[error("the library has no function {name}, so it is not libfabric")]
    Symbol {
        /// The function that is missing.
        name: &'static str,
    },
    /// The libfabric is too old. Install a newer one.
    #[error("libfabric is {}.{}; it must be {}.{} or newer", got.0, got.1, least.0, least.1)]
    Version {
        /// Major and minor number of the library.
        got: (u32, u32),
        /// The smallest numbers that are allowed.
        least: (u32, u32),
    },
    /// libfabric has no such provider on this host, at this address or device, or the provider lacks what a transport
    /// needs: an RDM endpoint, messages in order, writes, reads, and writes whose end means that the bytes are in the
    /// peer's memory (`FI_DELIVERY_COMPLETE`). `fi_info` lists the providers.
    #[error(
        "provider is {provider:?}, which libfabric does not have here with all that is needed: {status} ({code})"
    )]
    Provider {
        /// The provider that was asked for: [`FabricConfig::provider`](crate::FabricConfig::provider).
        provider: String,
        /// libfabric's number for the reason.
        code: i32,
        /// What the number means.
        status: &'static str,
    },
    /// The provider is known to harm a worker whose peer is killed.
    #[error("provider is {provider:?}, which is refused: {reason}")]
    Refused {
        /// The provider that was asked for: [`FabricConfig::provider`](crate::FabricConfig::provider).
        provider: String,
        /// What the provider does.
        reason: &'static str,
    },
    /// The address names no host that peers could connect to. Name an address of an interface.
    #[error("address is {address}, which names no host that a peer could connect to")]
    Address {
        /// The address that was asked for: [`FabricDevice::address`](crate::FabricDevice::address).
        address: IpAddr,
    },
    /// Devices of one provider differ in how a peer addresses memory behind them, so that one transport cannot use both.
    #[error("devices[{device}] addresses memory otherwise than devices[0] does")]
    Mixed {
        /// Position of the device in [`FabricConfig::devices`](crate::FabricConfig::devices).
        device: usize,
    },
    /// The host has no device with this PCI address. `nvidia-smi --query-gpu=pci.bus_id --format=csv` prints those of GPUs.
    #[error("gpu is {address:?}, which is the PCI address of no device here")]
    Gpu {
        /// The address that was asked for.
        address: String,
    },
    /// The provider's messages are too short.
    #[error("the provider's messages have {max} bytes at most; {least} are needed")]
    Messages {
        /// The longest message of the provider, in bytes.
        max: usize,
        /// The length that is needed, in bytes.
        least: usize,
    },
    /// The name of a peer's endpoint is of another kind of network than this endpoint's.
    #[error(
        "the name of the peer's endpoint has {got} bytes, or another family; this endpoint's has {ours} bytes"
    )]
    Name {
        /// The length of the peer's name, in bytes.
        got: usize,
        /// The length of this endpoint's name, in bytes.
        ours: usize,
    },
    /// A call of libfabric failed.
    #[error("{call} failed: {status} ({code})")]
    Call {
        /// The function of libfabric that failed.
        call: &'static str,
        /// What its number means.
        status: &'static str,
        /// libfabric's number for the reason.
        code: i32,
    },
    /// The memory is refused: the range is impossible, or the metadata has been asked for already.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A region lies in a device's memory or in a file, and this transport moves host memory only. Use NIXL, or UCX
    /// with its CUDA module, for memory of a GPU.
    #[error("regions[{region}] is in {memory:?} of device {device}; kv-fabric reaches Dram only")]
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

impl From<FabricError> for TransportError {
    fn from(error: FabricError) -> TransportError {
        match error {
            FabricError::Call { call, status, code } => {
                TransportError::Backend { call, status, code: Some(code) }
            }
            FabricError::Name { .. } => {
                TransportError::Metadata("the peer's endpoint is of another kind of network than this one")
            }
            FabricError::Os(error) => error.into(),
            _ => TransportError::Unsupported("libfabric cannot do this here"),
        }
    }
}
