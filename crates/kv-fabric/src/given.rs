//! What the transport has: its name, its memory, its regions, and what peers are told about them.

use std::cell::OnceCell;

use bytes::Bytes;
use kv_core::{MemoryKind, Region, TransportError};
use kv_host::{Frozen, Host, Memory, ProcessIdentity, Token};

use crate::error::FabricError;
use crate::metadata::{Identity, Metadata, Place, Port};

/// This transport as its peers see it. Nothing changes after the metadata has been asked for.
#[derive(Debug)]
pub(crate) struct Given {
    provider: String,
    ports: Vec<Port>,
    immediate: u8,
    token: Token,
    host: Host,
    process: ProcessIdentity,
    memory: Vec<Memory>,
    regions: Vec<Place>,
    /// The transport's metadata, once the owner has asked for it.
    frozen: Frozen,
    identity: OnceCell<Identity>,
}

impl Given {
    /// A transport with a new token and these endpoints.
    pub(crate) fn new(provider: String, ports: Vec<Port>, immediate: usize) -> Result<Given, FabricError> {
        Ok(Given {
            provider,
            ports,
            immediate: immediate.min(8) as u8,
            token: Token::random()?,
            host: Host::here()?,
            process: ProcessIdentity::here()?,
            memory: Vec::new(),
            regions: Vec::new(),
            frozen: Frozen::default(),
            identity: OnceCell::new(),
        })
    }

    pub(crate) fn add(&mut self, memory: Memory) -> Result<(), FabricError> {
        self.frozen.check_memory()?;
        self.memory.push(memory);
        Ok(())
    }

    /// The given memory that the next region lies in.
    pub(crate) fn find(&self, region: &Region) -> Result<Memory, TransportError> {
        let number = self.frozen.next_region(self.regions.len())?;
        let found = match region.memory {
            MemoryKind::Dram => self.memory.iter().find_map(|memory| memory.at(region.addr, region.len)),
            MemoryKind::Vram | MemoryKind::File => None,
        };
        found.ok_or(TransportError::UnknownMemory { region: number, addr: region.addr, len: region.len })
    }

    /// The next region was registered.
    pub(crate) fn registered(&mut self, place: Place) {
        self.regions.push(place);
    }

    /// The transport's metadata. After the first call, no memory and no region can be added.
    pub(crate) fn metadata(&self) -> Result<Bytes, TransportError> {
        self.frozen.get_or_make(|| {
            let metadata = Metadata {
                token: self.token,
                provider: self.provider.clone(),
                host: self.host,
                process: self.process,
                ports: self.ports.clone(),
                immediate: self.immediate,
                regions: self.regions.clone(),
            };
            metadata.encode()
        })
    }

    /// Who this transport is to its peers.
    pub(crate) fn identity(&self) -> Result<Identity, TransportError> {
        if let Some(identity) = self.identity.get() {
            return Ok(*identity);
        }
        let identity = Identity::of(self.token, &self.metadata()?);
        Ok(*self.identity.get_or_init(|| identity))
    }

    /// The token that names this life of the transport.
    pub(crate) fn token(&self) -> Token {
        self.token
    }

    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }

    /// The name of the endpoint that takes messages.
    pub(crate) fn name(&self) -> &[u8] {
        self.ports.first().map_or(&[], |port| &port.name)
    }

    /// The NUMA node of a region's memory, where it is known.
    pub(crate) fn node_of(&self, region: u32) -> Option<u16> {
        self.regions.get(region as usize).and_then(|place| place.node)
    }

    /// The length of a region, in bytes.
    pub(crate) fn len_of(&self, region: u32) -> Option<u64> {
        self.regions.get(region as usize).map(|place| place.len)
    }
}
