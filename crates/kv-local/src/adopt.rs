//! Memory that the server already owns.
#![allow(unsafe_code)]

use kv_host::Memory;

use crate::error::LocalError;
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Takes memory that the server already owns. Peers reach it with `process_vm_readv` and
    /// `process_vm_writev`, at about half the speed of an [`Arena`](kv_host::Arena).
    ///
    /// Peers need the right to trace this process: the same user, the same PID namespace, and
    /// where Yama restricts tracing, [`LocalConfig::permit_tracing`](crate::LocalConfig).
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
