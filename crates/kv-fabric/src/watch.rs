//! What the kernel is asked to report: completions, and the ends of peers' processes.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_host::{OsError, Process};
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::way::WayId;

/// Most events taken from the kernel at once.
const EVENTS: usize = 64;
const COMPLETIONS: u64 = u64::MAX;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The descriptor on which the owner sleeps.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
}

impl Watch {
    /// Watches the descriptors of the completions, where there are some.
    pub(crate) fn new<'a>(completions: impl IntoIterator<Item = BorrowedFd<'a>>) -> Result<Watch, OsError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| OsError::new("epoll_create", error))?;
        for completions in completions {
            add(&epoll, completions, COMPLETIONS)?;
        }
        Ok(Watch { epoll })
    }

    /// A descriptor that is readable when there is an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches the process of a way's peer.
    pub(crate) fn watch(&self, way: WayId, process: &Process) -> Result<(), OsError> {
        add(&self.epoll, process.as_fd(), way)
    }

    /// Stops watching a process.
    pub(crate) fn forget(&self, process: &Process) {
        let _ = epoll::delete(&self.epoll, process.as_fd());
    }

    /// Ways whose peers' processes have ended.
    pub(crate) fn ended(&self) -> Vec<WayId> {
        let mut room = [const { MaybeUninit::uninit() }; EVENTS];
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut room, Some(&NOW)) else { return Vec::new() };
        ready.iter().map(|event| event.data.u64()).filter(|id| *id != COMPLETIONS).collect()
    }
}

fn add(epoll: &OwnedFd, fd: BorrowedFd<'_>, id: u64) -> Result<(), OsError> {
    match epoll::add(epoll, fd, epoll::EventData::new_u64(id), EventFlags::IN) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(OsError::new("epoll_ctl", error)),
    }
}
