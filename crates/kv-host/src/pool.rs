//! Private memory of this process.

use std::ops::Deref;
use std::sync::Arc;

use rustix::io::Errno;

use crate::arena::HUGE_PAGE;
use crate::error::{MemoryError, OsError};
use crate::sys::{Mapping, Memory};

/// Anonymous host memory, on huge pages where the kernel grants them, all of it present from the
/// start: UCX copies between processes ran at up to twice the speed on huge pages here.
///
/// Clones are the same memory. It stays mapped while a clone lives, here or inside a plane. Forked children
/// do not have it, because a card may write to it. A pool is read and written as the [`Memory`] that it
/// holds, and its address is a multiple of 2 MiB.
///
/// ```
/// let pool = kv_host::HostPool::new(1 << 20)?;
/// pool.write(4096, b"page")?;
/// let mut page = [0; 4];
/// pool.read(4096, &mut page)?;
/// assert_eq!(&page, b"page");
/// # Ok::<(), kv_host::MemoryError>(())
/// ```
#[derive(Debug, Clone)]
pub struct HostPool {
    memory: Memory,
}

impl HostPool {
    /// Allocates `len` bytes of zeroes.
    pub fn new(len: usize) -> Result<HostPool, MemoryError> {
        let max = isize::MAX as usize - 2 * HUGE_PAGE;
        if len == 0 || len > max {
            return Err(MemoryError::Length { got: len, max });
        }
        let mapping = present(len.next_multiple_of(HUGE_PAGE));
        let mapping = mapping.map_err(|cause| MemoryError::Os { len, cause })?;
        Ok(HostPool { memory: Memory::of(&Arc::new(mapping), 0, len)? })
    }

    /// The bytes asked for.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Deref for HostPool {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}

fn present(len: usize) -> Result<Mapping, OsError> {
    let mapping = Mapping::anonymous(len, HUGE_PAGE)?;
    mapping.prefer_huge_pages();
    mapping.keep_from_children()?;
    match mapping.populate(0, len) {
        // Older than Linux 5.14: the first transfer will be slower.
        Err(error) if error.errno == Errno::INVAL.raw_os_error() => Ok(mapping),
        populated => populated.map(|()| mapping),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_bounded_by_the_length_asked_for() {
        let pool = HostPool::new(5000).unwrap();
        assert_eq!(pool.addr() % HUGE_PAGE as u64, 0);
        pool.write(4990, &[7; 10]).unwrap();
        let mut out = [0; 10];
        pool.read(4990, &mut out).unwrap();
        assert_eq!(out, [7; 10]);
        let error = MemoryError::OutOfBounds { len: 5000, offset: 4991, size: 10 };
        assert_eq!(pool.write(4991, &out), Err(error));
        assert_eq!(pool.read(4991, &mut out), Err(error));
        assert!(pool.read(usize::MAX, &mut out).is_err());
    }

    #[test]
    fn clones_outlive_each_other() {
        let first = HostPool::new(4096).unwrap();
        let second = first.clone();
        first.write(0, b"kept").unwrap();
        drop(first);
        let mut out = [0; 4];
        second.read(0, &mut out).unwrap();
        assert_eq!(&out, b"kept");
    }

    #[test]
    fn impossible_lengths_are_errors() {
        assert!(matches!(HostPool::new(0), Err(MemoryError::Length { got: 0, .. })));
        assert!(matches!(HostPool::new(usize::MAX), Err(MemoryError::Length { .. })));
        assert!(matches!(HostPool::new(1 << 60), Err(MemoryError::Os { .. })));
    }
}
