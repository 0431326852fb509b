//! Memory that the server owns, which only a promise of the caller makes safe to use.

use kv_core::{MemoryKind, Region};

use crate::error::NixlError;
use crate::ffi::memory::Memory;
use crate::transport::NixlTransport;

impl NixlTransport {
    /// Takes `len` bytes of host memory at `addr`, which the server already owns: of a `Vec`, a tensor or an own
    /// mapping. No alignment is needed. [`Region`] has the whole contract of such memory.
    ///
    /// # Errors
    ///
    /// [`NixlError::Memory`] if the range is impossible (it begins at address zero, has no bytes, or wraps around),
    /// or the transport's metadata has been asked for.
    ///
    /// # Safety
    ///
    /// As [`Region`] says of memory that a server owns, for the whole range.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), NixlError> {
        // SAFETY: the caller promises the range for as long as the transport, or what it leaves behind, may
        // touch it, and nothing else gets this value.
        let memory = unsafe { kv_host::Memory::adopt(addr, len) }?;
        self.adopt_memory(Memory::of_host(memory))
    }

    /// Takes `len` bytes at `addr` of a device's memory, a GPU's say. `device` is the device's index, as
    /// NIXL's backend counts devices.
    ///
    /// # Safety
    ///
    /// As [`Region`] says of memory that a server owns, for the whole range, which is allocated on that device.
    pub unsafe fn adopt_device(&mut self, device: u64, addr: u64, len: u64) -> Result<(), NixlError> {
        self.adopt_memory(Memory::of_device(device, addr, len)?)
    }

    /// Takes the memory of every one of these regions, on the host or on devices, which the server already owns: the
    /// regions of a worker's arguments, in one call.
    ///
    /// # Errors
    ///
    /// [`NixlError::File`] for a region in a file, which [`add_file`](NixlTransport::add_file) takes; otherwise as
    /// [`adopt`](NixlTransport::adopt). Regions before the one at fault are taken.
    ///
    /// # Safety
    ///
    /// The promises of [`adopt`](NixlTransport::adopt), for each region.
    pub unsafe fn adopt_regions<'a>(
        &mut self,
        regions: impl IntoIterator<Item = &'a Region>,
    ) -> Result<(), NixlError> {
        for region in regions {
            let Region { memory, device, addr, len, .. } = *region;
            match memory {
                // SAFETY: the caller promises this for each region.
                MemoryKind::Dram => unsafe { self.adopt(addr, len) }?,
                // SAFETY: as above.
                MemoryKind::Vram => unsafe { self.adopt_device(device, addr, len) }?,
                MemoryKind::File => {
                    return Err(NixlError::File { reason: "a region in a file is added with its file" });
                }
            }
        }
        Ok(())
    }
}
