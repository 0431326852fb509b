//! What the transport has: its name, its memory, its regions, and what peers are told about them.

use bytes::Bytes;
use kv_core::{MemoryKind, Region, TransportError};
use kv_host::{Arena, Frozen, Host, Memory, OsError, ProcessIdentity, Token};

use crate::error::LocalError;
use crate::metadata::{MAX_ARENAS, Metadata, Place};

/// This transport as its peers see it. Nothing changes after the metadata has been asked for.
#[derive(Debug)]
pub(crate) struct Given {
    host: Host,
    token: Token,
    process: ProcessIdentity,
    socket_name: String,
    arenas: Vec<Arena>,
    adopted: Vec<Memory>,
    regions: Vec<Memory>,
    places: Vec<Place>,
    /// The transport's metadata, once the owner has asked for it.
    frozen: Frozen,
}

impl Given {
    /// A transport with a new token, in this process, which listens under `socket_name`.
    pub(crate) fn new(socket_name: String) -> Result<Given, OsError> {
        Ok(Given {
            host: Host::here()?,
            token: Token::random()?,
            process: ProcessIdentity::here()?,
            socket_name,
            arenas: Vec::new(),
            adopted: Vec::new(),
            regions: Vec::new(),
            places: Vec::new(),
            frozen: Frozen::default(),
        })
    }

    /// Adds an arena, which peers may map.
    pub(crate) fn add_arena(&mut self, arena: &Arena) -> Result<(), LocalError> {
        self.frozen.check_memory()?;
        if self.arenas.len() >= MAX_ARENAS {
            return Err(LocalError::Arenas { got: self.arenas.len() + 1, max: MAX_ARENAS });
        }
        self.arenas.push(arena.clone());
        Ok(())
    }

    /// Adds adopted memory, which peers reach by its addresses.
    pub(crate) fn adopt(&mut self, memory: Memory) -> Result<(), LocalError> {
        self.frozen.check_memory()?;
        self.adopted.push(memory);
        Ok(())
    }

    /// Registers a range of the given memory as the next region.
    pub(crate) fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        let number = self.frozen.next_region(self.places.len())?;
        let found = match region.memory {
            MemoryKind::Dram => self.locate(region.addr, region.len),
            MemoryKind::Vram | MemoryKind::File => None,
        };
        let (memory, place) = found.ok_or(TransportError::UnknownMemory {
            region: number,
            addr: region.addr,
            len: region.len,
        })?;
        self.regions.push(memory);
        self.places.push(place);
        Ok(())
    }

    /// The transport's metadata. After the first call, no memory and no region can be added.
    pub(crate) fn metadata(&self) -> Result<Bytes, TransportError> {
        self.frozen.get_or_make(|| {
            Metadata {
                host: self.host,
                token: self.token,
                process: self.process,
                socket: self.socket_name.clone(),
                arenas: self.arenas.iter().map(|arena| arena.file().len()).collect(),
                regions: self.places.clone(),
            }
            .encode()
        })
    }

    /// Refuses a peer that cannot be reached from here, or is this transport itself.
    pub(crate) fn check_peer(&self, peer: &Metadata) -> Result<(), TransportError> {
        self.host.check(&peer.host)?;
        if peer.token == self.token {
            return Err(TransportError::Metadata("it is that of this transport itself"));
        }
        Ok(())
    }

    /// The token that names this life of the transport.
    pub(crate) fn token(&self) -> Token {
        self.token
    }

    /// The arenas, in the order of their numbers.
    pub(crate) fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    /// The memory of the regions, in the order of their numbers.
    pub(crate) fn regions(&self) -> &[Memory] {
        &self.regions
    }

    /// Where a range is in the memory that the transport was given.
    fn locate(&self, addr: u64, len: u64) -> Option<(Memory, Place)> {
        for (index, arena) in self.arenas.iter().enumerate() {
            if let Some(part) = arena.memory().at(addr, len) {
                let start = addr - arena.addr();
                return Some((part, Place { arena: u32::try_from(index).ok(), start, len }));
            }
        }
        let part = self.adopted.iter().find_map(|memory| memory.at(addr, len))?;
        Some((part, Place { arena: None, start: addr, len }))
    }

    #[cfg(test)]
    pub(crate) fn socket_name(&self) -> &str {
        &self.socket_name
    }

    /// Gives peers other metadata from now on.
    #[cfg(test)]
    pub(crate) fn pretend(&mut self, metadata: Bytes) {
        self.frozen = metadata.into();
    }
}
