//! What the kernel is asked to report: UCX's worker, and the ends of peers' processes.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_host::{OsError, Process};
use rustix::event::epoll::{self, EventFlags};
use rustix::time::Timespec;

use crate::remote::RemoteId;

/// Most events taken from the kernel at once.
const EVENTS: usize = 64;
const WORKER: u64 = u64::MAX;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The descriptor on which the owner sleeps.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
}

impl Watch {
    /// Watches the descriptor of UCX's worker, which must be dropped after this.
    pub(crate) fn new(worker: BorrowedFd<'_>) -> Result<Watch, OsError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|error| OsError::new("epoll_create", error))?;
        let added = epoll::add(&epoll, worker, epoll::EventData::new_u64(WORKER), EventFlags::IN);
        added.map_err(|error| OsError::new("epoll_ctl", error))?;
        Ok(Watch { epoll })
    }

    /// A descriptor that is readable when there is an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches for the end of a peer's process.
    pub(crate) fn add(&self, id: RemoteId, process: &Process) -> Result<(), OsError> {
        let added = epoll::add(&self.epoll, process, epoll::EventData::new_u64(id), EventFlags::IN);
        added.map_err(|error| OsError::new("epoll_ctl", error))
    }

    /// Stops watching a process.
    pub(crate) fn remove(&self, process: &Process) {
        let _ = epoll::delete(&self.epoll, process);
    }

    /// Peers whose processes have ended, at most 64.
    pub(crate) fn ended(&self) -> Vec<RemoteId> {
        let mut room = [const { MaybeUninit::uninit() }; EVENTS];
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut room, Some(&NOW)) else { return Vec::new() };
        ready.iter().map(|event| event.data.u64()).filter(|id| *id != WORKER).collect()
    }
}
