//! Everything unsafe: mappings, raw copies, and the calls that `rustix` does not wrap.
//!
//! The safe types of this module carry the proofs: a [`Mapping`] is mapped for as long as it lives,
//! a [`Memory`] is a range that this process may read and write. Shared memory is only ever copied
//! through raw pointers, never referenced, because another process may write to it at any moment;
//! the bytes of a torn copy are wrong, and nothing else is.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::param::page_size;

use crate::arena::Arena;
use crate::error::{ArenaError, LocalError};
use crate::plane::LocalPlane;

/// The step in which pages are touched where the kernel cannot populate them: the smallest page.
const TOUCH: usize = 4096;

/// A shared, readable and writable mapping of a memory file.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset` on, a multiple of the page size. The caller has made sure
    /// that the file has that many and cannot shrink.
    pub(crate) fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so no memory of ours is replaced.
        let addr = unsafe { mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) }?;
        Ok(Mapping { addr: addr as usize, len })
    }

    /// Bytes mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Asks for huge pages where the host has them. A hint: failure costs speed only.
    pub(crate) fn prefer_huge_pages(&self) {
        let _ = self.advise(0, self.len, Advice::LinuxHugepage);
    }

    /// Keeps the mapping out of forked children: they cannot write to a peer's memory after this
    /// process has told the peer that it is done.
    pub(crate) fn keep_from_children(&self) -> io::Result<()> {
        self.advise(0, self.len, Advice::LinuxDontFork)
    }

    /// Makes the pages of a range present and writable, without changing them.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        self.advise(offset, len, Advice::LinuxPopulateWrite)
    }

    /// Makes those pages of a range present and writable that the file has already, and none that it
    /// has not: a hole stays a hole.
    pub(crate) fn populate_existing(&self, offset: usize, len: usize) -> io::Result<()> {
        let page = page_size();
        if !inside(self.len, offset, len) || !offset.is_multiple_of(page) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut exists = vec![0_u8; len.div_ceil(page)];
        // SAFETY: the range is mapped, and the kernel writes one byte a page into `exists`.
        let result = unsafe { libc::mincore((self.addr + offset) as *mut c_void, len, exists.as_mut_ptr()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut at = 0;
        for run in exists.chunk_by(|a, b| a & 1 == b & 1) {
            let size = (run.len() * page).min(len - at);
            if run.first().is_some_and(|first| first & 1 == 1) {
                self.populate(offset + at, size)?;
            }
            at += size;
        }
        Ok(())
    }

    /// The word at `offset`, a multiple of eight.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            inside(self.len, offset, 8) && offset.is_multiple_of(8),
            "{offset} is no word of {}",
            self.len
        );
        // SAFETY: the word is inside the mapping and aligned, mapped while `self` is borrowed, and only
        // ever used as an atomic.
        unsafe { AtomicU64::from_ptr((self.addr + offset) as *mut u64) }
    }

    /// The same by hand, for kernels older than 5.14.
    pub(crate) fn touch(&self) {
        for offset in (0..self.len).step_by(TOUCH) {
            // SAFETY: the byte is inside the mapping, which lives as long as `self`; an atomic has
            // no alignment needs at one byte.
            let byte = unsafe { AtomicU8::from_ptr((self.addr + offset) as *mut u8) };
            byte.fetch_or(0, Ordering::Relaxed);
        }
    }

    /// Unmaps everything from `keep` (a multiple of the page size) on.
    pub(crate) fn shrink(&mut self, keep: usize) {
        if keep >= self.len {
            return;
        }
        // SAFETY: the range is ours, and `&mut self` shows that nothing can use it any more.
        let _ = unsafe { munmap((self.addr + keep) as *mut c_void, self.len - keep) };
        // Even if the kernel refused: the range is not used again.
        self.len = keep;
    }

    fn advise(&self, offset: usize, len: usize, advice: Advice) -> io::Result<()> {
        if !inside(self.len, offset, len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the range is inside our mapping, and none of the advices used here changes what
        // its bytes are.
        unsafe { madvise((self.addr + offset) as *mut c_void, len, advice) }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

/// A range of memory that this process may read and write: part of a mapping, which it keeps alive,
/// or adopted by a promise of the owner.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    addr: usize,
    len: usize,
    _mapping: Option<Arc<Mapping>>,
}

impl Memory {
    /// Part of a mapping.
    pub(crate) fn of(mapping: &Arc<Mapping>, offset: usize, len: usize) -> Option<Memory> {
        inside(mapping.len, offset, len).then(|| Memory {
            addr: mapping.addr + offset,
            len,
            _mapping: Some(Arc::clone(mapping)),
        })
    }

    /// Part of this memory.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<Memory> {
        inside(self.len, offset, len).then(|| Memory {
            addr: self.addr + offset,
            len,
            _mapping: self._mapping.clone(),
        })
    }

    /// Address of the first byte.
    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    /// Bytes in it.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies `len` bytes from `at` here to `to_at` there; false, and nothing done, if either range
    /// is out of bounds.
    pub(crate) fn copy_to(&self, at: usize, to: &Memory, to_at: usize, len: usize) -> bool {
        if !inside(self.len, at, len) || !inside(to.len, to_at, len) {
            return false;
        }
        let (from, to) = (self.addr + at, to.addr + to_at);
        if from.abs_diff(to) < len {
            return false;
        }
        // SAFETY: both ranges are readable and writable (that is what a `Memory` is) and distinct;
        // no reference to them exists, and the bytes are only moved, never looked at.
        unsafe { ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
        true
    }

    /// Copies from here into `out`; false if out of bounds.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) -> bool {
        if !inside(self.len, at, out.len()) {
            return false;
        }
        // SAFETY: the source is readable, the target is borrowed exclusively and thus distinct.
        unsafe { ptr::copy((self.addr + at) as *const u8, out.as_mut_ptr(), out.len()) };
        true
    }

    /// Copies `bytes` to here; false if out of bounds.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> bool {
        if !inside(self.len, at, bytes.len()) {
            return false;
        }
        // SAFETY: the target is writable and the source borrowed; `copy` allows them to overlap.
        unsafe { ptr::copy(bytes.as_ptr(), (self.addr + at) as *mut u8, bytes.len()) };
        true
    }
}

