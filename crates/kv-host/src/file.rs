//! Memory files that cannot become shorter, so that a process that maps one can rely on every byte.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{
    FileType, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;

use crate::error::{MemoryError, OsError};
use crate::sys::{Mapping, Memory};

/// Files with larger blocks are on reserved huge pages.
const SMALL_PAGE: i64 = 64 << 10;

/// A memory file, of this process or of a peer, that cannot become shorter.
///
/// Reading past the end of a mapped file kills the process (`SIGBUS`). So a file that is mapped must have all
/// bytes, and must not be able to lose them: memory files can be sealed against that, and a seal cannot be
/// removed.
#[derive(Debug)]
pub struct MemoryFile {
    fd: OwnedFd,
    len: u64,
    huge_pages: bool,
}

impl MemoryFile {
    /// A file of `len` zero bytes that can neither shrink nor grow. With `huge_pages` the file is on huge
    /// pages of 2 MiB that the host has reserved, and the call fails if there are too few. `name` shows in
    /// `/proc/PID/fd`.
    pub fn create(name: &str, len: u64, huge_pages: bool) -> Result<MemoryFile, OsError> {
        let huge = if huge_pages { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
        let error = |call| move |error: Errno| OsError::new(call, error);
        let fd = memfd_create(name, flags).map_err(error("memfd_create"))?;
        ftruncate(&fd, len).map_err(error("ftruncate"))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(error("fcntl"))?;
        Ok(MemoryFile { fd, len, huge_pages })
    }

    /// The memory file behind a descriptor that a peer has sent; `None` if the descriptor is not that of a
    /// memory file, or the file can shrink.
    pub fn received(fd: OwnedFd) -> Option<MemoryFile> {
        let seals = fcntl_get_seals(&fd).ok()?;
        let stat = fstat(&fd).ok()?;
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let len =
            u64::try_from(stat.st_size).ok().filter(|_| seals.contains(SealFlags::SHRINK) && regular)?;
        Some(MemoryFile { fd, len, huge_pages: stat.st_blksize > SMALL_PAGE })
    }

    /// Length of the file in bytes. A received file may have grown since.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True for a file without bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if the file is on reserved huge pages. If such a file has holes and the host has no reserved huge
    /// page left, a process that touches a hole is killed.
    pub fn on_huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// Bytes of the file that are allocated now; the other bytes are holes.
    pub fn allocated(&self) -> u64 {
        fstat(&self.fd).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
    }

    /// Maps `len` bytes from `offset` on, which is a multiple of the page size. Fails with `EINVAL` if the
    /// range ends beyond the end of the file.
    pub fn map(&self, offset: u64, len: usize) -> Result<Mapping, OsError> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return Err(OsError::new("mmap", Errno::INVAL));
        }
        Mapping::shared(self.fd.as_fd(), offset, len)
    }

    /// Maps the whole file as one range of memory.
    pub fn memory(&self) -> Result<Memory, MemoryError> {
        let len = usize::try_from(self.len).unwrap_or(usize::MAX);
        let mapping = self.map(0, len).map_err(|cause| MemoryError::Os { len, cause })?;
        Memory::of(&Arc::new(mapping), 0, len)
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<MemoryFile> for OwnedFd {
    fn from(file: MemoryFile) -> OwnedFd {
        file.fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_files_that_cannot_shrink_are_received() {
        let file = |seals: SealFlags| {
            let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&fd, 8192).unwrap();
            fcntl_add_seals(&fd, seals).unwrap();
            MemoryFile::received(fd)
        };
        let sealed = file(SealFlags::SHRINK).unwrap();
        assert_eq!((sealed.len(), sealed.allocated(), sealed.on_huge_pages()), (8192, 0, false));
        assert!(file(SealFlags::GROW).is_none());
        let disk = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(MemoryFile::received(disk.into()).is_none());
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(MemoryFile::received(socket.into()).is_none());
    }

    #[test]
    fn nothing_beyond_the_end_of_a_file_is_mapped() {
        let file = MemoryFile::create("test", 8192, false).unwrap();
        assert_eq!(file.map(4096, 4096).map(|mapping| mapping.len()), Ok(4096));
        for (offset, len) in [(4096, 4097), (8192, 1), (u64::MAX, 2)] {
            assert_eq!(
                file.map(offset, len).err(),
                Some(OsError::new("mmap", Errno::INVAL)),
                "{offset}+{len}"
            );
        }
    }

    #[test]
    fn a_created_file_can_never_change_its_length_and_both_sides_see_its_bytes() {
        let file = MemoryFile::create("test", 8192, false).unwrap();
        assert!(ftruncate(&file, 0).is_err());
        assert!(ftruncate(&file, 1 << 20).is_err());
        assert!(fcntl_add_seals(&file, SealFlags::WRITE).is_err());
        let ours = file.memory().unwrap();
        let theirs = MemoryFile::received(file.into()).unwrap().memory().unwrap();
        ours.write(8000, b"seen").unwrap();
        let mut out = [0; 4];
        theirs.read(8000, &mut out).unwrap();
        assert_eq!(&out, b"seen");
    }
}
