//! What the transport is and has: its name, its memory, its regions, and what peers are told of them.

use bytes::Bytes;
use kv_core::{MemoryKind, Region, TransportError};
use kv_host::{Arena, Frozen, Host, Memory, OsError, ProcessIdentity};

use crate::error::LocalError;
use crate::metadata::{MAX_ARENAS, Metadata, Place, Token};

/// This worker's end, as peers see it. From the first look at the metadata on, nothing of it changes.
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
    /// Our metadata, once anybody has asked for it.
    frozen: Frozen,
}

impl Given {
    /// A life of its own, in this process, under the name of a socket.
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

    /// Takes an arena, which peers may map.
    pub(crate) fn add_arena(&mut self, arena: &Arena) -> Result<(), LocalError> {
        self.frozen.check_memory()?;
        if self.arenas.len() >= MAX_ARENAS {
            return Err(LocalError::Arenas { got: self.arenas.len() + 1, max: MAX_ARENAS });
        }
        self.arenas.push(arena.clone());
        Ok(())
    }

    /// Takes memory that peers reach by its addresses.
    pub(crate) fn adopt(&mut self, memory: Memory) -> Result<(), LocalError> {
        self.frozen.check_memory()?;
        self.adopted.push(memory);
        Ok(())
    }

    /// Makes the next region of a range of the memory given.
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

    /// Our metadata. From the first call on, our memory does not change any more.
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
            return Err(TransportError::Metadata("it is this transport's own"));
        }
        Ok(())
    }

    /// This life of the transport.
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

    /// Where a range lies in the memory that we were given.
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

    /// Tells peers something else from now on.
    #[cfg(test)]
    pub(crate) fn pretend(&mut self, metadata: Bytes) {
        self.frozen = metadata.into();
    }
}
