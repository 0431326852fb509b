//! The transports, each with the memory that it likes best.

#[cfg(feature = "fabric")]
use kv_transfer::fabric::{FabricConfig, FabricTransport};
use kv_transfer::local::Memory;
#[cfg(feature = "nixl")]
use kv_transfer::nixl::{Nixl, NixlConfig, NixlTransport, Search};
use kv_transfer::prelude::*;
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
#[cfg(feature = "ucx")]
use kv_transfer::ucx::{Ucx, UcxConfig, UcxTransport};

use crate::Error;

/// The address at which libfabric is measured.
#[cfg(feature = "fabric")]
pub(crate) const ADDRESS: &str = "127.0.0.1";

/// A transport.
pub(crate) enum Way {
    Local,
    Tcp,
    #[cfg(feature = "nixl")]
    Nixl(Box<Nixl>),
    #[cfg(feature = "ucx")]
    Ucx(Ucx),
    #[cfg(feature = "fabric")]
    Fabric,
}

impl Way {
    /// The names of the transports.
    pub(crate) const NAMES: [&str; 5] = ["local", "tcp", "nixl", "ucx", "fabric"];

    /// The wanted transports that can be used here. Comes first in `main`. One process has UCX once: where NIXL has loaded
    /// its own, kv-ucx is not measured.
    pub(crate) fn all(wanted: impl Fn(&str) -> bool) -> Vec<Way> {
        let mut all = vec![Way::Local, Way::Tcp];
        #[cfg(feature = "nixl")]
        if wanted("nixl") {
            all.extend(found("NIXL", Nixl::load(&Search::default())).map(|nixl| Way::Nixl(Box::new(nixl))));
        }
        #[cfg(feature = "ucx")]
        if wanted("ucx") {
            all.extend(found("UCX", Ucx::load(None)).map(Way::Ucx));
        }
        #[cfg(feature = "fabric")]
        if wanted("fabric") {
            all.extend(found("libfabric", kv_transfer::fabric::installed()).map(|_| Way::Fabric));
        }
        all.retain(|way| wanted(way.name()));
        all
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Way::Local => "local",
            Way::Tcp => "tcp",
            #[cfg(feature = "nixl")]
            Way::Nixl(_) => "nixl",
            #[cfg(feature = "ucx")]
            Way::Ucx(_) => "ucx",
            #[cfg(feature = "fabric")]
            Way::Fabric => "fabric",
        }
    }

    /// Starts a worker with `len` bytes of memory. `config` says what the worker is, once the memory is known.
    pub(crate) fn start(
        &self,
        len: usize,
        config: impl FnOnce(&Memory) -> Result<WorkerConfig, Error>,
    ) -> Result<(Worker, Memory), Error> {
        let client = Box::new(HttpBootstrapClient::new(ClientConfig::default())?);
        match self {
            Way::Local => {
                let arena = Arena::new(len)?;
                let mut transport = LocalTransport::new(LocalConfig::default())?;
                transport.add_arena(&arena)?;
                let memory = arena.memory().clone();
                Ok((Worker::start(config(&memory)?, transport, client)?, memory))
            }
            Way::Tcp => {
                let memory = HostMemory::new(len)?.memory().clone();
                let mut transport = TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse()?))?;
                transport.add_memory(&memory)?;
                Ok((Worker::start(config(&memory)?, transport, client)?, memory))
            }
            #[cfg(feature = "nixl")]
            Way::Nixl(nixl) => {
                let memory = HostMemory::new(len)?;
                let mut transport = NixlTransport::new(nixl, NixlConfig::default())?;
                transport.add_memory(&memory)?;
                let memory = memory.memory().clone();
                Ok((Worker::start(config(&memory)?, transport, client)?, memory))
            }
            #[cfg(feature = "ucx")]
            Way::Ucx(ucx) => {
                let memory = HostMemory::new(len)?.memory().clone();
                let mut transport = UcxTransport::new(*ucx, UcxConfig::default())?;
                transport.add_memory(&memory)?;
                Ok((Worker::start(config(&memory)?, transport, client)?, memory))
            }
            #[cfg(feature = "fabric")]
            Way::Fabric => {
                let memory = HostMemory::new(len)?.memory().clone();
                let mut transport = FabricTransport::new(FabricConfig::new(ADDRESS.parse()?))?;
                transport.add_memory(&memory)?;
                Ok((Worker::start(config(&memory)?, transport, client)?, memory))
            }
        }
    }
}

/// What was found; otherwise says why the library's transport is not measured.
#[cfg(any(feature = "nixl", feature = "ucx", feature = "fabric"))]
fn found<T>(library: &str, found: Result<T, impl std::fmt::Display>) -> Option<T> {
    found.inspect_err(|error| println!("{library} is not measured: {error}")).ok()
}
