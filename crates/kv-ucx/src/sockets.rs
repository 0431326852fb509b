//! The TCP connections of this process, whichever library has made them.
#![allow(unsafe_code)]

use std::fs;
use std::mem::size_of_val;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::io::ioctl_fionread;
use rustix::net::{SocketType, getpeername, getsockname, sockopt};

/// States of a TCP connection as the kernel numbers them (`TCP_CLOSE`, `TCP_CLOSE_WAIT`, `TCP_LAST_ACK`,
/// `TCP_CLOSING`, `TCP_TIME_WAIT`).
const CLOSED: [u8; 5] = [7, 8, 9, 11, 6];
const LISTENS: u8 = 10;

/// A TCP socket of this process that does not listen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Connection {
    pub(crate) local: SocketAddr,
    /// `None` if the kernel has forgotten it: the connection was reset, or never came about.
    pub(crate) remote: Option<SocketAddr>,
    /// True if the other side sends nothing more.
    pub(crate) closed: bool,
    /// Bytes that have arrived and that this process has not read.
    pub(crate) unread: u64,
}

/// All connections of this process; `None` if its descriptors cannot be listed.
pub(crate) fn connections() -> Option<Vec<Connection>> {
    let descriptors = fs::read_dir("/proc/self/fd").ok()?.flatten();
    let sockets = descriptors.filter(|entry| {
        fs::read_link(entry.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
    });
    let numbers = sockets.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Some(numbers.filter_map(connection).collect())
}

/// The connection of a descriptor; `None` if the descriptor is no TCP connection, or was closed meanwhile.
pub(crate) fn connection(fd: RawFd) -> Option<Connection> {
    // SAFETY: the descriptor is asked about, and neither read from, changed, nor closed. If another thread has closed
    // it meanwhile, or has opened another file under the number, the answer is about that, or an error.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    if sockopt::socket_type(socket).ok()? != SocketType::STREAM {
        return None;
    }
    let local = SocketAddr::try_from(getsockname(socket).ok()?).ok()?;
    let state = state(socket)?;
    if state == LISTENS {
        return None;
    }
    let unread = ioctl_fionread(socket).unwrap_or(0);
    let remote = getpeername(socket).ok().and_then(|name| SocketAddr::try_from(name?).ok());
    Some(Connection { local, remote, closed: remote.is_none() || CLOSED.contains(&state), unread })
}

/// The state of a TCP socket: the first byte of `struct tcp_info`.
fn state(socket: BorrowedFd<'_>) -> Option<u8> {
    let mut info = [0_u8; 8];
    let mut len = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes.
    let result = unsafe {
        let place = info.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, place, &raw mut len)
    };
    (result == 0).then_some(info[0])
}
