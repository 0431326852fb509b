//! What the kernel is asked to report: new connections, sockets that are ready, processes that have ended.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_host::{OsError, Process};
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use rustix::time::Timespec;

use crate::link::LinkId;

/// Most events taken from the kernel in one call of `poll`.
const EVENTS: usize = 64;
const BACKLOG: i32 = 1024;
const LISTENER: u64 = u64::MAX;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The descriptor on which the owner sleeps, and the socket under which peers find the transport.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
    listener: OwnedFd,
    /// Counts calls, so that another event comes first in each.
    turn: usize,
}

/// An event that the kernel has reported.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Woken {
    /// A connection waits to be accepted.
    Listener,
    /// The process behind a link has ended.
    Process(LinkId),
    /// The socket of a link is ready for the operations in the flags.
    Socket(LinkId, EventFlags),
}

impl Watch {
    /// Listens under a name of the abstract socket namespace.
    pub(crate) fn new(name: &str) -> Result<Watch, OsError> {
        let error = |call| move |error: Errno| OsError::new(call, error);
        let listener = new_socket()?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(error("bind"))?;
        bind(&listener, &address).map_err(error("bind"))?;
        listen(&listener, BACKLOG).map_err(error("listen"))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(error("epoll_create"))?;
        let watch = Watch { epoll, listener, turn: 0 };
        watch.watch_listener()?;
        Ok(watch)
    }

    /// A descriptor that is readable when there is an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The events that the kernel reports now, at most 64, beginning with another one in each call.
    pub(crate) fn woken(&mut self) -> Vec<Woken> {
        let mut room = [const { MaybeUninit::uninit() }; EVENTS];
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut room, Some(&NOW)) else { return Vec::new() };
        if ready.is_empty() {
            return Vec::new();
        }
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn % ready.len();
        ready.rotate_left(first);
        let woken = ready.iter().map(|event| match (event.data.u64(), event.flags) {
            (LISTENER, _) => Woken::Listener,
            (key, _) if key & 1 == 1 => Woken::Process(key >> 1),
            (key, flags) => Woken::Socket(key >> 1, flags),
        });
        woken.collect()
    }

    /// Watches for new connections.
    pub(crate) fn watch_listener(&self) -> Result<(), OsError> {
        let data = epoll::EventData::new_u64(LISTENER);
        let added = epoll::add(&self.epoll, &self.listener, data, EventFlags::IN);
        added.map_err(|error| OsError::new("epoll_ctl", error))
    }

    /// Stops watching for new connections, which stay in the backlog.
    pub(crate) fn ignore_listener(&self) {
        let _ = epoll::delete(&self.epoll, &self.listener);
    }

    /// Accepts a new connection, on a socket that does not block.
    pub(crate) fn accept(&self) -> Result<OwnedFd, Errno> {
        accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
    }

    /// Watches for the end of the process behind a link.
    pub(crate) fn watch_process(&self, id: LinkId, process: &Process) -> Result<(), OsError> {
        let added = epoll::add(&self.epoll, process, epoll::EventData::new_u64(id << 1 | 1), EventFlags::IN);
        added.map_err(|error| OsError::new("epoll_ctl", error))
    }

    /// Stops watching for the end of a process.
    pub(crate) fn forget_process(&self, process: &Process) {
        let _ = epoll::delete(&self.epoll, process);
    }

    /// Watches the socket of a link for `wanted`; `before` are the events that it was watched for, if any.
    pub(crate) fn watch_socket(
        &self,
        id: LinkId,
        socket: BorrowedFd<'_>,
        before: Option<EventFlags>,
        wanted: EventFlags,
    ) -> Result<(), OsError> {
        let data = epoll::EventData::new_u64(id << 1);
        let done = match before {
            None => epoll::add(&self.epoll, socket, data, wanted),
            Some(_) => epoll::modify(&self.epoll, socket, data, wanted),
        };
        done.map_err(|error| OsError::new("epoll_ctl", error))
    }

    /// Stops watching a socket that is about to be closed. Closing alone is not enough if a forked child
    /// holds the socket open.
    pub(crate) fn forget_socket(&self, socket: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, socket);
    }

    /// Makes every later call that watches something fail.
    #[cfg(test)]
    pub(crate) fn exhaust(&mut self) {
        self.epoll = new_socket().unwrap();
    }
}

/// A Unix socket that does not block.
pub(crate) fn new_socket() -> Result<OwnedFd, OsError> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    socket.map_err(|error| OsError::new("socket", error))
}
