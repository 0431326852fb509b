//! Memory that NIXL may reach: parts of host memory, files, and what the owner of a server lends.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kv_core::MemoryKind;
use kv_host::{MemoryError, check};
use nixl_sys::{MemType, MemoryRegion, NixlDescriptor};

/// A range of memory that may be registered.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    device: u64,
    addr: u64,
    len: u64,
    holder: Holder,
}

/// What contains the range, and what keeps the range in place.
#[derive(Debug, Clone)]
enum Holder {
    /// Host memory of ours, or of an owner who has promised it; mapped for as long as this value lives.
    Host(kv_host::Memory),
    /// A device's memory, for whose life its owner has promised.
    Device,
    /// A file, which stays open for as long as this value lives.
    File(Arc<File>),
}

impl Memory {
    /// All bytes of a mapping.
    pub(crate) fn whole(memory: &kv_host::Memory) -> Memory {
        Memory::of_host(memory.clone())
    }

    pub(super) fn of_host(memory: kv_host::Memory) -> Memory {
        let (addr, len) = (memory.addr(), memory.len() as u64);
        Memory { device: 0, addr, len, holder: Holder::Host(memory) }
    }

    /// A range of a device's memory. `Err` if no such range can exist.
    pub(super) fn of_device(device: u64, addr: u64, len: u64) -> Result<Memory, MemoryError> {
        check::range(addr, len)?;
        Ok(Memory { device, addr, len, holder: Holder::Device })
    }

    /// The first `len` bytes of a file.
    pub(crate) fn of_file(file: &Arc<File>, len: u64) -> Memory {
        let device = u64::from(file.as_raw_fd().unsigned_abs());
        Memory { device, addr: 0, len, holder: Holder::File(Arc::clone(file)) }
    }

    /// The length of the file now; `None` of memory that is no file.
    pub(crate) fn file_len(&self) -> Option<u64> {
        let Holder::File(file) = &self.holder else { return None };
        file.metadata().ok().map(|about| about.len())
    }

    /// The part of this memory with this kind, address and length; `None` if this memory does not contain all
    /// of the part.
    pub(crate) fn part(&self, kind: MemoryKind, device: u64, addr: u64, len: u64) -> Option<Memory> {
        // NUMA nodes are a remark about host memory; device numbers are part of an address.
        let same = kind == self.kind() && (kind == MemoryKind::Dram || device == self.device);
        let offset = addr.checked_sub(self.addr).filter(|_| same && len > 0)?;
        offset.checked_add(len).filter(|end| *end <= self.len)?;
        let holder = match &self.holder {
            Holder::Host(memory) => Holder::Host(memory.at(addr, len)?),
            other => other.clone(),
        };
        Some(Memory { device, addr, len, holder })
    }

    pub(crate) fn kind(&self) -> MemoryKind {
        match &self.holder {
            Holder::Host(_) => MemoryKind::Dram,
            Holder::Device => MemoryKind::Vram,
            Holder::File(_) => MemoryKind::File,
        }
    }

    pub(crate) fn device(&self) -> u64 {
        // NIXL matches registrations by device; ours are not told apart by NUMA node.
        if self.kind() == MemoryKind::Dram { 0 } else { self.device }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl MemoryRegion for Memory {
    unsafe fn as_ptr(&self) -> *const u8 {
        self.addr as *const u8
    }

    fn size(&self) -> usize {
        self.len as usize
    }
}

impl NixlDescriptor for Memory {
    fn mem_type(&self) -> MemType {
        mem_type(self.kind())
    }

    fn device_id(&self) -> u64 {
        self.device()
    }
}

/// NIXL's name for a kind of memory.
pub(crate) fn mem_type(kind: MemoryKind) -> MemType {
    match kind {
        MemoryKind::Dram => MemType::Dram,
        MemoryKind::Vram => MemType::Vram,
        MemoryKind::File => MemType::File,
    }
}
