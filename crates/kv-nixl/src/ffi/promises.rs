//! What only a promise of the caller makes safe: slices of pools that peers do not touch, and memory that the
//! server owns.

use std::slice;

use kv_core::MemoryKind;

use crate::error::{NixlError, PoolError};
use crate::ffi::memory::adopted;
use crate::plane::NixlPlane;
use crate::pool::HostPool;

impl HostPool {
    /// The bytes of a range.
    ///
    /// # Safety
    ///
    /// While the slice lives, nobody writes to the range: not this process, and no peer that has
    /// been given these pages.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> Result<&[u8], PoolError> {
        let addr = self.checked_addr(offset, len)?;
        // SAFETY: the range is mapped while `self` lives; the caller excludes writers.
        Ok(unsafe { slice::from_raw_parts(addr as *const u8, len) })
    }

    /// The bytes of a range, to be changed.
    ///
    /// # Safety
    ///
    /// While the slice lives, nobody else reads or writes the range: not this process, and no peer
    /// that has been given these pages.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> Result<&mut [u8], PoolError> {
        let addr = self.checked_addr(offset, len)?;
        // SAFETY: the range is mapped while `self` lives; the caller excludes everyone else.
        Ok(unsafe { slice::from_raw_parts_mut(addr as *mut u8, len) })
    }

    fn checked_addr(&self, offset: usize, size: usize) -> Result<usize, PoolError> {
        let bounds = PoolError::OutOfBounds { len: self.len(), offset, size };
        self.memory().checked(offset, size).ok_or(bounds)
    }
}

impl NixlPlane {
    /// Takes host memory that the server already owns.
    ///
    /// # Safety
    ///
    /// The whole range stays mapped, readable and writable, until the plane has been
    /// [shut down](NixlPlane::shutdown) or dropped, and beyond that for as long as the process lives
    /// if posts were unfinished then: NIXL cannot stop them. And no Rust reference to a page of it
    /// exists while that page is given to a transfer, here or by a peer.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), NixlError> {
        self.adopt_memory(adopted(MemoryKind::Dram, 0, addr, len)?)
    }

    /// Takes memory of a device, say of a GPU: `device` is its index as the backend counts them.
    ///
    /// # Safety
    ///
    /// As for [`adopt`](NixlPlane::adopt), of memory that is allocated on that device.
    pub unsafe fn adopt_device(&mut self, device: u64, addr: u64, len: u64) -> Result<(), NixlError> {
        self.adopt_memory(adopted(MemoryKind::Vram, device, addr, len)?)
    }
}
