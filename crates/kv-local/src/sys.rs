//! Copies between this process' memory and that of other processes. This file and `adopt` hold all unsafe
//! code of the crate.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;

use kv_host::{Memory, OsError};

/// Most pieces copied in one call (the kernel's bound `UIO_MAXIOV` is 1024).
pub(crate) const MAX_PIECES: usize = 512;

/// Pieces of this process' memory and of another process' memory, which one call copies.
pub(crate) struct ProcessBatch<'a> {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    memory: PhantomData<&'a Memory>,
}

impl<'a> ProcessBatch<'a> {
    /// A batch without pieces.
    pub(crate) fn new() -> ProcessBatch<'a> {
        ProcessBatch { local: Vec::new(), remote: Vec::new(), memory: PhantomData }
    }

    /// True if the batch takes no more pieces.
    pub(crate) fn is_full(&self) -> bool {
        self.local.len() >= MAX_PIECES
    }

    /// True if the batch has no pieces.
    pub(crate) fn is_empty(&self) -> bool {
        self.local.is_empty()
    }

    /// Adds a piece of `len` bytes; false if the piece is not inside `local`.
    pub(crate) fn push(&mut self, local: &'a Memory, at: usize, remote: usize, len: usize) -> bool {
        if at.checked_add(len).is_none_or(|end| end > local.len()) {
            return false;
        }
        let addr = local.addr() as usize + at;
        self.local.push(libc::iovec { iov_base: addr as *mut c_void, iov_len: len });
        self.remote.push(libc::iovec { iov_base: remote as *mut c_void, iov_len: len });
        true
    }

    /// The first address in the other process; zero for a batch without pieces.
    pub(crate) fn peer_at(&self) -> usize {
        self.remote.first().map_or(0, |piece| piece.iov_base as usize)
    }

    /// Copies from the other process to this one. Returns how many bytes were copied, from the first piece
    /// on.
    pub(crate) fn read_from(&self, pid: i32) -> Result<usize, OsError> {
        let count = self.local.len() as libc::c_ulong;
        // SAFETY: the local pieces lie in memory that we may write and that is borrowed while the
        // batch lives; the remote addresses are checked by the kernel.
        let done = unsafe {
            libc::process_vm_readv(pid, self.local.as_ptr(), count, self.remote.as_ptr(), count, 0)
        };
        usize::try_from(done).map_err(|_| OsError::new("process_vm_readv", io::Error::last_os_error()))
    }

    /// Copies from this process to the other one. Returns how many bytes were copied, from the first piece
    /// on.
    pub(crate) fn write_to(&self, pid: i32) -> Result<usize, OsError> {
        let count = self.local.len() as libc::c_ulong;
        // SAFETY: the local pieces lie in memory that we may read; the remote ones lie in memory
        // that the other process adopted for this transport, as it told us itself.
        let done = unsafe {
            libc::process_vm_writev(pid, self.local.as_ptr(), count, self.remote.as_ptr(), count, 0)
        };
        usize::try_from(done).map_err(|_| OsError::new("process_vm_writev", io::Error::last_os_error()))
    }
}
