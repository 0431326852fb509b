//! [`TcpTransport::adopt`]: regions in memory that the server already owns.
#![allow(unsafe_code)]

use kv_core::{MemoryKind, Region};
use kv_host::Memory;

use crate::error::TcpError;
use crate::transport::TcpTransport;

impl TcpTransport {
    /// Allows regions in memory that the server already owns: `len` bytes at the address `addr`, of a `Vec`, a
    /// tensor or an own mapping. This costs nothing compared with memory that the transport was given:
    /// bytes go between this memory and the sockets either way. [`Region`] has the whole contract of such memory.
    ///
    /// # Errors
    ///
    /// [`TcpError::Memory`] if the range is impossible (it begins at address zero, has no bytes, or wraps around),
    /// or the transport's metadata has been asked for.
    ///
    /// # Safety
    ///
    /// As [`Region`] says of memory that a server owns, for the whole range.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), TcpError> {
        // SAFETY: the caller keeps the range for as long as the transport uses it.
        let memory = unsafe { Memory::adopt(addr, len) }?;
        self.given.add(memory)
    }

    /// Allows every one of these regions, which lie in host memory that the server already owns: the regions of a
    /// worker's arguments, in one call.
    ///
    /// # Errors
    ///
    /// [`TcpError::Kind`] for a region that is not in host memory; otherwise as [`adopt`](TcpTransport::adopt).
    /// Regions before the one at fault are adopted.
    ///
    /// # Safety
    ///
    /// The promises of [`adopt`](TcpTransport::adopt), for each region.
    pub unsafe fn adopt_regions<'a>(
        &mut self,
        regions: impl IntoIterator<Item = &'a Region>,
    ) -> Result<(), TcpError> {
        for (index, region) in regions.into_iter().enumerate() {
            let Region { memory, device, addr, len, .. } = *region;
            if memory != MemoryKind::Dram {
                return Err(TcpError::Kind { region: index, memory, device });
            }
            // SAFETY: the caller promises this for each region.
            unsafe { self.adopt(addr, len) }?;
        }
        Ok(())
    }
}
