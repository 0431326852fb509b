//! [`Arena`]: shared memory that peers on the same host can map.

use std::ops::Deref;
use std::sync::Arc;

use rustix::io::Errno;

use crate::error::MemoryError;
use crate::file::MemoryFile;
use crate::sys::{Mapping, Memory};

/// Bytes to whose multiple a length is rounded up: one huge page, so that huge pages can hold all bytes.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// Bytes to whose multiple a short length is rounded up: a multiple of every page size in use.
const PAGE: usize = 64 << 10;

/// Memory to register regions in: a sealed memory file that a connected peer maps, so that either
/// side moves bytes with one plain copy.
///
/// Clones of an arena are the same memory. The memory stays mapped while a clone lives, here or inside a
/// transport, and while a connected peer has mapped the file.
///
/// The file can neither shrink nor grow (`F_SEAL_SHRINK`, `F_SEAL_GROW`, `F_SEAL_SEAL`), so a peer can rely
/// on every byte being there. The file is on huge pages where the host has reserved some, else on transparent
/// huge pages where the kernel has some to give (from Linux 6.1 on). All pages are present from the start: the
/// first transfer is as fast as the last. A peer makes its mapping of huge pages present in a moment, and its
/// mapping of others in some 20 ms a GiB.
///
/// An arena is read and written with the methods of [`Memory`], to which it dereferences.
///
/// ```
/// let arena = kv_host::Arena::new(1 << 20)?;
/// arena.write(4096, b"page")?;
/// let mut page = [0; 4];
/// arena.read(4096, &mut page)?;
/// assert_eq!(&page, b"page");
/// # Ok::<(), kv_host::MemoryError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Arena {
    file: Arc<MemoryFile>,
    memory: Memory,
}

impl Arena {
    /// Allocates an arena of `len` zero bytes, at least one.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Length`] for no bytes, or more than an address space has; [`MemoryError::Os`] if the
    /// host does not have the memory.
    pub fn new(len: usize) -> Result<Arena, MemoryError> {
        let max = isize::MAX as usize - HUGE_PAGE;
        if len == 0 || len > max {
            return Err(MemoryError::Length { got: len, max });
        }
        Arena::huge(len).or_else(|_| Arena::normal(len))
    }

    /// True if the arena is on huge pages that the host has reserved (`vm.nr_hugepages`).
    pub fn huge_pages(&self) -> bool {
        self.file.on_huge_pages()
    }

    /// The memory file, whose length is [`len`](Memory::len) rounded up to whole pages.
    pub fn file(&self) -> &MemoryFile {
        &self.file
    }

    /// The arena's bytes: as many as [`new`](Arena::new) was asked for.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    fn huge(len: usize) -> Result<Arena, MemoryError> {
        Arena::map(len, HUGE_PAGE, true, |mapping| mapping.populate(0, mapping.len()))
    }

    fn normal(len: usize) -> Result<Arena, MemoryError> {
        let granularity = if len >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        Arena::map(len, granularity, false, |mapping| {
            mapping.prefer_huge_pages();
            mapping.collect_huge_pages();
            match mapping.populate(0, mapping.len()) {
                // Before Linux 5.14 the kernel cannot populate pages.
                Err(error) if error.errno == Some(Errno::INVAL.raw_os_error()) => mapping.touch(),
                other => return other,
            }
            Ok(())
        })
    }

    fn map(
        len: usize,
        granularity: usize,
        huge_pages: bool,
        populate: impl FnOnce(&Mapping) -> Result<(), crate::OsError>,
    ) -> Result<Arena, MemoryError> {
        let file_len = len.next_multiple_of(granularity);
        let make = || {
            let file = MemoryFile::create("kv-arena", file_len as u64, huge_pages)?;
            let mapping = file.map(0, file_len)?;
            populate(&mapping)?;
            Ok((file, mapping))
        };
        let (file, mapping) = make().map_err(|cause| MemoryError::Os { len, cause })?;
        Ok(Arena { file: Arc::new(file), memory: Memory::of(&Arc::new(mapping), 0, len)? })
    }
}

impl Deref for Arena {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_holds_all_that_was_asked_for_in_whole_pages_from_the_start() {
        let arena = Arena::new(5000).unwrap();
        assert!(arena.file().len() > 5000);
        assert_eq!(arena.file().allocated(), arena.file().len(), "not all of it is present");
    }

    #[test]
    fn the_file_can_never_change_its_size() {
        use rustix::fs::{SealFlags, fcntl_add_seals, ftruncate};
        let arena = Arena::new(1 << 20).unwrap();
        assert!(ftruncate(arena.file(), 0).is_err());
        assert!(ftruncate(arena.file(), 1 << 30).is_err());
        assert!(fcntl_add_seals(arena.file(), SealFlags::WRITE).is_err());
    }
}
