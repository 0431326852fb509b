//! The transports, each with the memory that it likes best.

use kv_transfer::local::Memory;
#[cfg(feature = "nixl")]
use kv_transfer::nixl::{Nixl, NixlConfig, NixlTransport, Search};
use kv_transfer::prelude::*;
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};

use crate::Error;

/// A transport.
pub(crate) enum Way {
    Local,
    Tcp,
    #[cfg(feature = "nixl")]
    Nixl(Box<Nixl>),
}

impl Way {
    /// The names of the transports.
    pub(crate) const NAMES: [&str; 3] = ["local", "tcp", "nixl"];

    /// All transports that can be used here. Comes first in `main`.
    pub(crate) fn all() -> Vec<Way> {
        #[cfg(feature = "nixl")]
        let nixl = match Nixl::load(&Search::default()) {
            Ok(nixl) => Some(Way::Nixl(Box::new(nixl))),
            Err(error) => {
                println!("NIXL is not measured: {error}");
                None
            }
        };
        #[cfg(not(feature = "nixl"))]
        let nixl = None;
        [Way::Local, Way::Tcp].into_iter().chain(nixl).collect()
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Way::Local => "local",
            Way::Tcp => "tcp",
            #[cfg(feature = "nixl")]
            Way::Nixl(_) => "nixl",
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
        }
    }
}