impl Arena {
    /// The bytes of a range.
    ///
    /// # Safety
    ///
    /// While the slice lives, nobody writes to the range: not this process, and no peer that has
    /// been given these pages.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> Result<&[u8], ArenaError> {
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
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> Result<&mut [u8], ArenaError> {
        let addr = self.checked_addr(offset, len)?;
        // SAFETY: the range is mapped while `self` lives; the caller excludes everyone else.
        Ok(unsafe { slice::from_raw_parts_mut(addr as *mut u8, len) })
    }
}

impl LocalPlane {
    /// Takes memory that the server already owns. Peers reach it with `process_vm_readv` and
    /// `process_vm_writev`, at about half the speed of an [`Arena`].
    ///
    /// Peers need the right to trace this process: the same user, the same PID namespace, and
    /// where Yama restricts tracing, [`LocalConfig::permit_tracing`](crate::LocalConfig).
    ///
    /// # Safety
    ///
    /// The whole range is mapped, readable and writable, until the plane has been dropped **and**
    /// no peer can reach it any more; and no Rust reference to a page of it exists while that page
    /// is given to a transfer.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), LocalError> {
        let range = || Some((usize::try_from(addr).ok()?, usize::try_from(len).ok()?));
        match range() {
            Some((at, size)) if at != 0 && size != 0 && at.checked_add(size).is_some() => {
                self.adopt_memory(Memory { addr: at, len: size, _mapping: None })
            }
            _ => Err(LocalError::Range { addr, len }),
        }
    }
}

/// Most pieces in one call: the kernel's `UIO_MAXIOV` is 1024.
pub(crate) const MAX_PIECES: usize = 512;

/// Pieces of our memory and of another process', to be copied in one call.
pub(crate) struct ProcessBatch<'a> {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    memory: PhantomData<&'a Memory>,
}

impl<'a> ProcessBatch<'a> {
    /// An empty batch.
    pub(crate) fn new() -> ProcessBatch<'a> {
        ProcessBatch { local: Vec::new(), remote: Vec::new(), memory: PhantomData }
    }

    /// True if it takes no more pieces.
    pub(crate) fn is_full(&self) -> bool {
        self.local.len() >= MAX_PIECES
    }

    /// True if it has no pieces.
    pub(crate) fn is_empty(&self) -> bool {
        self.local.is_empty()
    }

    /// Adds a piece; false if it is out of our bounds.
    pub(crate) fn push(&mut self, local: &'a Memory, at: usize, remote: usize, len: usize) -> bool {
        if !inside(local.len, at, len) {
            return false;
        }
        self.local.push(libc::iovec { iov_base: (local.addr + at) as *mut c_void, iov_len: len });
        self.remote.push(libc::iovec { iov_base: remote as *mut c_void, iov_len: len });
        true
    }

    /// Copies from the other process to here. Returns how many bytes, from the first piece on.
    pub(crate) fn read_from(&self, pid: i32) -> io::Result<usize> {
        let count = self.local.len() as libc::c_ulong;
        // SAFETY: the local pieces lie in memory that we may write and that is borrowed while the
        // batch lives; the remote addresses are checked by the kernel.
        let done = unsafe {
            libc::process_vm_readv(pid, self.local.as_ptr(), count, self.remote.as_ptr(), count, 0)
        };
        usize::try_from(done).map_err(|_| io::Error::last_os_error())
    }

    /// Copies from here to the other process. Returns how many bytes, from the first piece on.
    pub(crate) fn write_to(&self, pid: i32) -> io::Result<usize> {
        let count = self.local.len() as libc::c_ulong;
        // SAFETY: the local pieces lie in memory that we may read; the remote ones lie in memory
        // that the other process adopted for this plane, as it told us itself.
        let done = unsafe {
            libc::process_vm_writev(pid, self.local.as_ptr(), count, self.remote.as_ptr(), count, 0)
        };
        usize::try_from(done).map_err(|_| io::Error::last_os_error())
    }
}

/// Who is at the other end of a Unix socket, as the kernel knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// Its process id; zero if it lives in a PID namespace that we cannot see.
    pub(crate) pid: i32,
    /// Its effective user.
    pub(crate) uid: u32,
}

/// `SO_PEERCRED`. Not through `rustix`, whose type cannot express the process id zero.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `credentials`, which any bytes are valid
    // for.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            ptr::from_mut(&mut credentials).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Credentials { pid: credentials.pid, uid: credentials.uid })
}

/// `SO_PEERPIDFD` (Linux 6.5): a descriptor of exactly the process at the other end.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `fd`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            ptr::from_mut(&mut fd).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if fd < 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    // SAFETY: the kernel has just opened this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn inside(whole: usize, offset: usize, len: usize) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= whole)
}
