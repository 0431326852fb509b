//! Which process is at the other end of a Unix socket, as the kernel knows.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::io::Errno;

use crate::error::OsError;

/// The process at the other end of a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// Process id; zero if the process is in a PID namespace that the calling process cannot see.
    pub(crate) pid: i32,
    /// Effective user id of the process.
    pub(crate) uid: u32,
}

/// The credentials of the peer (`SO_PEERCRED`). Not through `rustix`, whose type cannot express the process
/// id zero.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> Result<Credentials, OsError> {
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
        return Err(OsError::new("getsockopt", io::Error::last_os_error()));
    }
    Ok(Credentials { pid: credentials.pid, uid: credentials.uid })
}

/// A descriptor of exactly the process at the other end (`SO_PEERPIDFD`, Linux 6.5).
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, OsError> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `fd`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            ptr::from_mut(&mut fd).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(OsError::new("getsockopt", io::Error::last_os_error()));
    }
    if fd < 0 {
        return Err(OsError::new("getsockopt", Errno::BADF));
    }
    // SAFETY: the kernel has just opened this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
