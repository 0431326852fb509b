//! What the transport has: its name, its memory, its regions, and what peers are told about them.

use std::cell::OnceCell;
use std::net::SocketAddr;

use bytes::Bytes;
use kv_core::{MemoryKind, Region, TransportError};
use kv_host::{Frozen, Memory, Token};

use crate::error::TcpError;
use crate::metadata::{Identity, Metadata};

/// This transport as its peers see it. Nothing changes after the metadata has been asked for.
#[derive(Debug)]
pub(crate) struct Given {
    token: Token,
    addresses: Vec<SocketAddr>,
    tls: bool,
    memory: Vec<Memory>,
    regions: Vec<Memory>,
    /// The transport's metadata, once the owner has asked for it.
    frozen: Frozen,
    identity: OnceCell<Identity>,
}

impl Given {
    /// A transport with a new token, which peers reach at these addresses, with TLS or without.
    pub(crate) fn new(addresses: Vec<SocketAddr>, tls: bool) -> Result<Given, TcpError> {
        Ok(Given {
            token: Token::random()?,
            addresses,
            tls,
            memory: Vec::new(),
            regions: Vec::new(),
            frozen: Frozen::default(),
            identity: OnceCell::new(),
        })
    }

    pub(crate) fn add(&mut self, memory: Memory) -> Result<(), TcpError> {
        self.frozen.check_memory()?;
        self.memory.push(memory);
        Ok(())
    }

    /// Registers a range of the given memory as the next region.
    pub(crate) fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        let number = self.frozen.next_region(self.regions.len())?;
        let found = match region.memory {
            MemoryKind::Dram => self.memory.iter().find_map(|memory| memory.at(region.addr, region.len)),
            MemoryKind::Vram | MemoryKind::File => None,
        };
        self.regions.push(found.ok_or(TransportError::UnknownMemory {
            region: number,
            addr: region.addr,
            len: region.len,
        })?);
        Ok(())
    }

    /// The transport's metadata. After the first call, no memory and no region can be added.
    pub(crate) fn metadata(&self) -> Result<Bytes, TransportError> {
        self.frozen.get_or_make(|| {
            let regions = self.regions.iter().map(|region| region.len() as u64).collect();
            let (token, addresses, tls) = (self.token, self.addresses.clone(), self.tls);
            Metadata { token, addresses, regions, tls }.encode()
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

    /// Where peers reach this transport.
    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The memory of the regions, in the order of their numbers.
    pub(crate) fn regions(&self) -> &[Memory] {
        &self.regions
    }

    /// The length of a region, in bytes.
    pub(crate) fn len_of(&self, region: u32) -> Option<u64> {
        self.regions.get(region as usize).map(|memory| memory.len() as u64)
    }
}
