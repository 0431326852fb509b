//! [`LocalTransport::adopt`]: regions in memory that the server already owns.
#![allow(unsafe_code)]

use kv_host::Memory;

use crate::error::LocalError;
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Allows regions in memory that the server already owns: `len` bytes at the address `addr`. Peers reach
    /// this memory with `process_vm_readv` and `process_vm_writev`, at about half the speed of an
    /// [`Arena`](kv_host::Arena).
    ///
    /// Peers need the right to trace this process: the same user, the same PID namespace, and
    /// where the Yama security module restricts tracing,
    /// [`LocalConfig::permit_tracing`](crate::LocalConfig::permit_tracing).
    ///
    /// # Errors
    ///
    /// [`LocalError::Memory`] if the range is impossible, or the transport's metadata has been asked for.
    ///
    /// # Safety
    ///
    /// The whole range is mapped, readable and writable, until the transport has been dropped **and**
    /// no peer can reach it any more; and no Rust reference to a page of it exists while that page
    /// is given to a transfer.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), LocalError> {
        // SAFETY: the caller keeps the range for as long as the transport and its peers use it.
        let memory = unsafe { Memory::adopt(addr, len) }?;
        self.adopt_memory(memory)
    }
}
