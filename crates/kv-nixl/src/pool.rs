//! Host memory to register regions in.

use std::sync::Arc;

use crate::error::PoolError;
use crate::ffi::memory::{Mapping, Memory};

/// Granularity of the length and of the address: one huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Anonymous host memory, on huge pages where the kernel grants them, all of it present from the
/// start: UCX copies between processes ran at up to twice the speed on huge pages here.
///
/// Clones are the same memory. It stays mapped while a clone lives, here or inside a plane.
///
/// [`read`](HostPool::read) and [`write`](HostPool::write) copy. They are safe whatever peers do at
/// the same time; but what is read while a peer writes can be any mixture of old and new.
///
/// ```
/// let pool = kv_nixl::HostPool::new(1 << 20)?;
/// pool.write(4096, b"page")?;
/// let mut page = [0; 4];
/// pool.read(4096, &mut page)?;
/// assert_eq!(&page, b"page");
/// # Ok::<(), kv_nixl::PoolError>(())
/// ```
#[derive(Debug, Clone)]
pub struct HostPool {
    memory: Memory,
}

impl HostPool {
    /// Allocates `len` bytes of zeroes.
    pub fn new(len: usize) -> Result<HostPool, PoolError> {
        let max = isize::MAX as usize - 2 * HUGE_PAGE;
        if len == 0 || len > max {
            return Err(PoolError::Length { got: len, max });
        }
        let error = |call, error: std::io::Error| PoolError::Os { call, len, kind: error.kind() };
        let mapping =
            Mapping::anonymous(len.next_multiple_of(HUGE_PAGE), HUGE_PAGE).map_err(|e| error("mmap", e))?;
        mapping.prefer_huge_pages();
        mapping.populate().map_err(|e| error("madvise", e))?;
        Ok(HostPool { memory: Memory::of(&Arc::new(mapping), len) })
    }

    /// Address of the first byte.
    pub fn addr(&self) -> u64 {
        self.memory.addr()
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.memory.len() as usize
    }

    /// Never true: a pool has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies from the pool into `out`.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), PoolError> {
        let size = out.len();
        if self.memory.read(offset, out) { Ok(()) } else { Err(self.out_of_bounds(offset, size)) }
    }

    /// Copies `bytes` into the pool.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), PoolError> {
        if self.memory.write(offset, bytes) { Ok(()) } else { Err(self.out_of_bounds(offset, bytes.len())) }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    fn out_of_bounds(&self, offset: usize, size: usize) -> PoolError {
        PoolError::OutOfBounds { len: self.len(), offset, size }
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
        let error = PoolError::OutOfBounds { len: 5000, offset: 4991, size: 10 };
        assert_eq!(pool.write(4991, &out), Err(error.clone()));
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
        assert!(matches!(HostPool::new(0), Err(PoolError::Length { got: 0, .. })));
        assert!(matches!(HostPool::new(usize::MAX), Err(PoolError::Length { .. })));
        assert!(matches!(HostPool::new(1 << 60), Err(PoolError::Os { .. })));
    }
}
