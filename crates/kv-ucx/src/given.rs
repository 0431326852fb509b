//! What the transport has: its name, its memory, its regions, and what peers are told about them.

use std::cell::OnceCell;

use bytes::Bytes;
use kv_core::{MemoryKind, Region, TransportError};
use kv_host::{Frozen, Host, Memory, MemoryError, ProcessIdentity, Token};

use crate::metadata::{self, Hash, Metadata, Name, Place};

/// A range of memory that the owner has given: of the host, which is kept for as long as a clone of the range lives,
/// or of a device.
#[derive(Debug, Clone)]
pub(crate) struct Range {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) kind: MemoryKind,
    device: u64,
    _memory: Option<Memory>,
}

impl Range {
    pub(crate) fn host(memory: Memory) -> Range {
        let (addr, len) = (memory.addr(), memory.len() as u64);
        Range { addr, len, kind: MemoryKind::Dram, device: 0, _memory: Some(memory) }
    }

    /// Memory of a device, which the owner keeps.
    pub(crate) fn device(addr: u64, len: u64, device: u64) -> Range {
        Range { addr, len, kind: MemoryKind::Vram, device, _memory: None }
    }

    /// The part of the range that a region describes, if all of the region is inside.
    fn part(&self, region: &Region) -> Option<Range> {
        let same =
            self.kind == region.memory && (self.kind == MemoryKind::Dram || self.device == region.device);
        let end = region.addr.checked_add(region.len)?;
        let inside = region.addr >= self.addr && end <= self.addr + self.len;
        (same && inside).then(|| Range { addr: region.addr, len: region.len, ..self.clone() })
    }
}

/// This transport as its peers see it. Nothing changes after the metadata has been asked for.
#[derive(Debug)]
pub(crate) struct Given {
    name: Name,
    pub(crate) host: Host,
    pub(crate) process: ProcessIdentity,
    memory: Vec<Range>,
    regions: Vec<Place>,
    /// The transport's metadata, once the owner has asked for it.
    frozen: Frozen,
    hash: OnceCell<Hash>,
}

impl Given {
    /// A transport with a new incarnation, whose UCX worker has this address.
    pub(crate) fn new(token: Token, address: Bytes) -> Given {
        Given {
            name: Name { token, address },
            host: Host::here().unwrap_or_default(),
            process: ProcessIdentity::here().unwrap_or_default(),
            memory: Vec::new(),
            regions: Vec::new(),
            frozen: Frozen::default(),
            hash: OnceCell::new(),
        }
    }

    pub(crate) fn add(&mut self, range: Range) -> Result<(), MemoryError> {
        self.frozen.check_memory()?;
        self.memory.push(range);
        Ok(())
    }

    /// The range of the given memory that is the next region.
    pub(crate) fn next_region(&self, region: &Region) -> Result<Range, TransportError> {
        let number = self.frozen.next_region(self.regions.len())?;
        let found = self.memory.iter().find_map(|range| range.part(region));
        found.ok_or(TransportError::UnknownMemory { region: number, addr: region.addr, len: region.len })
    }

    /// Takes note of a region that UCX has registered.
    pub(crate) fn registered(&mut self, range: &Range) {
        let Range { addr, len, kind, .. } = *range;
        self.regions.push(Place { kind, addr, len });
    }

    /// The transport's metadata. After the first call, no memory and no region can be added.
    pub(crate) fn metadata(&self) -> Result<Bytes, TransportError> {
        self.frozen.get_or_make(|| {
            let Given { name, host, process, regions, .. } = self;
            Metadata { name: name.clone(), host: *host, process: *process, regions: regions.clone() }.encode()
        })
    }

    /// The hash of the metadata.
    pub(crate) fn hash(&self) -> Result<Hash, TransportError> {
        if let Some(hash) = self.hash.get() {
            return Ok(*hash);
        }
        let hash = metadata::hash(&self.metadata()?);
        Ok(*self.hash.get_or_init(|| hash))
    }

    /// This life of the transport, and where it is reached.
    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// Where all regions lie.
    pub(crate) fn regions(&self) -> &[Place] {
        &self.regions
    }

    /// Where a region lies.
    pub(crate) fn place_of(&self, region: u32) -> Option<&Place> {
        self.regions.get(region as usize)
    }

    /// The length of a region, in bytes.
    pub(crate) fn len_of(&self, region: u32) -> Option<u64> {
        self.place_of(region).map(|place| place.len)
    }
}
