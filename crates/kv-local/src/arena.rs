//! Shared memory that peers on the host can map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::error::ArenaError;
use crate::sys::{Mapping, Memory};

/// Granularity of the length: one huge page, so that huge pages can hold all of it.
const HUGE_PAGE: usize = 2 << 20;
/// Granularity without huge pages; a multiple of every page size in use.
const PAGE: usize = 64 << 10;

/// Memory to register regions in: a sealed memory file that a connected peer maps, so that either
/// side moves bytes with one plain copy.
///
/// Clones are the same memory. It stays mapped while a clone lives, here or inside a plane, and
/// while a connected peer has it mapped.
///
/// The file can neither shrink nor grow (`F_SEAL_SHRINK`, `F_SEAL_GROW`, `F_SEAL_SEAL`): a peer can
/// rely on every byte of it being there. It is on huge pages where the host has reserved some,
/// else on transparent huge pages where the host allows that, and all of it is present from the
/// start: the first transfer is as fast as the last.
///
/// [`read`](Arena::read) and [`write`](Arena::write) copy. They are safe whatever peers do at the
/// same time, because no reference to the shared bytes is ever made; but what is read while a peer
/// writes can be any mixture of old and new.
///
/// ```
/// let arena = kv_local::Arena::new(1 << 20)?;
/// arena.write(4096, b"page")?;
/// let mut page = [0; 4];
/// arena.read(4096, &mut page)?;
/// assert_eq!(&page, b"page");
/// # Ok::<(), kv_local::ArenaError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    fd: OwnedFd,
    mapping: Arc<Mapping>,
    memory: Memory,
    huge_pages: bool,
}

impl Arena {
    /// Allocates at least `len` bytes of zeroes.
    pub fn new(len: usize) -> Result<Arena, ArenaError> {
        let max = isize::MAX as usize - HUGE_PAGE;
        if len == 0 || len > max {
            return Err(ArenaError::Length { got: len, max });
        }
        let shared = match Shared::huge(len) {
            Ok(shared) => shared,
            Err(_) => Shared::normal(len)?,
        };
        Ok(Arena { shared: Arc::new(shared) })
    }

    /// Address of the first byte in this process.
    pub fn addr(&self) -> u64 {
        self.shared.memory.addr() as u64
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.shared.memory.len()
    }

    /// Never true: an arena has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if the host granted reserved huge pages (`vm.nr_hugepages`).
    pub fn huge_pages(&self) -> bool {
        self.shared.huge_pages
    }

    /// Copies from the arena.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), ArenaError> {
        let size = out.len();
        if self.shared.memory.read(offset, out) { Ok(()) } else { Err(self.out_of_bounds(offset, size)) }
    }

    /// Copies into the arena.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), ArenaError> {
        if self.shared.memory.write(offset, bytes) {
            Ok(())
        } else {
            Err(self.out_of_bounds(offset, bytes.len()))
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.fd.as_fd()
    }

    /// Length of the file: `len` rounded up to whole pages.
    pub(crate) fn file_len(&self) -> usize {
        self.shared.mapping.len()
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.shared.memory
    }

    pub(crate) fn checked_addr(&self, offset: usize, len: usize) -> Result<usize, ArenaError> {
        match self.shared.memory.part(offset, len) {
            Some(part) => Ok(part.addr()),
            None => Err(self.out_of_bounds(offset, len)),
        }
    }

    fn out_of_bounds(&self, offset: usize, size: usize) -> ArenaError {
        ArenaError::OutOfBounds { len: self.len(), offset, size }
    }
}

impl Shared {
    fn huge(len: usize) -> Result<Shared, ArenaError> {
        let shared = Shared::map(len, HUGE_PAGE, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
        let file_len = shared.mapping.len();
        shared.mapping.populate(0, file_len).map_err(|error| os("madvise", len, &error))?;
        Ok(Shared { huge_pages: true, ..shared })
    }

    fn normal(len: usize) -> Result<Shared, ArenaError> {
        let granularity = if len >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        let shared = Shared::map(len, granularity, MemfdFlags::empty())?;
        shared.mapping.prefer_huge_pages();
        match shared.mapping.populate(0, shared.mapping.len()) {
            Ok(()) => {}
            // Before Linux 5.14 there is no such advice.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => shared.mapping.touch(),
            Err(error) => return Err(os("madvise", len, &error)),
        }
        Ok(shared)
    }

    fn map(len: usize, granularity: usize, flags: MemfdFlags) -> Result<Shared, ArenaError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags;
        let file_len = len.next_multiple_of(granularity);
        let fd = memfd_create("kv-arena", flags).map_err(|error| os("memfd_create", len, &error.into()))?;
        ftruncate(&fd, file_len as u64).map_err(|error| os("ftruncate", len, &error.into()))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|error| os("fcntl", len, &error.into()))?;
        let mapping = Mapping::shared(fd.as_fd(), 0, file_len).map_err(|error| os("mmap", len, &error))?;
        let mapping = Arc::new(mapping);
        let memory = Memory::of(&mapping, 0, len).ok_or(ArenaError::Length { got: len, max: file_len })?;
        Ok(Shared { fd, mapping, memory, huge_pages: false })
    }
}

fn os(call: &'static str, len: usize, error: &io::Error) -> ArenaError {
    ArenaError::Os { call, len, kind: error.kind() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_bounded_by_the_length_asked_for_not_by_the_pages() {
        let arena = Arena::new(5000).unwrap();
        assert!(arena.file_len() > 5000);
        arena.write(4990, &[7; 10]).unwrap();
        let mut out = [0; 10];
        arena.read(4990, &mut out).unwrap();
        assert_eq!(out, [7; 10]);
        let error = ArenaError::OutOfBounds { len: 5000, offset: 4991, size: 10 };
        assert_eq!(arena.write(4991, &out), Err(error.clone()));
        assert_eq!(arena.read(4991, &mut out), Err(error));
        assert!(arena.read(usize::MAX, &mut out).is_err());
    }

    #[test]
    fn the_file_can_never_change_its_size() {
        let arena = Arena::new(1 << 20).unwrap();
        assert!(ftruncate(arena.fd(), 0).is_err());
        assert!(ftruncate(arena.fd(), 1 << 30).is_err());
        assert!(fcntl_add_seals(arena.fd(), SealFlags::WRITE).is_err());
    }

    #[test]
    fn clones_are_the_same_memory_and_outlive_each_other() {
        let first = Arena::new(4096).unwrap();
        let second = first.clone();
        first.write(0, b"kept").unwrap();
        drop(first);
        let mut out = [0; 4];
        second.read(0, &mut out).unwrap();
        assert_eq!(&out, b"kept");
    }

    #[test]
    fn impossible_lengths_are_errors() {
        assert!(matches!(Arena::new(0), Err(ArenaError::Length { got: 0, .. })));
        assert!(matches!(Arena::new(usize::MAX), Err(ArenaError::Length { .. })));
        assert!(matches!(Arena::new(1 << 60), Err(ArenaError::Os { .. })));
    }
}
