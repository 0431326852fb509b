//! [`UcxTransport::adopt`]: regions in memory that the server already owns.
#![allow(unsafe_code)]

use kv_core::{MemoryKind, Region};
use kv_host::{Memory, check};

use crate::error::UcxError;
use crate::given::Range;
use crate::transport::UcxTransport;

impl UcxTransport {
    /// Allows regions in memory that the server already owns: `len` bytes at the address `addr`, of a `Vec`, a tensor
    /// or an own mapping. [`Region`] has the whole contract of such memory.
    ///
    /// # Errors
    ///
    /// [`UcxError::Memory`] if the range is impossible (it begins at address zero, has no bytes, or wraps around), or
    /// the transport's metadata has been asked for.
    ///
    /// # Safety
    ///
    /// As [`Region`] says of memory that a server owns, for the whole range.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), UcxError> {
        // SAFETY: the caller keeps the range for as long as the transport uses it.
        let memory = unsafe { Memory::adopt(addr, len) }?;
        Ok(self.add_range(Range::host(memory))?)
    }

    /// Allows regions in the memory of the CUDA device of this number: `len` bytes at the address `addr`.
    ///
    /// # Errors
    ///
    /// [`UcxError::Kind`] if UCX could not load its CUDA module; otherwise as [`adopt`](UcxTransport::adopt).
    ///
    /// # Safety
    ///
    /// As [`Region`] says of memory that a server owns, for the whole range, which is allocated on that device.
    pub unsafe fn adopt_device(&mut self, device: u64, addr: u64, len: u64) -> Result<(), UcxError> {
        let memory = MemoryKind::Vram;
        if !self.engine.knows(memory) {
            return Err(UcxError::Kind { region: 0, memory, device });
        }
        check::range(addr, len)?;
        Ok(self.add_range(Range::device(addr, len, device))?)
    }

    /// Allows every one of these regions, which lie in memory that the server already owns: the regions of a worker's
    /// arguments, in one call.
    ///
    /// # Errors
    ///
    /// [`UcxError::Kind`] for a region in memory that UCX does not move; otherwise as
    /// [`adopt`](UcxTransport::adopt). Regions before the one at fault are adopted.
    ///
    /// # Safety
    ///
    /// The promises of [`adopt`](UcxTransport::adopt) and [`adopt_device`](UcxTransport::adopt_device), for each
    /// region.
    pub unsafe fn adopt_regions<'a>(
        &mut self,
        regions: impl IntoIterator<Item = &'a Region>,
    ) -> Result<(), UcxError> {
        for (index, region) in regions.into_iter().enumerate() {
            let Region { memory, device, addr, len, .. } = *region;
            if !self.engine.knows(memory) {
                return Err(UcxError::Kind { region: index, memory, device });
            }
            if memory == MemoryKind::Vram {
                // SAFETY: the caller promises this for each region.
                unsafe { self.adopt_device(device, addr, len) }?;
            } else {
                // SAFETY: as above.
                unsafe { self.adopt(addr, len) }?;
            }
        }
        Ok(())
    }
}
