//! The address space in which a peer's adopted memory lies.

use std::os::fd::OwnedFd;

use kv_host::{PeerError, Process};
use rustix::io::pread;

/// The address space that a peer's process had when the connection was made. A process keeps its id, and its
/// descriptor, when it executes another program: only the address space shows that the adopted memory is gone.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    memory: OwnedFd,
}

impl AddressSpace {
    /// The present address space of a process. [`Process::memory`] has the errors.
    pub(crate) fn of(process: &Process) -> Result<AddressSpace, PeerError> {
        Ok(AddressSpace { memory: process.memory()? })
    }

    /// False once the process has ended or executes another program. `at` is an address of the adopted memory, because
    /// the kernel takes longer for one where nothing lies.
    pub(crate) fn is_in_use(&self, at: usize) -> bool {
        // Without an address space, the file is empty.
        !matches!(pread(&self.memory, &mut [0], at as u64), Ok(0))
    }
}
