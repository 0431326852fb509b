//! What the kernel is asked to report besides completions: the ends of peers' processes.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_host::{OsError, Process};
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::way::WayId;

/// Most events taken from the kernel at once.
const EVENTS: usize = 64;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The processes of peers on this host.
///
/// The queues of completions are not among what is watched. Otherwise each look for ended processes would look at their
/// sockets, too, and each arrival would wake this set besides their own.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
}

impl Watch {
    /// Watches no process yet.
    pub(crate) fn new() -> Result<Watch, OsError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| OsError::new("epoll_create", error))?;
        Ok(Watch { epoll })
    }

    /// A descriptor that is readable when a process has ended.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches the process of a way's peer.
    pub(crate) fn watch(&self, way: WayId, process: &Process) -> Result<(), OsError> {
        let way = epoll::EventData::new_u64(way);
        match epoll::add(&self.epoll, process.as_fd(), way, EventFlags::IN) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(OsError::new("epoll_ctl", error)),
        }
    }

    /// Stops watching a process.
    pub(crate) fn forget(&self, process: &Process) {
        let _ = epoll::delete(&self.epoll, process.as_fd());
    }

    /// Ways whose peers' processes have ended.
    pub(crate) fn ended(&self) -> Vec<WayId> {
        let mut room = [const { MaybeUninit::uninit() }; EVENTS];
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut room, Some(&NOW)) else { return Vec::new() };
        ready.iter().map(|event| event.data.u64()).collect()
    }
}
