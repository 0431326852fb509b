//! What the kernel is asked to report: new connections, and sockets that are ready.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_host::OsError;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::connection::ConnectionId;

/// Most events taken from the kernel at once.
const EVENTS: usize = 64;
const LISTENER: u64 = u64::MAX;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The descriptor on which the owner sleeps, and the socket on which peers find the transport.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
    listener: OwnedFd,
}

/// An event that the kernel has reported.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Woken {
    /// A connection waits to be accepted.
    Listener,
    /// A socket is ready for the operations in the flags.
    Socket(ConnectionId, EventFlags),
}

impl Watch {
    pub(crate) fn new(listener: OwnedFd) -> Result<Watch, OsError> {
        let error = |error: Errno| OsError::new("epoll_create", error);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(error)?;
        let watch = Watch { epoll, listener };
        watch.watch_listener()?;
        Ok(watch)
    }

    /// A descriptor that is readable when there is an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The socket on which new connections come.
    pub(crate) fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// The events that the kernel reports now, at most 64. Sockets that stay ready take turns.
    pub(crate) fn woken(&self) -> Vec<Woken> {
        let mut room = [const { MaybeUninit::uninit() }; EVENTS];
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut room, Some(&NOW)) else { return Vec::new() };
        let woken = ready.iter().map(|event| match (event.data.u64(), event.flags) {
            (LISTENER, _) => Woken::Listener,
            (id, flags) => Woken::Socket(id, flags),
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

    /// Watches a socket for `wanted`; `before` are the events that it was watched for, if any.
    pub(crate) fn watch_socket(
        &self,
        id: ConnectionId,
        socket: BorrowedFd<'_>,
        before: Option<EventFlags>,
        wanted: EventFlags,
    ) -> Result<(), OsError> {
        let data = epoll::EventData::new_u64(id);
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
}
