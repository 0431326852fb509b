//! What only a promise of the caller makes safe: memory that the server owns.

use crate::error::NixlError;
use crate::ffi::memory::Memory;
use crate::transport::NixlTransport;

impl NixlTransport {
    /// Takes host memory that the server already owns.
    ///
    /// # Safety
    ///
    /// The whole range stays mapped, readable and writable, until the transport has been
    /// [shut down](NixlTransport::shutdown) or dropped, and beyond that for as long as the process lives
    /// if posts were unfinished then: NIXL cannot stop them. And no Rust reference to a page of it
    /// exists while that page is given to a transfer, here or by a peer.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), NixlError> {
        // SAFETY: the caller promises the range for as long as the transport, or what it leaves behind, may
        // touch it, and nothing else gets this value.
        let memory = unsafe { kv_host::Memory::adopt(addr, len) }?;
        self.adopt_memory(Memory::of_host(memory))
    }

    /// Takes memory of a device, say of a GPU: `device` is its index as the backend counts them.
    ///
    /// # Safety
    ///
    /// As for [`adopt`](NixlTransport::adopt), of memory that is allocated on that device.
    pub unsafe fn adopt_device(&mut self, device: u64, addr: u64, len: u64) -> Result<(), NixlError> {
        self.adopt_memory(Memory::of_device(device, addr, len)?)
    }
}
