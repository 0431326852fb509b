//! Memory that may be registered: mappings, ranges of them, and raw copies.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

use kv_core::MemoryKind;
use nixl_sys::{MemType, MemoryRegion, NixlDescriptor};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::NixlError;

/// Private anonymous memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: usize,
    len: usize,
}

impl Mapping {
    /// `len` bytes at a multiple of `align`, both multiples of the page size.
    pub(crate) fn anonymous(len: usize, align: usize) -> io::Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let whole = len.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the kernel chooses the address, so no memory of ours is replaced.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), whole, prot, MapFlags::PRIVATE) }? as usize;
        let addr = start.next_multiple_of(align);
        for (at, size) in [(start, addr - start), (addr + len, start + whole - addr - len)] {
            if size > 0 {
                // SAFETY: the margins are part of the mapping just made, and nothing knows them.
                let _ = unsafe { munmap(at as *mut c_void, size) };
            }
        }
        Ok(Mapping { addr, len })
    }

    /// Asks for huge pages. A hint: failure costs speed only.
    pub(crate) fn prefer_huge_pages(&self) {
        let _ = self.advise(Advice::LinuxHugepage);
    }

    /// Makes all pages present, and keeps them out of forked children: a card may write to them.
    pub(crate) fn populate(&self) -> io::Result<()> {
        self.advise(Advice::LinuxDontFork)?;
        match self.advise(Advice::LinuxPopulateWrite) {
            // Older than Linux 5.14: the first transfer will be slower.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            result => result,
        }
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is our mapping, and none of the advices used here changes its bytes.
        unsafe { madvise(self.addr as *mut c_void, self.len, advice) }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours; whoever uses it holds an `Arc` of this mapping.
        let _ = unsafe { munmap(self.addr as *mut c_void, self.len) };
    }
}

/// A range of memory that may be registered: part of a pool, which it keeps mapped, or adopted by a
/// promise of the owner.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    kind: MemoryKind,
    device: u64,
    addr: u64,
    len: u64,
    mapping: Option<Arc<Mapping>>,
    file: Option<Arc<File>>,
}

impl Memory {
    /// The first `len` bytes of a mapping.
    pub(crate) fn of(mapping: &Arc<Mapping>, len: usize) -> Memory {
        Memory {
            kind: MemoryKind::Dram,
            device: 0,
            addr: mapping.addr as u64,
            len: len.min(mapping.len) as u64,
            mapping: Some(Arc::clone(mapping)),
            file: None,
        }
    }

    /// The first `len` bytes of a file, which stays open.
    pub(crate) fn of_file(file: &Arc<File>, len: u64) -> Memory {
        let device = u64::from(file.as_raw_fd().unsigned_abs());
        let file = Some(Arc::clone(file));
        Memory { kind: MemoryKind::File, device, addr: 0, len, mapping: None, file }
    }

    /// How long its file is now, if it is one.
    pub(crate) fn file_len(&self) -> Option<u64> {
        self.file.as_ref()?.metadata().ok().map(|about| about.len())
    }

    /// The part of this memory that is this range of this kind; `None` if it is not inside.
    pub(crate) fn part(&self, kind: MemoryKind, device: u64, addr: u64, len: u64) -> Option<Memory> {
        let offset = addr.checked_sub(self.addr)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // NUMA nodes are a remark about host memory; device numbers are part of an address.
        let same = kind == self.kind && (kind == MemoryKind::Dram || device == self.device);
        (inside && same && len > 0).then(|| Memory { device, addr, len, ..self.clone() })
    }

    pub(crate) fn kind(&self) -> MemoryKind {
        self.kind
    }

    pub(crate) fn device(&self) -> u64 {
        // NIXL matches registrations by device; ours are not told apart by NUMA node.
        if self.kind == MemoryKind::Dram { 0 } else { self.device }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Copies from here into `out`; false if out of bounds, or not memory of the host's pools.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) -> bool {
        let Some(from) = self.checked(at, out.len()) else { return false };
        // SAFETY: the source is inside a mapping that `self` keeps; the target is borrowed
        // exclusively and thus distinct. No reference to the source is made.
        unsafe { ptr::copy(from as *const u8, out.as_mut_ptr(), out.len()) };
        true
    }

    /// Copies `bytes` to here; false as for `read`.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> bool {
        let Some(to) = self.checked(at, bytes.len()) else { return false };
        // SAFETY: the target is inside a mapping that `self` keeps, the source is borrowed; `copy`
        // allows them to overlap.
        unsafe { ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        true
    }

    /// The address of a range inside a mapping.
    pub(super) fn checked(&self, at: usize, size: usize) -> Option<usize> {
        let end = at.checked_add(size)?;
        (self.mapping.is_some() && end as u64 <= self.len).then_some(self.addr as usize + at)
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
        mem_type(self.kind)
    }

    fn device_id(&self) -> u64 {
        self.device()
    }
}

/// A range that the owner of its memory lends.
pub(crate) fn adopted(kind: MemoryKind, device: u64, addr: u64, len: u64) -> Result<Memory, NixlError> {
    let fits =
        usize::try_from(addr).is_ok() && addr.checked_add(len).is_some_and(|end| end <= i64::MAX as u64);
    if addr == 0 || len == 0 || !fits {
        return Err(NixlError::Range { addr, len });
    }
    Ok(Memory { kind, device, addr, len, mapping: None, file: None })
}

/// NIXL's name of a kind of memory.
pub(crate) fn mem_type(kind: MemoryKind) -> MemType {
    match kind {
        MemoryKind::Dram => MemType::Dram,
        MemoryKind::Vram => MemType::Vram,
        MemoryKind::File => MemType::File,
    }
}
