//! Bytes that go from registered memory into a socket, and from a socket into registered memory, without a
//! copy in between. This file and `adopt` hold all unsafe code of the crate.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};

use kv_host::{Memory, OsError};

/// Most pieces in one call (the kernel's bound `UIO_MAXIOV` is 1024).
const MAX_PIECES: usize = 1024;

/// Pieces of memory that one call gathers from. Registered memory may change at any moment, so the pieces are
/// never referenced by Rust: the kernel alone looks at them.
pub(crate) struct Gather<'a> {
    pieces: Vec<libc::iovec>,
    bytes: usize,
    memory: PhantomData<&'a Memory>,
}

/// Pieces of memory that one call scatters to.
pub(crate) struct Scatter<'a> {
    pieces: Vec<libc::iovec>,
    bytes: usize,
    memory: PhantomData<&'a Memory>,
}

fn piece(memory: &Memory, at: usize, len: usize) -> Option<libc::iovec> {
    let inside = at.checked_add(len).is_some_and(|end| end <= memory.len());
    inside.then(|| libc::iovec { iov_base: (memory.addr() as usize + at) as *mut c_void, iov_len: len })
}

impl<'a> Gather<'a> {
    pub(crate) fn new() -> Gather<'a> {
        Gather { pieces: Vec::new(), bytes: 0, memory: PhantomData }
    }

    /// True if no more pieces can be added.
    pub(crate) fn is_full(&self) -> bool {
        self.pieces.len() >= MAX_PIECES
    }

    /// Bytes of all pieces.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds `len` bytes of `memory` from `at` on; false if they are not inside.
    pub(crate) fn memory(&mut self, memory: &'a Memory, at: usize, len: usize) -> bool {
        let piece = piece(memory, at, len);
        self.pieces.extend(piece);
        self.bytes += piece.map_or(0, |_| len);
        piece.is_some()
    }

    /// Adds these bytes.
    pub(crate) fn slice(&mut self, bytes: &'a [u8]) {
        let iov_base = bytes.as_ptr().cast_mut().cast::<c_void>();
        self.pieces.push(libc::iovec { iov_base, iov_len: bytes.len() });
        self.bytes += bytes.len();
    }

    /// Sends as many of the bytes as the socket takes now. Returns how many.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>) -> Result<usize, OsError> {
        // SAFETY: a message header of zeros is valid: no name, no pieces, no ancillary data.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = self.pieces.as_mut_ptr();
        message.msg_iovlen = self.pieces.len() as _;
        // SAFETY: each piece lies in memory that this process may read and that is borrowed while `self`
        // lives; the header is valid for the call.
        let sent =
            unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| OsError::new("sendmsg", io::Error::last_os_error()))
    }
}

impl<'a> Scatter<'a> {
    pub(crate) fn new() -> Scatter<'a> {
        Scatter { pieces: Vec::new(), bytes: 0, memory: PhantomData }
    }

    /// True if only one more piece can be added.
    pub(crate) fn is_full(&self) -> bool {
        self.pieces.len() + 1 >= MAX_PIECES
    }

    /// Bytes of all pieces.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds `len` bytes of `memory` from `at` on; false if they are not inside.
    pub(crate) fn memory(&mut self, memory: &'a Memory, at: usize, len: usize) -> bool {
        let piece = piece(memory, at, len);
        self.pieces.extend(piece);
        self.bytes += piece.map_or(0, |_| len);
        piece.is_some()
    }

    /// Adds this buffer.
    pub(crate) fn slice(&mut self, bytes: &'a mut [u8]) {
        let iov_base = bytes.as_mut_ptr().cast::<c_void>();
        self.pieces.push(libc::iovec { iov_base, iov_len: bytes.len() });
        self.bytes += bytes.len();
    }

    /// Receives as many bytes as have come, into the pieces in their order. Returns how many; 0 at the end of
    /// the stream.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<usize, OsError> {
        // SAFETY: a message header of zeros is valid: no name, no pieces, no ancillary data.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = self.pieces.as_mut_ptr();
        message.msg_iovlen = self.pieces.len() as _;
        // SAFETY: each piece lies in memory that this process may write and that is borrowed while `self`
        // lives; no reference to registered memory exists; the header is valid for the call.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        usize::try_from(got).map_err(|_| OsError::new("recvmsg", io::Error::last_os_error()))
    }
}
