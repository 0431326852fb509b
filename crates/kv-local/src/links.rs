//! The life of connections: dialing, accepting, greeting, reading, and the end.
//!
//! # When a peer is reported gone
//!
//! `PeerGone` with `WayEnd::Dead` says that the peer copies nothing into our memory any more. It is
//! reported
//!
//! - when its goodbye arrives: a plane queues it after its last copy, and the stream keeps order;
//! - when its pidfd becomes readable: every thread of it has ended, in the kernel as well;
//! - when nobody listens under its address any more: its plane has ended.
//!
//! The end of the stream alone is no proof. Posts end then, because our own copies are ours to stop, and
//! `PeerGone` comes with `WayEnd::Lost`. The peer's right to write through the connection is revoked; its
//! death is reported as well, once it is proven, unless the peer was disconnected before.

mod ending;
mod greeting;
mod opening;
mod pacing;
mod revoking;
#[cfg(test)]
mod tests;
mod timers;
mod traffic;

use std::os::fd::OwnedFd;
use std::time::Duration;

use kv_host::OsError;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen as listen_on, socket_with,
};
use rustix::time::Timespec;

use crate::link::LinkId;

pub(crate) use pacing::Pacing;

/// Bytes read from one socket at once.
pub(crate) const READ_SCRATCH: usize = 64 << 10;
/// How long a plane that is dropped waits for full sockets.
pub(crate) const FAREWELL: Duration = Duration::from_millis(100);

/// Bytes read in one call of `poll`, in all and from one link.
const READ_BUDGET: usize = 1 << 20;
const READ_SHARE: usize = 256 << 10;
/// Messages taken in one call of `poll`, in all and from one link.
const MESSAGE_BUDGET: usize = 2048;
const MESSAGE_SHARE: usize = 256;
/// Connections accepted in one call of `poll`.
const ACCEPT_BUDGET: usize = 16;
/// Events taken from the kernel in one call of `poll`.
const EVENTS: usize = 64;
/// How soon a peer with a full backlog is dialed again.
const DIAL_AGAIN: Duration = Duration::from_millis(10);
/// How soon a revocation that waits for the end of a slice is looked at again: at first, and at last.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
const LOOK_RARELY: Duration = Duration::from_millis(10);
/// How soon listening goes on after file descriptors ran out.
const LISTEN_AGAIN: Duration = Duration::from_millis(100);

const BACKLOG: i32 = 1024;
const LISTENER: u64 = u64::MAX;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// What one call of `poll` may still read.
struct Budget {
    bytes: usize,
    messages: usize,
}

/// Opens the socket under which peers find the plane.
pub(crate) fn listen(name: &str) -> Result<OwnedFd, OsError> {
    let os = |call| move |error: Errno| OsError::new(call, error);
    let socket = new_socket().map_err(os("socket"))?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(os("bind"))?;
    bind(&socket, &address).map_err(os("bind"))?;
    listen_on(&socket, BACKLOG).map_err(os("listen"))?;
    Ok(socket)
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

fn socket_key(id: LinkId) -> epoll::EventData {
    epoll::EventData::new_u64(id << 1)
}

fn process_key(id: LinkId) -> epoll::EventData {
    epoll::EventData::new_u64(id << 1 | 1)
}
